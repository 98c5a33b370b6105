"""Ray Train on hpcray: PyTorch's DistributedDataParallel in one worker per node, with checkpoints.

    export HPCRAY_RAY_LIBRARIES=/some/where       # an unpacked wheel of Ray, see docs/how-to/train-and-serve.md
    hpcray-launch -n 2 --as-ray examples/train_torch.py --storage /shared/runs --epochs 10
    hpcray-launch -n 2 --as-ray examples/train_torch.py --storage /shared/runs --epochs 20     # goes on after epoch 10

The workers learn the handwritten digits that scikit-learn ships. Rank 0 saves model and optimizer after each epoch; a
run of the same name and storage goes on from the newest checkpoint, whatever ended the last one. A worker that dies is
replaced, and all go on from that checkpoint too (FailureConfig).
"""

from __future__ import annotations

import argparse
import os
import tempfile

import ray
import ray.train
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

HELD_OUT = 360
"""Images that no worker learns from."""


def images() -> tuple[torch.Tensor, torch.Tensor]:
    """All images, [count, 64] between 0 and 1, in one random order, and their labels."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(pixels, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]


def save(folder: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> Checkpoint:
    """Write what the next epoch needs into a directory."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, os.path.join(folder, "state.pt"))
    return Checkpoint.from_directory(folder)


def train(config: dict[str, int]) -> None:
    """What each worker runs."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    pixels, labels = images()
    loader = prepare_data_loader(
        DataLoader(TensorDataset(pixels[HELD_OUT:], labels[HELD_OUT:]), batch_size=32, shuffle=True)
    )
    model = prepare_model(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)))
    bare = getattr(model, "module", model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    start = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"), weights_only=True)
        bare.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epoch"] + 1
    rank = ray.train.get_context().get_world_rank()
    for epoch in range(start, config["epochs"]):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for batch, wanted in loader:
            loss = torch.nn.functional.cross_entropy(model(batch), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            right = (bare(pixels[:HELD_OUT]).argmax(1) == labels[:HELD_OUT]).float().mean()
        metrics = {"epoch": epoch, "accuracy": right.item(), "started_at": start}
        with tempfile.TemporaryDirectory() as folder:
            ray.train.report(metrics, checkpoint=save(folder, bare, optimizer, epoch) if rank == 0 else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", default=os.path.abspath("runs"), help="a directory that all nodes see")
    parser.add_argument("--name", default="digits", help="of the run")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--workers", type=int, help="default: one per node, at least two")
    given = parser.parse_args()
    ray.init()
    workers = given.workers or max(2, sum(node["Alive"] for node in ray.nodes()))
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": given.epochs},
        scaling_config=ScalingConfig(num_workers=workers, placement_strategy="SPREAD"),
        run_config=RunConfig(
            name=given.name,
            storage_path=given.storage,
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    result = trainer.fit()
    if result.metrics is None:
        print("nothing left to do")
        return
    print(
        f"epoch {result.metrics['epoch'] + 1}, started at {result.metrics['started_at']}: "
        f"accuracy {result.metrics['accuracy']:.3f} on {HELD_OUT} held-out images"
    )


if __name__ == "__main__":
    main()
