"""The process of the near end: its order comes on standard input, which ends with the program that has started it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys

import msgspec

from hpcray.attach.carrier import Carrier, CarrierError
from hpcray.attach.near_end import Attaching, NearEnd, Ready
from hpcray.common.exceptions import StartupError
from hpcray.platform.process_tree import set_process_name


def main() -> None:
    """Attach, say so, and serve the program to its end."""
    for number in (signal.SIGINT, signal.SIGTSTP, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    set_process_name("hpcray-attach")
    order = msgspec.json.decode(_first_line(), type=Attaching)
    carrier = None
    try:
        carrier = Carrier(order.place, secrets.token_hex(8), order.wait)
        carrier.wait_until_open()
        near = NearEnd(order, carrier, 0)
    except (CarrierError, StartupError, OSError) as error:
        if carrier is not None:
            carrier.end(0.0)
        _answer(Ready(error=str(error)))
        return
    try:
        _answer(Ready(near.directory.path))
        near.run()
    finally:
        near.close()


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def _answer(ready: Ready) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(1, msgspec.json.encode(ready) + b"\n")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(1)
