"""Batch scripts that start Ray node by node, as they are: steps, ranks, allocations that end, separate homes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from helpers.slurm import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = """\
import os, socket, sys, time
import hpcray as ray
ray.init(*sys.argv[2:])
until = time.time() + 40
while sum(row["Alive"] for row in ray.nodes()) < int(sys.argv[1]) and time.time() < until:
    time.sleep(0.1)
@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
def where():
    time.sleep(0.2)
    return socket.gethostname()
found = set()
while len(found) < int(sys.argv[1]) and time.time() < until:  # a node that came last has no worker yet
    found |= set(ray.get([where.remote() for _ in range(6)]))
print("hosts", *sorted(found), "cpus", int(ray.cluster_resources()["CPU"]), flush=True)
time.sleep(float(os.environ.get("HOLD", 0)))
sys.exit(7)
"""
HEADER = """\
#!/bin/bash
#SBATCH --ntasks-per-node=1 --cpus-per-task=2 --time=10 --output=%x-%j.out
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
head_ip=$(getent hosts "${nodes[0]}" | awk '{print $1}')
on() { local node=$1; shift; srun --overlap --nodes=1 --ntasks=1 -w "$node" "$@"; }
"""


class Scripts:
    """Batch scripts with a command `ray` on their PATH."""

    def __init__(self, slurm: Slurm) -> None:
        self.slurm = slurm
        slurm.write(f'#!/bin/sh\nexec {slurm.python} -m hpcray.cli.ray "$@"\n', "ray")
        slurm.write(PROGRAM)
        # The directory of the test is open to all, and so it is no place for secrets.
        self.secrets = slurm.place.parent / f"clusters-{slurm.place.name}"
        self.environ = {
            "PATH": f"{slurm.place}:{slurm.environ()['PATH']}",
            "HPCRAY_START_DIR": str(self.secrets),
            "HPCRAY_OBJECT_STORE_MEMORY": "64m",
        }

    def submit(self, body: str, *options: str, name: str = "script", **variables: str) -> str:
        script = self.slurm.write(HEADER + body, f"{name}.sbatch")
        return self.slurm.sbatch("-J", name, *options, script, environ={**self.environ, **variables})

    def code(self, job: str, timeout: float = 90.0) -> tuple[str, str]:
        """The exit code of a job that has ended, and all that jobs have written."""
        facts = self.slurm.finish(job, timeout)
        return facts["ExitCode"].split(":")[0], self.slurm.output()

    def files(self) -> list[str]:
        return sorted(path.name for path in self.secrets.glob("*"))


@pytest.fixture
def scripts(slurm: Slurm) -> Scripts:
    return Scripts(slurm)


STEPS = """\
for node in "${nodes[@]:1}"; do on "$node" ray start --address="$head_ip:6379" --block & done
sleep 3
on "${nodes[0]}" ray start --head --node-ip-address="$head_ip" --port=6379 --block &
"$PYTHON" program.py 3 "$head_ip:6379"
"""


def test_steps_in_the_background_without_a_pause_in_the_wrong_order(scripts: Scripts) -> None:
    # Each node offers the two CPUs that the job has on it, though its step has one.
    code, shown = scripts.code(scripts.submit(STEPS, "-N3"))
    assert code == "7" and "hosts n1 n2 n3 cpus 6" in shown, shown
    assert scripts.files() == []


def test_roles_by_rank_in_one_step_and_every_rank_is_a_driver(scripts: Scripts) -> None:
    body = """\
export head_ip
srun --mpi=none --kill-on-bad-exit=0 bash -c '
    if [ "$SLURM_PROCID" = 0 ]; then ray start --head --num-cpus=1
    else sleep 2; ray start --address=$head_ip:6379 --num-cpus=1; fi || exit 3
    "$PYTHON" program.py 3; code=$?; touch done.$SLURM_PROCID
    while [ "$(ls done.* | wc -l)" -lt 3 ]; do sleep 0.2; done
    exit $code'
"""
    code, shown = scripts.code(scripts.submit(body, "-N3"))
    assert code == "7" and shown.count("hosts n1 n2 n3 cpus 3") == 3, shown


def test_two_jobs_of_one_name_on_the_same_hosts_and_a_bell_for_one(scripts: Scripts) -> None:
    body = """\
