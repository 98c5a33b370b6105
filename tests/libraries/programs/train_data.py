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
    kinds, totals = set(), []
    for _ in range(2):
        seen = []
        for batch in shard.iter_torch_batches(batch_size=16, dtypes=torch.float32):
            seen.extend(batch["x"].tolist())
            kinds.add(str(batch["y"].dtype))
        # Which worker gets a row may differ from epoch to epoch; each row comes once.
        both = torch.tensor([float(len(seen)), sum(seen), sum(value * value for value in seen)])
        torch.distributed.all_reduce(both)
        totals.append(both.tolist())
    other = sum(row["id"] for row in whole.iter_rows())
    ray.train.report({"rows": len(seen), "other": other, "kinds": sorted(kinds)})
    return {"totals": totals, "whole": other, "kinds": sorted(kinds)}


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
    print(json.dumps(result.return_value))


if __name__ == "__main__":
    main()
