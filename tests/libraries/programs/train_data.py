"""Train: datasets, split between the workers or whole for each, as batches of tensors, and checked after each epoch."""

import json
import tempfile

import ray
import ray.data
import ray.train
import torch
from ray.train import DataConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def loop():
    shard = ray.train.get_dataset_shard("train")
    whole = ray.train.get_dataset_shard("whole")
    epochs = []
    for _ in range(2):
        seen, kinds = [], set()
        for batch in shard.iter_torch_batches(batch_size=16, dtypes=torch.float32):
            seen.extend(batch["x"].tolist())
            kinds.add(str(batch["y"].dtype))
        epochs.append(sorted(seen))
    assert epochs[0] == epochs[1], "a shard is not the same in both epochs"
    other = sum(row["id"] for row in whole.iter_rows())
    gathered = ray.train.collective.broadcast_from_rank_zero(epochs[0])
    rank = ray.train.get_context().get_world_rank()
    overlap = len(set(gathered) & set(epochs[0]))
    ray.train.report({"rows": len(epochs[0]), "other": other, "kinds": sorted(kinds)})
    both = torch.tensor([float(len(epochs[0])), sum(epochs[0]), overlap if rank else 0.0])
    torch.distributed.all_reduce(both)
    return both.tolist()


def main():
    ray.init(num_cpus=6)
    train = ray.data.range(200).map(lambda row: {"x": row["id"], "y": 2 * row["id"]})
    with tempfile.TemporaryDirectory() as storage:
        trainer = TorchTrainer(
            loop, scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(name="data", storage_path=storage),
            datasets={"train": train, "whole": ray.data.range(50)},
            dataset_config=DataConfig(datasets_to_split=["train"]),
        )  # fmt: skip
        result = trainer.fit()
    print(
        json.dumps({"rows": result.return_value[0], "sum": result.return_value[1], "overlap": result.return_value[2]})
    )


if __name__ == "__main__":
    main()
