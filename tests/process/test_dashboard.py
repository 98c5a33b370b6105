"""`hpcray dashboard` beside a job: what it answers, whom it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from engine import alive, eventually, hpcray_only, ray
from helpers.dashboards import Dashboard
from helpers.strangers import needs_stranger, stranger_says

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
INIT = {"num_cpus": 3, "object_store_memory": 64 << 20}
NASTY = "<img src=x onerror=alert(1)>\x1b[31m"


@ray.remote
def quick(number):
    return number


@ray.remote
def fails():
    raise ValueError("as the test wants it")


@ray.remote
def sleeps(seconds):
    print("it sleeps", flush=True)
    time.sleep(seconds)


@ray.remote(num_cpus=0)
class Keeper:
    def pid(self):
        print("kept by an actor", flush=True)
        return os.getpid()


def address() -> str:
    return ray.init(ignore_reinit_error=True)["address"]


@pytest.fixture
def board() -> Iterator[Dashboard]:
    with Dashboard(address()) as board:
        board.enter()
        yield board


def rows_of(board: Dashboard, path: str, **params: Any) -> list[dict[str, Any]]:
    return board.ask(path, **params)["rows"]


def test_the_overview_and_the_tables_say_what_the_job_does(board: Dashboard) -> None:
    keeper = Keeper.options(name=NASTY).remote()
    killed = Keeper.remote()
    os.kill(ray.get(killed.pid.remote()), signal.SIGKILL)
    pid = ray.get(keeper.pid.remote())
    block = ray.put(bytes(4 << 20))
    group = ray.util.placement_group([{"CPU": 1}], name="pair")
    ray.get(group.ready())
    ray.get([quick.options(name=NASTY).remote(number) for number in range(20)])
    with pytest.raises(ValueError, match="as the test wants it"):
        ray.get(fails.options(max_retries=0).remote())
    held = [sleeps.remote(600) for _ in range(4)]

    def overview() -> Any:
        found = board.ask("overview")
        now = {one["name"]: one for one in found["functions"]}
        return found if now.get("sleeps", {}).get("running") == 2 and now["sleeps"]["queued"] == 2 else None

    found = eventually(overview)
    functions = {one["name"]: one for one in found["functions"]}
    assert functions[NASTY]["ended"] == 20 and functions["fails"]["failed"] == 1, functions
    assert found["nodes"]["alive"] == 1 and found["now"]["store_used"] >= 4 << 20 and found["history"]
    (node,) = rows_of(board, "nodes")
    assert node["state"] == "alive" and node["actors"] == 1
    detail = board.ask("node", node=0)
    assert any("sleeps" in one["runs"] for one in detail["processes"]), detail["processes"]
    assert any(one["pid"] == pid for one in detail["processes"])

    tasks = board.ask("tasks", limit=500)
    assert tasks["states"]["RUNNING"] == 2 and tasks["states"]["FAILED"] == 1, tasks["states"]
    (failed,) = rows_of(board, "tasks", **{"is.state": "FAILED", "q": "fails"})
    assert "as the test wants it" in failed["message"]
    assert len(rows_of(board, "tasks", **{"is.name": NASTY})) == 20

    actors = {one["state"]: one for one in rows_of(board, "actors")}
    assert (actors["ALIVE"]["pid"], actors["ALIVE"]["name"]) == (pid, NASTY)
    assert "signal 9" in actors["DEAD"]["reason"] and abs(actors["DEAD"]["ended"] - time.time()) < 60

    objects = board.ask("objects")
    assert any(one["size"] >= 4 << 20 for one in objects["rows"]) and objects["sites"][0]["bytes"] >= 4 << 20
    (pair,) = rows_of(board, "groups", q="pair")
    assert pair["state"] == "CREATED" and pair["count"] == 1
    line = board.ask("timeline", width=800)
    assert {"sleeps", NASTY} <= set(line["names"]), line["names"]
    assert any("in sleeps" in text for text in board.ask("stacks")["lines"])
    profile = board.ask("profile", seconds=0.5)
    assert profile["unit"] == "seconds" and any("sleeps" in stack[0][0] for stack in profile["stacks"]), profile
    assert board.request("/api/profile", board.key, seconds=1e9)[0] == 400
    assert board.ask("slurm")["problem"]
    times = board.ask("function", name=NASTY)
    assert sum(one["runs"] for one in times["times"]) == 20

    def lines() -> Any:
        return [one["text"] for one in board.ask("logs/search", grep="it s[l]eeps")["lines"]]

    assert eventually(lines) == ["it sleeps"] * 2
    assert {one["text"] for one in board.ask("logs/search", actor="Keeper")["lines"]} == {"kept by an actor"}
    files = [one["name"] for one in rows_of(board, "logs/files") if str(pid) in one["name"]]
    name = next(one for one in files if one.endswith(".out"))
    assert "kept by an actor" in board.ask("logs/piece", node=0, name=name)["text"]
    assert board.request("/api/logs/piece", board.key, node=0, name="../info.json")[0] == 400
    for ref in held:
        ray.cancel(ref, force=True)
    ray.util.remove_placement_group(group)
    del block, keeper


def test_waits_are_a_graph(board: Dashboard) -> None:
    @ray.remote(num_cpus=0)
    def waits(refs):
        return ray.get(refs[0])

    asleep = sleeps.remote(600)
    outer = waits.remote([asleep])

    def graph() -> Any:
        found = board.ask("waits")
        texts = " ".join(one["text"] for one in found["nodes"])
        return found if "waits" in texts and "runs sleeps" in texts else None

    found = eventually(graph)
    assert found["edges"] and all(0 <= end < len(found["nodes"]) for edge in found["edges"] for end in edge)
    ray.cancel(asleep, force=True)
    del outer


def test_a_wrong_token_another_host_and_another_site_are_refused(board: Dashboard) -> None:
    assert board.request("/api/overview", "wrong")[0] == 401
    assert board.request("/api/enter", "wrong", "POST")[0] == 401
    assert board.request("/api/overview", board.key, host="evil.example:8265")[0] == 403
    assert board.request("/api/actions/kill-actor", board.key, "POST", {"actor": "0" * 26})[0] == 403
    eventually(lambda: len(board.links) == 2)
    first = board.key
    second = board.enter()
    assert first != second and board.ask("about", bearer=first) == board.ask("about", bearer=second)


def test_a_stranger_is_refused_at_the_socket_and_at_the_port() -> None:
    needs_stranger()
    code = """\
