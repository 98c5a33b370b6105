"""Applications of FastAPI by value: classes of a driver's script have them in their closures."""

from __future__ import annotations

import pytest

from hpcray.protocol.serialization import deserialize, serialize

fastapi = pytest.importorskip("fastapi")


def test_the_state_of_an_application_is_the_same_afterwards() -> None:
    app = fastapi.FastAPI(title="mine")
    app.state.limit = {"rows": 3}
    value, _ = serialize(app.state)
    assert deserialize(value).limit == {"rows": 3}


def test_a_class_with_an_application_travels_by_value() -> None:
    app = fastapi.FastAPI(title="mine")
    app.state.limit = 7

    class Handlers:
        @app.get("/limit")
        def limit(self) -> int:
            return int(app.state.limit)

    found = deserialize(serialize(Handlers)[0])
    assert found().limit() == 7
    arrived = found.limit.__closure__[0].cell_contents
    assert arrived is not app and arrived.title == "mine" and arrived.state.limit == 7
    assert "/limit" in arrived.openapi()["paths"]
