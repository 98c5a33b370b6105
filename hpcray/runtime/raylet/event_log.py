"""The events on a node: those for people (`list_cluster_events`), and the door between a raylet and features.

A feature inside a raylet is a `NodeExtension`. The entry point of raylets hands in functions that make them
(`hpcray.runtime.node.node_features`); the kernel does not know them.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

_MAX_EVENTS = 1000


class NodeExtension:
    """A feature inside one raylet. The methods are events; those that a feature does not need do nothing.

    They are called in the raylet's loop and must not wait.

    Attributes:
        name: what messages to it are addressed to (`hpcray.protocol.messages.ExtensionMessage`).
    """

    name: ClassVar[str] = ""

    def on_message(self, src: bytes, body: bytes) -> None:
        """A process has sent the half of this feature in its raylet a message. Its extension has encoded the body."""

    def came_up(self, session: str) -> None:
        """This node takes part in the job. session: the name of the job's session, equal on all nodes."""

    def process_joined(self, proc: bytes, kind: str, pid: int) -> None:
        """A process of this node was welcomed; kind: as in `Hello`."""

    def process_died(self, proc: bytes, kind: str, reason: str) -> None:
        """A process of this node is gone."""

    def last_figures(self, proc: bytes, figures: bytes) -> None:
        """A worker of this node ends in good order; figures: what it has run, as in `LastFigures`."""

    def node_died(self, node: int, reason: str) -> None:
        """The head has declared another node dead."""

    def printed(self, severity: str, text: str) -> None:
        """The raylet prints a line. severity: "INFO", "WARNING" or "ERROR"."""

    def end_explained(self, kind: str, text: str, proc: bytes) -> None:
        """A reason of the job's end is known, see `NodeEventLog.explain_end`."""

    def stopping(self, code: int) -> None:
        """The processes of this node are about to be asked to leave. code: the job's exit code."""

    def leaving(self, proc: bytes) -> None:
        """A process of this node is about to be asked to leave: what it is sent now, it reads before that."""

    def figures(self) -> dict[str, Any]:
        """Return what this feature adds to the figures of its node, which are asked for."""
        return {}

    def close(self) -> None:
        """The raylet's loop has ended."""


class NodeEventLog:
    """The latest events of one node; each is also printed.

    Args:
        log: prints a line.

    Attributes:
        extensions: features of this raylet, which learn of all that happens here.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._severity = "INFO"
        self._events: deque[dict[str, Any]] = deque(maxlen=_MAX_EVENTS)
        self.extensions: Sequence[NodeExtension] = ()

    def report(self, severity: str, text: str) -> None:
        """Add an event. severity: "INFO", "WARNING" or "ERROR"."""
        self._severity = severity
        try:
            self._log(text)
        finally:
            self._severity = "INFO"
        event = {"severity": severity, "time": time.time(), "message": text, "event_id": os.urandom(18).hex()}
        self._events.append(event)

    def printed(self, text: str) -> None:
        """Pass on that the raylet prints a line."""
        self.inform(lambda extension: extension.printed(self._severity, text))

    def inform(self, event: Callable[[NodeExtension], object]) -> None:
        """Call a method of all features."""
        for extension in self.extensions:
            event(extension)

    def explain_end(self, kind: str, text: str, proc: bytes = b"") -> None:
        """Note why the job ends, or is about to end: the one place for such reasons. Nothing is printed.

        Call it before the job is ended. Where several reasons are noted, the first one is the cause.

        Args:
            kind: one word: "exception", "exit", "signal", "drain", "memory", "hang", "node" (it was lost), "head".
            text: the reason as a sentence, with what is known of where and when.
            proc: the process that knows it; b"": the raylet.
        """
        self.inform(lambda extension: extension.end_explained(kind, text, proc))

    def rows(self) -> list[dict[str, Any]]:
        """The events, oldest first; "time" is Unix time."""
        return list(self._events)
