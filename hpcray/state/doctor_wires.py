"""The doctor's look at MPI, UCX and the network of this host."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcray.host.allocation import read_allocation
from hpcray.host.launcher import open_mpi_wheel
from hpcray.state.findings import FAIL, NOTE, OK, WARN, Finding
from hpcray.transport.start_checks import (
    check_fault_tolerance,
    check_protocol,
    few_cores,
    pmi_offered,
    several_tasks,
    threads_of_a_core,
)
from hpcray.transport.startup import read_launch

_PROBE_TIMEOUT = 40
_INFINIBAND = Path("/sys/class/infiniband")
_NETWORK = Path("/sys/class/net")
_PROBE = "import json; from hpcray.transport.select import describe; print(json.dumps(describe()))"
_UCT = re.compile(r"libuct_(\w+)[.-]")
_PROTOCOLS = {"pmix": "PMIx", "pmi2": "PMI-2", "none": "none"}


def probe_wires() -> dict[str, Any]:
    """`transport.select.describe` in a process of its own: libraries that do not fit each other may crash it."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"loading MPI and UCX took more than {_PROBE_TIMEOUT} s"}
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": f"loading MPI and UCX ended with code {done.returncode}: {last}"}
    return found


def find_launchers() -> dict[str, str]:
    """Launchers by name: the path, of mpirun that which `hpcray-launch` would use."""
    beside = shutil.which("mpirun", path=os.path.dirname(sys.executable))
    found = {"mpirun": beside or shutil.which("mpirun"), "srun": shutil.which("srun")}
    return {name: path for name, path in found.items() if path}


def look_at_mpi(wires: Mapping[str, Any], launchers: Mapping[str, str]) -> list[Finding]:
    """The library, mpi4py, and whether the launchers belong to it.

    Args:
        wires: what `probe_wires` found.
        launchers: what `find_launchers` found.
    """
    hint = "load the site's MPI and install mpi4py for it, or pip install 'hpcray[mpi]'; one node needs none"
    if "error" in wires:
        return [Finding("MPI", "library", str(wires["error"]), FAIL, hint)]
    if not wires.get("mpi4py"):
        return [Finding("MPI", "library", str(wires["mpi"]), FAIL, hint)]
    found = [
        Finding("MPI", "library", str(wires["mpi"]), OK),
        Finding("MPI", "mpi4py", str(wires["mpi4py"])),
    ]
    if not launchers:
        found.append(Finding("MPI", "launcher", "neither mpirun nor srun", FAIL, "put the site's mpirun on PATH"))
    if "mpirun" in launchers:
        banner = _first_line([launchers["mpirun"], "--version"])
        fits = _family(banner) == _family(str(wires["mpi"]))
        found.append(
            Finding(
                "MPI",
                "mpirun",
                f"{launchers['mpirun']}: {banner}",
                OK if fits else FAIL,
                "" if fits else "it is of another MPI than mpi4py's library: every rank would be alone",
            )
        )
    if "srun" in launchers:
        found.append(Finding("MPI", "srun", f"{launchers['srun']}: {_first_line([launchers['srun'], '--version'])}"))
    return found


def look_at_start(wires: Mapping[str, Any], environ: Mapping[str, str]) -> list[Finding]:
    """In a task of srun: whether its start-up protocol and the library fit, and what else would go wrong at a start."""
    launch = read_launch(environ)
    if launch.kind != "srun":
        return []
    offered = f"srun gives {_PROTOCOLS[pmi_offered(environ)]}"
    problem = check_protocol(launch, str(wires.get("mpi_text", "")), environ)
    found = [_judged("start-up", problem, offered, FAIL)]
    if _family(str(wires.get("mpi", ""))) == "Open MPI" and "OMPI_MCA_pml" not in environ and not open_mpi_wheel():
        # hpcray sets it for the wheel, whose UCX it knows; a site's Open MPI may have been built without.
        hint = "OMPI_MCA_pml=ucx, if this Open MPI has it: only that layer lets the other ranks live when one dies"
        found.append(Finding("MPI", "loss of a rank", "as Open MPI's own choice of a layer has it", NOTE, hint))
    cores = few_cores(launch, read_allocation(environ).cpus_meant, os.sched_getaffinity(0), threads_of_a_core())
    for text, level in ((check_fault_tolerance(launch, environ), FAIL), (several_tasks(launch), WARN), (cores, WARN)):
        if text:
            found.append(_judged("start-up", text, "", level))
    return found


