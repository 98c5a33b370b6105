"""Spilling that cannot go on for a while: errors that say so, and a job that goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.jobs import ROOT
from helpers.leaks import LeakCheck

TIMEOUT = 150.0

# Of the raylet's threads that spill alone: what they call does not return while a file of the call's name is there, and
# none can be started while there is one named "start".
HOOK = """\
import os, threading, time

def held(name, call):
    gate = os.path.join(%r, name)
    def silent(*args):
        while threading.current_thread().name.startswith("hpcray-spill") and os.path.exists(gate):
            time.sleep(0.02)
        return call(*args)
    return silent

def start(thread, begin=threading.Thread.start):
    if thread.name.startswith("hpcray-spill") and os.path.exists(os.path.join(%r, "start")):
        raise RuntimeError("can't start new thread")
    begin(thread)

os.pwritev, os.preadv = held("pwritev", os.pwritev), held("preadv", os.preadv)
threading.Thread.start = start
"""

BEGIN = """\
import gc, os, re, sys, time
import numpy as np
import hpcray as ray
from hpcray.runtime.core_worker.core_worker import need_process

gates, spill = sys.argv[1], os.environ["HPCRAY_SPILL_DIR"]


def gate(name, shut):
    path = os.path.join(gates, name)
    open(path, "w").close() if shut else os.unlink(path)


def block(seed):
    return np.random.default_rng(seed).integers(0, 1 << 62, (4 << 20) // 8)


def is_there(seed, ref):
    return np.array_equal(ray.get(ref), block(seed))


def store():
    (numbers,) = need_process().diagnostics.list_stores(0, 60.0)
    return numbers


def until(what):
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, store()
        time.sleep(0.02)


@ray.remote
def add(value):
    return value + 1


@ray.remote
def fails(refs):
    try:
        ray.get(refs[0])
    except ray.exceptions.ObjectStoreFullError as error:
        text = str(error)
    gc.collect()  # of what the error refers to
    return text


def told(error):
    assert re.search(re.escape(spill) + r" has not answered since \\d\\d:\\d\\d:\\d\\d", str(error)), str(error)
    assert "hint:" in str(error) and "HPCRAY_SPILL_DIR" in str(error), str(error)


ray.init(num_cpus=1, object_store_memory=48 << 20)
"""


def run(tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    """A program of its own, with a spill directory that can be held."""
    gates, spill = tmp_path / "gates", tmp_path / "spill"
    gates.mkdir()
    spill.mkdir()
    (tmp_path / "sitecustomize.py").write_text(HOOK % ((str(gates),) * 2))
    (tmp_path / "program.py").write_text(BEGIN + code)
    environ = {
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
        "HPCRAY_SPILL_DIR": str(spill),
        "HPCRAY_SPILL_TIMEOUT": "0.5",
    }
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), str(gates)],
        env={**os.environ, **environ}, capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "went on" in done.stdout, f"{done.stdout}\n{done.stderr}"
    assert os.listdir(spill) == []
    return done


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_write_that_does_not_return(tmp_path: Path, leak_check: LeakCheck) -> None:
    code = """
gate("pwritev", True)
refs = []
try:
    for seed in range(40):
        refs.append(ray.put(block(seed)))
except ray.exceptions.ObjectStoreFullError as error:
    told(error)
else:
    raise AssertionError("there is room for all of them")
assert len(refs) >= 8 and all(is_there(seed, ref) for seed, ref in enumerate(refs)), "what is in memory can be read"
assert ray.get([add.remote(i) for i in range(100)], timeout=60) == list(range(1, 101))
gone = len(refs) - 2
del refs[-2:]
more = ray.put(block(gone)), ray.put(block(gone + 1))
refs += more
del more
assert all(is_there(seed, ref) for seed, ref in enumerate(refs)), "and what fits is put"
gate("pwritev", False)
until(lambda: store()["spilled_bytes"] > 0)
refs += [ray.put(block(seed)) for seed in range(len(refs), 40)]
assert all(is_there(seed, ref) for seed, ref in enumerate(refs))
del refs
gc.collect()
until(lambda: store()["objects"] == store()["on_disk"] == store()["segments"] == 0)
print("went on", flush=True)
"""
    done = run(tmp_path, code)
    assert done.stderr.count("has not answered since") == 1 == done.stderr.count("answers again, after"), done.stderr


@pytest.mark.timeout(180)
def test_a_read_that_does_not_return(tmp_path: Path, leak_check: LeakCheck) -> None:
    code = """
refs = [ray.put(block(seed)) for seed in range(20)]
until(lambda: store()["spilled"] >= 6)
gate("preadv", True)
for ref in refs[:2]:
    try:
        ray.get(ref)
    except ray.exceptions.ObjectStoreFullError as error:
        told(error)
        assert "lies on disk on node 0" in str(error)
    else:
        raise AssertionError("it came")
assert is_there(19, refs[19]), "it is in memory"
told(ray.get(fails.remote(refs[:1])))
assert ray.get([add.remote(i) for i in range(100)], timeout=60) == list(range(1, 101))
gate("preadv", False)
until(lambda: not store()["restoring"])
assert all(is_there(seed, ref) for seed, ref in enumerate(refs))
del refs, ref
gc.collect()
until(lambda: store()["objects"] == store()["on_disk"] == store()["segments"] == 0)
print("went on", flush=True)
"""
    done = run(tmp_path, code)
    assert done.stderr.count("has not answered since") == 1 == done.stderr.count("answers again, after"), done.stderr


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_threads_that_cannot_be_started(tmp_path: Path, leak_check: LeakCheck) -> None:
    code = """
gate("start", True)
refs = []
try:
    for seed in range(40):
        refs.append(ray.put(block(seed)))
except ray.exceptions.ObjectStoreFullError as error:
    assert "Spilling to disk failed: can't start new thread" in str(error) and "ulimit -u" in str(error)
else:
    raise AssertionError("there is room for all of them")
assert all(is_there(seed, ref) for seed, ref in enumerate(refs))
assert ray.get([add.remote(i) for i in range(100)], timeout=60) == list(range(1, 101))
gate("start", False)
refs += [ray.put(block(seed)) for seed in range(len(refs), 40)]
assert all(is_there(seed, ref) for seed, ref in enumerate(refs))
print("went on", flush=True)
"""
    run(tmp_path, code)
