"""`ray.util.state.util`: values of the command line."""

from __future__ import annotations

import contextlib
from typing import Any


def convert_string_to_type(val: Any, convert_type: type) -> Any:
    """Convert text to int, float or bool; None, and what has the type, stay. Raises ValueError for other texts."""
    if val is None or type(val) is convert_type:
        return val
    texts = {"False": False, "false": False, "0": False, "True": True, "true": True, "1": True}
    with contextlib.suppress(ValueError, KeyError):
        return texts[val] if convert_type is bool else convert_type(val)
    raise ValueError(f"Failed to convert a value {val} of type {type(val)} to {convert_type}")
