"""Train: checkpoints by name, by several workers, uploaded beside the training, validated, scored, read back."""

import json
import os
import sys
import tempfile

import ray
import ray.train
from ray.train import Checkpoint, CheckpointConfig, Result, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.report_config import CheckpointConsistencyMode, CheckpointUploadMode
from ray.train.v2.api.validation_config import ValidationConfig, ValidationTaskConfig


def save(directory, rank, step):
    with open(os.path.join(directory, f"part{rank}"), "w") as file:
        file.write(str(step))
    checkpoint = Checkpoint.from_directory(directory)
    if rank == 0:
        checkpoint.set_metadata({"step": step, "by": rank})
        checkpoint.update_metadata({"more": True})
    return checkpoint


def modes(config):
    """SYNC, ASYNC and NO_UPLOAD, each with names."""
    rank = ray.train.get_context().get_world_rank()
    kept = []
    for step, mode in enumerate(CheckpointUploadMode):
        name = f"{mode.value.lower()}-{step}"
        if mode is CheckpointUploadMode.NO_UPLOAD:
            # Where the program itself has put it: in the storage already.
            directory = os.path.join(config["storage"], "modes", name)
            os.makedirs(directory, exist_ok=True)
        else:
            directory = tempfile.mkdtemp(dir=config["scratch"])
        checkpoint = save(directory, rank, step)
        ray.train.report({"step": step}, checkpoint=checkpoint, checkpoint_dir_name=name, checkpoint_upload_mode=mode)
        kept.append(directory)
    reported = ray.train.get_all_reported_checkpoints(consistency_mode=CheckpointConsistencyMode.COMMITTED)
    return {
        "reported": [(os.path.basename(each.checkpoint.path), each.metrics, each.status.name) for each in reported],
        "local": [os.path.exists(directory) for directory in kept],
    }


def custom(config):
    """A function of the program's own uploads."""
    rank = ray.train.get_context().get_world_rank()

    def upload(checkpoint, name):
        target = os.path.join(config["storage"], "custom", name)
        os.makedirs(target, exist_ok=True)
        with checkpoint.as_directory() as source:
            for file in sorted(os.listdir(source)):
                os.link(os.path.join(source, file), os.path.join(target, file + ".linked"))
        return Checkpoint(target)

    with tempfile.TemporaryDirectory(dir=config["storage"]) as directory:
        ray.train.report(
            {"step": 0}, checkpoint=save(directory, rank, 0), checkpoint_dir_name="own", checkpoint_upload_fn=upload
        )


def scored(config):
    rank = ray.train.get_context().get_world_rank()
    for step, score in enumerate([3, 9, 1, 7, 5]):
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = save(directory, rank, step) if rank == 1 else None
            ray.train.report({"score": score}, checkpoint=checkpoint, checkpoint_dir_name=f"c{step}")
    latest = ray.train.get_checkpoint()
    return os.path.basename(latest.path) if latest else None


def judge(checkpoint, factor=1):
    with checkpoint.as_directory() as directory, open(os.path.join(directory, "part0")) as file:
        step = int(file.read())
    if step == 1:
        raise ValueError("this one is no good")
    return {"judged": factor * (step + 1)}


def validated(config):
    rank = ray.train.get_context().get_world_rank()
    for step, wanted in enumerate([True, True, ValidationTaskConfig(fn_kwargs={"factor": 10}), False]):
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = save(directory, rank, step) if rank == 0 else None
            ray.train.report(
                {"step": step}, checkpoint=checkpoint, checkpoint_dir_name=f"v{step}",
                validation=wanted if rank == 0 else False,
            )  # fmt: skip
    reported = ray.train.get_all_reported_checkpoints()
    return [(os.path.basename(each.checkpoint.path), each.metrics, each.status.name) for each in reported]


def show(result):
    found = {
        "metrics": result.metrics,
        "latest": os.path.basename(result.checkpoint.path),
        "best": [(os.path.basename(checkpoint.path), metrics) for checkpoint, metrics in result.best_checkpoints],
        "frame": result.metrics_dataframe.to_dict("list"),
        "returned": result.return_value,
        "files": {
            name: sorted(os.listdir(os.path.join(result.path, name)))
            for name in sorted(os.listdir(result.path))
            if os.path.isdir(os.path.join(result.path, name))
        },
    }
    if metadata := result.checkpoint.get_metadata():
        found["metadata"] = metadata
    again = Result.from_path(result.path)
    assert again.metrics == result.metrics, (again.metrics, result.metrics)
    found["again"] = sorted(os.path.basename(checkpoint.path) for checkpoint, _ in again.best_checkpoints)
    return found


def main(storage):
    ray.init(num_cpus=4)
    scratch = os.path.join(storage, "scratch")
    os.mkdir(scratch)

    def run(loop, keep=None, **options):
        trainer = DataParallelTrainer(
            loop, train_loop_config={"storage": storage, "scratch": scratch},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name=loop.__name__, storage_path=storage, checkpoint_config=keep), **options,
        )  # fmt: skip
        return show(trainer.fit())

    found = {
        "modes": run(modes),
        "custom": run(custom),
        "scored": run(
            scored, CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="score", checkpoint_score_order="max")
        ),
        "validated": run(validated, validation_config=ValidationConfig(fn=judge)),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else folder)
