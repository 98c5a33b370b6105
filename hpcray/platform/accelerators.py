"""Accelerators that are no GPUs: which of them a node has, and which of those a worker may see.

One row per kind: its resource, and the variable in which its runtime looks up which devices to use. As for GPUs
(`gpu_visibility`), a variable that is set before the node starts lists the node's devices, and a worker's own are
written into it before any library is loaded.

Source: Ray 2.60, "Accelerator support"; the vendors' documents on these variables; kernel, accel/introduction.rst.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from hpcray.common.exceptions import StartupError
from hpcray.common.resources import ACCELERATOR_TYPE, ASSIGNED_ACCELERATORS
from hpcray.platform.gpu_visibility import (
    NOSET,
    OVERRIDE_ON_ZERO,
    apply_gpu_visibility,
    gpu_visibility_state,
    is_true,
    listed,
    own_part,
    restore_gpu_visibility,
)

_DEVICES, _SYS = Path("/dev"), Path("/sys")
_NEURON_LS = Path("/opt/aws/neuron/bin/neuron-ls")
_NEURON_LS_TIMEOUT = 10.0  # seconds
_GOOGLE, _HABANA = "0x1ae0", "0x1da3"  # PCI vendors
_CHIPS_PER_HOST, _HOSTS = "TPU_CHIPS_PER_HOST_BOUNDS", "TPU_HOST_BOUNDS"
_CHIPS_BOUNDS = {1: "1,1,1", 2: "1,2,1"}


class Accelerator(Struct, frozen=True):
    """A kind of accelerator.

    Attributes:
        resource: its name. variable: lists the visible devices of a process. noset: ends the name of the variable that
            leaves `variable` to the program; "": it is the same.
        count: the number of devices of this machine.
        amounts: the quantities that can be requested; (): any whole number; None: any.
        type_name: Ray's name of the type, "" if unknown.
        prefix: of each id in the variable.
    """

    resource: str
    variable: str
    count: Callable[[], int]
    noset: str = ""
    amounts: tuple[int, ...] | None = ()
    type_name: Callable[[Mapping[str, str]], str] = lambda environ: ""
    prefix: str = ""

    @property
    def noset_variable(self) -> str:
        """The variable that leaves `variable` to the program."""
        return NOSET + (self.noset or self.variable)

    def visible(self, environ: Mapping[str, str]) -> list[str] | None:
        """Ids of the devices that a process may see; None: all of them."""
        found = listed(environ.get(self.variable))
        return found and [one.strip().removeprefix(self.prefix) for one in found if one]

    def variables(self, ids: Sequence[str]) -> dict[str, str]:
        """The variables that confine a process to these devices."""
        wanted = {self.variable: ",".join(f"{self.prefix}{one.removeprefix(self.prefix)}" for one in ids)}
        if self.resource != "TPU":
            return wanted
        if ids and len(ids) == self.count():
            return {}  # the whole host: its library finds the chips and how they are connected
        if len(ids) in _CHIPS_BOUNDS:
            wanted.update({_CHIPS_PER_HOST: _CHIPS_BOUNDS[len(ids)], _HOSTS: "1,1,1"})
        return wanted

    def amount_problem(self, quantity: float) -> str | None:
        """Why no task can request this amount; None if it can."""
        if self.amounts and quantity not in self.amounts:
            return (
                f"The number of requested '{self.resource}' was set to {quantity} which is not a supported chip "
                f"configuration. Supported configs: {self.amounts}"
            )
        if self.amounts == () and quantity != int(quantity):
            return (
                f"{self.resource} resource quantity must be whole numbers. "
                f"The specified quantity {quantity} is invalid."
            )
        return None


def _files(pattern: str) -> int:
    return sum(not path.is_dir() for path in _DEVICES.glob(pattern))


def _of_vendor(pattern: str, vendor: str) -> int:
    found = 0
    for path in _SYS.glob(pattern):
        with contextlib.suppress(OSError):
            found += path.read_text().strip().lower() == vendor
    return found


def _tpus() -> int:
    return _files("accel[0-9]*") or sum(
        bool(_of_vendor(f"kernel/iommu_groups/{path.name}/devices/*/vendor", _GOOGLE))
        for path in _DEVICES.glob("vfio/[0-9]*")
    )


def _neuron_cores() -> int:
    if not _NEURON_LS.exists():
        return 0
    import subprocess  # few nodes need it

    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        line = [str(_NEURON_LS), "--json-output"]
        found = subprocess.run(line, capture_output=True, timeout=_NEURON_LS_TIMEOUT, check=True).stdout
        return sum(int(device.get("nc_count", 0)) for device in json.loads(found))
    return 0


def _tpu_type(environ: Mapping[str, str]) -> str:
    version = environ.get("TPU_ACCELERATOR_TYPE", "").partition("-")[0]
    return f"TPU-{version.upper()}" if version else ""


KINDS: dict[str, Accelerator] = {
    one.resource: one
    for one in (
        Accelerator("TPU", "TPU_VISIBLE_CHIPS", _tpus, amounts=(1, 2, 4, 8), type_name=_tpu_type),
        Accelerator("NPU", "ASCEND_RT_VISIBLE_DEVICES", lambda: _files("davinci[0-9]*"), amounts=None),
        Accelerator("HPU", "HABANA_VISIBLE_MODULES", lambda: _of_vendor("class/accel/*/device/vendor", _HABANA)),
        Accelerator(
            "neuron_cores", "NEURON_RT_VISIBLE_CORES", _neuron_cores, type_name=lambda environ: "aws-neuron-core"
        ),
        Accelerator("RBLN", "RBLN_DEVICES", lambda: _files("rbln[0-9]*"), "RBLN_RT_VISIBLE_DEVICES"),
        Accelerator("FURIOSA", "FURIOSA_DEVICES", lambda: _files("rngd/npu[0-9]*mgmt"), prefix="npu:"),
        Accelerator(
            "MBLT",
            "QBRUNTIME_VISIBLE_DEVICES",
            lambda: _files("aries[0-9]*") or _files("regulus-npu*"),
            "MBLT_RT_VISIBLE_DEVICES",
        ),
        Accelerator("TTNPU", "TT_VISIBLE_DEVICES", lambda: _files("tenstorrent/*"), "TENSTORRENT_VISIBLE_DEVICES"),
    )
}
"""By resource."""


def node_accelerators(
    given: Mapping[str, float], local_size: int, environ: Mapping[str, str] | None = None
) -> dict[str, tuple[str, ...]]:
    """Ids of the accelerators that this node offers, by resource.

    Args:
        given: the custom resources that the user set; accelerators among them need not exist.
        local_size: ranks on this host, which share what it has.
        environ: None: ours.

    Raises:
        StartupError: a variable makes fewer of them visible than the user set.
    """
    environ = os.environ if environ is None else environ
    offered: dict[str, tuple[str, ...]] = {}
    for name, kind in KINDS.items():
        wanted, visible = given.get(name), kind.visible(environ)
        if wanted == 0 or (wanted is not None and wanted != int(wanted)):
            continue
        if wanted is not None and visible is None:
            offered[name] = _numbered(int(wanted))
            continue
        if visible is None:
            ids = own_part(_numbered(kind.count()), local_size, environ)
        elif wanted is None:
            ids = own_part(tuple(visible[: kind.count()]), local_size, environ)
        else:
            ids = own_part(tuple(visible), local_size, environ)
            if wanted > len(ids):
                raise StartupError(
                    f"this node shall have {wanted:g} {name}, but it was given {len(ids)}: "
                    f"{kind.variable}={environ[kind.variable]!r}, {local_size} rank(s) on this host. "
                    "hint: ask for fewer, or leave the resource out"
                )
            ids = ids[: int(wanted)]
        if ids:
            offered[name] = ids
    return offered


def accelerator_resources(offered: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> dict[str, float]:
    """The resources of a node for the accelerators that it offers, with their types."""
    found: dict[str, float] = {name: len(ids) for name, ids in offered.items()}
    for name in offered:
        if type_name := KINDS[name].type_name(environ):
            found[ACCELERATOR_TYPE + type_name] = 1
    return found


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(str(index) for index in range(count))


class _Assigned:
    """The accelerators of this worker, by resource."""

    ids: Mapping[str, list[str]] = {}


def assigned_accelerators() -> dict[str, list[str]]:
    """Ids of the accelerators that this worker has, by resource; none in a driver."""
    return {name: list(ids) for name, ids in _Assigned.ids.items()}


def device_visibility_state() -> dict[str, Any]:
    """The worker's devices, to be passed to another Python that takes its place; see `restore_device_visibility`."""
    return {**gpu_visibility_state(), "accelerators": assigned_accelerators()}


def restore_device_visibility(state: Mapping[str, Any]) -> None:
    """Continue as the worker with this `device_visibility_state`."""
    restore_gpu_visibility(state)
    _Assigned.ids = {name: list(ids) for name, ids in state["accelerators"].items()}


def apply_device_visibility(environ: MutableMapping[str, str]) -> None:
    """Make visible to this worker the GPUs and other accelerators that it was forked for, and no others of their kind.
    Called after anything else that changes `environ`, so that neither a `runtime_env` nor the driver can undo it,
    except by the variables that Ray has for that."""
    apply_gpu_visibility(environ)
    if (text := environ.pop(ASSIGNED_ACCELERATORS, None)) is not None:
        pairs = (one.partition("=") for one in text.split(";"))
        _Assigned.ids = {name: ids.split(",") for name, _, ids in pairs}
    wanted = KINDS if is_true(environ, OVERRIDE_ON_ZERO) else _Assigned.ids
    for name in wanted:
        kind = KINDS[name]
        if not is_true(environ, kind.noset_variable):
            environ.update(kind.variables(_Assigned.ids.get(name, [])))
