"""The features of hpcray, for the core workers of drivers and workers: which there are, and how each is imported.

The functions import when they are called, since most processes use no feature.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from hpcray.core.core_worker.object_table import ObjectTable
from hpcray.platform.arena import Arena
from hpcray.runtime.core_worker.context import CoreWorkerContext
from hpcray.runtime.core_worker.extensions import Extension, FeatureTable


def _durable() -> type[Extension]:
    from hpcray.durable.durable_tasks import DurableTasks

    return DurableTasks


def _graphs() -> type[Extension]:
    from hpcray.graphs.compiled_graphs import CompiledGraphs

    return CompiledGraphs


def _history() -> type[Extension]:
    from hpcray.history.process_history import ProcessHistory

    return ProcessHistory


def _tensors() -> type[Extension]:
    from hpcray.tensors.device_objects import DeviceObjects

    return DeviceObjects


def _hangs() -> type[Extension]:
    from hpcray.hangs.hang_watch import HangWatch

    return HangWatch


def _read_targets() -> type[Extension]:
    from hpcray.tensors.read_targets import ReadTargets

    return ReadTargets


def _runtime_env() -> type[Extension]:
    from hpcray.runtime_env.submitted_runtime_env import RuntimeEnvs

    return RuntimeEnvs


def _registered_memory() -> type[Extension]:
    from hpcray.tensors.registered_memory import MemoryRegistrations

    return MemoryRegistrations


def _transport_memory(process: Any, content: Any) -> AbstractContextManager[Any]:
    from hpcray.tensors.registered_memory import transfer_memory

    return transfer_memory(process, content)


def _device_view(
    process: CoreWorkerContext, arena: Arena, offset: int, size: int, gone: Callable[[], object]
) -> memoryview | None:
    from hpcray.tensors.registered_memory import device_view

    return device_view(process, arena, offset, size, gone)


def _post_mortem(error: BaseException) -> None:
    from hpcray.diagnostics.debugger import post_mortem

    post_mortem(error)


def _record_table(*arguments: Any) -> tuple[ObjectTable, Any]:
    from hpcray.diagnostics.record_replay import record_table

    return record_table(*arguments)


def _ref_html(ref: Any) -> str:
    from hpcray.notebooks import ref_html

    return ref_html(ref)


FEATURES = FeatureTable(
    extensions={
        "durable": _durable,
        "graphs": _graphs,
        "hangs": _hangs,
        "history": _history,
        "read_targets": _read_targets,
        "registered_memory": _registered_memory,
        "runtime_env": _runtime_env,
        "tensors": _tensors,
    },
    default_transport="tensors",
    transport_memory=_transport_memory,
    device_view=_device_view,
    post_mortem=_post_mortem,
    record_table=_record_table,
    ref_html=_ref_html,
)
