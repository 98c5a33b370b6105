"""Ray Train on four nodes: preempted, at its time limit, with a node drained or lost, a run has the losses of one that
nobody disturbs."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from helpers.slurm import Slurm

pytest.importorskip("torch")
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]
_PATIENCE = 400.0
STEPS, EVERY = 100, 60

# Rank 0 notes the loss of each step. Checkpoints: every EVERY steps, and when a preemption is announced.
TRAINING = f"""\
import json, os, socket, sys, tempfile, time
import ray, ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

PLACE, NAME, PAUSE, STEPS, EVERY = sys.argv[1], sys.argv[2], float(sys.argv[3]), {STEPS}, {EVERY}


def note(*words):
    with open(os.path.join(PLACE, NAME + ".notes"), "a") as file:
        file.write(json.dumps(words) + "\\n")


def train():
    torch.manual_seed(5)
    torch.set_num_threads(1)
    rank = ray.train.get_context().get_world_rank()
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
    # Without this DDP arranges the gradients anew after its first step: a run that resumes would round otherwise there.
    model = prepare_model(model, parallel_strategy_kwargs={{"find_unused_parameters": True}})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as directory:
            state = torch.load(os.path.join(directory, "state.pt"), weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    note("begun", rank, socket.gethostname(), first, time.time())
    announced = False
    for step in range(first, STEPS):
        time.sleep(PAUSE)
        random = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(16, 20, generator=random)
        loss = ((model(inputs) - inputs.sin().sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            note("loss", step, loss.item())
        preemption = ray.train.get_preemption_info()
        now = preemption is not None and not announced
        if now or step % EVERY == EVERY - 1 or step == STEPS - 1:
            announced |= now
            with tempfile.TemporaryDirectory() as directory:
                checkpoint = None
                if rank == 0:
                    saved = {{"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}}
                    torch.save({{**saved, "step": step + 1}}, os.path.join(directory, "state.pt"))
                    checkpoint = Checkpoint.from_directory(directory)
                    if now:
                        note("saved", step + 1, time.time())
                ray.train.report({{"step": step, "loss": loss.item()}}, checkpoint=checkpoint)


ray.init()
trainer = TorchTrainer(
    train,
    scaling_config=ScalingConfig(num_workers=4, placement_strategy="SPREAD"),
    run_config=RunConfig(name=NAME, storage_path=PLACE, failure_config=FailureConfig(max_failures=3)),
)
print("result", trainer.fit().metrics, flush=True)
"""


class Training:
    """The program above, as a job on four nodes."""

    def __init__(self, slurm: Slurm, lent: dict[str, str], name: str, pause: float, *options: object) -> None:
        self.slurm, self.name = slurm, name
        script = slurm.write(TRAINING)
        batch = slurm.source / "slurm" / "cpu.sbatch"
        self.job = slurm.sbatch(
            "-N4", "--open-mode=append", *options, batch, "--as-ray", script, slurm.place, name, pause,
            environ={
                **lent, "HPCRAY_PRELOAD": "torch,ray.train", "HPCRAY_DRAIN_TIMEOUT": "10",
                "HPCRAY_REQUEUE": "scontrol",
            },
        )  # fmt: skip

    def notes(self, kind: str) -> list[list[Any]]:
        """What was noted of this kind, without its name."""
        path = self.slurm.place / f"{self.name}.notes"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        notes = [json.loads(line) for line in lines if line.endswith("\n")]
        return [words for name, *words in notes if name == kind]

    def wait_underway(self, steps: int) -> None:
        self.slurm.wait(lambda: len(self.notes("loss")) >= steps, f"step {steps}", _PATIENCE)

    def losses(self) -> list[float]:
        """Wait for the end; the loss of every step, which is the same each time where a step was done again."""
        self.slurm.complete(self.job, _PATIENCE)
        found: dict[int, float] = {}
        for step, loss in self.notes("loss"):
            assert found.setdefault(step, loss) == loss, f"step {step} has another loss when it is done again"
        assert sorted(found) == list(range(STEPS))
        return [found[step] for step in range(STEPS)]


@pytest.fixture(scope="module")
def expected() -> list[list[float]]:
    """Filled by the first test that needs it: each test has a view of the cluster of its own."""
    return []


@pytest.fixture
def undisturbed(slurm: Slurm, lent: dict[str, str], expected: list[list[float]]) -> list[float]:
    """The losses of a run that nobody disturbs."""
    if not expected:
        expected.append(Training(slurm, lent, "undisturbed", 0.0).losses())
    return expected[0]


def test_a_run_that_is_preempted_has_the_same_losses(
    slurm: Slurm, lent: dict[str, str], undisturbed: list[float]
) -> None:
    training = Training(slurm, lent, "run", 0.25, "--requeue", "-p", "scavenge")
    training.wait_underway(5)
    announced = time.time()
    rival = slurm.sbatch("-N4", "-p", "main", "--exclusive", "-o", "rival.txt", "--wrap", "srun -N4 true")
    assert slurm.finish(rival)["JobState"] == "COMPLETED"
    slurm.wait(lambda: slurm.job(training.job)["Restarts"] == "1", "the requeue")
    assert training.losses() == undisturbed
    ((step, saved),) = training.notes("saved")
    assert step % EVERY, "not one of the regular checkpoints"
    begun = training.notes("begun")
    assert [first for _, _, first, _ in begun] == [0] * 4 + [step] * 4
    again = min(at for _, _, first, at in begun if first)
    print(f"saved after {saved - announced:.1f} s, went on after {again - announced:.1f} s")
    slurm.check()


def test_a_run_that_loses_a_node_has_the_same_losses(
    slurm: Slurm, lent: dict[str, str], undisturbed: list[float]
) -> None:
    training = Training(slurm, lent, "run", 0.25)
    training.wait_underway(EVERY + 20)  # Train's controller hears of a checkpoint seconds after it was reported
    lost = time.time()
    slurm.kill("n3")
    assert training.losses() == undisturbed
    begun = training.notes("begun")
    assert [first for _, _, first, _ in begun] == [0] * 4 + [EVERY] * 4
    assert "n3" in {host for _, host, _, _ in begun[:4]} and "n3" not in {host for _, host, _, _ in begun[4:]}
    print(f"a node lost: went on after {begun[4][3] - lost:.1f} s")
    slurm.check()


def test_a_run_at_its_time_limit_has_the_same_losses(
    slurm: Slurm, lent: dict[str, str], undisturbed: list[float]
) -> None:
    """It drains some time before the end, and asks Slurm to run it again."""
    training = Training(slurm, lent, "run", 1.0, "--requeue", "--time=2")
    slurm.wait(lambda: slurm.job(training.job)["Restarts"] == "1", "the requeue", _PATIENCE)
    slurm.said("scontrol", "update", f"jobid={training.job}", "timelimit=8")
    assert training.losses() == undisturbed
    ((step, _),) = training.notes("saved")
    begun = [first for _, _, first, _ in training.notes("begun")]
    assert begun[:4] == [0] * 4 and begun[4:] in ([step] * 4, [EVERY] * 4), "it trained on while there was time"
    assert "the end of the job's time limit" in slurm.output()
    slurm.check()


def test_a_run_on_a_node_that_is_drained_has_the_same_losses(
    slurm: Slurm, lent: dict[str, str], undisturbed: list[float]
) -> None:
    """Its workers hear of it, and save; when the node is gone, the others go on from there."""
    training = Training(slurm, lent, "run", 0.8)
    training.wait_underway(3)
    drained = time.time()
    slurm.said("scontrol", "update", "nodename=n3", "state=drain", "reason=test")
    try:
        slurm.wait(lambda: training.notes("saved"), "the checkpoint")
        ((step, saved),) = training.notes("saved")
        assert saved - drained < 45.0, "Slurm is asked every 30 s, Train looks every 5"
        training.wait_underway(step + 8)  # Train's controller hears of a checkpoint seconds after it was reported
        slurm.kill("n3")
        assert training.losses() == undisturbed
    finally:
        slurm.said("scontrol", "update", "nodename=n3", "state=resume")
    begun = training.notes("begun")
    assert [first for _, _, first, _ in begun] == [0] * 4 + [step] * 4
    assert "n3" not in {host for _, host, _, _ in begun[4:]}
    print(f"saved {saved - drained:.1f} s after the drain")
    slurm.check()
