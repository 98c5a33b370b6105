"""The dashboard as an ASGI application: the page, and a route per question that it asks."""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from hpcray.common.exceptions import RayError
from hpcray.dashboard.access import DashboardAccess, bearer, is_from_here, is_loopback_host
from hpcray.dashboard.job_pages import EndedJobPages, JobPages, fold_empty
from hpcray.jobs.added_nodes import remove_nodes

# ------------------------------------------------------------ table pages
# One page of a table: searched, sorted and cut on the server, so that a browser never gets more than it shows.


MOST_ROWS = 500
_ROWS = 100
_TRUE = ("1", "true")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class TableQuery:
    """Which rows of a table are wanted.

    Attributes:
        search: text that a row contains, whatever the case of its letters. only: values of columns, as text.
        sort: a column, "" for the order of the rows. descending: the largest first.
        offset, limit: which of the rows that are left.
    """

    search: str = ""
    only: tuple[tuple[str, str], ...] = ()
    sort: str = ""
    descending: bool = False
    offset: int = 0
    limit: int = _ROWS

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> TableQuery:
        """The query in the parameters of a URL: q, sort, desc, offset, limit, and is.COLUMN.

        Raises:
            ValueError: one of them is not valid.
        """
        only = tuple((name[3:], text) for name, text in given.items() if name.startswith("is."))
        offset, limit = int(given.get("offset", 0)), int(given.get("limit", _ROWS))
        if offset < 0 or not 1 <= limit <= MOST_ROWS:
            raise ValueError(f"offset={offset}, limit={limit}: at most {MOST_ROWS} rows at once")
        return cls(given.get("q", ""), only, given.get("sort", ""), given.get("desc", "") in _TRUE, offset, limit)


def table_page(rows: Sequence[Row], query: TableQuery) -> dict[str, Any]:
    """Return the "rows" that a query wants, how many "matching" there are, and the "total" of rows."""
    wanted = query.search.lower()
    found = [row for row in rows if _passes(row, query.only) and (not wanted or _contains(row, wanted))]
    if query.sort:
        known = [row for row in found if row.get(query.sort) is not None]
        known.sort(key=lambda row: _order(row[query.sort]), reverse=query.descending)
        found = known + [row for row in found if row.get(query.sort) is None]
    shown = found[query.offset : query.offset + query.limit]
    return {"rows": shown, "matching": len(found), "total": len(rows)}


def _passes(row: Row, only: Sequence[tuple[str, str]]) -> bool:
    return all(str(row.get(name)) == text for name, text in only)


def _contains(row: Row, text: str) -> bool:
    return any(text in str(value).lower() for value in row.values() if value is not None)


def _order(value: Any) -> tuple[int, Any]:
    if isinstance(value, (int, float)):
        return 0, value
    if isinstance(value, (list, tuple)):
        return 1, [str(one) for one in value]
    return 2, str(value).lower()


# ------------------------------------------------------------ answer cache
# Answers about a job that is looked at: each is gathered once for all browsers that ask at about the same time.


_MOST_ANSWERS = 128
_IDLE_SHARE = 9.0
"""An answer that took a second to gather serves for so many more: gathering takes at most a tenth of the time."""


class NoAnswerError(Exception):
    """The job has not answered within the time."""


@dataclass
class _Answer:
    value: Any
    until: float


