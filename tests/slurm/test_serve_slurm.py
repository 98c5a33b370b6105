"""Ray Serve on four nodes, under load: a node that is lost takes with it the requests that were in flight there, and no
others; a node that is drained none at all. And its HTTP at the Unix sockets of two nodes, and with a token between
them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from helpers.slurm import Slurm

pytest.importorskip("fastapi")
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]
REPLICAS = 8

# Every request has a number. A replica notes those that it begins, and says where it is. The driver is a client through
# handles and over HTTP, until the file `stop` is there, and notes how each request ended.
SERVING = f"""\
import asyncio, itertools, json, os, socket, sys, threading, time, urllib.error, urllib.request
import ray
from ray import serve

PLACE, REPLICAS, PORT = sys.argv[1], {REPLICAS}, 8000


@serve.deployment(
    num_replicas=REPLICAS, max_ongoing_requests=20, ray_actor_options={{"num_cpus": 0.5}}, health_check_period_s=2
)
class Echo:
    def __init__(self):
        self.host = socket.gethostname()
        self.file = open(os.path.join(PLACE, f"begun-{{self.host}}-{{os.getpid()}}"), "a", buffering=1)

    async def __call__(self, request):
        return await self.echo(int(request.query_params["number"]))

    async def echo(self, number):
        self.file.write(f"{{number}}\\n")
        await asyncio.sleep(0.2)
        return {{"number": number, "host": self.host}}


numbers = itertools.count()
ended = open(os.path.join(PLACE, "ended"), "a", buffering=1)
stop = threading.Event()


def client(kind, ask):
    while not stop.is_set():
        number, begun, error, host = next(numbers), time.time(), "", ""
        try:
            answer = ask(number)
            assert answer["number"] == number
            host = answer["host"]
        except Exception as raised:
            error = f"{{type(raised).__name__}}: {{str(raised)[:500]}}"
            if isinstance(raised, urllib.error.HTTPError):
                error += raised.read().decode()[:500]
        ended.write(json.dumps([number, kind, begun, time.time(), host, error]) + "\\n")


def over_http(number):
    with urllib.request.urlopen(f"http://127.0.0.1:{{PORT}}/echo?number={{number}}", timeout=60) as answer:
        return json.load(answer)


ray.init()
serve.start(http_options={{"port": PORT}}, logging_config={{"enable_access_log": False}})
handle = serve.run(Echo.bind(), name="echo", route_prefix="/echo")
asks = {{"handle": lambda number: handle.echo.remote(number).result(timeout_s=60), "http": over_http}}
clients = [threading.Thread(target=client, args=item) for item in asks.items() for _ in range(6)]
for thread in clients:
    thread.start()


def watch():
    while all(node["Alive"] for node in ray.nodes()):
        time.sleep(0.05)
    print("noticed", time.time(), flush=True)


threading.Thread(target=watch, daemon=True).start()
print("ready", flush=True)
while not os.path.exists(os.path.join(PLACE, "stop")):
    time.sleep(0.1)
stop.set()
for thread in clients:
    thread.join()
