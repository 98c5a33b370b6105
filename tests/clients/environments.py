"""Python environments with hpcray, its stand-in distribution "ray", and a package from PyPI that wants Ray.

`python -m tests.clients.environments NAME…` makes them beforehand. They are kept in $CLIENTS_DIR, if that is set.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH = ["torch"]  # a CPU build would do, but PyPI has none for Linux

# What pip is called with, one call after the other, after hpcray and the stand-in are installed.
WANTED: dict[str, list[list[str]]] = {
    "joblib": [["scikit-learn"]],
    "dask": [["dask[array]"]],
    "modin": [["modin", "scikit-learn"]],
    "xgboost_ray": [["xgboost_ray", "xgboost<2.1", "scikit-learn"]],  # its own limit: 2.1 changed the tracker
    "daft": [["daft"]],
    "datatrove": [["datatrove[processing,io]"]],
    "distilabel": [["distilabel", "requests"]],
    "evotorch": [TORCH, ["evotorch"]],
    "hamilton": [["sf-hamilton"]],
    "lightgbm_ray": [["lightgbm_ray", "scikit-learn"]],
    "nemo_curator": [["nemo-curator", "tqdm", "psutil"]],
    "prefect": [["prefect-ray"]],
    "smallpond": [["smallpond", "duckdb<1.4"]],  # it imports duckdb.typing
    "tianshou": [TORCH, ["tianshou"]],
    "torchrl": [TORCH, ["torchrl", "gymnasium"]],
    "verl": [
        TORCH,
        [
            "tensordict<=0.10",
            "transformers<5.11",
            "hydra-core",
            "codetiming",
            "datasets",
            "orjson",
            "pyzmq",
            "cachetools",
            "pillow",
            "aiohttp",
            "fastapi",
            "uvicorn",
        ],
        ["verl==0.9.1", "TransferQueue==0.1.11", "accelerate", "peft", "torchdata", "--no-deps"],
        ["psutil"],
    ],
}


class Environment:
    """One environment. It is made at the first use."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._directory = Path(os.environ.get("CLIENTS_DIR") or tempfile.gettempdir()) / f"hpcray-clients-{name}"
        self.python = str(self._directory / "bin" / "python")

    def make(self) -> None:
        """Install. Packages are installed once (a file marks an environment that is whole), hpcray each time."""
        whole = self._directory / "whole"
        fresh = not whole.exists()
        if fresh:
            run(sys.executable, "-m", "venv", "--clear", str(self._directory))
            self.pip("install", str(ROOT))
        self.pip("install", "--no-deps", "--force-reinstall", str(ROOT), str(ROOT / "hpcray" / "compat" / "standin"))
        if fresh:
            for packages in WANTED[self.name]:
                self.pip("install", *packages)
            whole.touch()

    def pip(self, *arguments: str) -> None:
        """Call pip."""
        run(self.python, "-m", "pip", "-q", "--disable-pip-version-check", *arguments)


def run(*command: str) -> None:
    """Run a command; its output is in the error."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    if ended.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {ended.stdout[-2000:]}{ended.stderr[-4000:]}")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or list(WANTED):
        Environment(chosen).make()
