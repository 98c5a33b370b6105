"""The driver of a `Cluster`: says where the job is, and keeps it until whoever started it closes a pipe or is gone."""

from __future__ import annotations

import os
import sys

ADDRESS_FILE = "address"
LIFE_FIFO = "life"


def main(directory: str) -> None:
    """Wait.

    Args:
        directory: holds the pipe; gets the address of the job.
    """
    path = os.path.join(directory, ADDRESS_FILE)
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(os.environ["HPCRAY_ADDRESS"])
    os.replace(path + ".new", path)
    try:
        with open(os.path.join(directory, LIFE_FIFO), "rb") as life:
            life.read()
    except FileNotFoundError:
        pass  # it has gone already


if __name__ == "__main__":
    main(sys.argv[1])
