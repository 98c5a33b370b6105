"""How much of a long test with hypothesis is run: less by default, all of it for a night."""

from __future__ import annotations

import os

ALL = "HPCRAY_TEST_ALL_EXAMPLES" in os.environ


def examples(number: int) -> int:
    """Return how many to try: two fifths of `number`, or all with the variable HPCRAY_TEST_ALL_EXAMPLES."""
    return number if ALL else max(number * 2 // 5, 8)
