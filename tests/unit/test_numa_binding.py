"""What a rank and its workers are bound to: the decisions, the files they come from, and the kernel's answer."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.machines import adapter, machine, write

from hpcray.platform import numa_binding
from hpcray.platform.numa_binding import (
    RdmaPort,
    WorkerPlan,
    bind_worker,
    bind_worker_to_cpus,
    nearest_adapters,
    numa_nodes,
    numa_nodes_of_gpus,
    original_affinity,
    plan_rank,
    plan_workers,
    rank_cores,
    rdma_ports,
    worker_cores,
)

ONE = {0: frozenset(range(16))}
TWO = {0: frozenset(range(8)), 1: frozenset(range(8, 16))}
FOUR = {node: frozenset(range(node * 4, node * 4 + 4)) for node in range(4)}
ALL = frozenset(range(16))


# ---------------------------------------------------------------- ranks


@pytest.mark.parametrize(
    ("nodes", "place", "ranks", "cpus", "cores"),
    [
        pytest.param(TWO, 0, 1, 16, ALL, id="alone"),
        pytest.param(TWO, 0, 2, 8, TWO[0], id="first of two"),
        pytest.param(TWO, 1, 2, 8, TWO[1], id="second of two"),
        pytest.param(TWO, 2, 4, 4, TWO[1], id="more ranks than nodes"),
        pytest.param(FOUR, 1, 2, 8, FOUR[2] | FOUR[3], id="more nodes than ranks"),
        pytest.param(TWO, 0, 2, 9, ALL, id="more CPUs than a node has"),
        pytest.param(ONE, 0, 2, 8, ALL, id="one NUMA node"),
        pytest.param(TWO, -1, 2, 8, ALL, id="who we are is not known"),
    ],
)
def test_ranks_of_an_unbound_host_get_numa_nodes_of_their_own(
    nodes: dict[int, frozenset[int]], place: int, ranks: int, cpus: float, cores: frozenset[int]
) -> None:
    assert rank_cores(ALL, nodes, place, ranks, cpus) == cores


def test_cores_that_the_launcher_has_bound_stay() -> None:
    assert rank_cores(frozenset({3, 4, 9}), TWO, 0, 2, 2) == {3, 4, 9}


def test_the_shares_of_ranks_cover_all_cores_and_suffice_for_their_cpus() -> None:
    for ranks in range(2, 9):
        shares = [rank_cores(ALL, FOUR, place, ranks, 16 / ranks) for place in range(ranks)]
        assert frozenset().union(*shares) == ALL
        assert all(len(share) >= 16 // ranks for share in shares)


# ---------------------------------------------------------------- adapters

_FABRIC = ("InfiniBand", "400 Gb/sec", "fe80:0000:0000:0001")
PORTS = [RdmaPort("mlx5_0:1", 0, _FABRIC), RdmaPort("mlx5_1:1", 1, _FABRIC)]


def test_a_rank_on_one_node_uses_the_adapter_of_that_node() -> None:
    assert nearest_adapters(TWO[1], TWO, PORTS, {}) == "mlx5_1:1"
    assert nearest_adapters(frozenset({1, 2}), TWO, PORTS, {}) == "mlx5_0:1"


@pytest.mark.parametrize("name", ["UCX_NET_DEVICES", "UCX_TLS"])
def test_ucx_variables_of_the_site_are_kept(name: str) -> None:
    assert nearest_adapters(TWO[1], TWO, PORTS, {name: "all"}) == ""


@pytest.mark.parametrize(
    "ports",
    [
        pytest.param([], id="none"),
        pytest.param(PORTS[:1], id="only a far one"),
        pytest.param([PORTS[1], RdmaPort("mlx5_2:1", 1, _FABRIC)], id="all of them near"),
        pytest.param([PORTS[0], RdmaPort("mlx5_1:1", 1, ("InfiniBand", "400 Gb/sec", "other"))], id="two fabrics"),
        pytest.param([*PORTS, RdmaPort("mlx5_2:1", -1, _FABRIC)], id="one of unknown place"),
    ],
)
def test_without_a_unique_nearest_adapter_the_choice_is_left_to_ucx(ports: list[RdmaPort]) -> None:
    assert nearest_adapters(TWO[1], TWO, ports, {}) == ""
    assert nearest_adapters(ALL, TWO, PORTS, {}) == "", "a rank on both nodes"
    assert nearest_adapters(ALL, ONE, PORTS, {}) == ""


# ---------------------------------------------------------------- workers


def test_a_worker_is_bound_to_the_numa_node_of_its_gpu_with_at_least_its_cpus() -> None:
    plan = plan_workers(ALL, TWO, {"0": 0, "2": 1})
    assert worker_cores(plan, ["0"], 1) == TWO[0]
    assert worker_cores(plan, ["2"], 8) == TWO[1]
    assert worker_cores(plan, ["2"], 8.5) == frozenset(), "it has more CPUs than the node"
    assert worker_cores(plan, ["0", "2"], 1) == frozenset(), "its GPUs are on both"
    assert worker_cores(plan, ["0", "7"], 1) == frozenset(), "the place of one is not known"
    assert worker_cores(plan, [], 1) == frozenset()


def test_a_worker_gets_only_cores_of_its_rank() -> None:
    plan = plan_workers(frozenset({6, 7, 8}), TWO, {"0": 0, "2": 1})
    assert worker_cores(plan, ["0"], 2) == {6, 7}
    assert plan_workers(TWO[0], TWO, {"0": 0, "2": 1}).near == {}, "the rank is there already, or has no core there"


# ---------------------------------------------------------------- the machine's files


def test_the_topology_of_a_machine_is_read_from_sys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, monkeypatch)
    write(tmp_path / "sys/devices/system/node/node2/cpulist", "")  # memory without cores
    adapter(tmp_path, "mlx5_9", 0, state="1: DOWN")
    assert numa_nodes() == TWO
    assert [(port.name, port.node) for port in rdma_ports()] == [("mlx5_0:1", 0), ("mlx5_1:1", 1)]
    assert len({port.fabric for port in rdma_ports()}) == 1
    assert numa_nodes_of_gpus(["0", "3"], False, {}) == {"0": 0, "3": 1}
    assert numa_nodes_of_gpus(["GPU-2abc", "MIG-1", "9"], False, {}) == {"GPU-2abc": 1}


def test_gpu_indices_count_the_gpus_that_this_process_may_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, monkeypatch)
    for minor in (0, 1):  # held back by a container
        (tmp_path / f"dev/nvidia{minor}").unlink()
    assert numa_nodes_of_gpus(["0", "1"], False, {}) == {"0": 1, "1": 1}


def test_gpus_of_different_models_have_no_known_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, monkeypatch)
    about = tmp_path / "proc/driver/nvidia/gpus/0000:17:00.0/information"
    about.write_text(about.read_text().replace("H100", "T4"))
    assert numa_nodes_of_gpus(["0", "GPU-0abc"], False, {}) == {"GPU-0abc": 0}
    assert numa_nodes_of_gpus(["0"], False, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == {"0": 0}


def test_numa_nodes_of_amd_gpus_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa_binding, "ROOT", tmp_path)
    places = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    write(places / "0/gpu_id", "0")
    for index, (bus, node) in enumerate([(0x29, 0), (0xC9, 1)]):
        directory = places / str(index + 2)
        write(directory / "gpu_id", "4711")
        write(directory / "properties", f"simd_count 304\nlocation_id {bus << 8}\ndomain 0\nunique_id {index + 1}")
        write(tmp_path / f"sys/bus/pci/devices/0000:{bus:02x}:00.0/numa_node", str(node))
    assert numa_nodes_of_gpus(["0", "1"], True, {}) == {"0": 0, "1": 1}
    assert numa_nodes_of_gpus([f"GPU-{2:016x}"], True, {}) == {f"GPU-{2:016x}": 1}


def test_a_rank_plan_is_made_of_a_machine_with_two_numa_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, monkeypatch)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    plan = plan_rank(["0", "3"], 1, 2, 8, {})
    assert (plan.mask, plan.cores, plan.adapters) == (ALL, TWO[1], "mlx5_1:1")
    assert plan.workers.near == {}, "all cores of the rank are near one of them, none near the other"
    assert plan_rank(["0", "3"], 0, 1, 16, {}).workers.near == {"0": TWO[0], "3": TWO[1]}
    off = plan_rank(["0", "3"], 1, 2, 8, {}, wanted=False)
    assert (off.cores, off.adapters, off.workers) == (ALL, "", WorkerPlan())


def test_nothing_is_bound_where_sys_has_no_topology(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa_binding, "ROOT", tmp_path)
    plan = plan_rank(["0", "GPU-1"], 0, 2, 1, {})
    assert plan.cores == plan.mask == os.sched_getaffinity(0)
    assert plan.workers.near == {} and plan.adapters == ""


# ---------------------------------------------------------------- the kernel


def in_a_fork(work: Callable[[], object]) -> str:
    """What `work` gives in a process of its own."""
    read, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write_end, repr(work()).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read) as file:
        said = file.read()
    os.waitpid(pid, 0)
    return said


def bystander() -> Callable[[], set[int]]:
    """A thread that is there already; the call ends it and tells where it might run."""
    begun, asked, seen = threading.Event(), threading.Event(), set()

    def look() -> None:
        begun.set()
        asked.wait()
        seen.update(os.sched_getaffinity(0))

    thread = threading.Thread(target=look)
    thread.start()
    begun.wait()

    def finish() -> set[int]:
        asked.set()
        thread.join()
        return seen

    return finish


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_the_cores_of_a_worker_follow_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = frozenset(os.sched_getaffinity(0))
    near = frozenset([min(cores)])
    monkeypatch.setattr(numa_binding._ThisProcess, "plan", WorkerPlan(cores, {"0": near}))

    def life() -> object:
        bind_worker(["0"], {})
        seen = [os.sched_getaffinity(0)]
        finish = bystander()
        bind_worker_to_cpus(2)
        seen += [os.sched_getaffinity(0), finish()]
        bind_worker_to_cpus(1)
        return [*seen, os.sched_getaffinity(0)]

    whole = set(cores)
    assert in_a_fork(life) == repr([set(near), whole, whole, set(near)])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
@pytest.mark.parametrize(
    ("gpus", "environ"), [(["0"], {"OMP_PLACES": "cores"}), ([], {}), (["1"], {})], ids=["program", "no GPU", "other"]
)
def test_a_worker_that_places_its_threads_itself_is_not_bound(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], environ: dict[str, str]
) -> None:
    cores = frozenset(os.sched_getaffinity(0))
    monkeypatch.setattr(numa_binding._ThisProcess, "plan", WorkerPlan(cores, {"0": frozenset([min(cores)])}))

    def life() -> object:
        bind_worker(gpus, environ)
        bind_worker_to_cpus(1)
        return os.sched_getaffinity(0)

    assert in_a_fork(life) == repr(set(cores))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_the_program_has_the_original_affinity_not_that_of_its_rank() -> None:
    mask = frozenset(os.sched_getaffinity(0))

    def life() -> object:
        os.sched_setaffinity(0, [min(mask)])
        with original_affinity(mask):
            inside = os.sched_getaffinity(0)
        return inside, os.sched_getaffinity(0)

    assert in_a_fork(life) == repr((set(mask), {min(mask)}))
