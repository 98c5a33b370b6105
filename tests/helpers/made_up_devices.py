"""Has every process of a job use made-up devices: half of them one, half of them another one.

Imported by the template of workers (HPCRAY_PRELOAD=torch,helpers.made_up_devices); the folder of the devices is in the
variable MADE_UP_DEVICES. Device objects pass through the host in small pieces, each of which takes some time. Where
HPCRAY_DEVICE_TRANSPORTS is set, each process is on a host of its own, and all device objects pass directly.
"""

from __future__ import annotations

import os
import time

VARIABLE = "MADE_UP_DEVICES"
PIECE = 32 << 10
PAUSE = 0.002
"""Seconds of the copy of a piece."""


def use_made_up_devices() -> None:
    """Use them in this process."""
    from helpers.fake_device_driver import FakeDeviceDriver
    from hpcray.tensors import device_mappings, device_memory, device_pieces, tensor_pulls

    tensor_pulls._SMALLEST = tensor_pulls._LARGEST = device_pieces.PIECED_SIZE = PIECE
    driver = FakeDeviceDriver(os.environ[VARIABLE], visible=(f"gpu-{os.getpid() % 2}",))
    driver.pause = PAUSE
    driver.transfers = note_transfer
    if os.environ.get("HPCRAY_DEVICE_TRANSPORTS"):
        device_mappings.DIRECT_SIZE = 1
        device_memory.running_kernel = lambda: f"host of {os.getpid()}"  # type: ignore[assignment]
        driver.activate = note_message  # type: ignore[method-assign]
    device_memory.use_driver(driver)


def note_message(device: str) -> None:
    """Count a message of UCX, at one of its ends, in the file `messages`. It takes some time."""
    time.sleep(PAUSE)
    with open(os.path.join(os.environ[VARIABLE], "messages"), "ab") as file:
        file.write(b".")


def note_transfer() -> bool:
    """Count a copy of a piece, or a stream for them, in the file `transfers`."""
    with open(os.path.join(os.environ[VARIABLE], "transfers"), "ab") as file:
        file.write(b".")
    return True


if VARIABLE in os.environ:
    os.register_at_fork(after_in_child=use_made_up_devices)
