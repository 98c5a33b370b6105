"""`ray._private.dict`: nested dicts merged, flattened and read by path."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn


def merge_dicts(d1: dict[str, Any], d2: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of `d1` with the values of `d2`; dicts in it are merged."""
    return deep_update(copy.deepcopy(d1), d2, True, [])


def deep_update(
    original: dict[str, Any],
    new_dict: Mapping[str, Any],
    new_keys_allowed: bool = False,
    allow_new_subkey_list: Sequence[str] | None = None,
    override_all_if_type_changes: Sequence[str] | None = None,
    override_all_key_list: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Set values of `original`, in place, to those of `new_dict`; dicts in it are updated in the same way.

    Args:
        original: the dict, which is returned.
        new_dict: the new values.
        new_keys_allowed: new keys may come in.
        allow_new_subkey_list: keys of dicts into which new keys may come in any case.
        override_all_if_type_changes: keys of dicts that are replaced where their "type" differs.
        override_all_key_list: keys of dicts that are replaced.

    Raises:
        Exception: a key is new that may not be.
    """
    for key, value in new_dict.items():
        if key not in original and not new_keys_allowed:
            raise Exception(f"Unknown config parameter `{key}` ")
        old = original.get(key)
        replaced = key in (override_all_key_list or ()) or not (isinstance(old, dict) and isinstance(value, dict))
        if not replaced and key in (override_all_if_type_changes or ()):
            replaced = "type" in value and "type" in old and value["type"] != old["type"]  # type: ignore[operator,index]
        if replaced:
            original[key] = value
        else:
            allowed = new_keys_allowed or key in (allow_new_subkey_list or ())
            deep_update(old, value, allowed, override_all_key_list=override_all_key_list)  # type: ignore[arg-type]
    return original


def flatten_dict(
    dt: dict[str, Any], delimiter: str = "/", prevent_delimiter: bool = False, flatten_list: bool = False
) -> dict[str, Any]:
    """Return a dict of the same type whose keys are the paths to the values of nested dicts.

    Args:
        dt: the dict, which is not changed.
        delimiter: separator of the parts of a path.
        prevent_delimiter: raise ValueError where a key has it.
        flatten_list: resolve lists too, by index. Empty dicts and lists vanish.
    """
    nested = (dict, list) if flatten_list else (dict,)
    flat = copy.copy(dt)
    if prevent_delimiter and any(delimiter in key for key in flat):
        _refuse_delimiter(delimiter)
    while any(isinstance(value, nested) for value in flat.values()):
        for key in [key for key, value in flat.items() if isinstance(value, nested)]:
            value = flat.pop(key)
            for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
                if prevent_delimiter and delimiter in str(name):
                    _refuse_delimiter(delimiter)
                flat[f"{key}{delimiter}{name}"] = inner
    return flat


def _refuse_delimiter(delimiter: str) -> NoReturn:
    raise ValueError(
        f"Found delimiter `{delimiter}` in key when trying to flatten array. Please avoid using the delimiter in your "
        "specification."
    )


def unflatten_dict(dt: dict[str, Any], delimiter: str = "/") -> dict[str, Any]:
    """Return the dict of dicts that `flatten_dict` flattened. Raises TypeError where a key is a value and a dict."""
    kind = type(dt)
    found = kind()
    for path, value in dt.items():
        *parents, last = path.split(delimiter)
        inner = found
        for name in parents:
            inner = inner.setdefault(name, kind())
            if not isinstance(inner, kind):
                raise TypeError(
                    f"Cannot unflatten dict due the key '{path}' having a parent key '{name}', which value is not of "
                    f"type {kind} (got {type(inner)}). Change the key names to resolve the conflict."
                )
        inner[last] = value
    return found


def unflatten_list_dict(dt: dict[str, Any], delimiter: str = "/") -> Any:
    """Return the dicts and lists that `flatten_dict` flattened: where all names are numbers there was a list."""
    return _with_lists(unflatten_dict(dt, delimiter))


def _with_lists(nested: Any) -> Any:
    if not isinstance(nested, dict) or not nested:
        return nested
    values = [_with_lists(value) for value in nested.values()]
    if not all(isinstance(name, str) and name.isdigit() for name in nested):
        return type(nested)(zip(nested, values, strict=True))
    if [int(name) for name in nested] != list(range(len(nested))):
        raise AssertionError(f"the indices of a list are {list(nested)}, and have to be in order, from 0 on")
    return values


def unflattened_lookup(flat_key: str, lookup: Any, delimiter: str = "/", **kwargs: Any) -> Any:
    """Return `lookup["a"][0]["b"]` for "a/0/b".

    Args:
        flat_key: the path. lookup: dicts and lists. delimiter: separator of the path's parts.
        kwargs: `default`, which is returned instead of a KeyError.
    """
    if flat_key in lookup:
        return lookup[flat_key]
    found = lookup
    for name in flat_key.split(delimiter):
        try:
            if isinstance(found, Mapping):
                found = found[name]
            elif isinstance(found, Sequence):
                found = found[int(name)]
            else:
                raise KeyError
        except KeyError:
            if "default" in kwargs:
                return kwargs["default"]
            raise
    return found
