"""The distribution "ray" of an environment in which `import ray` is hpcray: its metadata, extras and version.

pip and `importlib.metadata` read it. Its extras are hpcray's, so that `pip install "package[ray]"`, which asks for
`ray[tune]`, installs what Ray's library imports. It lists its own files, so that pip can replace it, where a package
wants another version, instead of stopping half-way.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Sequence
from pathlib import Path

from hpcray.common.ray_version import RAY_VERSION, STANDIN, claimed_version

EXTRAS: dict[str, Sequence[str]] = {
    "adag": (), "air": ("hpcray[serve,train]",), "all": ("hpcray[rllib,serve]",), "all-cpp": ("hpcray[rllib,serve]",),
    "cgraph": (), "client": (), "cpp": (), "data": ("hpcray[data]",), "default": (),
    "llm": ("hpcray[serve]", "hf_transfer", "jsonref>=1.1.0", "jsonschema", "ninja", "typer", "vllm"),
    "observability": (), "rllib": ("hpcray[rllib]",), "serve": ("hpcray[serve]",),
    "serve-async-inference": ("hpcray[serve]", "celery", "taskiq"), "serve-grpc": ("hpcray[serve]",),
    "train": ("hpcray[train]",), "tune": ("hpcray[tune]",),
}  # fmt: skip
"""Ray's extras, and what each means here. Those of Ray's own processes (its dashboard, its client) need nothing."""
_VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?")


def metadata(version: str = RAY_VERSION) -> str:
    """Return the METADATA of the distribution, in which it says that it is this version of Ray.

    Raises:
        ValueError: that is no version.
    """
    if not _VERSION.fullmatch(version):
        raise ValueError(f"{version!r} is no version of Ray; hint: 2.44.1, for example")
    lines = [
        "Metadata-Version: 2.1", "Name: ray", f"Version: {version}+hpcray",
        f"Summary: Not Ray: the names of Ray {RAY_VERSION}'s Python API, served by hpcray.", "License: Apache-2.0",
        "Requires-Python: >=3.10",
    ]  # fmt: skip
    for extra, wanted in sorted(EXTRAS.items()):
        lines += [f"Provides-Extra: {extra}", *(f'Requires-Dist: {one}; extra == "{extra}"' for one in wanted)]
    return "\n".join(lines) + "\n"


def write(site: Path, version: str, files: Sequence[str]) -> None:
    """Write the distribution into a site-packages directory, with the paths of the files that belong to it."""
    text = metadata(version)
    remove(site)
    info = site / f"ray-{version}+hpcray.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(text, encoding="utf-8")
    (info / "INSTALLER").write_text("hpcray\n", encoding="utf-8")
    own = [f"{info.name}/{name}" for name in ("METADATA", "INSTALLER", "RECORD")]
    listed = [*(os.path.relpath(path, site) for path in files), *own]
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in listed), encoding="utf-8")


def remove(site: Path) -> None:
    """Remove what `write` has written."""
    for info in site.glob("ray-*+hpcray.dist-info"):
        for file in info.iterdir():
            file.unlink()
        info.rmdir()


class ClaimedDistribution(importlib.metadata.Distribution):
    """The distribution "ray" in a process where HPCRAY_RAY_VERSION is set."""

    def read_text(self, filename: str) -> str | None:
        """Return METADATA; None for any other file."""
        return metadata(claimed_version()) if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        """Return the path of a file of the package."""
        return Path(STANDIN, str(path))
