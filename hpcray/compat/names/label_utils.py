"""`ray._private.label_utils`: labels and label selectors from text, and what is wrong with them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_LABEL = r"([a-zA-Z0-9]([a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?)"
LABEL_REGEX = re.compile(_LABEL)
LABEL_PREFIX_REGEX = rf"^({_LABEL}?(\.{_LABEL}?)*)$"
LABEL_OPERATORS = {"in"}
LABEL_SELECTOR_REGEX = re.compile(rf"^!?(?:in)?\({_LABEL}(?:, ?{_LABEL})*\)$|^!?{_LABEL}$")
_RESERVED = "ray.io/"
_FORM = (
    "63 chars or less beginning and ending with an alphanumeric character ([a-z0-9A-Z]) with dashes (-), underscores "
    "(_),dots (.), and alphanumerics between."
)


def parse_node_labels_json(labels_json: str) -> dict[str, str]:
    """Return the labels of a JSON object. Raises ValueError where it is none, or names a label of Ray's."""
    labels = _of_strings(json.loads(labels_json), 'The value of the "{}" is not string type')
    validate_node_labels(labels)
    return labels


def parse_node_labels_string(labels_str: str) -> dict[str, str]:
    """Return the labels of `key=value,key=value`, which may be in quotes. Raises ValueError where it is not that."""
    if len(labels_str) > 1 and labels_str[0] == labels_str[-1] == '"':
        labels_str = labels_str[1:-1]
    labels = {}
    for pair in labels_str.split(",") if labels_str else ():
        parts = pair.split("=")
        if len(parts) != 2:
            raise ValueError("Label string is not a key-value pair.")
        labels[parts[0].strip()] = parts[1].strip()
    validate_node_label_syntax(labels)
    return labels


def parse_node_labels_from_yaml_file(path: str) -> dict[str, str]:
    """Return the labels of a YAML file; {} for "". Raises ValueError where it is no mapping of texts."""
    if path == "":
        return {}
    import yaml

    with open(path, encoding="utf-8") as file:
        labels = _of_strings(yaml.safe_load(file), 'The value of "{}" is not string type.')
    validate_node_label_syntax(labels)
    return labels


def validate_node_labels(labels: Mapping[str, str] | None) -> None:
    """Raise ValueError for a label that Ray sets itself."""
    for key in labels or ():
        if key.startswith(_RESERVED):
            raise ValueError(
                f"Custom label keys `{key}` cannot start with the prefix `{_RESERVED}`. This is reserved for Ray "
                "defined labels."
            )


def validate_label_key(key: str) -> str | None:
    """Return the reason why a key is not valid, or None."""
    prefix, slash, name = key.rpartition("/")
    if slash and (len(prefix) > 253 or not re.fullmatch(LABEL_PREFIX_REGEX, prefix)):
        return (
            f"Invalid label key prefix `{prefix}`. Prefix must be a series of DNS labels separated by dots (.), not "
            "longer than 253 characters in total."
        )
    if len(name) > 63 or not LABEL_REGEX.fullmatch(name):
        return f"Invalid label key name `{name}`. Name must be {_FORM}"
    return None


def validate_label_value(value: str) -> None:
    """Raise ValueError for a value that is not valid; "" is."""
    if value and (len(value) > 63 or not LABEL_REGEX.fullmatch(value)):
        raise ValueError(f"Invalid label key value `{value}`. Value must be {_FORM}")


def validate_label_selector(label_selector: Mapping[str, str] | None) -> str | None:
    """Return the reason why a selector is not valid, or None."""
    for key, value in (label_selector or {}).items():
        problem = validate_label_key(key) or (validate_label_selector_value(value) if value is not None else None)
        if problem:
            return problem
    return None


def validate_label_selector_value(selector: str) -> str | None:
    """Return the reason why a value of a selector is not valid, or None."""
    if not selector or LABEL_SELECTOR_REGEX.fullmatch(selector):
        return None
    return (
        f"Invalid label selector value `{selector}`. The label selector value should contain optional operators and a "
        f"label value. Supported operators are: ! and {LABEL_OPERATORS}. Value must be {_FORM}"
    )


def validate_node_label_syntax(labels: Mapping[str, str] | None) -> None:
    """Raise ValueError for a key or value that is not valid."""
    for key, value in (labels or {}).items():
        if problem := validate_label_key(key):
            raise ValueError(problem)
        if value is not None:
            validate_label_value(value)


def validate_fallback_strategy(fallback_strategy: list[Any] | None) -> str | None:
    """Return the reason why a `fallback_strategy` is not valid, or None."""
    for strategy in fallback_strategy or ():
        if not isinstance(strategy, dict):
            return "Each element in fallback_strategy must be a dictionary."
        if not strategy:
            return "Empty dictionary found in `fallback_strategy`."
        for option in strategy:
            if option != "label_selector":
                return f"Unsupported option found: '{option}'. Only ['label_selector'] is currently supported."
        selector = strategy.get("label_selector")
        if selector and not isinstance(selector, dict):
            return 'The value of "label_selector" must be a dictionary.'
        if problem := validate_label_selector(selector):
            return problem
    return None


def _of_strings(labels: Any, wrong_value: str) -> dict[str, str]:
    if not isinstance(labels, dict):
        raise ValueError("The format after deserialization is not a key-value pair map.")
    for key, value in labels.items():
        if not isinstance(key, str):
            raise ValueError("The key is not string type.")
        if not isinstance(value, str):
            raise ValueError(wrong_value.format(key))
    return labels
