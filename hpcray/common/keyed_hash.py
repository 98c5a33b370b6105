"""BLAKE2b and the comparison of digests in constant time, without `hashlib` and `hmac`: these load OpenSSL, which takes
5 ms of each raylet's start, and use it for neither."""

from __future__ import annotations

try:
    from _blake2 import blake2b
    from _operator import _compare_digest as compare_digest
except ImportError:  # another Python than CPython
    from hashlib import blake2b
    from hmac import compare_digest  # type: ignore[no-redef]

__all__ = ["blake2b", "compare_digest"]
