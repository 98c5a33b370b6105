"""What one worker imports is not brought into others: each has random numbers, ids and directories of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.jobs import Job, embedded
from helpers.leaks import LeakCheck

PACKAGE = """
import os, random, time, uuid
time.sleep(0.4)
rng, ident, pid = random.Random(), uuid.uuid4().hex, os.getpid()
"""
PROGRAM = """
import os, sys, time
import hpcray as ray

ray.init(num_cpus=2)

@ray.remote(num_cpus=0)
class User:
    def draw(self):
        had = "large_package" in sys.modules
        import large_package
        return had, large_package.rng.random(), large_package.ident, large_package.pid == os.getpid()

def draw(count):
    users = [User.remote() for _ in range(count)]
    return users, ray.get([user.draw.remote() for user in users], timeout=100)

first, found = draw(1)
time.sleep(4)
more, later = draw(4)
found += later
had, drawn, idents, own = zip(*found)
print(any(had), len(set(drawn)), len(set(idents)), all(own))
ray.shutdown()
"""


@pytest.mark.slow
def test_later_workers_import_a_large_package_for_themselves(leak_check: LeakCheck, tmp_path: Path) -> None:
    package = tmp_path / "site" / "large_package"
    package.mkdir(parents=True)
    for number in range(120):
        (package / f"part{number}.py").write_text("")
    lines = [f"from . import part{number}" for number in range(120)]
    (package / "__init__.py").write_text("\n".join([PACKAGE, *lines]))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with Job(embedded(program), {"PYTHONPATH": str(package.parent), "HPCRAY_LEARN_IMPORTS": "1"}) as job:
        ended = job.wait(120)
    assert ended.code == 0, ended.err
    assert ended.out.strip() == "False 5 5 True", (ended.out, ended.err)
    assert "HPCRAY_LEARN_IMPORTS is no setting any more" in ended.err
