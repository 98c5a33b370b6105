"""Train: two workers fit a line with DistributedDataParallel; checkpoints, the best of them, and a run that goes on."""

import json
import os
import sys
import tempfile

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader, TensorDataset


def loop(config):
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    loader = prepare_data_loader(DataLoader(TensorDataset(x, 3 * x + 1), batch_size=16, shuffle=True))
    model = prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    start = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            state = torch.load(os.path.join(directory, "state.pt"), weights_only=True)
        model.module.load_state_dict(state["model"])
        start = state["epoch"] + 1
    context = ray.train.get_context()
    for epoch in range(start, config["epochs"]):
        loader.sampler.set_epoch(epoch)
        for features, labels in loader:
            loss = torch.nn.functional.mse_loss(model(features), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        metrics = {"loss": total.item() / context.get_world_size(), "epoch": epoch, "started": start}
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = None
            if context.get_world_rank() == 0:
                torch.save({"model": model.module.state_dict(), "epoch": epoch}, os.path.join(directory, "state.pt"))
                checkpoint = Checkpoint.from_directory(directory)
            ray.train.report(metrics, checkpoint=checkpoint)
    return {
        "rank": context.get_world_rank(), "size": context.get_world_size(), "local": context.get_local_world_size(),
        "device": str(get_device()), "ddp": type(model).__name__, "backend": dist.get_backend(),
        "name": context.get_experiment_name(),
    }  # fmt: skip


def main(storage):
    ray.init(num_cpus=4)

    def run(epochs):
        config = RunConfig(
            name="line", storage_path=storage,
            checkpoint_config=CheckpointConfig(
                num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min"
            ),
        )  # fmt: skip
        trainer = TorchTrainer(
            loop, train_loop_config={"epochs": epochs}, scaling_config=ScalingConfig(num_workers=2), run_config=config
        )
        return trainer.fit()

    first = run(5)
    second = run(8)
    with second.checkpoint.as_directory() as directory:
        state = torch.load(os.path.join(directory, "state.pt"), weights_only=True)
    found = {
        "first": (first.metrics["epoch"], first.metrics["started"]),
        "second": (second.metrics["epoch"], second.metrics["started"]),
        "slope": round(state["model"]["weight"].item(), 1),
        "kept": len(second.best_checkpoints),
        "returned": first.return_value,
        "path": os.path.relpath(second.path, storage),
        "columns": sorted(second.metrics_dataframe.columns),
        "files": sorted(name.split("_")[0] for name in os.listdir(second.path)),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else folder)