class AnswerCache:
    """Gathers answers in threads, of which a job that does not answer can hold only so many.

    All methods are called on the event loop.

    Args:
        threads: how many gather at once.
        patience: seconds after which `get` raises.
    """

    def __init__(self, threads: int = 8, patience: float = 15.0) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="dashboard")
        self._patience = patience
        self._answers: OrderedDict[Hashable, _Answer] = OrderedDict()
        self._running: dict[Hashable, asyncio.Future[Any]] = {}
        self._closed = False

    async def get(self, key: Hashable, gather: Callable[[], Any], fresh: float, more: float = 0.0) -> Any:
        """Return the answer to a question: one that is there already, or that is being gathered, or a new one.

        Args:
            key: of the question.
            gather: called in a thread.
            fresh: seconds for which its answer serves others.
            more: seconds that it may take beyond the usual ones.

        Raises:
            NoAnswerError: there is none in time. Exception: what `gather` raised.
        """
        known = self._answers.get(key)
        if known is not None and time.monotonic() < known.until:
            self._answers.move_to_end(key)
            return known.value
        running = self._running.get(key)
        if running is None:
            loop = asyncio.get_running_loop()
            running = self._running[key] = loop.run_in_executor(self._threads, gather)
            running.add_done_callback(partial(self._gathered, key, fresh, time.monotonic()))
        try:
            return await asyncio.wait_for(asyncio.shield(running), self._patience + more)
        except asyncio.CancelledError:
            if not self._closed:
                raise
            raise NoAnswerError("the dashboard has ended") from None
        except asyncio.TimeoutError:
            raise NoAnswerError(f"the job has not answered within {self._patience + more:g} s; still trying") from None

    def forget(self, key: Hashable) -> None:
        """Have the next one who asks get a new answer."""
        self._answers.pop(key, None)

    def close(self) -> None:
        """Gather no more: who waits gets an error. What is being gathered ends with the connection to the job."""
        self._closed = True
        for running in list(self._running.values()):
            running.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _gathered(self, key: Hashable, fresh: float, began: float, future: asyncio.Future[Any]) -> None:
        self._running.pop(key, None)
        if future.cancelled() or future.exception() is not None:
            return
        now = time.monotonic()
        self._answers[key] = _Answer(future.result(), now + max(fresh, _IDLE_SHARE * (now - began)))
        self._answers.move_to_end(key)
        while len(self._answers) > _MOST_ANSWERS:
            self._answers.popitem(last=False)


# ------------------------------------------------------------ app


STATIC = Path(__file__).parent / "static"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_FRESH, _SLOW_FRESH = 1.0, 4.0
"""Seconds for which the figures serve all browsers, and longer answers."""
_GONE = 410
_MOST_BODY = 10_000  # bytes
_MOST_PIXELS, _MOST_LANES = 4000, 128
_LONGEST_PROFILE = 20  # seconds

Answer = Callable[["DashboardApp", Request], Awaitable[Any]]


class RefusedError(Exception):
    """A request that is not answered. status: of HTTP."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class DashboardApp:
    """Answers requests: those for files of the page to all that come this far, others to browsers with a key.

    Args:
        pages: gathers the answers.
        access: knows the browsers.
        session_dir: of the node of the job.
        allow_actions: whether actors may be killed and nodes removed.
    """

    def __init__(
        self, pages: JobPages | EndedJobPages, access: DashboardAccess, session_dir: str, allow_actions: bool
    ) -> None:
        self.pages = pages
        self.access = access
        self.session_dir = session_dir
        self.allow_actions = allow_actions
        self.cache = AnswerCache()
        questions = [Route(f"/api/{name}", partial(self._answer, answer)) for name, answer in QUESTIONS.items()]
        actions = [
            Route(f"/api/{name}", partial(self._answer, answer), methods=["POST"]) for name, answer in ACTIONS.items()
        ]
        enter = Route("/api/enter", self._enter, methods=["POST"])
        self._app = Starlette(
            routes=[*questions, *actions, enter, Mount("/", StaticFiles(directory=STATIC, html=True))]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, unless a page of another site asks or the name of the server is not this machine's."""
        if scope["type"] != "http":
            return  # no WebSocket, no lifespan
        headers = {name.decode("latin-1"): text.decode("latin-1") for name, text in scope["headers"]}
        host = headers.get("host", "")

        async def send_safe(message: Any) -> None:
            if message["type"] == "http.response.start":
                kept = [pair for pair in message["headers"] if pair[0].decode() not in _HEADERS]
                message["headers"] = kept + [(name.encode(), text.encode()) for name, text in _HEADERS.items()]
            await send(message)

        refusal = ""
        if not is_loopback_host(host):
            refusal = f"{host!r} is no name of this server; hint: http://localhost:PORT/"
        elif scope["path"].startswith("/api/") and not is_from_here(
            headers.get("sec-fetch-site", ""), headers.get("origin", ""), host
        ):
            refusal = "another site's page asks"
        app = _json({"error": refusal}, 403) if refusal else self._app
        await app(scope, receive, send_safe)

    async def gather(self, key: Any, gather: Callable[[], Any], fresh: float = _SLOW_FRESH) -> Any:
        """Return an answer of `pages` that is fresh enough."""
        return await self.cache.get(key, gather, fresh)

    async def _enter(self, request: Request) -> Response:
        key = self.access.enter(bearer(request.headers.get("authorization", "")))
        if key is None:
            return _json({"error": "this link was used, or is of another dashboard; a new one is in its terminal"}, 401)
        return _json({"key": key, "actions": self.allow_actions})

    async def _answer(self, answer: Answer, request: Request) -> Response:
        if not self.access.knows(bearer(request.headers.get("authorization", ""))):
            return _json({"error": "open the link that hpcray dashboard prints"}, 401)
        if ended := self._ended():
            return ended
        try:
            return _json(await answer(self, request))
        except RefusedError as error:
            return _json({"error": str(error)}, error.status)
        except (ValueError, KeyError) as error:
            return _json({"error": str(error)}, 400)
        except (ConnectionError, NoAnswerError, RayError) as error:
            return self._ended() or _json({"error": str(error)}, 503)

    def _ended(self) -> Response | None:
        """Return the answer to all questions once the job has ended."""
        ended = self.pages.ended
        return _json({"error": ended, "ended": True}, _GONE) if ended else None


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


