"""The raylet as a process of its own, a child of the user's process (`bootstrap.NodeChild` starts it)."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import NoReturn

import msgspec

from hpcray.base.failures import StartupError
from hpcray.host.processes import set_process_name
from hpcray.runtime.bootstrap import Ready
from hpcray.runtime.node import SaidElsewhere, run_node
from hpcray.runtime.options import NodeOptions


def main() -> NoReturn:
    """Last arguments: the options as JSON, the ready pipe's and the life pipe's descriptors."""
    given, *descriptors = sys.argv[-3:]
    options = msgspec.json.decode(given, type=NodeOptions)
    ready_fd, life = map(int, descriptors)
    os.set_inheritable(ready_fd, False)
    os.set_inheritable(life, False)
    set_process_name("hpcray-raylet")
    told = False

    def tell(answer: Ready) -> None:
        nonlocal told
        if not told:
            told = True
            with contextlib.suppress(OSError):  # the parent is gone; the life pipe says so too
                os.write(ready_fd, msgspec.json.encode(answer))
            os.close(ready_fd)

    code = 1
    try:
        code = run_node(options, lambda session_dir: tell(Ready(session_dir=session_dir)), life)
    except SaidElsewhere:
        tell(Ready(said_elsewhere=True))
    except (StartupError, ValueError) as error:
        tell(Ready(error=str(error)))
    except BaseException:
        tell(Ready(error=traceback.format_exc()))
        traceback.print_exc()
    finally:
        tell(Ready(error="the node ended before it was up; its error output tells why"))
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
