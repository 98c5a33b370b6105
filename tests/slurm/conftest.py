"""The Slurm test cluster, once for all tests that use it, and one view of it for each test."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
from helpers.as_ray import lent_libraries
from helpers.slurm import Cluster, Slurm, boot, leak_checked
from testcluster.cluster import why_not
from testcluster.registry import sweep

_number = itertools.count(1)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster of four nodes, n1 to n4, that lives as long as this test run."""
    if reason := why_not():
        pytest.skip(reason)
    sweep()
    found = boot(4)
    yield found
    found.down()


@pytest.fixture
def slurm(cluster: Cluster) -> Iterator[Slurm]:
    """The cluster, idle; the test fails when it leaves anything on a host, or a job or a step."""
    with leak_checked(cluster, f"t{next(_number)}") as found:
        yield found


@pytest.fixture
def lent(cluster: Cluster, slurm: Slurm) -> dict[str, str]:
    """What a job's environment needs for Ray's libraries, as the hosts see them."""
    found = str(cluster.directory / "ray") if os.environ.get("HPCRAY_RAY_LIBRARIES") else lent_libraries()
    (slurm.place / "tmp").mkdir()  # for what a trial that is killed leaves of tempfile
    # The nodes of the cluster share the processors of this machine.
    environ = {"OMP_NUM_THREADS": "1", "TMPDIR": str(slurm.place / "tmp"), "HPCRAY_TMPDIR": "/tmp"}
    return {**environ, "HPCRAY_RAY_LIBRARIES": found}
