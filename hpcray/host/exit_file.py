"""The program's exit code, told to an `hpcray-launch` on another host.

srun ends with the highest code of its tasks, and a rank that was killed counts with 137 although the job went on
without it. So where ranks died on the way, the rank with the program writes the code to a file whose name it was given.
It lies in the directory where the launcher runs, which all nodes share as a rule; else srun's code is all there is.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import MutableMapping

VARIABLE = "HPCRAY_EXIT_FILE"
_LONGEST = 3


class ExitFile:
    """The launcher's end.

    Attributes:
        path: what the ranks find in the variable `HPCRAY_EXIT_FILE`.
    """

    def __init__(self, directory: str) -> None:
        self.path = os.path.join(directory, f".hpcray-exit-{secrets.token_hex(12)}")

    def is_there(self) -> bool:
        """Whether the program is over, and its rank has said so."""
        return os.path.lexists(self.path)

    def take(self) -> int | None:
        """The code that was told, None when there is none. The file is gone then."""
        with contextlib.suppress(OSError, ValueError):
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(fd, encoding="ascii") as file:
                state = os.fstat(fd)
                os.unlink(self.path)
                if state.st_uid == os.getuid() and stat.S_ISREG(state.st_mode):
                    return int(file.read(_LONGEST)) & 0xFF
        return None


def exit_file(environ: MutableMapping[str, str]) -> str:
    """The path that the launcher has given, "" for none. The variable is removed: nested launches do not see it."""
    return environ.pop(VARIABLE, "")


def tell(path: str, code: int) -> None:
    """Write the program's exit code, as far as the directory takes it."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="ascii") as file:
            file.write(str(code))
