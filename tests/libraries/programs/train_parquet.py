"""Train: from Parquet files through Data (columns chosen, rows filtered, scaled, shuffled) to a model, seed by seed."""

import json
import os
import sys
import tempfile

os.environ["RAY_DATA_PARQUET_FOOTER_NUM_ACTORS"] = "2"  # of 32; each takes Ray a process

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data
import ray.train
import torch
from ray.data.preprocessors import StandardScaler
from ray.train import Checkpoint, DataConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

FEATURES = ["a", "b", "c"]


def write(folder, files=3, rows=200):
    os.makedirs(folder)
    for number in range(files):
        random = np.random.default_rng(number)
        columns = {
            name: random.normal(loc=5 * index, scale=index + 1, size=rows) for index, name in enumerate(FEATURES)
        }
        columns["y"] = 2 * columns["a"] - columns["b"] + 0.5 * columns["c"] + random.normal(scale=0.1, size=rows)
        columns["row"] = np.arange(number * rows, (number + 1) * rows)
        columns["noise"] = random.normal(size=rows)
        pq.write_table(pa.table(columns), os.path.join(folder, f"part-{number}.parquet"))


def loop(config):
    torch.manual_seed(7)
    rank, size = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    model = prepare_model(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    shard, check = ray.train.get_dataset_shard("train"), ray.train.get_dataset_shard("check")
    losses, order = [], []
    for epoch in range(config["epochs"]):
        total = count = 0
        batches = shard.iter_torch_batches(
            batch_size=config["batch"], dtypes={"row": torch.int64, "x": torch.float32, "y": torch.float32},
            drop_last=True,
            **config["shuffle"],
        )  # fmt: skip
        for index, batch in enumerate(batches):
            if config["stride"] and index % size != rank:
                continue
            loss = torch.nn.functional.mse_loss(model(batch["x"]).squeeze(1), batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, count = total + loss.item(), count + 1
            order.append(int(batch["row"][0]))
        losses.append(total / max(count, 1))
        with torch.no_grad():
            errors = [
                torch.nn.functional.mse_loss(model(batch["x"]).squeeze(1), batch["y"]).item()
                for batch in check.iter_torch_batches(batch_size=100, dtypes=torch.float32)
            ]
        with tempfile.TemporaryDirectory() as directory:
            torch.save(model.state_dict(), os.path.join(directory, "model.pt"))
            checkpoint = Checkpoint.from_directory(directory) if rank == 0 else None
            ray.train.report({"epoch": epoch, "loss": losses[-1], "check": sum(errors) / len(errors)}, checkpoint)
    return {"losses": losses, "order": order[:20], "steps": len(order)}


def main(storage):
    ray.init(num_cpus=4)
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True  # the same batches in each run, on either engine
    context.default_hash_shuffle_parallelism = 4
    folder = os.path.join(storage, "table")
    write(folder)
    table = ray.data.read_parquet(folder, columns=[*FEATURES, "y", "row"], override_num_blocks=3)
    table = table.filter(lambda row: row["row"] % 7 != 0).sort("row").repartition(3)
    train, check = table.filter(lambda row: row["row"] < 525), table.filter(lambda row: row["row"] >= 525)
    scaler = StandardScaler(columns=FEATURES)
    train = scaler.fit_transform(train)
    check = scaler.transform(check)

    def stack(batch):
        x = np.stack([batch[name] for name in FEATURES], axis=1)
        return {"x": x, "y": batch["y"], "row": batch["row"]}

    train, check = train.map_batches(stack).materialize(), check.map_batches(stack).materialize()
    found = {"stats": {name: round(float(value), 9) for name, value in sorted(scaler.stats_.items())}}
    shuffled = {"local_shuffle_buffer_size": 100, "local_shuffle_seed": 5}
    runs = {
        "one, shuffled twice": (1, train.random_shuffle(seed=3), shuffled, False),
        "two, in order": (2, train, {}, True),
    }
    for name, (workers, rows, shuffle, stride) in runs.items():
        trainer = TorchTrainer(
            loop, train_loop_config={"epochs": 2, "lr": 0.02, "batch": 32, "shuffle": shuffle, "stride": stride},
            datasets={"train": rows, "check": check}, dataset_config=DataConfig(datasets_to_split=[]),
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(name=name.replace(", ", "-"), storage_path=storage),
        )  # fmt: skip
        result = trainer.fit()
        found[name] = {**result.return_value, "check": result.metrics["check"]}
    print(json.dumps(found))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(sys.argv[1] if len(sys.argv) > 1 else scratch)
