"""Fixtures of the attacks of another user of the same machine. Needs root, which can be anybody."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.strangers import UID, needs_stranger


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that all users may write to, as /tmp is."""
    needs_stranger()
    path = Path(tempfile.mkdtemp(prefix="hcp-", dir="/tmp"))
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def theirs(shared: Path) -> Path:
    """A directory of the other user, which all may enter."""
    path = shared / "theirs"
    path.mkdir()
    os.chown(path, UID, UID)
    path.chmod(0o777)
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's home."""
    path = tmp_path / "home"
    path.mkdir()
    monkeypatch.setenv("HOME", str(path))
    return path


@pytest.fixture
def stranger() -> None:
    """Skip the test where there can be no other user."""
    needs_stranger()
