"""`python -m hpcray.compat install [--version V] | uninstall | path`: make `import ray` hpcray in this environment.
`python -m hpcray.compat libraries install [DIR] | path`: Ray's own libraries (Data, Tune, ...), for `import ray.data`.

`install` writes one line into site-packages (`hpcray-ray.pth`), and Ray's commands `ray`, `serve` and `tune` beside
`python`. The environment then has a package `ray` and a distribution "ray" with Ray's extras, for pip and
`importlib.metadata` too. `--version 2.44.1` is for packages that pin that version: the distribution, and
`ray.__version__` with HPCRAY_RAY_VERSION=2.44.1, claim it. `install` refuses where the real Ray is installed.

`libraries install` unpacks the libraries of Ray's wheel into a directory of this environment, or into DIR.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shlex
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from hpcray.common.ray_version import RAY_VERSION, STANDIN
from hpcray.compat import distribution, libraries
from hpcray.platform.process_control import code_line, module_line

_PTH = "hpcray-ray.pth"
_COMMAND = """\
#!/bin/sh
exec {line} "$@"
"""


def commands() -> dict[str, str]:
    """Return the text of each command that Ray's own distribution has, by its path. `serve` and `tune` are those of
    Ray's libraries, and say so where these are not installed."""
    lines = {
        "ray": module_line("hpcray.cli.ray"),
        "serve": module_line("hpcray.cli", "serve"),
        "tune": code_line("from ray.tune.cli.scripts import cli; cli(prog_name='tune')"),
    }
    scripts = sysconfig.get_path("scripts")
    return {os.path.join(scripts, name): _COMMAND.format(line=shlex.join(line)) for name, line in lines.items()}


def _is_ours(path: str) -> bool:
    """True unless another package has put a command of that name there."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return True
    return text in commands().values() or "hpcray.cli.ray" in text


def main(argv: Sequence[str]) -> int:
    """Run a command of the module docstring. Returns the exit code."""
    site = sysconfig.get_path("purelib")
    path = os.path.join(site, _PTH)
    if list(argv[:1]) == ["libraries"]:
        return libraries.main(list(argv[1:]))
    if list(argv) == ["path"]:
        print(STANDIN)
    elif list(argv[:1]) == ["install"] and (len(argv) == 1 or (len(argv) == 3 and argv[1] == "--version")):
        version = argv[2] if len(argv) == 3 else RAY_VERSION
        try:
            distribution.metadata(version)
        except ValueError as error:
            print(f"hpcray: {error}", file=sys.stderr)
            return 2
        try:
            found = importlib.metadata.version("ray")
        except importlib.metadata.PackageNotFoundError:
            found = ""
        if found and "hpcray" not in found:
            print(f"hpcray: ray {found} is installed here; hint: pip uninstall ray", file=sys.stderr)
            return 1
        with open(path, "w", encoding="utf-8") as file:
            file.write(STANDIN + "\n")
        written = {command: text for command, text in commands().items() if _is_ours(command)}
        for command, text in written.items():
            with open(command, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o755)) as file:
                file.write(text)
        distribution.write(Path(site), version, [path, *written])
        print(f"hpcray: import ray is hpcray now; {', '.join([path, *written])}")
        for command in commands().keys() - written.keys():
            print(f"hpcray: {command} is another package's, and stays")
        if version != RAY_VERSION:
            print(f"hpcray: pip sees ray {version}; for `ray.__version__` too: export HPCRAY_RAY_VERSION={version}")
    elif list(argv) == ["uninstall"]:
        if not os.path.exists(path):
            print(f"hpcray: there is no {path}", file=sys.stderr)
            return 1
        os.unlink(path)
        distribution.remove(Path(site))
        for command in filter(_is_ours, commands()):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(command)
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
