"""What loading UCX does to the process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import zlib

import pytest

from hpcray.transport.ucx_engine import _other_threads_sleep

_LOAD = """\
import os, sys
from hpcray.transport import ucx_engine
before = dict(os.environ)
set_for_ucx = {}
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "libucxx":
            set_for_ucx.update({key: os.environ[key] for key in os.environ if key.startswith("UCX_MEM_")})
sys.meta_path.insert(0, Watch())
ucx_engine.load()
assert dict(os.environ) == before
print(set_for_ucx)
"""


def load(**environ: str) -> str:
    pytest.importorskip("libucxx")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    command = [sys.executable, "-c", _LOAD]
    return subprocess.run(command, env={**clean, **environ}, check=True, capture_output=True, text=True).stdout.strip()


def test_ucx_does_not_wait_for_threads_that_are_not_there() -> None:
    assert load() == "{'UCX_MEM_BISTRO_GRACE_DURATION': '0'}"


def test_what_the_site_sets_wins() -> None:
    assert load(UCX_MEM_BISTRO_GRACE_DURATION="7ms") == "{'UCX_MEM_BISTRO_GRACE_DURATION': '7ms'}"


def test_a_thread_that_waits_sleeps_and_one_that_computes_does_not() -> None:
    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True).start()
    assert _becomes(True)
    data = bytes(100 << 20)

    def compute() -> None:
        while not over.is_set():
            zlib.crc32(data)  # without the GIL

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        assert _becomes(False)
    finally:
        over.set()
        thread.join()


def _becomes(sleep: bool) -> bool:
    """Whether the other threads of this process are seen to sleep, or not to. Those of the test runner compute too."""
    end = time.monotonic() + 60
    while _other_threads_sleep() is not sleep:
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True
