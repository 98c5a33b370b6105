"""The test cluster itself: separate hosts, and an end that leaves nothing, however it comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.jobs import ROOT
from helpers.leaks import wait_until
from helpers.slurm import Cluster, Slurm
from testcluster.registry import BASE, ClusterError, is_free, running, sweep

pytestmark = pytest.mark.slurm
COMMAND = (sys.executable, str(ROOT / "slurm" / "testcluster"))
LISTEN = "import socket; s = socket.create_server(('', 7000)); print('up', flush=True); s.accept(); print('met')"
DIAL = "import socket; socket.create_connection(('n1', 7000), timeout={timeout})"


def test_hosts_are_separate_machines(slurm: Slurm) -> None:
    said = slurm.said("srun", "-N4", "bash", "-c", "touch /tmp/$(hostname) /dev/shm/$(hostname); ls /tmp /dev/shm")
    own = [line for line in said.splitlines() if line in ("n1", "n2", "n3", "n4")]
    assert sorted(own) == [name for name in ("n1", "n2", "n3", "n4") for _ in range(2)], said
    assert not Path("/tmp/n1").exists()
    slurm.said("srun", "-N4", "bash", "-c", "rm /tmp/$(hostname) /dev/shm/$(hostname)")


def test_every_node_has_two_gpus_of_its_own(slurm: Slurm) -> None:
    said = slurm.said(
        "srun", "-N4", "--gpus-per-node=2", "bash", "-c", "echo $CUDA_VISIBLE_DEVICES $SLURM_GPUS_ON_NODE"
    )
    assert said.splitlines() == ["0,1 2"] * 4
    assert slurm.run("srun", "-N1", "--gpus-per-node=3", "true").code != 0


def test_users_are_the_same_on_every_host(slurm: Slurm) -> None:
    ended = slurm.run("srun", "-N2", "bash", "-c", "echo $(id -un) $HOME; touch ~/seen", user="ada")
    assert ended.out.splitlines() == [f"ada {slurm.cluster.directory}/home/ada"] * 2, ended.err
    assert slurm.run("ls", "/run/hpcray-testcluster", user="bob").code == 0
    assert slurm.run("ls", slurm.cluster.directory / "home" / "ada", user="bob").code != 0


def test_a_cut_host_is_not_reached_until_healed(slurm: Slurm) -> None:
    with slurm.start("python", "-c", LISTEN, host="n1") as listening:
        assert listening.line() == "up"
        slurm.cluster.cut("n1")
        try:
            assert slurm.run("python", "-c", DIAL.format(timeout=1), host="n2").code != 0
        finally:
            slurm.cluster.heal("n1")
        assert slurm.run("python", "-c", DIAL.format(timeout=30), host="n2").code == 0
        assert listening.wait().out == "met\n"


def test_the_rate_of_a_host_can_be_limited(slurm: Slurm) -> None:
    slurm.cluster.rate("n2", "8mbit")
    try:
        assert "tbf" in slurm.said("tc", "qdisc", "show", "dev", "eth0", host="n2")
    finally:
        slurm.cluster.rate("n2", "off")
    assert "tbf" not in slurm.said("tc", "qdisc", "show", "dev", "eth0", host="n2")


@pytest.mark.parametrize("silent", [False, True])
def test_a_crashed_host_is_gone_and_boots_again(slurm: Slurm, silent: bool) -> None:
    cluster = slurm.cluster
    with slurm.start("sleep", "600", host="n4") as sleeping:
        cluster.crash("n4", silent)
        assert sleeping.wait().code != 0
    assert not cluster.is_up("n4")
    with pytest.raises(ClusterError, match="n4 is not up; hint: boot n4"):
        cluster.command("n4", ["true"])
    cluster.boot("n4")
    cluster.wait_idle()
    assert slurm.said("srun", "-w", "n4", "hostname") == "n4"


# ---------------------------------------------------------------- coming and going


@pytest.fixture
def other(cluster: Cluster) -> Iterator[str]:
    """The name of a second cluster; it is gone after the test."""
    name = f"other-{os.getpid()}"
    yield name
    if name in running():
        Cluster.find(name).down()
    sweep()
    assert not (BASE / name).exists()


def processes_of(name: str) -> list[int]:
    """Pids of what was started with the directory of a cluster on its command line."""
    found = []
    for pid in [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]:
        try:
            if f"{BASE}/{name}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            pass
    return found


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=90)


def test_the_test_cluster_is_controlled_from_its_command_line(other: str) -> None:
    assert call("--name", other, "up", "1").returncode == 0
    assert other in call("list").stdout.split()
    again = call("--name", other, "up", "1")
    assert again.returncode == 1
    assert "is up already" in again.stderr
    done = call("--name", other, "on", "ada@n1", "sh", "-c", "id -un; exit 5")
    assert (done.returncode, done.stdout) == (5, "ada\n")
    assert call("--name", other, "down").returncode == 0
    assert not processes_of(other), "down waits for them"
    assert not (BASE / other).exists()
    gone = call("--name", other, "on", "n1", "true")
    assert gone.returncode == 1
    assert "hint: up" in gone.stderr


def test_a_test_cluster_ends_with_its_owner(other: str) -> None:
    with subprocess.Popen(["sleep", "600"]) as owner:
        Cluster.up(other, 1, owner=owner.pid)
        assert processes_of(other)
        owner.kill()
    wait_until(lambda: is_free(other) and not (BASE / other).exists(), "the end of the cluster")
    wait_until(lambda: not processes_of(other), "the end of its processes")


def test_a_killed_keeper_takes_everything_along(other: str) -> None:
    up = Cluster.up(other, 1)
    os.kill(up.pid_of("keeper"), signal.SIGKILL)
    wait_until(lambda: not processes_of(other), "the end of its processes")
    assert other not in running()
    assert other in sweep()
