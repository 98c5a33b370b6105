"""`--broadcast-env` under srun: one read, four copies, nothing left."""

from __future__ import annotations

import pytest
from helpers.slurm import Slurm

pytestmark = pytest.mark.slurm

PROGRAM = """\
import socket
import hpcray as ray
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
ray.init()


@ray.remote
def where():
    import package_of_the_user
    return socket.gethostname(), package_of_the_user.__file__


nodes = [On(node["NodeID"], soft=False) for node in ray.nodes()]
found = ray.get([where.options(scheduling_strategy=on).remote() for on in nodes])
print("nodes", len({host for host, _ in found}), *sorted(path for _, path in found))
"""


def test_every_node_imports_from_its_own_copy(slurm: Slurm) -> None:
    slurm.write("x = 1", "package_of_the_user.py")
    script = slurm.write(PROGRAM)
    ended = slurm.run("salloc", "-Q", "-N4", "hpcray-launch", "--broadcast-env", slurm.place, script)
    assert ended.code == 0, ended.err
    _, count, *paths = next(line for line in ended.out.splitlines() if line.startswith("nodes")).split()
    assert count == "4" and len(paths) == 4
    assert all(path.endswith("/env/package_of_the_user.py") for path in paths), paths
