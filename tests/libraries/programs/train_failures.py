"""Train: a worker that dies, one that raises, no failure left; callbacks; ranks that agree; a return value."""

import json
import os
import tempfile
import time
from pathlib import Path

import ray
import ray.train
import ray.train.collective
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer


def loop(config):
    context = ray.train.get_context()
    rank = context.get_world_rank()
    start = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as directory, open(os.path.join(directory, "step")) as file:
            start = int(file.read()) + 1
    for step in range(start, 4):
        if step == 2 and rank == config["victim"] and not os.path.exists(config["marker"]):
            open(config["marker"], "w").close()
            if config["how"] == "exit":
                os._exit(7)
            raise ValueError("a bug in the training function")
        if config["how"] == "always" and step == 1:
            raise ValueError(f"never works, rank {rank}")
        with tempfile.TemporaryDirectory() as directory:
            with open(os.path.join(directory, "step"), "w") as file:
                file.write(str(step))
            with open(os.path.join(directory, f"rank{rank}"), "w") as file:
                file.write("x")
            ray.train.report({"step": step, "start": start}, checkpoint=Checkpoint.from_directory(directory))
    told = ray.train.collective.broadcast_from_rank_zero({"from": rank, "pid": 1})
    ray.train.collective.barrier()
    return told


class Watch(ray.train.UserCallback):
    def __init__(self, path):
        self.path = path

    def after_exception(self, run_context, worker_exceptions):
        with open(self.path, "a") as file:
            file.write(f"{sorted(worker_exceptions)}\n")

    def after_report(self, run_context, metrics, checkpoint):
        assert len(metrics) == 2


def main(storage):
    ray.init(num_cpus=4)
    found = {}
    for how in ("exit", "raise", "always"):
        log = os.path.join(storage, f"{how}.log")
        trainer = DataParallelTrainer(
            loop,
            train_loop_config={"how": how, "victim": 1, "marker": os.path.join(storage, f"{how}.marker")},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                name=how, storage_path=storage, failure_config=FailureConfig(max_failures=1), callbacks=[Watch(log)]
            ),
        )
        try:
            result = trainer.fit()
        except ray.train.TrainingFailedError as error:
            found[how] = {
                "error": type(error).__name__,
                "failures": {rank: str(cause) for rank, cause in sorted(error.worker_failures.items())},
            }
        else:
            with result.checkpoint.as_directory() as directory:
                files = sorted(name for name in os.listdir(directory) if not name.startswith("."))
            found[how] = {
                "step": result.metrics["step"], "start": result.metrics["start"], "files": files,
                "told": result.return_value,
            }  # fmt: skip
        found[how]["callbacks"] = Path(log).read_text().splitlines()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        alive = [actor.class_name for actor in ray.util.state.list_actors(filters=[("state", "!=", "DEAD")])]
        groups = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
        free = ray.available_resources().get("CPU")
        gone = {"PlacementGroupCleaner", "RayTrainWorker"}.isdisjoint(alive)
        if gone and not groups and free == ray.cluster_resources()["CPU"]:
            break
        time.sleep(0.2)
    found["left"] = (sorted(alive), len(groups), free == ray.cluster_resources()["CPU"])
    print(json.dumps(found))


if __name__ == "__main__":
    import ray.util.state

    with tempfile.TemporaryDirectory() as folder:
        main(folder)
