"""A raylet core whose forks succeed at once, and what it sent."""

from __future__ import annotations

from typing import Any, TypeVar

from hpcray.common.config import Config
from hpcray.common.ids import make_proc
from hpcray.common.resources import to_units
from hpcray.core.effects import Effect, ForkWorker, KillWorker, Preload, Send
from hpcray.core.raylet.local_lease_manager import LocalLeaseManager
from hpcray.protocol import messages as m

UNIT = 10_000
CPU1 = m.Shape((("CPU", UNIT),))
CPU2 = m.Shape((("CPU", 2 * UNIT),))
JOB = m.JobInfo("01", "ns", (), "/")
FAR = make_proc(1, 7)
M = TypeVar("M", bound=m.Message)


class Node:
    """A raylet whose forks succeed at once; remembers what was sent."""

    def __init__(self, cpus: float = 2, size: int = 2, forks: bool = True, gpus: int = 0, **config: Any) -> None:
        total = to_units({"CPU": cpus, "GPU": gpus})
        self.core = LocalLeaseManager(0, total, size, Config(**{"prestart": 0, "spread_threshold": 1.0, **config}))
        self.forks = forks
        self.forked: list[ForkWorker] = []
        self.killed: list[bytes] = []
        self.preloaded: list[Preload] = []
        self.sent: list[Send] = []
        self.now = 0.0
        self.do(self.core.start(0.0))

    def do(self, effects: list[Effect]) -> None:
        self.core.check_invariants()
        for effect in effects:
            if isinstance(effect, ForkWorker):
                self.forked.append(effect)
                if self.forks:
                    proc = make_proc(0, effect.number)
                    self.do(self.core.process_joined(self.now, proc, "worker", 100 + effect.number))
            elif isinstance(effect, KillWorker):
                self.killed.append(effect.worker)
            elif isinstance(effect, Preload):
                self.preloaded.append(effect)
            else:
                assert isinstance(effect, Send)
                self.sent.append(effect)

    def handle(self, src: bytes, msg: m.Message) -> None:
        self.do(self.core.handle(self.now, src, msg))

    def take(self, kind: type[M], dest: bytes | None = None) -> list[M]:
        """Messages of a type sent since the last call."""
        found = [s for s in self.sent if isinstance(s.msg, kind) and dest in (None, s.dest)]
        self.sent = [s for s in self.sent if s not in found]
        return [s.msg for s in found]  # type: ignore[misc]

    def driver(self) -> bytes:
        proc = make_proc(0, self.core.pool.new_number())
        self.do(self.core.process_joined(self.now, proc, "driver", 1))
        return proc

    def free(self) -> float:
        return self.core.available().get("CPU", 0) / UNIT

    def tick(self, now: float) -> None:
        self.now = now
        self.do(self.core.tick(now))


def spec(number: int = 1, hold: m.Shape = CPU1, place: m.Shape = CPU1, **more: Any) -> m.ActorSpec:
    return m.ActorSpec(
        actor=FAR + number.to_bytes(5, "big"),
        class_name="Counter",
        cls=b"c",
        args=b"",
        refs=[],
        place=place,
        hold=hold,
        name="",
        namespace="",
        detached=False,
        max_restarts=0,
        max_task_retries=0,
        max_concurrency=1,
        methods={},
        **more,
    )