# ---------------------------------------------------------------- questions


async def _overview(app: DashboardApp, request: Request) -> Any:
    use = await app.gather("overview", app.pages.overview, _FRESH)
    history = app.pages.history(float(request.query_params.get("since", 0)))
    return {**{name: use[name] for name in use if name not in ("rows", "buckets")}, "history": history}


async def _nodes(app: DashboardApp, request: Request) -> Any:
    use = await app.gather("overview", app.pages.overview, _FRESH)
    return table_page(use["rows"], TableQuery.parse(request.query_params))


async def _node(app: DashboardApp, request: Request) -> Any:
    index = int(request.query_params["node"])
    return await app.gather(("node", index), partial(app.pages.node, index), _FRESH)


async def _functions(app: DashboardApp, request: Request) -> Any:
    use = await app.gather("overview", app.pages.overview, _FRESH)
    return {**table_page(use["functions"], TableQuery.parse(request.query_params)), "partial": use["partial"]}


async def _function(app: DashboardApp, request: Request) -> Any:
    use = await app.gather("overview", app.pages.overview, _FRESH)
    name = request.query_params["name"]
    row = next((row for row in use["functions"] if row["name"] == name), None)
    if row is None:
        raise ValueError(f"there is no function {name!r}")
    return {**row, "times": app.pages.function(use["buckets"][name])}


async def _tasks(app: DashboardApp, request: Request) -> Any:
    given = request.query_params
    nodes = given.get("nodes", "")
    found = await app.gather(("tasks", nodes), partial(app.pages.tasks, nodes), 2 * _FRESH)
    states: dict[str, int] = {}
    for row in found["rows"]:
        states[row["state"]] = states.get(row["state"], 0) + 1
    return {**table_page(found["rows"], TableQuery.parse(given)), "note": found["note"], "states": states}


async def _actors(app: DashboardApp, request: Request) -> Any:
    found = await app.gather("actors", app.pages.actors, 2 * _FRESH)
    states: dict[str, int] = {}
    for row in found["rows"]:
        states[row["state"]] = states.get(row["state"], 0) + 1
    page = table_page(found["rows"], TableQuery.parse(request.query_params))
    page["rows"] = await _with_pids(app, page["rows"])
    return {**page, "note": found["note"], "states": states}