mine='--num-cpus=1 --block --resources={"'$TAG'":1}'
on "${nodes[0]}" ray start --head --node-ip-address="$head_ip" --port=6379 $mine &
on "${nodes[1]}" ray start --address="$head_ip:6379" $mine &
"$PYTHON" program.py 2 "$head_ip:6379"
"$PYTHON" -c 'import hpcray as ray, os; ray.init(); found = ray.cluster_resources()
print("units", os.environ["TAG"], [found.get(name, 0) for name in ("red", "blue")])'
touch "over.$TAG"; while [ ! -e over.red -o ! -e over.blue ]; do sleep 0.2; done
ray stop
exit 5
"""
    options = ("-N2", "--nodelist=n1,n2", "--oversubscribe", "--mem=500")
    jobs = [scripts.submit(body, *options, name=tag, TAG=tag) for tag in ("red", "blue")]
    for job in jobs:
        code, shown = scripts.code(job)
        assert code == "5", shown
    assert "units red [2.0, 0]" in shown and "units blue [0, 2.0]" in shown, shown


def test_nothing_stays_when_the_job_is_cancelled_or_its_shell_is_killed(scripts: Scripts) -> None:
    body = """\
ray start --head --node-ip-address="$head_ip" --num-cpus=1
on "${nodes[1]}" ray start --address="$head_ip:6379" --num-cpus=1 --block &
on "${nodes[1]}" ray start --address="$head_ip:6380" --num-cpus=1 --block &
echo "shell $$"
HOLD=300 "$PYTHON" program.py 2
"""
    slurm = scripts.slurm
    job = scripts.submit(body, "-N2")
    slurm.wait_output(job, "hosts n1 n2")
    slurm.said("scancel", job)
    slurm.check()
    slurm.finish(job)
    job = scripts.submit(body, "-N2", name="killed")
    slurm.wait(lambda: slurm.output().count("hosts n1 n2") == 2, "the second program")
    orphan = slurm.processes(Path(slurm.python).name)["n1"]  # the program
    for pid in [*slurm.processes("slurm_script")["n1"], *orphan]:
        os.kill(pid, signal.SIGKILL)
    slurm.finish(job)
    slurm.check(40.0)
    assert not [name for name in scripts.files() if name.endswith(".cluster")]


@pytest.mark.parametrize("port", ["--port=6379", "--dashboard-port=8265"])  # with a bell, and without one
def test_homes_that_are_not_shared_are_named_within_seconds(scripts: Scripts, port: str) -> None:
    body = """\
export HOME=/tmp/home; srun mkdir -p -m 700 /tmp/home
begin=$(date +%s%N)
on "${nodes[1]}" ray start --address="$head_ip:6379" --num-cpus=1 --block; code=$?
echo "took $((($(date +%s%N) - $(cat started)) / 1000000)) ms, code $code"
"$PYTHON" program.py 1
ray stop; srun rm -rf /tmp/home
"""
    head = f'ray start --head --node-ip-address="$head_ip" {port} --num-cpus=1 && date +%s%N > started\n'
    scripts.environ.pop("HPCRAY_START_DIR")
    job = scripts.submit(body.replace("begin=", head + "begin=", 1), "-N2")
    _, shown = scripts.code(job)
    (took,) = [line.split() for line in shown.splitlines() if line.startswith("took")]
    assert int(took[1]) < 10_000 and took[-1] == "1", shown
    assert "/tmp/home/.hpcray/clusters" in shown and "HPCRAY_START_DIR" in shown


def test_homes_that_are_not_shared_are_named_where_the_head_is_in_another_job_too(scripts: Scripts) -> None:
    home = "export HOME=/tmp/home; mkdir -p -m 700 $HOME; trap 'ray stop; rm -rf $HOME' EXIT\n"
    scripts.environ.pop("HPCRAY_START_DIR")
    node = home + 'ray start --address=n1:6379 --num-cpus=1 --block; echo "code $?"\n'
    waits = scripts.submit(node + "touch over", "-N1", "--nodelist=n2", name="node")  # begins before its head's job
    scripts.slurm.wait(lambda: any(scripts.slurm.place.glob("node-*.out")), "the node's job")
    time.sleep(4.0)
    head = home + "ray start --head --num-cpus=1; while [ ! -e over ]; do sleep 0.1; done\n"
    job = scripts.submit(head, "-N1", "--nodelist=n1", name="head")  # without --port, and so without a bell
    _, shown = scripts.code(waits)
    scripts.code(job)
    assert "code 1" in shown, shown
    assert "/tmp/home/.hpcray/clusters" in shown and "HPCRAY_START_DIR" in shown and "on its host" in shown


def test_a_node_that_its_site_kills_with_its_step_is_named_by_the_program(scripts: Scripts) -> None:
    body = """\
export nodes_of='[h]pcray-raylet|[h]pcray.cli.ray'
on "${nodes[0]}" bash -c 'ray start --head --num-cpus=1 --port=6379; sleep 1; pkill -KILL -f "$nodes_of"; true'
"$PYTHON" program.py 1 "$head_ip:6379"; echo "named $?"
"$PYTHON" program.py 1; echo "plain $?"
"""
    _, shown = scripts.code(scripts.submit(body, "-N2"))
    assert "named 1" in shown and "plain 1" in shown, shown
    assert shown.count("was killed") >= 2 and "--block" in shown, shown
    scripts.slurm.kill("n1")  # and removes what no process was left to remove


def test_nodes_that_their_site_kills_with_their_steps_leave_nothing_and_the_program_says_why(scripts: Scripts) -> None:
    # As cgroups do: all that a step has started goes with it. The guard is a step of its own, which has begun when
    # `ray start` returns, and needs no `srun` any more.
    body = """\
