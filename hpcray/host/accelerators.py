"""The GPUs of one node as a resource, and how a worker gets to see its own and no others.

Which GPUs there are `allocation_gpus` finds out. A rank that shares its host, and its list of GPUs, with other ranks
takes its part of the list, unless the launcher has given it GPUs of its own.

Source: Slurm, srun(1), `--gpus-per-task` and SLURM_GPUS_ON_NODE; Ray 2.60, "Accelerator support".
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from hpcray.base.failures import StartupError
from hpcray.base.resources import ASSIGNED_GPUS
from hpcray.host.allocation_gpus import accelerators, visibility_variable, worker_variables

OVERRIDE_ON_ZERO = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
"""Set to 1, it hides all GPUs from workers that have none; else these see what the node sees, as in Ray 2.60."""
NOSET = "RAY_EXPERIMENTAL_NOSET_"
"""With the name of a variable behind it: that variable is the program's own business."""

_LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "MPI_LOCALRANKID")
_TYPES = ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPUS", "SLURM_GPUS_PER_SOCKET", "SLURM_TRES_PER_TASK")
_TYPE = re.compile(r"(?:^|,)(?:gpu:)?([A-Za-z][\w.-]*):\d|gres/gpu:([A-Za-z][\w.-]*)=\d")
_NVIDIA = Path("/proc/driver/nvidia/gpus")
_KFD = Path("/sys/class/kfd/kfd/topology/nodes")
_AMD = {
    0x66A1: "AMD-Instinct-MI50",
    0x738C: "AMD-Instinct-MI100",
    0x7408: "AMD-Instinct-MI250X",
    0x740C: "AMD-Instinct-MI250X-MI250",
    0x740F: "AMD-Instinct-MI210",
    0x74A0: "AMD-Instinct-MI300A",
    0x74A1: "AMD-Instinct-MI300X-OAM",
    0x74A2: "AMD-Instinct-MI308X-OAM",
    0x74A5: "AMD-Instinct-MI325X-OAM",
    0x74A9: "AMD-Instinct-MI300X-HF",
    0x75A0: "AMD-Instinct-MI350X-OAM",
    0x75A3: "AMD-Instinct-MI355X-OAM",
}
_UNNAMED = ("", "gpu")


# ---------------------------------------------------------------- the node


