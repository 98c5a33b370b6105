"""The dashboard as an ASGI application: the page, and a route per question that it asks."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
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
from hpcray.dashboard.answer_cache import AnswerCache, NoAnswerError
from hpcray.dashboard.job_pages import JobPages
from hpcray.dashboard.table_pages import TableQuery, table_page
from hpcray.jobs.added_nodes import remove_nodes

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

    def __init__(self, pages: JobPages, access: DashboardAccess, session_dir: str, allow_actions: bool) -> None:
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
    return {**table_page(found["rows"], TableQuery.parse(request.query_params)), "note": found["note"]}


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
