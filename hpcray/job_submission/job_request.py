"""The request that submits a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcray.common.labels import selector_problem

_NUMBER = (int, float)
# Field: its types, their name in errors, the types of values.
_TYPES: dict[str, tuple[Any, str, Any]] = {
    "entrypoint": (str, "a string", None),
    "submission_id": (str, "a string if provided", None),
    "runtime_env": (dict, "a dict", None),
    "metadata": (dict, "a dict", (str, "strings")),
    "entrypoint_num_cpus": (_NUMBER, "a number", None),
    "entrypoint_num_gpus": (_NUMBER, "a number", None),
    "entrypoint_memory": (int, "an integer", None),
    "entrypoint_resources": (dict, "a dict", (_NUMBER, "numbers")),
    "entrypoint_label_selector": (dict, "a dict", (str, "strings")),
}


@dataclass
class JobSubmitRequest:
    """A job to submit.

    Raises:
        TypeError: a field is of the wrong type.
    """

    entrypoint: str
    submission_id: str | None = None
    runtime_env: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    entrypoint_num_cpus: int | float | None = None
    entrypoint_num_gpus: int | float | None = None
    entrypoint_memory: int | None = None
    entrypoint_resources: dict[str, float] | None = None
    entrypoint_label_selector: dict[str, str] | None = None

    def __post_init__(self) -> None:
        for field, (kind, name, values) in _TYPES.items():
            value = getattr(self, field)
            if field != "entrypoint" and value is None:
                continue
            if not isinstance(value, kind):
                raise TypeError(f"{field} must be {name}, got {type(value)}")
            if isinstance(value, Mapping):
                _check_items(field, value, values)

    @property
    def has_place(self) -> bool:
        """True if the job says where, or with which resources, its entrypoint runs; else that is on the head."""
        return any((
            self.entrypoint_num_cpus, self.entrypoint_num_gpus, self.entrypoint_memory, self.entrypoint_resources,
            self.entrypoint_label_selector,
        ))  # fmt: skip

    def problem(self) -> str:
        """Return why the cluster refuses the job; "" if it does not."""
        selector = self.entrypoint_label_selector
        return (selector_problem(selector) or "") if selector else ""


def _check_items(field: str, value: Mapping[Any, Any], values: tuple[Any, str] | None) -> None:
    for key, item in value.items():
        if not isinstance(key, str):
            raise TypeError(f"{field} keys must be strings, got {type(key)}")
        if values is not None and not isinstance(item, values[0]):
            raise TypeError(f"{field} values must be {values[1]}, got {type(item)}")
