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
    from ray.cluster_utils import Cluster, cluster_not_supported

    assert cluster_not_supported is False
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"head": 1}})
    added = [cluster.add_node(num_cpus=2, num_gpus=1, resources={"worker": 1}) for _ in range(2)]
    gone = cluster.add_node()
    cluster.remove_node(gone)
    ray.init(address=cluster.address)
    kept = ray.put(1)
    cluster.wait_for_nodes()
    print(len(ray.nodes()), ray.cluster_resources()["CPU"], ray.cluster_resources()["GPU"])
    where = ray.remote(lambda: ray.get_runtime_context().get_node_id())
    print(ray.get(where.options(resources={"head": 1}).remote()) == cluster.head_node.node_id)
    print({node.node_id for node in cluster.list_all_nodes()} == {row["NodeID"] for row in ray.nodes()})
    held, marked = ray.put(b"x" * 10_000_000), ray.remote(len).options(resources={"late": 1})
    waiting = marked.remote(held)
    late = cluster.add_node(num_cpus=1, resources={"late": 1})
    print(ray.get(waiting) == 10_000_000, late.node_id in {row["NodeID"] for row in ray.nodes()})
    cluster.remove_node(late)
    print(len([row for row in ray.nodes() if row["Alive"]]))
    REST
    ray.shutdown()
    cluster.shutdown()
    """


@row("ray.cluster_utils.Cluster")
def test_a_cluster_starts_the_nodes_that_were_added(tmp_path: Path, leak_check: object) -> None:
    out = script(PROGRAM.replace("REST", ""), tmp_path)
    assert out.split() == ["3", "5.0", "2.0", "True", "True", "True", "True", "3"]


@row("ray.cluster_utils.Cluster")
def test_a_removed_node_is_reported_dead(tmp_path: Path, leak_check: object) -> None:
    rest = """cluster.remove_node(added[0])
    cluster.wait_for_nodes()
    print(sum(row["Alive"] for row in ray.nodes()), ray.cluster_resources()["CPU"])"""
    out = script(PROGRAM.replace("REST", rest), tmp_path)
    assert out.split()[-2:] == ["2", "3.0"]


LATE = """
    import hpcray.compat.ray
    import os
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    assert cluster.address is None
    head = cluster.add_node(num_cpus=1, _system_config={"scheduler_spread_threshold": 0.25}, node_name="first")
    for wrong in ({"labels": {"a": "b"}}, {"num_cpus": 1}, {"resources": {"r": 1}}, {"_system_config": {"x": 1}}):
        try:
            ray.init(**wrong)
        except ValueError as error:
            assert "must not be provided" in str(error), error
    context = ray.init(address=cluster.address, namespace="here")
    late = cluster.add_node(num_cpus=2, labels={"zone": "b"}, env_vars={"SPECIAL": "yes"})
    cluster.wait_for_nodes()
    assert ray.is_initialized()

    where = ray.remote(lambda: (ray.get_runtime_context().get_node_id(), os.environ.get("SPECIAL")))
    print(ray.get(where.options(label_selector={"zone": "b"}).remote()) == (late.node_id, "yes"))
    print(ray.get(where.options(label_selector={"zone": "!b"}).remote()) == (head.unique_id, None))
    rows = {row["NodeID"]: row for row in ray.nodes()}
    print(rows[head.node_id]["NodeName"], rows[late.node_id]["Labels"]["zone"], ray.get_runtime_context().namespace)
    print(context.address_info["node_id"] == head.node_id, cluster.address == context["address"])
    cluster.remove_node(late)
    cluster.add_node(num_cpus=4)
    print(ray.cluster_resources()["CPU"], ray.get_runtime_context().namespace)
    ray.shutdown()
    cluster.shutdown()
    again = Cluster(initialize_head=True, connect=True)
    print(len(ray.nodes()))
    try:
        again.remove_node(again.head_node)
    except ValueError:
        print(ray.is_initialized())
    again.shutdown()
    """


def test_nodes_can_be_added_until_the_session_is_used(tmp_path: Path, leak_check: object) -> None:
    out = script(LATE, tmp_path)
    assert out.split() == ["True", "True", "first", "b", "here", "True", "True", "5.0", "here", "1", "False"]


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