import socket, sys
path = "/" in sys.argv[1]
sock = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
place = sys.argv[1] if path else ("127.0.0.1", int(sys.argv[1]))
sock.settimeout(60)
try:
    sock.connect(place)
    sock.sendall(b"GET / HTTP/1.0\\r\\nHost: localhost\\r\\n\\r\\n")
    print(len(sock.recv(1000)))
except ConnectionError:
    print(0)
"""
    with Dashboard(address()) as board:
        assert stat.S_IMODE(os.stat(board.place).st_mode) == 0o600
        assert ray.init(ignore_reinit_error=True).dashboard_url == f"unix:{board.place}"
        directory = os.path.dirname(board.place)
        opened = [board.place, directory, os.path.dirname(directory), os.path.dirname(os.path.dirname(directory))]
        modes = [stat.S_IMODE(os.stat(path).st_mode) for path in opened]
        for path in opened:
            os.chmod(path, 0o777)
        try:
            assert stranger_says(code, board.place) == "0\n"
        finally:
            for path, mode in zip(opened, modes, strict=True):
                os.chmod(path, mode)
        assert board.request("/")[0] == 200
    assert ray.init(ignore_reinit_error=True).dashboard_url == ""
    with Dashboard(address(), "--port", "0") as board:
        assert ray.init(ignore_reinit_error=True).dashboard_url == board.place
        host, _, port = board.place.rpartition(":")
        assert host == "127.0.0.1" and stranger_says(code, port) == "0\n"
        assert board.request("/")[0] == 200
        board.enter()
        assert board.ask("about")["program"]


def test_ctrl_c_leaves_nothing_and_two_on_a_node_are_refused() -> None:
    with Dashboard(address()) as board:
        board.enter()
        kept = board.connection()
        kept.request("GET", "/")
        assert kept.getresponse().read()
        with pytest.raises(AssertionError, match="a dashboard of this job runs on this node"):
            Dashboard(address())
        asks = threading.Thread(target=lambda: board.request("/api/profile", board.key, seconds=20))
        asks.start()
        time.sleep(1.0)  # it is being answered
        began = time.monotonic()
        ended = board.stop()
        asks.join(30)
        assert ended.code == 0 and not ended.err, ended
        assert time.monotonic() - began < 15.0 and not asks.is_alive()
        assert not os.path.exists(board.place)
        kept.close()
    with Dashboard(address()) as board:
        os.kill(board.job.pid, signal.SIGKILL)
        board.job.child.wait(60)
        with Dashboard(address()) as other:
            assert other.place == board.place, "the socket of one that was killed is taken over"


def test_a_port_that_is_taken_is_said_to_be() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(AssertionError, match="in use"):
            Dashboard(address(), "--port", str(taken.getsockname()[1]))


def test_actors_are_killed_where_that_is_allowed() -> None:
    keeper = Keeper.remote()
    pid = ray.get(keeper.pid.remote())
    with Dashboard(address(), "--allow-actions") as board:
        board.enter()
        row = next(row for row in rows_of(board, "actors") if row["pid"] == pid)
        board.ask("actions/kill-actor", method="POST", body={"actor": row["id"]})
        eventually(lambda: not alive(pid))
        with pytest.raises(ray.exceptions.RayActorError, match="killed from the dashboard"):
            ray.get(keeper.pid.remote())
        assert board.request("/api/actions/remove-node", board.key, "POST", {"node": 99})[0] == 400


def test_zz_it_ends_with_the_job_and_says_so() -> None:
    board = Dashboard(address())
    board.enter()
    kept = board.connection()
    kept.request("GET", "/api/about", headers={"Authorization": f"Bearer {board.key}"})
    assert kept.getresponse().read()
    ray.shutdown()
    try:
        kept.request("GET", "/api/about", headers={"Authorization": f"Bearer {board.key}"})
        answer = kept.getresponse()
        assert answer.status in (200, 410)
        answer.read()
        ended = board.ended(30)
        assert ended.code == 0 and "the job has ended" in ended.out and not ended.err, ended
        assert not os.path.exists(board.place)
    finally:
        kept.close()
        board.job.__exit__(None, None, None)
