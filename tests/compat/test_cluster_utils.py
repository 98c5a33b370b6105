"""`ray.cluster_utils.Cluster`: several nodes on this host."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .rows import row
from .test_table_core import ROOT, script

MPIRUN = shutil.which("mpirun", path=os.path.dirname(sys.executable)) or shutil.which("mpirun")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(MPIRUN is None, reason="there is no mpirun")]

PROGRAM = """
    import hpcray.compat.ray
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"head": 1}})
    added = [cluster.add_node(num_cpus=2, num_gpus=1, resources={"worker": 1}) for _ in range(2)]
    gone = cluster.add_node()
    cluster.remove_node(gone)
    ray.init(address=cluster.address)
    cluster.wait_for_nodes()
    print(len(ray.nodes()), ray.cluster_resources()["CPU"], ray.cluster_resources()["GPU"])
    where = ray.remote(lambda: ray.get_runtime_context().get_node_id())
    print(ray.get(where.options(resources={"head": 1}).remote()) == cluster.head_node.node_id)
    print({node.node_id for node in cluster.list_all_nodes()} == {row["NodeID"] for row in ray.nodes()})
    try:
        cluster.add_node()
    except NotImplementedError as error:
        print("no node can join a running job" in str(error))
    REST
    ray.shutdown()
    cluster.shutdown()
    """


@row("ray.cluster_utils.Cluster", differs="all nodes are added before the cluster is used: no node joins a running job")
def test_a_cluster_starts_the_nodes_that_were_added(tmp_path: Path, leak_check: object) -> None:
    out = script(PROGRAM.replace("REST", ""), tmp_path)
    assert out.split() == ["3", "5.0", "2.0", "True", "True", "True"]


@row("ray.cluster_utils.Cluster")
def test_a_removed_node_is_reported_dead(tmp_path: Path, leak_check: object) -> None:
    rest = """cluster.remove_node(added[0])
    cluster.wait_for_nodes()
    print(sum(row["Alive"] for row in ray.nodes()), ray.cluster_resources()["CPU"])"""
    out = script(PROGRAM.replace("REST", rest), tmp_path)
    assert out.split()[-2:] == ["2", "3.0"]


def test_as_ray_runs_a_program_on_several_nodes(tmp_path: Path, leak_check: object) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import ray\n"
        "ray.init()\n"
        "@ray.remote(scheduling_strategy='SPREAD')\n"
        "def where():\n"
        "    import ray\n"
        "    return ray.__version__, ray.get_runtime_context().get_node_id()\n"
        "found = ray.get([where.remote() for _ in range(8)])\n"
        "print(*{version for version, _ in found}, len({node for _, node in found}))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "hpcray.cli.launch", "-n", "2", "--as-ray", str(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.stdout.split() == ["2.60.0", "2"], ended.stderr
