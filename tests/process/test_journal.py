"""`HPCRAY_JOURNAL_DIR`: a job that is run again, after whatever end, finds its names, detached actors and values."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from helpers.jobs import Ended, Job
from helpers.leaks import LeakCheck, wait_until

from hpcray.platform.session_directory import live_sessions

FIRST = """\
import sys
import hpcray as ray
from hpcray.experimental import internal_kv as kv
from hpcray.util.placement_group import placement_group
from hpcray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as In

ray.init(namespace="here", num_cpus=2)


@ray.remote(num_cpus=0)
class Counter:
    def __init__(self, start, step):
        self.count, self.step = start, step

    def more(self):
        self.count += self.step
        return self.count


keeps = Counter.options(name="keeps", lifetime="detached").remote(10, step=5)
group = placement_group([{"CPU": 1}], name="group", lifetime="detached")
ray.get(group.ready())
inside = Counter.options(
    name="inside", lifetime="detached", num_cpus=1, scheduling_strategy=In(group)
).remote(100, step=1)
takes_ref = Counter.options(name="takes_ref", lifetime="detached").remote(0, step=[ray.put(1)])
own = Counter.options(name="own").remote(0, step=1)
kv._internal_kv_put(b"key", b"value")
print(ray.get([keeps.more.remote(), keeps.more.remote(), inside.more.remote()]), flush=True)
"""

SECOND = """\
import sys
import hpcray as ray
from hpcray.experimental import internal_kv as kv
from hpcray.util.placement_group import get_placement_group

ray.init(namespace="here", num_cpus=2)
for name in ("keeps", "inside", "takes_ref", "own"):
    try:
        print(name, ray.get(ray.get_actor(name).more.remote(), timeout=60))
    except ValueError:
        print(name, "unknown")
print(kv._internal_kv_get(b"key"), ray.get(get_placement_group("group").ready(), timeout=60) is not None)
sys.exit(int(sys.argv[1]))
"""

FOUND = ["keeps 15", "inside 101", "takes_ref unknown", "own unknown", "b'value' True"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "second.py").write_text(SECOND)
    return tmp_path


def start(home: Path, name: str, *args: str) -> Job:
    command = [sys.executable, "-m", "hpcray", str(home / name), *args]
    return Job(command, {"HPCRAY_JOURNAL_DIR": str(home / "journal")})


def again(home: Path, code: int) -> Ended:
    with start(home, "second.py", str(code)) as job:
        ended = job.wait()
    assert ended.code == code, ended
    return ended


@pytest.mark.slow
def test_a_run_that_failed_is_gone_on_with(leak_check: LeakCheck, home: Path) -> None:
    (home / "first.py").write_text(FIRST + "sys.exit(3)\n")
    with start(home, "first.py") as job:
        ended = job.wait()
    assert ended.code == 3 and ended.out == "[15, 20, 101]\n", ended
    second = again(home, 4)
    assert second.out.splitlines() == FOUND, second.err
    assert again(home, 0).out.splitlines() == FOUND, "and again, after a run that failed too"
    assert "2 detached actors, 1 detached placement groups, 1 values" in second.err
    assert "not brought back: Counter 'takes_ref': its constructor takes refs or handles" in second.err
    with start(home, "second.py", "0") as job:
        third = job.wait()
    assert third.out.splitlines()[:2] == ["keeps unknown", "inside unknown"], "the second run was done"
    leak_check.check()


def test_so_is_one_whose_raylet_was_killed(leak_check: LeakCheck, home: Path) -> None:
    (home / "first.py").write_text(FIRST + "import time; time.sleep(100)\n")
    with start(home, "first.py") as job:
        assert job.line() == "[15, 20, 101]", job.wait()
        wait_until(lambda: b"value" in (home / "journal" / "journal").read_bytes(), "the last of it on the disk")
        (info,) = live_sessions()
        os.kill(info.pid, signal.SIGKILL)
        os.kill(job.pid, signal.SIGKILL)
        job.wait()
    assert again(home, 0).out.splitlines() == FOUND
    leak_check.check()


DAMAGED = """\
import sys
import hpcray as ray
from hpcray.experimental import internal_kv as kv

ray.init(num_cpus=1)
print([kv._internal_kv_get(b"key%d" % number) for number in range(3)], flush=True)
for number in range(3):
    kv._internal_kv_put(b"key%d" % number, b"value%d" % number)
sys.exit(1)
"""


def test_what_damage_takes_away_is_told_and_the_rest_is_gone_on_with(leak_check: LeakCheck, home: Path) -> None:
    (home / "program.py").write_text(DAMAGED)
    with start(home, "program.py") as job:
        assert job.wait().out == "[None, None, None]\n"
    file = home / "journal" / "journal"
    whole = file.read_bytes()
    assert whole.count(b"value1") == 1
    file.write_bytes(whole.replace(b"value1", b"value?"))
    with start(home, "program.py") as job:
        ended = job.wait()
    assert ended.out == "[b'value0', None, None]\n", ended
    assert ended.err.count("is damaged at byte") == 1 and f"{file}.damaged" in ended.err, ended.err
    with start(home, "program.py") as job:
        ended = job.wait()
    assert ended.out == "[b'value0', b'value1', b'value2']\n" and "damaged" not in ended.err, ended
    leak_check.check()


IDS = """\
import sys
import hpcray as ray

ray.init(num_cpus=1)
where = ray.remote(lambda: ray.get_runtime_context().get_worker_id())
print(ray.put(1).hex(), ray.get(where.remote()), flush=True)
sys.exit(1)
"""


def test_ids_that_a_run_makes_differ_from_those_of_the_run_before_it(leak_check: LeakCheck, home: Path) -> None:
    (home / "program.py").write_text(IDS)
    ids: list[str] = []
    for _ in range(2):
        with start(home, "program.py") as job:
            ids += job.wait().out.split()
    assert len(ids) == len(set(ids)) == 4, ids
    leak_check.check()


def test_a_journal_that_others_can_read_is_refused(leak_check: LeakCheck, home: Path) -> None:
    (home / "journal").mkdir(mode=0o755)
    with start(home, "second.py", "0") as job:
        ended = job.wait()
    assert ended.code == 1 and "is open to other users (mode 755); hint: chmod 700" in ended.err, ended
    leak_check.check()


@pytest.mark.slow
def test_a_node_that_the_program_starts_has_no_part_in_it(leak_check: LeakCheck, home: Path) -> None:
    (home / "outer.py").write_text(
        "import subprocess, sys\nimport hpcray as ray\nray.init(num_cpus=1)\n"
        "code = 'import hpcray; hpcray.init(address=\"local\", num_cpus=1)'\n"
        "inner = lambda: subprocess.run([sys.executable, '-c', code]).returncode\n"
        "print(inner(), ray.get(ray.remote(inner).remote()))\n"
    )
    with start(home, "outer.py") as job:
        ended = job.wait()
    assert ended.out == "0 0\n", ended
    leak_check.check()
