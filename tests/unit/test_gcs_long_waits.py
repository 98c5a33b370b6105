"""Actors that wait for long: their owners are told once, those that want the same together."""

from __future__ import annotations

from typing import Any

import pytest
from invariants_kit import GCS_EVENTS, check_after

from hpcray.common.config import Config
from hpcray.common.ids import make_proc, raylet_of
from hpcray.common.resources import REPORT_AFTER, to_units
from hpcray.core.effects import Effect, Send
from hpcray.core.gcs.gcs import Gcs
from hpcray.protocol import messages as m

OWNER, OTHER = make_proc(0, 5), make_proc(0, 6)
GPU1 = m.Shape((("GPU", 10_000),))


@pytest.fixture(autouse=True)
def _invariants_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    check_after(monkeypatch, Gcs, GCS_EVENTS)


class Head:
    def __init__(self, gpus: int) -> None:
        self.core = Gcs(Config())
        self.now = 0.0
        total = to_units({"CPU": 4, "GPU": gpus})
        self.core.cluster_up(0.0, "s", [m.NodeInfo(0, "id0", "host0", "10.0.0.0", 1, total, b"", "mpi", 0)])

    def create(self, number: int, owner: bytes = OWNER, **more: Any) -> bytes:
        actor = owner + number.to_bytes(5, "big")
        spec = m.ActorSpec(actor, "Model", b"", b"", [], GPU1, GPU1, "", "", False, 0, 0, 1, {}, **more)
        self.refuse(self.core.handle(self.now, owner, m.CreateActor(number, spec)))
        return actor

    def refuse(self, effects: list[Effect]) -> None:
        """The node has no room for whatever is sent to it."""
        for effect in effects:
            assert isinstance(effect, Send)
            if isinstance(effect.msg, m.StartActor):
                self.core.handle(self.now, raylet_of(0), m.StartActorRefused(effect.msg.spec.actor, ""))

    def run(self, until: float) -> list[tuple[bytes, m.Infeasible]]:
        """Ticks; every actor that is sent to the node comes back. Who was told what."""
        told = []
        while self.now < until:
            self.now += 0.5
            effects = self.core.tick(self.now)
            self.refuse(effects)
            sent = [effect for effect in effects if isinstance(effect, Send)]
            told += [(effect.dest, effect.msg) for effect in sent if isinstance(effect.msg, m.Infeasible)]
        return told


def test_owners_get_one_report_of_what_their_waiting_actors_lack() -> None:
    head = Head(2)
    head.core.handle(0.0, raylet_of(0), m.NodeView(0, 1, to_units({"CPU": 4, "GPU": 0.5})))
    head.create(1)
    head.create(2)
    head.create(3, OTHER)
    assert head.run(REPORT_AFTER - 1) == []
    told = head.run(REPORT_AFTER + 20)
    assert [dest for dest, _ in told] == [OWNER, OTHER] and all(report.waits for _, report in told)
    text = told[0][1].reason
    assert text.startswith("actor Model (and 1 more that want the same) asks for {GPU: 1}"), text
    assert "node 0 (host0): {GPU: 0.5} of {GPU: 2}" in text and "hint: " in text


def test_an_actor_with_a_slow_constructor_is_not_reported_as_waiting() -> None:
    head = Head(2)
    head.core.handle(0.0, raylet_of(0), m.NodeView(0, 1, to_units({"CPU": 4, "GPU": 0})))
    actor = head.create(1)
    head.run(2.0)
    effects = head.core.handle(head.now, raylet_of(0), m.NodeView(0, 2, to_units({"CPU": 4, "GPU": 2})))
    assert [e.msg.spec.actor for e in effects if isinstance(e, Send) and isinstance(e.msg, m.StartActor)] == [actor]
    assert head.run(60.0) == []


def test_an_infeasible_actor_is_reported_once() -> None:
    head = Head(0)
    spec = m.ActorSpec(OWNER + bytes(5), "Model", b"", b"", [], GPU1, GPU1, "", "", False, 0, 0, 1, {})
    effects = head.core.handle(0.0, OWNER, m.CreateActor(1, spec))
    assert [e.msg.waits for e in effects if isinstance(e, Send) and isinstance(e.msg, m.Infeasible)] == [False]
    assert head.run(30.0) == []
