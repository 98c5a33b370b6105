"""Hydra: a multirun whose jobs are tasks of Ray, by hydra-ray-launcher."""

import json
import os
import sys
import tempfile

import hydra
import ray
from omegaconf import DictConfig, OmegaConf

PLACE = os.environ.setdefault("USE_HYDRA", tempfile.mkdtemp())


@hydra.main(version_base=None, config_path=None, config_name="numbers")
def job(config: DictConfig) -> int:
    with open(os.path.join(PLACE, f"{config.x}-{config.y}"), "w") as file:
        json.dump({"value": config.x * config.y, "pid": os.getpid()}, file)
    return config.x * config.y


if __name__ == "__main__":
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store("numbers", OmegaConf.create({"x": 1, "y": 1}))
    sys.argv += [
        "--multirun", "x=1,2,3", "y=10,20", "hydra/launcher=ray", "+hydra.launcher.ray.init.num_cpus=2",
        f"hydra.sweep.dir={PLACE}/runs",
    ]  # fmt: skip
    job()
    found = {}
    for name in os.listdir(PLACE):
        if name != "runs":
            with open(os.path.join(PLACE, name)) as file:
                found[name] = json.load(file)
    print(json.dumps({
        "ray": ray.__file__,
        "values": sorted(one["value"] for one in found.values()),
        "elsewhere": all(one["pid"] != os.getpid() for one in found.values()),
    }))  # fmt: skip
