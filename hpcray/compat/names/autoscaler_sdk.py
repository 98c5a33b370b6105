"""`ray.autoscaler.sdk`: a program says how much room it will need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hpcray.common.labels import selector_problem
from hpcray.experimental.internal_kv import _internal_kv_put

_SPACE, _KEY = "__autoscaler", "__autoscaler_resource_requests"


def request_resources(
    num_cpus: int | None = None,
    bundles: Sequence[Mapping[str, float]] | None = None,
    bundle_label_selectors: Sequence[Mapping[str, str]] | None = None,
) -> None:
    """Have the autoscaler start nodes until the job has room for all of this, and keep them.

    It counts whole nodes, whatever runs on them: what is busy need not be there twice. Each call replaces the one
    before; a call without arguments takes it back. A job without an autoscaler (`max_nodes`) gets no nodes.

    Args:
        num_cpus: so many times one CPU.
        bundles: resources; each bundle must fit on one node.
        bundle_label_selectors: for each bundle the labels of its node.

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
    if bundle_label_selectors is not None:
        if bundles is None:
            raise ValueError("`bundles` must be provided when `bundle_label_selectors` is specified.")
        if len(bundle_label_selectors) != len(bundles):
            raise ValueError("`bundle_label_selector` must be a list with length equal to the number of bundles.")
        for selector in bundle_label_selectors:
            _check_selector(selector)
    selectors = bundle_label_selectors or [{} for _ in bundles or ()]
    wanted = [[{"CPU": 1}, {}]] * (num_cpus or 0) + [list(pair) for pair in zip(bundles or (), selectors, strict=True)]
    _internal_kv_put(_KEY, msgspec.msgpack.encode(wanted), namespace=_SPACE)


def _check_selector(selector: Any) -> None:
    problem = selector_problem(selector)
    if problem:
        raise ValueError(f"Invalid label selector provided in bundle_label_selectors list. Detailed error: '{problem}'")
