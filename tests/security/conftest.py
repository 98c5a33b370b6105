"""Tests by another user of this host, who means no good."""

from __future__ import annotations

import pytest
from helpers.strangers import needs_stranger


@pytest.fixture
def stranger() -> None:
    """Skip the test where there can be no other user."""
    needs_stranger()
