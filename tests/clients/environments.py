"""Python environments with hpcray, its stand-in distribution "ray", and packages from PyPI that want Ray.

`python -m tests.clients.environments NAME…` makes them beforehand. They are kept in $CLIENTS_DIR, if that is set.
docs/ray-packages.md has a row for each package and says the same versions (a test compares the two).
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH = ["torch==2.14.1"]  # a CPU build would do, but PyPI has none for Linux

# What pip is called with, one call after the other, after hpcray and the stand-in are installed. Packages that get
# along share an environment.
WANTED: dict[str, list[list[str]]] = {
    "numeric": [[
        "scikit-learn==1.9.1", "joblib==1.6.0", "dask[array]==2026.8.0", "modin[ray]==0.37.1", "fugue[ray]==0.9.7",
        "pymoo==0.6.2", "sktime==1.2.0", "optuna==5.0.0", "hyperopt==0.3.0", "flaml[automl]==2.8.0", "lightgbm==4.7.0",
        "statsforecast==2.1.1", "ray[tune]", "numpy==2.4.6", "pandas==2.3.3", "pyarrow==26.0.1", "duckdb==2.0.1",
    ]],
    "pipelines": [[
        "prefect-ray==0.6.0", "prefect==3.9.1", "dagster-ray==0.4.8", "dagster==1.13.29", "sf-hamilton==1.90.0",
        "datatrove[processing,io,ray]==0.10.1", "distilabel[ray]==1.5.3", "requests", "cubed==0.27.0", "numpy==2.4.6",
        "pandas==3.1.1", "pyarrow==26.0.1",
    ]],
    "tables": [[
        "daft==0.7.26", "econml==0.17.0", "feast==0.67.0", "lance-ray==0.5.0", "pylance==14.0.2", "ray[data]",
        "numpy==2.4.6", "pandas==2.3.3", "pyarrow==25.0.1", "scikit-learn==1.9.1",
    ]],
    "learning": [
        TORCH,
        [
            "deephyper==0.13.2", "evotorch==0.6.1", "gymnasium==1.4.0", "tensordict==0.14.3", "tianshou==2.0.1",
            "torchrl==0.14.1",
        ],
    ],
    "flwr": [["flwr[simulation]==1.42.0"]],
    "hydra": [["hydra-core==1.3.8"], ["--no-deps", "hydra-ray-launcher==1.2.2"]],  # it wants cloudpickle<3
    "lightgbm_ray": [["lightgbm_ray==0.1.9", "lightgbm==4.7.0", "scikit-learn==1.9.1"]],
    "nemo_curator": [TORCH, ["nemo-curator==1.4.0", "cosmos-xenna==0.2.0", "tqdm", "psutil"]],
    "smallpond": [["smallpond==0.15.0", "duckdb==1.3.2"]],  # it imports duckdb.typing, which 1.4 has no more
    "xgboost_ray": [["xgboost_ray==0.1.19", "xgboost==2.0.3", "scikit-learn==1.9.1"]],  # 2.1 changed the tracker
    "verl": [
        TORCH,
        [
            "tensordict==0.10.0",
            "transformers==5.10.4",
            "hydra-core==1.3.8",
            "codetiming==1.4.0",
            "datasets==5.2.0",
            "orjson==3.13.0",
            "pyzmq==27.3.0",
            "cachetools==8.0.2",
            "pillow==13.0.0",
            "aiohttp==3.14.5",
            "fastapi==0.165.0",
            "uvicorn==0.54.0",
        ],
        [
            "verl==0.9.1", "TransferQueue==0.1.11", "accelerate==1.15.0", "peft==0.21.2", "torchdata==0.11.0",
            "--no-deps",
        ],
        ["psutil==7.2.2"],
    ],
}  # fmt: skip

# Environments whose packages pin Ray: the version that the stand-in claims there.
CLAIMED = {"flwr": "2.55.1"}


class Environment:
    """One environment. It is made at the first use."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._directory = kept(f"hpcray-clients-{name}")
        self.bin = str(self._directory / "bin")
        self.python = str(self._directory / "bin" / "python")

    def make(self) -> None:
        """Install. Packages are installed once (a file marks an environment that is whole), hpcray each time."""
        whole = self._directory / "whole"
        wanted = repr(WANTED[self.name])
        fresh = not whole.exists() or whole.read_text() != wanted
        if fresh:
            run(sys.executable, "-m", "venv", "--clear", str(self._directory))
            self.pip("install", str(ROOT))
        self.pip("install", "--no-deps", "--force-reinstall", str(ROOT))
        claimed = ["--version", CLAIMED[self.name]] if self.name in CLAIMED else []
        run(self.python, "-m", "hpcray.compat", "install", *claimed)
        if fresh:
            version = subprocess.check_output(
                [self.python, "-c", "import importlib.metadata; print(importlib.metadata.version('ray'))"], text=True
            )
            stays = self._directory / "stand-in.txt"
            stays.write_text(f"ray=={version.strip()}\n")
            for packages in WANTED[self.name]:
                self.pip("install", "-c", str(stays), *packages)
            whole.write_text(wanted)

    def pip(self, *arguments: str) -> None:
        """Call pip."""
        run(self.python, "-m", "pip", "-q", "--disable-pip-version-check", *arguments)


@functools.cache
def environment(name: str) -> Environment:
    """Return an environment that is made; once in a process."""
    found = Environment(name)
    found.make()
    return found


@functools.cache
def libraries() -> str:
    """Return the directory with Ray's libraries, which all environments share."""
    place = kept("ray-libraries")
    run(environment("numeric").python, "-m", "hpcray.compat", "libraries", "install", str(place))
    return str(place)


def kept(name: str) -> Path:
    """Return where something is kept from one run to the next."""
    return Path(os.environ.get("CLIENTS_DIR") or tempfile.gettempdir()) / name


def run(*command: str) -> None:
    """Run a command; its output is in the error."""
    environ = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=1800)
    if ended.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {ended.stdout[-2000:]}{ended.stderr[-4000:]}")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or list(WANTED):
        environment(chosen)