def _judged(name: str, problem: str, fine: str, level: str) -> Finding:
    what, _, hint = problem.partition("; hint: ")
    return Finding("MPI", name, what, level, hint) if problem else Finding("MPI", name, fine, OK)


def look_at_ucx(wires: Mapping[str, Any], require_rdma: bool) -> list[Finding]:
    """UCX's build, its transports and devices, the network's devices, and whether object bytes go over RDMA.

    Args:
        wires: what `probe_wires` found.
        require_rdma: its absence is a failure.
    """
    devices = rdma_devices()
    adapters = [
        Finding("UCX", "RDMA adapters", ", ".join(devices) or "none"),
        Finding("UCX", "network devices", ", ".join(network_devices()) or "none"),
    ]
    missing = FAIL if require_rdma else WARN
    if "error" in wires:
        return adapters
    if not wires["libucx"]:
        hint = "pip install 'hpcray[ucx]', or install ucxx for the site's UCX"
        value = f"{wires['ucx']}: object bytes will go over MPI"
        return [Finding("UCX", "library", value, missing, hint), *adapters]
    transports = wires["transports"]
    found = [
        Finding("UCX", "library", f"{wires['ucx']} at {wires['libucx']}", OK),
        Finding("UCX", "build", ", ".join(_modules(str(wires["libucx"]))) or "transports inside the library"),
        Finding("UCX", "transports", ", ".join(sorted(set(transports))) or "none"),
        *adapters,
    ]
    if wires["rdma"]:
        found.append(Finding("UCX", "RDMA", "used", OK))
    elif devices:
        hint = "this UCX has no verbs: use the site's (RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=1)"
        found.append(Finding("UCX", "RDMA", "not used, although there is an adapter", missing, hint))
    else:
        level = FAIL if require_rdma else NOTE
        hint = "without --require-rdma a job runs over TCP" if require_rdma else ""
        found.append(Finding("UCX", "RDMA", "not used: there is no adapter; hosts talk over TCP", level, hint))
    return found


def rdma_devices() -> list[str]:
    """RDMA adapters with the state and rate of their first port."""
    found = []
    for device in sorted(_INFINIBAND.glob("*")):
        port = device / "ports" / "1"
        try:
            state = (port / "state").read_text().split(":")[-1].strip().lower()
            rate = (port / "rate").read_text().strip()
        except OSError:
            state = rate = "unknown"
        found.append(f"{device.name} ({state}, {rate})")
    return found


def network_devices() -> list[str]:
    """Network interfaces that are up, with their speed where they tell it."""
    found = []
    for device in sorted(_NETWORK.glob("*")):
        try:
            if device.name == "lo" or (device / "operstate").read_text().strip() not in ("up", "unknown"):
                continue
            speed = int((device / "speed").read_text())
        except (OSError, ValueError):
            speed = 0
        found.append(f"{device.name} ({speed / 1000:g} Gb/s)" if speed > 0 else device.name)
    return found


def nearest_adapters(nodes: set[int]) -> list[str]:
    """RDMA adapters, else network cards, that hang on one of these NUMA nodes; all where the system does not tell."""
    for directory in (_INFINIBAND, _NETWORK):
        cards = {path.parent.name: _numa_of(path) for path in sorted(directory.glob("*/device"))}
        near = [name for name, node in cards.items() if node in nodes or node < 0]
        if near:
            return near
    return []


def _numa_of(device: Path) -> int:
    try:
        return int((device / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def _modules(library: str) -> list[str]:
    """The transports that this UCX was built with, by the names of its modules."""
    files = glob.glob(os.path.join(os.path.dirname(library), "ucx", "libuct_*"))
    return sorted({match[1] for path in files if (match := _UCT.match(os.path.basename(path)))})


def _family(text: str) -> str:
    lower = text.lower()
    families = {"open mpi": "Open MPI", "open-mpi": "Open MPI", "mpich": "MPICH", "hydra": "MPICH", "intel": "MPICH"}
    return next((family for mark, family in families.items() if mark in lower), text)


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {error}"
    first = ((done.stdout or done.stderr).strip().splitlines() or ["says nothing"])[0]
    return first if done.returncode == 0 else f"does not work: {first}"
