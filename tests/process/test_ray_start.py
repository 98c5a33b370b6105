"""`ray start`, `ray stop` and `ray symmetric-run` on one host, without a batch system."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.jobs import ROOT

from hpcray.common.ray_version import STANDIN
from hpcray.platform.private_files import write_private_file

PROGRAM = """\
import sys, time
import hpcray as ray
ray.init(*sys.argv[1:2])
until = time.time() + 20
while len(ray.nodes()) < int(sys.argv[2]) and time.time() < until:
    time.sleep(0.05)
@ray.remote(num_cpus=1)
def add(a, b):
    return a + b
print("nodes", len(ray.nodes()), "sum", sum(ray.get([add.remote(i, 1) for i in range(20)])))
print("cpus", int(ray.cluster_resources()["CPU"]), *sorted(row["NodeName"] for row in ray.nodes()))
"""


class Shell:
    """Commands of one user's shell, with clusters that no other test sees."""

    def __init__(self, place: Path) -> None:
        self.place = place
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("HPCRAY_", "RAY_", "SLURM_"))}
        short = f"/tmp/hpcray-start-{os.getpid()}"  # sockets have short paths
        os.makedirs(short, 0o700, exist_ok=True)
        self.tmp = Path(short)
        self.environ = {
            **kept,
            "PYTHONPATH": path,
            "HPCRAY_TMPDIR": short,
            "HPCRAY_START_DIR": str(place / "clusters"),
            "HPCRAY_OBJECT_STORE_MEMORY": "64m",
            "TMPDIR": str(place),
            "PYTHONUNBUFFERED": "1",
        }

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "hpcray.cli.ray", *words]

    def ray(self, *words: str, code: int = 0, **variables: str) -> str:
        done = subprocess.run(
            self.command(*words), env={**self.environ, **variables}, capture_output=True, text=True, timeout=60,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*words), env={**self.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def program(self, *words: str, code: int = 0, text: str = PROGRAM, **variables: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", text, *words], env={**self.environ, **variables}, capture_output=True, text=True,
            timeout=90,
        )  # fmt: skip
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def left(self) -> list[str]:
        """What is there that `ray stop` should have removed."""
        found = [str(path) for path in (self.place / "clusters").glob("*")] + [str(path) for path in self.tmp.glob("*")]
        return found + ([str(self.place / "ray")] if (self.place / "ray").exists() else [])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    found = Shell(tmp_path)
    yield found
    with contextlib.suppress(Exception):
        found.ray("stop", "--force")
    until = time.monotonic() + 15.0
    while (left := found.left()) and time.monotonic() < until:
        time.sleep(0.05)
    with contextlib.suppress(OSError):
        found.tmp.rmdir()
    assert not left


def test_a_head_a_node_and_a_program_as_scripts_write_them(shell: Shell) -> None:
    port = free_port()
    said = shell.ray("start", "--head", f"--port={port}", "--num-cpus=1", "--node-name=first", "--dashboard-port=8265")
    assert "Local node IP: " in said and "Ray runtime started." in said
    found = re.search(r"ray start --address='([\d.]+):(\d+)'", said)
    assert found is not None and int(found[2]) == port
    (secret,) = (shell.place / "clusters").glob("*.cluster")
    assert secret.stat().st_mode & 0o777 == 0o600
    with socket.create_connection(("127.0.0.1", port), timeout=5) as line:
        assert line.recv(1) == b""  # the bell
    joined = shell.ray("start", f"--address=127.0.0.1:{port}", "--num-cpus=2", "--node-name=second", "--verbose")
    assert "Ray runtime started." in joined
    for address in (
        f"localhost:{port}",
        f"{found[1]}:{port}",
        "auto",
        "ray://localhost:10001",
        "http://127.0.0.1:8265",
    ):
        assert "nodes 2 sum 210" in shell.program(address, "2"), address
    assert "cpus 3 first second" in shell.program("auto", "2", RAY_ADDRESS=f"127.0.0.1:{port}")
    plain = PROGRAM.replace("*sys.argv[1:2]", "")
    assert "nodes 2 sum 210" in shell.program("", "2", text=plain)
    latest = shell.place / "ray" / "session_latest" / "logs"
    assert any(path.name.startswith("worker") for path in latest.iterdir())
    assert (shell.place / "ray" / "ray_current_cluster").read_text() == f"{found[1]}:{port}"
    shell.ray("status", "--address", f"127.0.0.1:{port}")
    shell.ray("status", "--address", f"127.0.0.1:{port + 1}", code=1)
    assert "Stopped all 2 Ray nodes" in shell.ray("stop")
    assert not shell.left()
    assert "Did not find any active Ray processes" in shell.ray("stop", "-f")


def test_rays_module_of_commands_can_be_run_and_called(shell: Shell) -> None:
    path = os.pathsep.join([STANDIN, shell.environ["PYTHONPATH"]])
    text = "import sys; from ray.scripts.scripts import main; sys.exit(main(sys.argv[1:]))"
    for line in (["-m", "ray.scripts.scripts"], ["-c", text]):
        for words, said in ((["start", "--head", "--num-cpus=1"], "runtime started"), (["stop"], "Stopped all 1")):
            done = subprocess.run(
                [sys.executable, *line, *words], env={**shell.environ, "PYTHONPATH": path}, capture_output=True,
                text=True, timeout=60, cwd=shell.place,
            )  # fmt: skip
            assert done.returncode == 0 and said in done.stdout, done


def test_a_node_waits_for_its_head_and_block_stays_until_the_head_ends(shell: Shell) -> None:
    port = free_port()
    node = shell.start("start", f"--address=127.0.0.1:{port}", "--num-cpus=1", "--block")
    time.sleep(1.5)
    assert node.poll() is None
    head = shell.start("start", "--head", "--port", str(port), "--num-cpus=1", "--block")
    assert "nodes 2" in shell.program(f"127.0.0.1:{port}", "2", HPCRAY_JOIN_WAIT="20")
    began = time.monotonic()
    head.terminate()
    out, err = head.communicate(timeout=20)
    assert head.returncode == 143 and "Ray runtime started." in out, err
    out, err = node.communicate(timeout=20)
    assert node.returncode == 0 and "Ray runtime started." in out, err
    assert time.monotonic() - began < 10.0


def test_a_node_that_finds_its_heads_bell_but_no_secret_says_where_it_looked(shell: Shell) -> None:
    port, other = free_port(), str(shell.place / "other")
    shell.ray("start", "--head", f"--port={port}", "--num-cpus=1")
    began = time.monotonic()
    said = shell.ray("start", f"--address=127.0.0.1:{port}", code=1, HPCRAY_START_DIR=other)
    assert time.monotonic() - began < 10.0
    assert other in said and "HPCRAY_START_DIR" in said and "a bell answers there" in said


def test_a_strange_listener_at_the_port_is_told_and_is_no_head(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:  # keeps its connections, and says nothing
        port = stranger.getsockname()[1]
        said = shell.ray("start", f"--address=127.0.0.1:{port}", code=1, HPCRAY_HEAD_WAIT="3")
    assert "something else listens" in said and "no head of hpcray's" in said


def test_who_does_not_know_the_secret_of_a_cluster_does_not_join_it(shell: Shell) -> None:
    port = free_port()
    shell.ray("start", "--head", f"--port={port}", "--num-cpus=1")
    (true,) = (shell.place / "clusters").glob("*.cluster")
    forged = json.loads(true.read_bytes())
    secret = base64.b64decode(forged["secret"])
    forged["secret"] = base64.b64encode(secret[:-1] + bytes([secret[-1] ^ 1])).decode()
    other = shell.place / "forged"
    other.mkdir(mode=0o700)
    write_private_file(str(other / true.name), json.dumps(forged).encode())
    limits = {"HPCRAY_START_DIR": str(other), "HPCRAY_START_TIMEOUT": "2", "HPCRAY_HEAD_WAIT": "3"}
    said = shell.ray("start", f"--address=127.0.0.1:{port}", code=1, **limits)
    assert "does not answer" in said
    assert "nodes 1 sum 210" in shell.program("auto", "1")
    shell.ray("stop")


def test_a_dead_heads_secret_is_known_to_be_stale(shell: Shell) -> None:
    port = free_port()
    shell.ray("start", "--head", f"--port={port}", "--num-cpus=1")
    (secret,) = (shell.place / "clusters").glob("*.cluster")
    stale = secret.read_bytes()
    shell.ray("stop")
    secret.write_bytes(stale)
    secret.chmod(0o600)
    said = shell.ray("start", f"--address=127.0.0.1:{port}", code=1, HPCRAY_HEAD_WAIT="1")
    assert "does not answer" in said and "no cluster" in said
    secret.unlink()


def test_the_end_of_a_keeper_is_the_end_of_its_node(shell: Shell) -> None:
    shell.ray("start", "--head", "--num-cpus=1")
    (path,) = shell.tmp.glob("hpcray-*/*/ray_start.json")
    os.kill(json.loads(path.read_text())["keeper"], signal.SIGKILL)

    def secrets() -> list[Path]:
        return list((shell.place / "clusters").glob("*.cluster"))

    until = time.monotonic() + 10.0
    while (path.parent.exists() or secrets()) and time.monotonic() < until:  # the secret goes after the directory
        time.sleep(0.02)
    assert not path.parent.exists() and not secrets()
    shell.ray("start", "--head", "--num-cpus=1")  # removes what the killed one has left
    assert len(list((shell.place / "clusters").glob("*.call"))) == 1
    (path,) = shell.tmp.glob("hpcray-*/*/ray_start.json")
    os.kill(json.loads(path.read_text())["keeper"], signal.SIGKILL)
    shell.ray("stop", "-g", "5")  # waits for its end, and removes the rest
    assert not shell.left()


def processes_below(pid: int) -> list[int]:
    """A process and all that it has started, as Slurm kills them with a step where no cgroups are."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(below for child in children for below in processes_below(int(child)))]


def test_what_is_killed_with_its_step_leaves_nothing_but_the_reason(shell: Shell) -> None:
    port = free_port()
    head = shell.start("start", "--head", f"--port={port}", "--num-cpus=1", "--block")
    assert head.stdout is not None
    while "Ray runtime started." not in head.stdout.readline():
        pass
    for pid in processes_below(head.pid):
        with contextlib.suppress(ProcessLookupError):  # it ended with the one killed before it
            os.kill(pid, signal.SIGKILL)
    head.communicate(timeout=20)
    until = time.monotonic() + 20.0
    while any(not path.endswith(".call") for path in shell.left()) and time.monotonic() < until:
        time.sleep(0.05)
    (reason,) = shell.left()
    assert reason.endswith(".call")
    shell.ray("stop")
    assert not shell.left()


def test_nodes_that_were_killed_are_named_by_the_next_program_and_by_ray_status(shell: Shell) -> None:
    port = free_port()
    shell.ray("start", "--head", f"--port={port}", "--num-cpus=1")
    for _ in range(2):
        shell.ray("start", f"--address=127.0.0.1:{port}", "--num-cpus=1")
    nodes = [json.loads(path.read_text()) for path in shell.tmp.glob("hpcray-*/*/ray_start.json")]
    stopped, killed = [node["keeper"] for node in nodes if not node["head"]]

    def end(pid: int, number: int, left: int) -> str:
        os.kill(pid, number)
        until = time.monotonic() + 20.0
        while (said := shell.ray("status")).count(" 1 node_") != left and time.monotonic() < until:
            time.sleep(0.05)
        return said

    said = end(stopped, signal.SIGTERM, 2)
    assert said.count("NodeTerminated") == 1 and "--block" not in said
    assert "--block" not in shell.program("auto", "2")
    said = end(killed, signal.SIGKILL, 1)
    assert said.count("NodeTerminated") == 2 and "--block" in said
    said = shell.program("auto", "1")
    assert "no command has stopped them" in said and "--block" in said


@pytest.mark.parametrize("killed", [True, False])
def test_the_guard_removes_what_is_killed_and_ends_the_node_with_its_job(shell: Shell, killed: bool) -> None:
    shell.ray("start", "--head", "--num-cpus=1")
    (path,) = shell.tmp.glob("hpcray-*/*/ray_start.json")
    (secret,) = (shell.place / "clusters").glob("*.cluster")
    node, raylet = json.loads(path.read_text()), json.loads((path.parent / "info.json").read_text())["pid"]
    line = "import sys; from hpcray.ray_start.allocation_watch import guard; print(flush=True); guard(*sys.argv[1:])"
    words = [str(path.parent), str(secret), str(node["keeper"]), str(node["started"])]
    guard = subprocess.Popen([sys.executable, "-c", line, *words], env=shell.environ, stdout=subprocess.PIPE)
    assert guard.stdout is not None
    guard.stdout.readline()
    until = time.monotonic() + 20.0
    while Path(f"/proc/{guard.pid}/comm").read_text() != "hpcray-guard\n" or not waits_for_lock(guard.pid):
        assert time.monotonic() < until
        time.sleep(0.02)
    if killed:
        for pid in {node["keeper"], *processes_below(node["keeper"]), *processes_below(raylet)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    else:
        guard.terminate()  # Slurm ends its step with the job
    assert guard.wait(20) == 0
    left = [path for path in shell.left() if not (killed and path.endswith(".call"))]  # the reason, for programs
    assert not left
    shell.ray("stop")


def waits_for_lock(pid: int) -> bool:
    return any(f" {pid} " in line for line in Path("/proc/locks").read_text().splitlines() if "->" in line)


NOTE = "; told by the starter"
LOSES_NODES = """\
import os, signal, sys
import hpcray as ray
ray.init(sys.argv[1])

@ray.remote(resources={"far": 1})
class Far:
    def pid(self):
        return os.getpid()

far = Far.remote()
ray.get(far.pid.remote())
def end(pid):
    os.kill(int(pid), signal.SIGKILL)

end(sys.argv[2])
try:
    while True:
        ray.get(far.pid.remote())
except ray.exceptions.RayActorError as error:
    print("actor:", str(error).replace(chr(10), " "))
end(sys.argv[3])
try:
    while True:
        ray.get(ray.remote(lambda: 1).remote())
except ray.exceptions.LocalRayletDiedError as error:
    print("driver:", error)
"""


def test_what_a_starter_knows_of_the_end_of_its_nodes_is_in_all_errors(shell: Shell) -> None:
    # `ray start` in a step without --block tells that the end of the step may be that of the node.
    port = free_port()
    shell.ray("start", "--head", f"--port={port}", "--num-cpus=1", HPCRAY_END_NOTE=NOTE)
    shell.ray("start", f"--address=127.0.0.1:{port}", "--num-cpus=1", '--resources={"far": 1}', HPCRAY_END_NOTE=NOTE)
    shell.ray("start", f"--address=127.0.0.1:{port}", "--num-cpus=1", HPCRAY_END_NOTE="; not this one")
    found = {}
    for path in shell.tmp.glob("hpcray-*/*/ray_start.json"):
        info = json.loads((path.parent / "info.json").read_text())
        found[info["node"]] = info["pid"], json.loads(path.read_text())["keeper"]
    os.kill(found[2][1], signal.SIGTERM)
    until = time.monotonic() + 20.0
    while (said := shell.ray("status")).count(" 1 node_") != 2 and time.monotonic() < until:
        time.sleep(0.05)
    assert "not this one" not in said, said  # it was ordered
    said = shell.program(f"127.0.0.1:{port}", str(found[1][0]), str(found[0][0]), text=LOSES_NODES)
    actor, driver = (next(line for line in said.splitlines() if line.startswith(who)) for who in ("actor", "driver"))
    assert actor.count(NOTE) == 1 and driver.count(NOTE) == 1, said


def test_ray_stop_ends_a_node_that_a_shell_has_started_by_an_ampersand(shell: Shell) -> None:
    line = " ".join(shell.command("start", "--head", "--num-cpus=1", "--block"))
    script = f"{line} >/dev/null 2>&1 & until {' '.join(shell.command('status'))}; do sleep 0.1; done; echo $!"
    done = subprocess.run(["sh", "-c", script], env=shell.environ, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    began = time.monotonic()
    assert "Stopped all 1" in shell.ray("stop", "--force")  # by SIGQUIT, which a shell has such a command ignore
    assert time.monotonic() - began < 4.5
    assert not shell.left()


def test_two_heads_need_two_ports(shell: Shell) -> None:
    shell.ray("start", "--head", "--num-cpus=1")
    assert "already running" in shell.ray("start", "--head", "--num-cpus=1", code=1)
    said = shell.ray("start", "--head", "--num-cpus=1", "--port=0")
    found = re.search(r"--address='([\d.]+:\d+)'", said)
    assert found is not None and not found[1].endswith(":6379")
    assert "nodes 1" in shell.program(found[1], "1")
    assert "more than one cluster" in shell.program("auto", "1", code=1)
    assert "Stopped all 2" in shell.ray("stop")


def test_without_a_bell_nothing_listens_and_a_taken_port_is_no_failure(shell: Shell) -> None:
    port = free_port()
    shell.ray("start", "--head", f"--port={port}", "--num-cpus=1", HPCRAY_START_BELL="0")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    shell.ray("stop")
    with socket.create_server(("0.0.0.0", port)):
        shell.ray(
            "start",
            "--head",
            f"--port={port}",
            "--num-cpus=1",
            "--node-manager-port=5",
            "--temp-dir",
            str(shell.place / "t"),
        )
        log = (shell.place / "t" / "session_latest" / "logs" / "ray_start.log").read_text()
        assert f"no bell at port {port}" in log and "--node-manager-port" in log
        shell.ray("stop")


def test_rays_rest_api_is_there_where_hpcrays_own_variable_asks_for_it(shell: Shell) -> None:
    pytest.importorskip("uvicorn")
    pytest.importorskip("wsproto")
    port = free_port()
    home = {"HPCRAY_RAY_API": "1", "HOME": str(shell.place)}
    said = shell.ray("start", "--head", "--num-cpus=1", f"--dashboard-port={port}", "--include-dashboard=true", **home)
    exports = dict(re.findall(r"export (\w+)=(\S+)", said))
    assert exports["RAY_API_SERVER_ADDRESS"] == f"http://127.0.0.1:{port}", said
    url = f"{exports['RAY_API_SERVER_ADDRESS']}/api/version"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(url, timeout=10)
    token = Path(exports["RAY_AUTH_TOKEN_PATH"]).read_text()
    with urllib.request.urlopen(
        urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"}), timeout=10
    ) as answer:
        assert json.loads(answer.read())["ray_version"]
    shell.ray("stop")
    until = time.monotonic() + 10.0
    with contextlib.suppress(ConnectionRefusedError):
        while time.monotonic() < until:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            time.sleep(0.05)
        pytest.fail("the API has outlived its node")
    shell.ray("start", "--head", "--num-cpus=1", f"--dashboard-port={port}", "--include-dashboard=true")
    with pytest.raises(ConnectionRefusedError):  # what scripts say out of habit is not asking for it
        socket.create_connection(("127.0.0.1", port), timeout=5)
    shell.ray("stop")
    with socket.create_server(("127.0.0.1", port)):
        said = shell.ray("start", "--head", "--num-cpus=1", f"--dashboard-port={port}", **home)
        assert "no REST API" in said and "Ray runtime started." in said
    shell.ray("stop")


def test_the_address_of_a_node_is_the_given_one_and_a_tmpdir_of_its_own_hides_it_from_nobody(shell: Shell) -> None:
    text = (
        "import hpcray as ray; from hpcray.util import get_node_ip_address as ip; ray.init()\n"
        "print([row['NodeManagerAddress'] for row in ray.nodes()], ray.cluster_resources().get('node:10.1.2.3'))\n"
        "print(ray.get(ray.remote(ip).remote()))"
    )
    other = shell.tmp / "of-the-step"
    other.mkdir(mode=0o700)
    here = shell.place / "here"
    here.mkdir()
    (here / "here").write_text("in the working directory")
    shell.ray("start", "--head", "--num-cpus=1", "--node-ip-address=10.1.2.3", HPCRAY_TMPDIR=str(other))
    assert "['10.1.2.3'] 1.0\n10.1.2.3" in shell.program(text=text)
    assert "Active:" in shell.ray("status")
    # As in another container of the same host: its files are not to be seen, and so the command comes to the node.
    (call,) = (shell.place / "clusters").glob("*.call")
    true = call.read_bytes()
    call.write_bytes(true.replace(str(other).encode(), b"/nowhere"))
    shell.ray("status", code=1, HPCRAY_ENTERED_JOB="node")
    assert "Active:" in shell.ray("status")
    submit = ("job", "submit", "--address=http://localhost:8265", "--working-dir", str(here), "--", "cat", "here")
    assert "in the working directory" in shell.ray(*submit)
    call.write_bytes(true)
    assert "Stopped all 1 Ray node." in shell.ray("stop")
    other.rmdir()


def test_symmetric_run_ends_with_the_code_of_its_command(shell: Shell) -> None:
    address = f"127.0.0.1:{free_port()}"
    code = (
        "import hpcray as ray, os, sys; ray.init(); print('nodes', len(ray.nodes()), os.environ['RAY_ADDRESS']); "
        "sys.exit(7)"
    )
    said = shell.ray("symmetric-run", "--address", address, "--num-cpus=1", "--", sys.executable, "-c", code, code=7)
    assert "nodes 1" in said
    assert not shell.left()
    assert "No separator" in shell.ray("symmetric-run", "--address", address, code=1)


def test_a_program_finds_why_ray_start_failed_in_the_background(shell: Shell) -> None:
    job = {"SLURM_JOB_ID": "4294967290"}
    shell.ray("start", "--head", "--porti=5", code=2, **job)
    plain = "import hpcray as ray; ray.init()"
    said = shell.program(text=plain, code=1, **job)
    assert "--porti" in said and "init(address='local')" in said
    for path in (shell.place / "clusters").glob("*.call"):
        path.unlink()


def test_a_program_finds_that_ray_start_had_no_place_for_its_secret(shell: Shell) -> None:
    place = shell.place / "open"
    place.mkdir()
    place.chmod(0o755)
    job = {"SLURM_JOB_ID": "4294967292", "HPCRAY_START_DIR": str(place)}
    for words in (
        ("start", "--head"),
        ("start", "--address=n1:6379"),
        ("symmetric-run", "--address=localhost:1", "--", "true"),
    ):
        assert "chmod 700" in shell.ray(*words, code=1, **job)
        said = shell.program(text="import hpcray as ray; ray.init()", code=1, **job)
        assert f"`ray {words[0]}" in said and "cannot keep the secrets" in said and "init(address='local')" in said
    place.chmod(0o700)
    shell.ray("start", "--head", "--num-cpus=1", **job)  # and now there is nothing to complain about
    assert "nodes 1" in shell.program("auto", "1", **job)
    shell.ray("stop", **job)


def test_a_program_that_comes_before_ray_start_waits_for_it(shell: Shell) -> None:
    job = {"SLURM_JOB_ID": "4294967291"}
    late = subprocess.Popen(["sh", "-c", 'sleep 3; exec "$@"', "sh", *shell.command("start", "--head", "--num-cpus=3")],
                            env={**shell.environ, **job}, stdout=subprocess.DEVNULL)  # fmt: skip
    said = shell.program("", "1", text=PROGRAM.replace("*sys.argv[1:2]", ""), **job)
    assert "cpus 3" in said and late.wait(10) == 0, said
    assert "Stopped all 1" in shell.ray("stop", **job)


def test_ctrl_c_while_it_waits_leaves_nothing(shell: Shell) -> None:
    node = shell.start("start", f"--address=127.0.0.1:{free_port()}")
    time.sleep(1.5)
    node.send_signal(signal.SIGINT)
    node.communicate(timeout=10)
    assert node.returncode != 0
    until = time.monotonic() + 5.0
    while list((shell.place / "clusters").glob("*.call")) and time.monotonic() < until:
        time.sleep(0.05)
    assert not shell.left()