cat >step.sh <<'EOF'
ray start "$@" --num-cpus=1 || exit 1
touch "up.$1"; while [ ! -e over ]; do sleep 0.1; done
pkill -KILL -u "$(id -u)" 'hpcray-(raylet|keeper|worke|templa)'
EOF
on "${nodes[0]}" bash step.sh --head --port=6379 & head=$!
while [ ! -e up.--head ]; do sleep 0.1; done
on "${nodes[1]}" bash step.sh --address="$head_ip:6379" & node=$!
while [ ! -e "up.--address=$head_ip:6379" ]; do sleep 0.1; done
"$PYTHON" - <<'EOF'
import hpcray as ray, pathlib, time
ray.init("auto")
@ray.remote(num_cpus=1)
class Here:
    def host(self): return 1
actors = [Here.options(scheduling_strategy="SPREAD").remote() for _ in range(2)]
ray.get([actor.host.remote() for actor in actors])
pathlib.Path("over").touch()
for actor in actors:
    try:
        while True: ray.get(actor.host.remote())
    except ray.exceptions.RayError as error:
        print("lost:", str(error).replace(chr(10), " "), flush=True)
EOF
wait $head $node
"""
    job = scripts.submit(body, "-N2")
    _, shown = scripts.code(job)
    lost = [line for line in shown.splitlines() if line.startswith("lost:")]
    assert len(lost) == 2 and all("without --block" in line for line in lost), shown
    scripts.slurm.check(20.0)
    assert not [name for name in scripts.files() if name.endswith(".cluster")]


def test_a_killed_srun_leaves_nothing_of_its_node(scripts: Scripts) -> None:
    body = """\
srun --overlap -N1 -n1 -w "${nodes[0]}" ray start --head --num-cpus=1 --port=6379 --block & head=$!
on "${nodes[1]}" ray start --address="$head_ip:6379" --num-cpus=1 --block & node=$!
"$PYTHON" program.py 2 "$head_ip:6379"; code=$?
kill $head $node; wait
exit $code
"""
    code, shown = scripts.code(scripts.submit(body, "-N2"))
    assert code == "7" and "hosts n1 n2" in shown, shown
    scripts.slurm.check(20.0)
    assert not [name for name in scripts.files() if name.endswith(".cluster")]


def test_symmetric_run_and_an_empty_environment(scripts: Scripts) -> None:
    body = 'srun --export=NONE "$PWD/in-step.sh" "$head_ip:6379"\n'
    slurm = scripts.slurm
    kept = {**slurm.environ(), **scripts.environ}
    names = ("PATH", "PYTHONPATH", "HOME", "HPCRAY_START_DIR", "HPCRAY_OBJECT_STORE_MEMORY", "PYTHON")
    exports = "".join(f"export {name}='{kept[name]}'\n" for name in names if name in kept)
    slurm.write(
        f'#!/bin/bash\n{exports}exec ray symmetric-run --address "$1" --min-nodes 2 -- "$PYTHON" program.py 2\n',
        "in-step.sh",
    )
    code, shown = scripts.code(scripts.submit(body, "-N2"))
    assert code == "7" and "hosts n1 n2 cpus 4" in shown, shown


def test_another_user_can_neither_join_nor_stop_nor_find_a_cluster(scripts: Scripts) -> None:
    slurm = scripts.slurm
    body = """\
ray start --head --node-ip-address="$head_ip" --port=6379 --num-cpus=1
HOLD=60 "$PYTHON" program.py 1
"""
    job = scripts.submit(body, "-N1", "--nodelist=n1")
    slurm.wait_output(job, "hosts n1")
    for words in (("start", "--address=n1:6379", "--num-cpus=1"), ("status", "--address=n1:6379"), ("status",)):
        began = time.monotonic()
        environ = {**scripts.environ, "HPCRAY_HEAD_WAIT": "5", "HOME": "/home/bob"}
        ended = slurm.run(slurm.place / "ray", *words, host="n1", user="bob", environ=environ)
        assert ended.code == 1 and time.monotonic() - began < 20.0, (words, ended)
    ended = slurm.run(slurm.place / "ray", "stop", "-f", host="n1", user="bob", environ=scripts.environ)
    assert ended.code == 0 and "Did not find any" in ended.out
    mine = slurm.run(slurm.place / "ray", "status", "--address=n1:6379", host="n1", environ=scripts.environ)
    assert mine.code == 0 and "Active:" in mine.out, mine
    slurm.said("scancel", job)
    slurm.finish(job)