def node_gpus(wanted: float | None, local_size: int, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Ids of the GPUs that this node offers.

    Args:
        wanted: how many the user says, None: all. Where nobody gave us GPUs, they are made up: "0", "1", …
        local_size: ranks on this host.
        environ: None: ours.

    Raises:
        StartupError: more are wanted than a variable lets us see.
        ValueError: not a whole number.
    """
    environ = os.environ if environ is None else environ
    if wanted == 0:
        return ()
    if wanted is not None and (wanted < 0 or wanted != int(wanted)):
        raise ValueError(f"num_gpus={wanted:g} of a node must be a whole number; hint: tasks may ask for fractions")
    found = _own_part(accelerators(environ), local_size, environ)
    if wanted is None:
        return found
    count = int(wanted)
    if count <= len(found):
        return found[:count]
    if found or visibility_variable(environ) in environ:
        name = visibility_variable(environ)
        raise StartupError(
            f"this node shall have {count} GPUs, but it was given {len(found)}: {name}={environ.get(name, '')!r}, "
            f"{local_size} rank(s) on this host. hint: ask for fewer, or leave num_gpus out"
        )
    return tuple(str(index) for index in range(count))


def local_rank(environ: Mapping[str, str]) -> int:
    """Number of this rank among those of its host; -1 where no launcher tells it."""
    return next((int(environ[name]) for name in _LOCAL_RANK if environ.get(name, "").isdecimal()), -1)


def gpu_type(environ: Mapping[str, str] | None = None) -> str:
    """Ray's name for the type of this node's GPUs ("H100"), "" where it is not told. Ask only where there are GPUs."""
    environ = os.environ if environ is None else environ
    for about in sorted(_NVIDIA.glob("*/information")):
        for line in _lines(about):
            if line.startswith("Model:"):
                return type_of_model(line.removeprefix("Model:").strip())
    for about in sorted(_KFD.glob("*/properties")):
        facts = dict(line.split(" ", 1) for line in _lines(about) if " " in line)
        if int(facts.get("simd_count", 0)):
            return _AMD.get(int(facts.get("device_id", 0)), "")
    for variable in _TYPES:
        match = _TYPE.search(environ.get(variable, ""))
        name = (match[1] or match[2]) if match else ""
        if name not in _UNNAMED:
            return name.upper()
    return ""


def type_of_model(model: str) -> str:
    """Ray's name for a model: A100 for `NVIDIA A100-SXM4-40GB`, GeForce-RTX-5090 for `NVIDIA GeForce RTX 5090`."""
    taken: list[str] = []
    for word in model.split()[1:]:
        stem = re.match(r"[A-Z0-9]*", word)
        head = stem[0] if stem else ""
        if len(head) > 1 and any(letter.isdigit() for letter in head):
            return "-".join([*taken, head])
        if head != word:
            break
        taken.append(word)
    return "-".join(model.removeprefix("NVIDIA ").split())


def _own_part(ids: tuple[str, ...], local_size: int, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The share of this rank in a list that all ranks of the host see; the first ranks get what is left over."""
    if local_size <= 1 or _has_gpus_of_its_own(ids, environ):
        return ids
    rank = local_rank(environ)
    if rank < 0:
        return ids
    each, more = divmod(len(ids), local_size)
    first = rank * each + min(rank, more)
    return ids[first : first + each + (rank < more)]


def _has_gpus_of_its_own(ids: tuple[str, ...], environ: Mapping[str, str]) -> bool:
    """Whether srun bound GPUs to tasks, as `--gpus-per-task` does: then a rank's list is shorter than the step's."""
    if "OMPI_COMM_WORLD_LOCAL_RANK" in environ:
        return False  # mpirun inside an allocation: the variables speak of the allocation
    of_step = environ.get("SLURM_GPUS_ON_NODE", "")
    return of_step.isdecimal() and len(ids) < int(of_step)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


# ---------------------------------------------------------------- a worker


class _Confinement:
    """What this worker was given. `base`: the node's environment. `done`: the variables that we have set."""

    ids: tuple[str, ...] = ()
    done: Mapping[str, str] = {}
    numbered: bool = True
    base: Mapping[str, str] | None = None


def remember(environ: Mapping[str, str]) -> None:
    """Call it in the template process, before anything of a worker is in `environ`."""
    _Confinement.base = dict(environ)
    _Confinement.numbered = visibility_variable(environ) not in environ


def confine(environ: MutableMapping[str, str]) -> None:
    """Let this worker see the GPUs that it was forked for. Called after anything else that changes `environ`, so that
    neither a `runtime_env` nor the driver can undo it, except by the variables that Ray has for that.
    """
    if _Confinement.base is None:
        remember(environ)
    assigned = environ.pop(ASSIGNED_GPUS, None)
    if assigned is not None:
        _Confinement.ids = tuple(assigned.split(","))
    if not _Confinement.ids and not _says_yes(environ, OVERRIDE_ON_ZERO):
        return
    base = _Confinement.base or {}
    wanted = worker_variables(_Confinement.ids, base)
    if not any(_says_yes(environ, NOSET + name) for name in wanted):
        environ.update(wanted)
        _Confinement.done = wanted
        return
    for name, text in _Confinement.done.items():
        if environ.get(name) == text:
            del environ[name]
            environ.update({name: base[name]} if name in base else {})
    _Confinement.done = {}


def kept() -> dict[str, Any]:
    """What a worker has to know again when another Python takes its place; for `keep`."""
    return {"ids": _Confinement.ids, "done": dict(_Confinement.done), "numbered": _Confinement.numbered,
            "base": dict(_Confinement.base or {})}  # fmt: skip


def keep(state: Mapping[str, Any]) -> None:
    """This process goes on as the worker whose `kept` it was."""
    _Confinement.ids = tuple(state["ids"])
    _Confinement.done, _Confinement.base = state["done"], state["base"]
    _Confinement.numbered = state["numbered"]


def assigned_gpus() -> list[str]:
    """Ids of the GPUs that this worker has; none in a driver."""
    return list(_Confinement.ids)


def numbered() -> bool:
    """Whether the ids are the machine's numbers, not names out of a variable that somebody had set."""
    return _Confinement.numbered and all(name.isdecimal() for name in _Confinement.ids)


def _says_yes(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").lower() in ("1", "true")
