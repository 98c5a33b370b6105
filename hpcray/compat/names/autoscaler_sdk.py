"""`ray.autoscaler.sdk`: requests for more nodes. The nodes of a job are those that its launcher started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcray.common.labels import selector_problem


def request_resources(
    num_cpus: int | None = None,
    bundles: Sequence[Mapping[str, float]] | None = None,
    bundle_label_selectors: Sequence[Mapping[str, str]] | None = None,
) -> None:
    """Check the arguments. There is no effect: a job gets no further nodes.

    Raises:
        TypeError: the number or a bundle is of another type.
        ValueError: the selectors are not as many as the bundles, or one is not valid.
    """
    if num_cpus is not None and not isinstance(num_cpus, int):
        raise TypeError("num_cpus should be of type int.")
    if bundles is not None and not isinstance(bundles, list):
        raise TypeError("bundles should be of type List")
    for bundle in bundles or ():
        if not isinstance(bundle, dict):
            raise TypeError("each bundle should be a Dict.")
        for key, value in bundle.items():
            if not isinstance(key, str):
                raise TypeError("each bundle key should be str.")
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError("each bundle value should be a number (int or float).")
    if bundle_label_selectors is None:
        return
    if bundles is None:
        raise ValueError("`bundles` must be provided when `bundle_label_selectors` is specified.")
    if len(bundle_label_selectors) != len(bundles):
        raise ValueError("`bundle_label_selector` must be a list with length equal to the number of bundles.")
    for selector in bundle_label_selectors:
        _check_selector(selector)


def _check_selector(selector: Any) -> None:
    problem = selector_problem(selector)
    if problem:
        raise ValueError(f"Invalid label selector provided in bundle_label_selectors list. Detailed error: '{problem}'")
