"""Lines that several workers print alike: the first is shown at once, the others are counted for a while."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hpcray.core.core_worker.output_lines import LogBatch

_EXPLANATION = (
    " (Ray deduplicates logs by default. Set RAY_DEDUP_LOGS=0 to disable log deduplication, or see "
    "https://docs.ray.io/en/master/ray-observability/user-guides/configure-logging.html#log-deduplication "
    "for more options.)"
)


@dataclass(slots=True)
class _Pattern:
    """Lines that differ in words with digits only.

    Attributes:
        since: when counting began. sources: who printed such a line: ip and pid.
        count: how many were not shown. line: the last of these, with the facts of its batch.
    """

    since: float
    sources: set[tuple[object, object]]
    count: int = 0
    line: str = ""
    facts: LogBatch = field(default_factory=dict)


class LogDeduplicator:
    """Counts the lines of one output.

    Args:
        window: seconds for which lines are counted after the first.
        always: returns whether a line is shown in any case. never: whether, of the others, it never is.
    """

    def __init__(self, window: float, always: Callable[[str], object], never: Callable[[str], object]) -> None:
        self._window = window
        self._always = always
        self._never = never
        self._recent: dict[str, _Pattern] = {}
        self._explained = False

    def deduplicate(self, now: float, batch: LogBatch) -> list[LogBatch]:
        """Return what to show now: of this batch, and of lines that were counted before."""
        facts = {name: value for name, value in batch.items() if name != "lines"}
        shown = [line for line in batch["lines"] if self._is_shown(now, line, facts)]
        return [*([{**facts, "lines": shown}] if shown else []), *self.expired(now)]

    def expired(self, now: float) -> list[LogBatch]:
        """Return the counts of lines whose time is over. Those that came more than once are counted on."""
        found: list[LogBatch] = []
        for key, state in list(self._recent.items()):
            if now - state.since < self._window:
                break  # they are in the order of their times
            del self._recent[key]
            found += self._counted(state)
            if state.count > 1:
                state.since, state.count = now, 0
                self._recent[key] = state
        return found

    def next_expiry(self) -> float | None:
        """Return when `expired` has something to return; None if nothing is counted."""
        return next((state.since + self._window for state in self._recent.values()), None)

    def flush(self) -> list[LogBatch]:
        """Return all counts; it begins anew."""
        found = [batch for state in self._recent.values() for batch in self._counted(state)]
        self._recent.clear()
        return found

    def _is_shown(self, now: float, line: str, facts: LogBatch) -> bool:
        if self._always(line):
            return True
        if self._never(line):
            return False
        key = " ".join(word for word in line.split() if not any(map(str.isdigit, word)))
        if not key:
            return True
        source = facts.get("ip"), facts.get("pid")
        state = self._recent.get(key)
        if state is None:
            self._recent[key] = _Pattern(now, {source})
            return True
        state.sources.add(source)
        if len(state.sources) == 1 and facts.get("pid") != "raylet":
            return True  # what one worker prints several times it means several times
        state.count += 1
        state.line, state.facts = line, facts
        return False

    def _counted(self, state: _Pattern) -> list[LogBatch]:
        if not state.count:
            return []
        line = state.line
        if state.count > 1:
            line += f" [repeated {state.count}x across cluster]{'' if self._explained else _EXPLANATION}"
            self._explained = True
        return [{**state.facts, "lines": [line]}]
