"""Which process opens which file: an audit hook in every Python of a job, put there by a `sitecustomize`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

_HOOK = """\
import os, sys, _thread

def _name():
    with open("/proc/self/comm") as file:
        return file.read().strip()

def _hook(event, args, busy=set()):
    me = _thread.get_ident()
    if event not in ("open", "import") or me in busy:
        return
    path = args[0] if event == "open" else args[1]
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    if not isinstance(path, str) or not path.startswith(PLACES) or not os.path.isfile(path):
        return
    busy.add(me)
    try:
        line = f"{os.getpid()}\\t{_name()}\\t{os.environ.get('OMPI_COMM_WORLD_RANK', '')}\\t{path}\\n"
        fd = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, line.encode())
        os.close(fd)
    finally:
        busy.discard(me)

PLACES, LOG = %r, %r
sys.addaudithook(_hook)
"""


class Reads:
    """Counts what Python code and the import system open below some directories.

    Args:
        directory: of this test's own; goes in front of PYTHONPATH.
        places: directories to watch.
    """

    def __init__(self, directory: Path, *places: Path | str) -> None:
        directory.mkdir()
        self.path = str(directory)
        self._log = directory / "log"
        (directory / "sitecustomize.py").write_text(_HOOK % (tuple(map(str, places)), str(self._log)))

    def all(self) -> list[tuple[str, str]]:
        """(command name of the process, path), in order."""
        if not self._log.exists():
            return []
        lines = [line.split("\t") for line in self._log.read_text().splitlines()]
        return [(name, path) for _, name, _, path in lines]

    def files(self) -> Counter[str]:
        """How often each file was opened."""
        return Counter(path for _, path in self.all())

    def by(self, name: str) -> list[str]:
        """What processes with this command name opened."""
        return [path for process, path in self.all() if process == name]