async def _with_pids(app: DashboardApp, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of actors, with the pids of those that live, which their nodes know."""
    nodes = tuple(sorted({row["node"] for row in rows if row["node"] is not None and not row["pid"]}))
    if not nodes:
        return rows
    pids = await app.gather(("pids", nodes), partial(app.pages.pids, nodes), _SLOW_FRESH)
    return [{**row, "pid": row["pid"] or pids.get(row["worker"])} for row in rows]


async def _objects(app: DashboardApp, request: Request) -> Any:
    given = request.query_params
    nodes = given.get("nodes", "")
    found = await app.gather(("objects", nodes), partial(app.pages.objects, nodes))
    return {**table_page(found["rows"], TableQuery.parse(given)), "sites": found["sites"][:200], "note": found["note"]}


async def _groups(app: DashboardApp, request: Request) -> Any:
    found = await app.gather("groups", app.pages.groups, 2 * _FRESH)
    return {**table_page(found["rows"], TableQuery.parse(request.query_params)), "note": ""}


async def _timeline(app: DashboardApp, request: Request) -> Any:
    given = request.query_params
    nodes = given.get("nodes", "")
    start, end = float(given.get("start", 0)), float(given.get("end", 0))
    width, rows = int(given.get("width", 1000)), int(given.get("rows", 32))
    offset = int(given.get("offset", 0))
    if not (1 <= width <= _MOST_PIXELS and 1 <= rows <= _MOST_LANES and offset >= 0 and (end > start or not end)):
        raise ValueError("this part of the timeline cannot be shown")
    key = ("timeline", nodes, start, end, width, offset, rows)
    return await app.gather(key, partial(app.pages.timeline, *key[1:]), _FRESH)


async def _stacks(app: DashboardApp, request: Request) -> Any:
    nodes, everything = request.query_params.get("nodes", ""), request.query_params.get("all") == "1"
    return await app.gather(("stacks", nodes, everything), partial(app.pages.stacks, nodes, everything), _FRESH)


async def _profile(app: DashboardApp, request: Request) -> Any:
    given = request.query_params
    nodes, seconds, memory = given.get("nodes", ""), float(given.get("seconds", 5)), given.get("memory") == "1"
    if not 0.1 <= seconds <= _LONGEST_PROFILE:
        raise ValueError(f"seconds={seconds:g}: at most {_LONGEST_PROFILE}")
    gather = partial(app.pages.profile, nodes, seconds, memory)
    return await app.cache.get(("profile", nodes, seconds, memory), gather, 0.0, more=seconds + 20)


async def _waits(app: DashboardApp, request: Request) -> Any:
    nodes = request.query_params.get("nodes", "")
    return await app.gather(("waits", nodes), partial(app.pages.waits, nodes), _SLOW_FRESH)


async def _log_files(app: DashboardApp, request: Request) -> Any:
    nodes = request.query_params.get("nodes", "")
    found = await app.gather(("files", nodes), partial(app.pages.log_files, nodes), 2 * _FRESH)
    rows, empty = fold_empty(found["rows"])
    note = ". ".join(filter(None, (found["note"], empty)))
    return {**table_page(rows, TableQuery.parse(request.query_params)), "note": note}


async def _log_piece(app: DashboardApp, request: Request) -> Any:
    given = request.query_params
    node, name, start = int(given["node"]), given["name"], int(given.get("start", -(64 << 10)))
    return await app.gather(("piece", node, name, start), partial(app.pages.log_piece, node, name, start), _FRESH)


async def _log_search(app: DashboardApp, request: Request) -> Any:
    given = request.query_params
    what = tuple(given.get(name, "") for name in ("nodes", "grep", "task", "actor"))
    return await app.gather(("search", *what), partial(app.pages.log_search, *what), 2 * _FRESH)


async def _slurm(app: DashboardApp, request: Request) -> Any:
    return await app.gather("slurm", app.pages.slurm, 15.0)


async def _about(app: DashboardApp, request: Request) -> Any:
    return {**await app.gather("about", app.pages.about, 60.0), "actions": app.allow_actions}


# ---------------------------------------------------------------- actions


async def _given(app: DashboardApp, request: Request) -> Mapping[str, Any]:
    """Return the parameters of an action.

    Raises:
        RefusedError: this dashboard is read-only.
    """
    if not app.allow_actions:
        raise RefusedError(403, "this dashboard is read-only; hint: hpcray dashboard --allow-actions")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MOST_BODY:
            raise RefusedError(413, "this is too long")
    try:
        given: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
    return given


async def _kill_actor(app: DashboardApp, request: Request) -> Any:
    actor = str((await _given(app, request))["actor"])
    if not re.fullmatch(r"[0-9a-f]{26}", actor):
        raise ValueError(f"{actor!r} is no id of an actor")
    said = await app.gather(("kill", actor), partial(app.pages.kill_actor, actor), 0.0)
    app.cache.forget("actors")
    return {"said": said}


async def _remove_node(app: DashboardApp, request: Request) -> Any:
    node = int((await _given(app, request))["node"])
    removing = partial(remove_nodes, [node], seconds=10.0, address=app.session_dir)
    await app.gather(("remove", node), removing, 0.0)
    app.cache.forget("overview")
    return {"said": f"node {node} has left"}


QUESTIONS: dict[str, Answer] = {
    "about": _about,
    "overview": _overview,
    "nodes": _nodes,
    "node": _node,
    "functions": _functions,
    "function": _function,
    "tasks": _tasks,
    "actors": _actors,
    "objects": _objects,
    "groups": _groups,
    "timeline": _timeline,
    "stacks": _stacks,
    "profile": _profile,
    "waits": _waits,
    "logs/files": _log_files,
    "logs/piece": _log_piece,
    "logs/search": _log_search,
    "slurm": _slurm,
}
ACTIONS: dict[str, Answer] = {"actions/kill-actor": _kill_actor, "actions/remove-node": _remove_node}
