"""Jobs in Slurm that hang give their nodes back; those that Slurm has suspended are no hangs."""

from __future__ import annotations

import shutil
import time

import pytest
from helpers.slurm import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

HUNG = """\
import threading

import hpcray as ray
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


@ray.remote(num_cpus=0)
def stuck():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


ray.init()
there = ray.nodes()[1]["NodeID"]
ref = stuck.options(scheduling_strategy=NodeAffinitySchedulingStrategy(there, soft=False)).remote()
print("MARK", flush=True)
ray.get(ref)
"""

SUSPENDED = """\
import time

import hpcray as ray


@ray.remote
def f():
    end = time.monotonic() + 70
    while time.monotonic() < end:
        sum(range(100_000))
        time.sleep(0.05)
    return "went on"


ray.init()
ref = f.remote()
print("MARK", flush=True)
print(ray.get(ref), flush=True)
"""


def test_a_job_that_hangs_gives_its_nodes_back_and_says_why(slurm: Slurm) -> None:
    program = slurm.write(HUNG)
    environ = {"HPCRAY_HISTORY_DIR": str(slurm.place / "history")}
    job = slurm.sbatch("-N2", slurm.source / "slurm" / "cpu.sbatch", "--end-hangs", "60", program, environ=environ)
    slurm.wait_output(job, "MARK")
    marked = time.monotonic()
    slurm.wait(lambda: job not in slurm.said("squeue", "-h", "-o", "%i").split(), f"the end of job {job}", 90.0)
    assert time.monotonic() - marked <= 75.0
    facts = slurm.finish(job)
    assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "79:0"), slurm.output()
    shown = slurm.output()
    assert "taken for hung" in shown and "stuck" in shown
    why = slurm.run(slurm.python, "-m", "hpcray.cli", "why", "--job", job, environ=environ)
    assert "hang: " in why.out and "stuck" in why.out, f"{why.out}\n{why.err}"


@pytest.mark.slow  # a minute and more
def test_a_suspended_job_is_not_hung(slurm: Slurm) -> None:
    program = slurm.write(SUSPENDED)
    job = slurm.sbatch("-N1", slurm.source / "slurm" / "cpu.sbatch", "--end-hangs", "20", program)
    slurm.wait_output(job, "MARK")
    time.sleep(5)
    slurm.said("scontrol", "suspend", job)
    time.sleep(60)
    slurm.said("scontrol", "resume", job)
    assert "went on" in slurm.complete(job)


ELSEWHERE = """\
import os
import subprocess
import sys

import hpcray as ray

SECONDS = 75


@ray.remote(num_cpus=0)
def wait_for(*command):
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("PMI", "SLURM_STEP"))}
    return subprocess.run([*command, f"sleep {SECONDS}; echo went on"], check=False, env=environ, capture_output=True)


ray.init()
refs = [
    wait_for.remote("ssh", *sys.argv[1:]),
    wait_for.remote("srun", "--overlap", "--mem=0", "-N1", "-n1", "sh", "-c"),
]
print("MARK", flush=True)
for ended in ray.get(refs):
    print(ended, flush=True)
    assert ended.stdout == b"went on\\n"
"""


@pytest.mark.slow  # a minute and more
def test_a_job_for_which_another_machine_works_is_not_hung(slurm: Slurm) -> None:
    sshd = shutil.which("sshd", path="/usr/sbin:/sbin:/usr/bin")
    if sshd is None or not shutil.which("ssh"):
        pytest.skip("neither sshd nor ssh here")
    for name in ("host", "user"):
        slurm.said("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", slurm.place / name)
    settings = {
        "Port": 2222, "ListenAddress": "0.0.0.0", "HostKey": slurm.place / "host", "PidFile": "none",
        "AuthorizedKeysFile": slurm.place / "user.pub", "StrictModes": "no", "UsePAM": "no", "PermitRootLogin": "yes",
    }  # fmt: skip
    config = slurm.write("".join(f"{name} {value}\n" for name, value in settings.items()), "sshd_config")
    program = slurm.write(ELSEWHERE)
    options = [
        "-p", "2222", "-i", slurm.place / "user", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no",
        "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR", "root@n2",
    ]  # fmt: skip
    with slurm.start("sh", "-c", f"mkdir -p /run/sshd && exec {sshd} -D -e -f {config}", host="n2"):
        job = slurm.sbatch(
            "-N2", "-w", "n1,n2", slurm.source / "slurm" / "cpu.sbatch", "--end-hangs", "20", program, *options
        )
        slurm.wait_output(job, "MARK")
        shown = slurm.complete(job, 180.0)
    assert shown.count("CompletedProcess") == 2 and "taken for hung" not in shown, shown
