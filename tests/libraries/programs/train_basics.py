"""Train: the context of a worker, a backend of the program's own, collectives, errors, local mode, elastic groups."""

import json
import os
import tempfile

import ray
import ray.data
import ray.train
import ray.train.collective
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer


def context():
    here = ray.train.get_context()
    told = ray.train.collective.broadcast_from_rank_zero({"rank": here.get_world_rank(), "list": [1, 2]})
    ray.train.collective.barrier()
    ray.train.report({"rank": here.get_world_rank(), "told": told})
    return {
        "world": (here.get_world_rank(), here.get_world_size()),
        "local": (here.get_local_rank(), here.get_local_world_size(), here.get_node_rank()),
        "names": (here.get_experiment_name(), os.path.basename(here.get_storage().experiment_fs_path)),
        "told": told,
        "checkpoint": ray.train.get_checkpoint(),
        "preemption": ray.train.get_preemption_info(),
        "environ": os.environ.get("OF_THE_RUN"),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "directory": os.path.basename(os.path.dirname(os.getcwd())) != "",
        "resources": {name: n for name, n in ray.get_runtime_context().get_assigned_resources().items() if n < 100},
    }


def set_variable(name, value):
    os.environ[name] = value


class Numbered(Backend):
    def on_start(self, worker_group, backend_config):
        sizes = worker_group.execute(len, [1] * backend_config.base)
        for index in range(len(worker_group)):
            worker_group.execute_single(index, set_variable, "NUMBER", str(sizes[index] + index))

    def on_training_start(self, worker_group, backend_config):
        worker_group.execute(set_variable, "STARTED", "yes")

    def on_shutdown(self, worker_group, backend_config):
        with open(backend_config.path, "a") as file:
            file.write(f"{worker_group.execute(os.getenv, 'NUMBER')}\n")


class NumberedConfig(BackendConfig):
    def __init__(self, base, path):
        self.base, self.path = base, path

    @property
    def backend_cls(self):
        return Numbered


def numbered():
    numbers = ray.train.collective.broadcast_from_rank_zero(os.environ["NUMBER"])
    return [os.environ["NUMBER"], os.environ["STARTED"], numbers]


def attempt(action):
    """What an action gives, or how it fails."""
    try:
        return action()
    except Exception as error:
        return [type(error).__name__, str(error).splitlines()[0]]


class OwnError(Exception):
    def __init__(self, code, detail):
        super().__init__(code, detail)
        self.code, self.detail = code, detail


def wrong(config):
    if config["how"] == "own":
        raise OwnError(3, {"a": 1})
    if config["how"] == "shard":
        ray.train.get_dataset_shard("nothing of this name")
    if config["how"] == "report":
        ray.train.report(None)
    if config["how"] == "lambda":
        return lambda: 1
    return None


def local():
    rows = sorted(row["id"] for row in ray.train.get_dataset_shard("train").iter_rows())
    ray.train.report({"sum": sum(rows)})
    return (ray.train.get_context().get_world_size(), rows, os.getpid())


def main(storage):
    ray.init(num_cpus=4)

    def trainer(loop, name, workers=2, failures=0, **options):
        config = RunConfig(
            name=name, storage_path=storage, failure_config=FailureConfig(max_failures=failures),
            worker_runtime_env={"env_vars": {"OF_THE_RUN": name}},
        )  # fmt: skip
        scaling = workers if isinstance(workers, ScalingConfig) else ScalingConfig(num_workers=workers)
        return DataParallelTrainer(loop, scaling_config=scaling, run_config=config, **options)

    found = {"context": (one := trainer(context, "context").fit()).return_value, "metrics": one.metrics}
    half = ScalingConfig(num_workers=3, resources_per_worker={"CPU": 0.5}, placement_strategy="SPREAD")
    found["half"] = trainer(context, "half", half).fit().return_value
    found["elastic"] = trainer(context, "elastic", ScalingConfig(num_workers=(1, 3))).fit().return_value["world"]
    log = os.path.join(storage, "numbers")
    found["backend"] = trainer(numbered, "backend", backend_config=NumberedConfig(10, log)).fit().return_value
    with open(log) as file:
        found["shutdown"] = file.read()
    for how in ("own", "shard", "report", "lambda", "nothing"):

        def fail(how=how):
            options = {"train_loop_config": {"how": how}}
            try:
                return repr(trainer(wrong, f"wrong-{how}", workers=1, **options).fit().return_value)[:10]
            except ray.train.TrainingFailedError as error:
                causes = getattr(error, "worker_failures", None) or {None: getattr(error, "controller_failure", None)}
                return [type(error).__name__, {str(rank): repr(cause)[:100] for rank, cause in causes.items()}]

        found[f"wrong {how}"] = fail()
    found["outside"] = attempt(lambda: ray.train.report({}))
    found["outside context"] = attempt(lambda: ray.train.get_context().get_world_size())
    found["bad scaling"] = attempt(lambda: ScalingConfig(num_workers=-1))
    found["bad loop"] = attempt(lambda: trainer(lambda a, b: 1, "bad").fit())
    single = trainer(local, "local", 0, datasets={"train": ray.data.range(5)}).fit()
    found["local"] = (single.metrics, single.return_value[:2], single.return_value[2] == os.getpid())
    print(json.dumps(found))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