running = serve.status().applications["echo"].deployments["Echo"].replica_states.get("RUNNING", 0)
print("running", running, flush=True)
serve.shutdown()
"""


class Serving:
    """The program above, as a job on four nodes."""

    def __init__(self, slurm: Slurm, lent: dict[str, str]) -> None:
        self.slurm = slurm
        script, environ = slurm.write(SERVING), {**lent, "HPCRAY_PRELOAD": "ray.serve"}
        batch = slurm.source / "slurm" / "cpu.sbatch"
        self.job = slurm.sbatch("-N4", batch, "--as-ray", script, slurm.place, environ=environ)
        slurm.wait_output(self.job, "ready", 300.0)
        slurm.wait(lambda: len(self.ended()) >= 200, "requests")
        slurm.wait(lambda: len(self.recent("")) == REPLICAS, "all replicas")

    def ended(self) -> list[list[Any]]:
        """Number, kind, begin, end, host and error of each request that has ended."""
        path = self.slurm.place / "ended"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def begun(self, host: str) -> set[int]:
        """Numbers of the requests that replicas on this host have begun."""
        return {int(line) for path in self.slurm.place.glob(f"begun-{host}-*") for line in path.read_text().split()}

    def wait_ended(self, more: int) -> None:
        """Wait until so many more requests have ended."""
        enough = len(self.ended()) + more
        self.slurm.wait(lambda: len(self.ended()) >= enough, f"{more} requests")

    def recent(self, host: str) -> list[str]:
        """The replicas, but for those on `host`, that have begun a request in the last two seconds."""
        found, now = self.slurm.place.glob("begun-*"), time.time()
        return [path.name for path in found if f"-{host}-" not in path.name and path.stat().st_mtime > now - 2]

    def stop(self) -> None:
        """Let 500 more requests end; then the job, with all replicas."""
        self.wait_ended(500)
        self.slurm.write("", "stop")
        self.slurm.complete(self.job)
        assert f"running {REPLICAS}\n" in self.slurm.output()


@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_a_lost_node_takes_only_the_requests_in_flight_there(slurm: Slurm, lent: dict[str, str], how: str) -> None:
    serving = Serving(slurm, lent)
    lost = time.time()
    if how == "killed":
        slurm.kill("n3")
    else:
        slurm.cluster.cut("n3")
    try:
        slurm.wait(lambda: len(serving.recent("n3")) == REPLICAS, "all replicas elsewhere")
        recovered = time.time()
    finally:
        slurm.cluster.heal("n3")
    serving.stop()
    rows = serving.ended()
    there = serving.begun("n3")
    in_flight = there - {number for number, _, _, _, host, _ in rows if host == "n3"}
    failed = {number: error for number, _, _, _, _, error in rows if error}
    assert not failed.keys() - in_flight, {number: failed[number] for number in failed.keys() - in_flight}
    assert {kind for _, kind, begun, _, _, error in rows if begun > lost and not error} == {"handle", "http"}
    longest = max(end - begun for _, _, begun, end, _, _ in rows if end > lost)
    (noticed,) = [line.split()[1] for line in slurm.output().splitlines() if line.startswith("noticed ")]
    print(
        f"{how}: noticed after {float(noticed) - lost:.1f} s; of {len(rows)} requests {len(failed)} failed, of "
        f"{len(in_flight)} in flight on n3; "
        f"the longest took {longest:.1f} s; all replicas again after {recovered - lost:.1f} s"
    )
    slurm.check()


def test_a_drained_node_costs_no_request(slurm: Slurm, lent: dict[str, str]) -> None:
    """And when its replicas have moved, its loss costs none either."""
    serving = Serving(slurm, lent)
    drained = time.time()
    slurm.said("scontrol", "update", "nodename=n3", "state=drain", "reason=test")
    try:
        slurm.wait(
            lambda: len(serving.recent("n3")) == REPLICAS and len(serving.recent("")) == REPLICAS, "the move", 150.0
        )
        print(f"all replicas elsewhere after {time.time() - drained:.1f} s")
        slurm.kill("n3")
        serving.stop()
    finally:
        slurm.said("scontrol", "update", "nodename=n3", "state=resume")
    assert not [row for row in serving.ended() if row[-1]]
    slurm.check()


PRIVATE = """\
import json, os, socket, urllib.error, urllib.request
import ray
from ray import serve
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On


@serve.deployment(num_replicas=2, max_replicas_per_node=1, ray_actor_options={"num_cpus": 0.1})
class Echo:
    async def __call__(self, request):
        return request.query_params["text"]


@ray.remote(num_cpus=0)
def over_socket():
    path = os.path.join(ray.get_runtime_context().gcs_address, "http-8000.s")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        sock.sendall(b"GET /echo?text=hello HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n")
        answer = b"".join(iter(lambda: sock.recv(4096), b""))
    return path, b" 200 OK" in answer and b"hello" in answer


@ray.remote(num_cpus=0)
def over_network(address, headers):
    request = urllib.request.Request(f"http://{address}:8000/echo?text=hello", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code


@ray.remote(num_cpus=0)
def token():
    with open(os.path.join(ray.get_runtime_context().gcs_address, "http-8000.token")) as file:
        return dict([file.read().strip().split(": ")])


ray.init()
nodes = [(On(row["NodeID"], soft=False), row["NodeManagerAddress"]) for row in ray.nodes()]
serve.start(http_options={"host": "unix"})
serve.run(Echo.bind(), name="echo", route_prefix="/echo")
found = ray.get([over_socket.options(scheduling_strategy=on).remote() for on, _ in nodes])
print("sockets", len({path for path, _ in found}), [good for _, good in found], flush=True)
serve.shutdown()
serve.start(http_options={"host": "0.0.0.0", "token": True})
serve.run(Echo.bind(), name="echo", route_prefix="/echo")
tokens = ray.get([token.options(scheduling_strategy=on).remote() for on, _ in nodes])
answers = [
    ray.get(over_network.options(scheduling_strategy=on).remote(address, headers))
    for on, _ in nodes for _, address in nodes for headers in ({}, tokens[0])
]
print("tokens", tokens[0] == tokens[1], answers, flush=True)
serve.shutdown()
"""


def test_http_is_at_a_socket_of_each_node_or_asks_for_a_token(slurm: Slurm, lent: dict[str, str]) -> None:
    script, environ = slurm.write(PRIVATE), {**lent, "HPCRAY_PRELOAD": "ray.serve"}
    job = slurm.sbatch("-N2", slurm.source / "slurm" / "cpu.sbatch", "--as-ray", script, environ=environ)
    said = slurm.complete(job, 300.0)
    assert "sockets 2 [True, True]" in said, said
    assert f"tokens True {[401, 'hello'] * 4}" in said, said
    slurm.check()
