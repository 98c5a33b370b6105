"""Why a node cannot join, where the hosts or the wires of the job do not allow it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hpcray.common.config import Config
from hpcray.common.exceptions import StartupError
from hpcray.runtime.node.join_token import JoinToken
from hpcray.runtime.node.joining import join_job
from hpcray.runtime.node.node_transports import NodeTransports
from hpcray.transport.base import TransportError
from hpcray.transport.mpi_data import MpiData
from hpcray.transport.startup import Launch
from hpcray.transport.ucx_data import UcxData


def wires(data: Any) -> NodeTransports:
    """Those of a job of several ranks."""
    arena: Any = None
    control: Any = object()
    found = NodeTransports(control, data, arena)
    found.attach(arena)
    return found


def test_a_node_of_another_host_is_told_that_the_job_is_for_one_host() -> None:
    token, arena = JoinToken("s", b"secret", 0, b"address", "login1", True, "/tmp/x"), None
    with pytest.raises(StartupError, match="runs on login1 and lets nodes of that host join only.*HPCRAY_ELASTIC=1"):
        join_job(token, Config(), Launch(), arena)  # type: ignore[arg-type]


def test_a_job_whose_objects_go_over_mpi_takes_no_node() -> None:
    with pytest.raises(TransportError, match="go over MPI, which no node can join later; hint: HPCRAY_DATA_PLANE=ucx"):
        wires(MpiData.__new__(MpiData)).outer()


def test_a_job_that_was_opened_for_one_host_says_how_others_can_join() -> None:
    data = UcxData.__new__(UcxData)
    data.engine = SimpleNamespace(one_host=True)  # type: ignore[assignment]
    found = wires(data)
    found._outer = object()  # type: ignore[assignment]
    assert found.outer(one_host=True) is found._outer
    with pytest.raises(TransportError, match="opened without TCP; hint: start it with HPCRAY_ELASTIC=1"):
        found.outer(one_host=False)
