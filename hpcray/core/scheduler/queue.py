"""The waiting room of one node: who wants how many workers of which shape, and whose turn it is.

Fairness is round-robin over (holder, class): every want has a turn number, a grant sends it to the end. Wants are
indexed by what they ask for, so finding out that nothing can be granted costs one check per different request, however
many thousand wants wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hpcray.base.bundle_names import bundle_of, in_bundle
from hpcray.base.resources import Resources
from hpcray.core.scheduler.devices import GPU, DeviceBook
from hpcray.wire.messages import ActorSpec, PrepareBundles, Shape

RESERVE_AFTER = 1.0
"""A want not served for this long, though others were whose turn was later, may have the node's resources set aside."""
FIRST_WINDOW = 1.0
LONGEST_WINDOW = 64.0
RETURN_GRACE = 5.0
"""How long they are set aside; doubles with each try. In between the others run for as long: what is waited for may
itself depend on them, so a reservation without an end could hang the job."""

FOR_BUNDLES = "bundles of"

Env = tuple[tuple[str, str], ...]
Kind = tuple[tuple[tuple[str, int], ...], Env]


@dataclass(slots=True, eq=False)
class Want:
    """Leases of one class that one holder wants from this node, or one actor that shall start here.

    Attributes:
        local: the holder is a process of this node and reports its demand to this raylet.
        own: this raylet may serve it by itself; otherwise only `bound` of it, which the head sent here.
        total, granted: cumulative (see `Demand`); `starting` are decided but have no worker yet.
        bound: how many the head has told this node to serve when it can.
        patience: when the unserved part of `bound` goes back to the head.
        since: when it last was served, or began to wait.
        left: when it was last sent away unserved; who comes back soon keeps `since`.
        told: when its holder was last told that it waits.
        bundle: the placement group and bundle that it is for, None for none; inside: its request by the names there.
        attempt: the bundles that shall be held here when there is room; no worker then.
    """

    holder: bytes
    klass: int
    shape: Shape
    local: bool
    own: bool
    spec: ActorSpec | None = None
    restarts: int = 0
    total: int = 0
    granted: int = 0
    starting: int = 0
    bound: int = 0
    patience: float = 0.0
    since: float = 0.0
    left: float = float("-inf")
    turn: int = 0
    window: float = FIRST_WINDOW
    reported: int = 0
    warned: bool = False
    told: float = 0.0
    attempt: PrepareBundles | None = None
    request: Resources = field(init=False)
    kind: Kind = field(init=False)
    bundle: tuple[str, int] | None = field(init=False)
    inside: Resources = field(init=False)

    def __post_init__(self) -> None:
        self.request = dict(self.shape.resources)
        self.kind = (self.shape.resources, self.shape.env)
        self.bundle = bundle_of(self.shape.resources)
        self.inside = self.request if self.bundle is None else in_bundle(self.request)

    def missing(self) -> int:
        """How many the holder still lacks, as far as this raylet knows."""
        return max(0, self.total - self.granted - self.starting) if self.local else self.bound

    def open(self) -> int:
        """How many this raylet should serve."""
        return self.missing() if self.own else min(self.bound, self.missing())


def for_bundles(group: str) -> Env:
    """In place of an environment: what is wanted is room for bundles of this group (id in hex), and no worker."""
    return ((FOR_BUNDLES, group),)


def is_for_bundles(env: Env) -> bool:
    """Whether it is such."""
    return bool(env) and env[0][0] == FOR_BUNDLES


@dataclass(slots=True)
class _Line:
    """Wants with the same request and environment, in the order of their turns."""

    kind: Kind
    request: Resources
    env: Env
    wants: OrderedDict[int, Want] = field(default_factory=OrderedDict)

    def first(self) -> Want:
        return next(iter(self.wants.values()))


