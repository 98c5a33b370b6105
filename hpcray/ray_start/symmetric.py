"""`ray symmetric-run`: the same line on every host starts a cluster, runs a command on its head, and ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from hpcray.common.exceptions import StartupError
from hpcray.ray_start.clusters import ClusterName, parse_cluster_name
from hpcray.ray_start.flags import NOT_OF_SYMMETRIC_RUN
from hpcray.ray_start.head_search import is_of_this_host
from hpcray.ray_start.lookup import session_here
from hpcray.ray_start.registry import Registry
from hpcray.ray_start.start import StartRequest, start_and_return, start_and_stay
from hpcray.ray_start.stop import stop_nodes
from hpcray.ray_start.surroundings import own_names, resolve
from hpcray.runtime.node.join_token import query_head

TIMEOUT = "RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT"
_TIMEOUT = 30.0
_CHECK, _QUERY_TIMEOUT = 0.2, 10.0
_OWN_OPTIONS = ("--address", "--min-nodes")


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options for `ray start` and the command, in the words after `symmetric-run`.

    Raises:
        ValueError: there is no `--`.
    """
    if "--" not in words:
        raise ValueError("No separator '--' found in arguments; hint: ray symmetric-run --address H:P -- COMMAND")
    end = list(words).index("--")
    options: list[str] = []
    rest = iter(words[:end])
    for word in rest:
        if word in _OWN_OPTIONS:
            next(rest, None)
        elif not word.startswith(tuple(f"{name}=" for name in _OWN_OPTIONS)):
            options.append(word)
    return options, list(words[end + 1 :])


def is_head_here(name: ClusterName, several: bool) -> bool:
    """True if the host of a name is this one. With several nodes the loopback is none of them."""
    if name.is_local:
        if several:
            raise ValueError(f"{name.text} means this host on every host; hint: the head's own name or address")
        return True
    own = {text.lower() for text in own_names()}
    return bool(own & {name.host, *resolve(name.host)})


def run_symmetric(
    given: Mapping[str, Any], address: str, min_nodes: int, command: Sequence[str], say: Callable[[str], None]
) -> int:
    """Be the head, and return the code of the command; or a node, and return its code when the cluster has ended.

    Args:
        given: options of `ray start`.
        say: prints a line.

    Raises:
        StartupError, ConnectionError, OSError, ValueError: the cluster did not come up.
    """
    if wrong := [name for name in NOT_OF_SYMMETRIC_RUN if given.get(name) not in (None, False)]:
        raise ValueError(f"--{wrong[0].replace('_', '-')} is no option of symmetric-run: it is one for all hosts")
    name = parse_cluster_name(address)
    if name is None or name.scheme:
        raise ValueError(f"Invalid address format: {address}, should be `host:port`")
    if not is_head_here(name, min_nodes > 1):
        say(f"On worker node. Connecting to Ray cluster at {address}...")
        return start_and_stay(StartRequest({**given, "block": True}, os.environ), lambda started: None)
    say("On head node. Starting Ray cluster head...")
    host = {} if name.is_local else {"node_ip_address": name.host}
    request = StartRequest({**given, **host, "head": True, "address": None, "port": name.port}, os.environ)
    started = start_and_return(request)
    try:
        _wait_for_nodes(started.address, min_nodes)
        say(f"Running command on head node: {list(command)}")
        return _run(command, {**os.environ, "RAY_ADDRESS": started.address})
    finally:
        stop_nodes(os.environ, force=False)


def _wait_for_nodes(address: str, count: int) -> None:
    limit = float(os.environ.get(TIMEOUT) or _TIMEOUT)
    deadline = time.monotonic() + limit
    where = session_here(address)
    assert where is not None
    while (alive := _alive(where)) < count:
        if time.monotonic() > deadline:
            path = Registry(os.environ).path
            unseen = f"; or HPCRAY_START_DIR, if not all nodes see {path}" if is_of_this_host(path) else ""
            raise StartupError(
                f"Timed out waiting for other nodes to start: {alive} of {count} within {limit:g} s; hint: {TIMEOUT}"
                f"{unseen}"
            )
        time.sleep(_CHECK)


def _alive(where: str) -> int:
    return sum(row["Alive"] for row in query_head(where, "nodes", _QUERY_TIMEOUT))


def _run(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command, with the signals of this process; return its code, 128 + n for signal n."""
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        if child is not None:
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        child = subprocess.Popen(command, env=environ)
        code = child.wait()
    except OSError as error:
        raise StartupError(f"cannot run {command[0]}: {error.strerror}") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code
