"""What the autoscaler asks of Slurm: options, environment and errors of sbatch, and the answers of squeue."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcray.autoscaler.autoscaler import InstanceState
from hpcray.autoscaler.node_provider import JobNodeProvider
from hpcray.core.gcs.node_types import DEFAULT_TYPE, NodeType

OUTER = {"SLURM_JOB_ID": "1", "SLURM_JOB_PARTITION": "gpu", "SLURM_JOB_ACCOUNT": "a1", "CUDA_VISIBLE_DEVICES": "0"}


class Loop:
    """A loop that runs a command to its end as soon as it is watched."""

    now = 0.0

    def __init__(self) -> None:
        self.calls: dict[int, Callable[[int], None]] = {}

    def watch(self, fd: int, call: Callable[[int], None]) -> None:
        self.calls[fd] = call

    def unwatch(self, fd: int) -> None:
        del self.calls[fd]

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        pass

    def run(self) -> None:
        while self.calls:
            fd, call = next(iter(self.calls.items()))
            call(fd)


@pytest.fixture
def provider(tmp_path: Path) -> JobNodeProvider:
    """A provider whose Slurm are shell scripts in `bin`, which leave their input and environment beside it."""
    (tmp_path / "bin").mkdir()
    environ = {**OUTER, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    loop = Loop()
    found = JobNodeProvider(loop, "s1", str(tmp_path / "s1.join-token"), 0.0, environ, False)  # type: ignore[arg-type]
    found.loop = loop  # type: ignore[attr-defined]
    return found


def answers(tmp_path: Path, name: str, script: str) -> None:
    path = tmp_path / "bin" / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def launch(provider: JobNodeProvider, node_type: NodeType, count: int) -> tuple[list[str], str, bool]:
    found: list[tuple[list[str], str, bool]] = []
    provider.launch(node_type, count, lambda *answer: found.append(answer))
    provider.loop.run()  # type: ignore[attr-defined]
    return found[0]


def test_several_nodes_are_one_array_like_the_first_node_and_without_its_devices(
    provider: JobNodeProvider, tmp_path: Path
) -> None:
    answers(tmp_path, "sbatch", f"cat > {tmp_path}/script; env > {tmp_path}/env; echo '77;cluster'")
    assert launch(provider, NodeType(DEFAULT_TYPE, {"CPU": 20_000}), 3) == (["77_1", "77_2", "77_3"], "", False)
    script = (tmp_path / "script").read_text()
    for option in ("--array=1-3", "--partition=gpu", "--account=a1", "--cpus-per-task=2", "--job-name=hpcray-nodes-s1"):
        assert f"#SBATCH {option}\n" in script
    environ = (tmp_path / "env").read_text()
    assert "SLURM_JOB_ID" not in environ and "CUDA_VISIBLE_DEVICES" not in environ


def test_a_type_has_its_own_options(provider: JobNodeProvider, tmp_path: Path) -> None:
    answers(tmp_path, "sbatch", f"cat > {tmp_path}/script; echo 5")
    config: dict[str, str | bool] = {"partition": "big", "constraint": "a100", "gres": "gpu:a100:4"}
    node_type = NodeType("a100", {"CPU": 80_000, "GPU": 40_000, "disk": 10_000}, node_config=config)
    assert launch(provider, node_type, 1) == (["5"], "", False)
    script = (tmp_path / "script").read_text()
    assert "--partition=big" in script and "--constraint=a100" in script and "gpus-per-node" not in script
    assert "--comment=a100" in script and '{"disk": 1.0}' in script and "--array" not in script


@pytest.mark.parametrize(
    ("text", "permanent"),
    [
        ("sbatch: error: invalid partition specified: x", True),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", True),
        ("sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit)", False),
        ("sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying", False),
        ("sbatch: error: Required nodes not available (down, drained or reserved)", False),
    ],
)
def test_a_refusal_is_for_good_or_for_now(
    provider: JobNodeProvider, tmp_path: Path, text: str, permanent: bool
) -> None:
    answers(tmp_path, "sbatch", f"echo '{text}' >&2; exit 1")
    names, reason, found = launch(provider, NodeType("a", {"CPU": 10_000}), 2)
    assert names == [] and text in reason and found is permanent


def test_a_site_without_arrays_gets_single_jobs(provider: JobNodeProvider, tmp_path: Path) -> None:
    answers(tmp_path, "sbatch", "grep -q -- --array && { echo 'Invalid job array specification' >&2; exit 1; }; echo 9")
    assert launch(provider, NodeType("a", {"CPU": 10_000}), 4) == (["9"], "", False)


def test_the_queue_is_read_with_reasons_and_last_words(provider: JobNodeProvider, tmp_path: Path) -> None:
    rows = "7_1|PENDING|a|Priority\\n7_2|CONFIGURING|a|None\\n7_3|COMPLETING|a|None\\n8|FAILED|a|NonZeroExitCode\\n"
    rows += "9|PENDING|a|PartitionTimeLimit\\n10|PENDING|a|JobHeldUser"
    answers(tmp_path, "squeue", f"printf '{rows}\\n'")
    (tmp_path / "nodes-8.out").write_text("hpcray: starting\nhpcray: no arena\n\n")
    found: list[dict[str, InstanceState]] = []
    provider.poll(found.append)
    provider.loop.run()  # type: ignore[attr-defined]
    assert found == [
        {
            "7_1": InstanceState("a", "PENDING", "Priority"),
            "7_2": InstanceState("a", "PENDING", "None"),
            "7_3": InstanceState("a", "RUNNING"),
            "8": InstanceState("a", "FAILED", "no arena"),
            "9": InstanceState("a", "HELD", "PartitionTimeLimit"),
            "10": InstanceState("a", "PENDING", "JobHeldUser"),
        }
    ]
    answers(tmp_path, "squeue", "exit 1")
    provider.poll(found.append)
    provider.loop.run()  # type: ignore[attr-defined]
    assert len(found) == 1, "no answer is not an empty queue"
