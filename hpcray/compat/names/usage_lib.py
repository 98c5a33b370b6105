"""`ray._common.usage.usage_lib`: what Ray reports of itself over the network. hpcray reports nothing."""

from __future__ import annotations

from typing import Any


class _TagKey:
    """Any attribute is a key; it is its own name."""

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name

    def Name(self, key: str) -> str:
        """Return the name of a key."""
        return key

    def Value(self, name: str) -> str:
        """Return the key of a name: the name itself."""
        return name


TagKey = _TagKey()


def usage_stats_enabled() -> bool:
    """Return False."""
    return False


def record_extra_usage_tag(key: Any, value: str, gcs_client: Any = None) -> None:
    """No effect."""


def record_library_usage(library_usage: str) -> None:
    """No effect."""


def record_hardware_usage(hardware_usage: str) -> None:
    """No effect."""


def get_hardware_usages_to_report(gcs_client: Any) -> list[str]:
    """Return an empty list."""
    return []


get_library_usages_to_report = get_hardware_usages_to_report


def get_extra_usage_tags_to_report(gcs_client: Any) -> dict[str, str]:
    """Return an empty dict."""
    return {}