class WaitingRoom:
    """Wants that have something open, and the reservation for one that has waited too long.

    Args:
        devices: the node's GPUs, where it has any: room in sum may be none on any one of them.

    Attributes:
        in_bundles: what is free in bundles of placement groups, and whether one of them has room for a want.
    """

    def __init__(self, devices: DeviceBook | None = None) -> None:
        self._devices = devices
        self.in_bundles: tuple[Resources, Callable[[Want], bool]] = ({}, lambda want: False)
        self._lines: dict[Kind, _Line] = {}
        self._turns = 0
        self._passed = 0
        self.waiting = 0
        self.reserved: Want | None = None
        self._until = 0.0
        self._rest_until = 0.0

    def __iter__(self) -> Iterator[Want]:
        for line in self._lines.values():
            yield from line.wants.values()

    def update(self, now: float, want: Want) -> bool:
        """Take in or drop `want` after its numbers changed; whether it began to wait now."""
        line = self._lines.get(want.kind)
        inside = line is not None and id(want) in line.wants
        if want.open() > 0:
            if inside:
                return False
            if line is None:
                line = self._lines[want.kind] = _Line(want.kind, want.request, want.shape.env)
            if now - want.left > RETURN_GRACE:
                want.since = now
                want.turn = 0
            self._insert(line, want)
            self.waiting += 1
            return True
        if inside and line is not None:
            self._remove(line, want)
        return False

    def only(self) -> Want | None:
        """The want that waits, when it is exactly one."""
        return next(iter(self)) if self.waiting == 1 else None

    def lacking(self, available: Resources) -> set[str]:
        """Of what those who wait find too little."""
        found: set[str] = set()
        for line in self._lines.values():
            free = self.in_bundles[0] if line.first().bundle is not None else available
            found.update(name for name, units in line.request.items() if free.get(name, 0) < units)
        return found

    def fits(self, request: Resources, available: Resources, want: Want | None = None) -> bool:
        """Whether `request` can be served from `available` and leaves what is set aside for another want."""
        reserved = self.reserved
        if want is not None and want.bundle is not None:
            available, has_room = self.in_bundles
            if not has_room(want):
                return False
        if reserved is None or reserved is want:
            if not all(available.get(name, 0) >= units for name, units in request.items()):
                return False
            return self._devices is None or GPU not in request or self._devices.fits(request[GPU])
        aside = reserved.request
        if not all(available.get(name, 0) >= units + aside.get(name, 0) for name, units in request.items()):
            return False
        return self._devices is None or GPU not in request or self._devices.fits(request[GPU], aside.get(GPU, 0))

    def serve(
        self, now: float, available: Resources, worker_for: Callable[[Env], bool], kinds: set[Kind] | None = None
    ) -> Iterator[Want]:
        """Yield wants in the order of their turns as long as one fits; the caller grants one lease per yield.

        Args:
            available: what is free, updated by the caller between yields.
            worker_for: whether a worker with this environment can be had.
            kinds: look only at these; None: at all.
        """
        if not self.waiting:
            return
        kinds = set(self._lines) if kinds is None else kinds & self._lines.keys()
        lines = [self._lines[kind] for kind in sorted(kinds)]
        while True:
            lines = [line for line in lines if line.wants and self._servable(line, available, worker_for)]
            if not lines:
                return
            line = min(lines, key=lambda line: self._next(line).turn)
            want = self._next(line)
            self._passed = max(self._passed, want.turn)
            yield want
            want.since = now
            want.window = FIRST_WINDOW
            if self.reserved is want:
                self.reserved = None
            if id(want) in line.wants:
                if want.open() > 0:
                    del line.wants[id(want)]
                    self._append(line, want)
                else:
                    self._remove(line, want)

    def passed(self) -> None:
        """Somebody was served who had not waited."""
        self._passed = self._turns + 1

    def tick(self, now: float, reachable: Callable[[Resources], bool]) -> bool:
        """End or make the reservation; whether somebody may be served who could not be before.

        Args:
            reachable: whether a request would fit if every lease ended; for others nothing is set aside.
        """
        freed = False
        reserved = self.reserved
        if reserved is not None:
            if now < self._until:
                return False
            self.reserved = None
            self._rest_until = now + reserved.window
            reserved.window = min(LONGEST_WINDOW, 2 * reserved.window)
            freed = True
        if now < self._rest_until:
            return freed
        oldest: Want | None = None
        for line in self._lines.values():
            want = line.first()
            if now - want.since < RESERVE_AFTER or not self._overtaken(want) or not reachable(want.request):
                continue
            if oldest is None or (want.window, want.since) < (oldest.window, oldest.since):
                oldest = want
        if oldest is not None:
            self.reserved = oldest
            self._until = now + oldest.window
        return freed

    def _next(self, line: _Line) -> Want:
        """Whose turn it is in a line: the first, unless only the reservation's owner may pass."""
        reserved = self.reserved
        if reserved is not None and reserved.kind == line.kind:
            return reserved
        return line.first()

    def _servable(self, line: _Line, available: Resources, worker_for: Callable[[Env], bool]) -> bool:
        return self.fits(line.request, available, self._next(line)) and worker_for(line.env)

    def _overtaken(self, want: Want) -> bool:
        """Whether somebody was served whose turn came later. Who merely waits for its turn needs nothing set aside."""
        return want.turn < self._passed or want.attempt is not None

    def _insert(self, line: _Line, want: Want) -> None:
        """Take in, at the end; one that was away for a moment has its turn still."""
        if not want.turn:
            self._append(line, want)
            return
        first = not line.wants or want.turn < line.first().turn
        line.wants[id(want)] = want
        if first:
            line.wants.move_to_end(id(want), last=False)

    def _append(self, line: _Line, want: Want) -> None:
        self._turns += 1
        want.turn = self._turns
        line.wants[id(want)] = want

    def _remove(self, line: _Line, want: Want) -> None:
        del line.wants[id(want)]
        self.waiting -= 1
        if not line.wants:
            self._lines.pop(want.kind, None)
        if self.reserved is want:
            self.reserved = None
