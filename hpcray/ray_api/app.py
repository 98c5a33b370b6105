"""The routes of Ray's REST API for jobs, answered by the client that hpcray's own commands use, and the packages that
clients upload."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import fields
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from hpcray.common.exceptions import RayError
from hpcray.common.ray_version import RAY_VERSION
from hpcray.job_submission import JobDetails, JobSubmissionClient
from hpcray.job_submission.job_submission_client import JobSubmitRequest
from hpcray.platform.private_files import make_private_directory
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.state.cluster_status import ClusterStatus, ProcessAsker, cluster_status, show_status, usage_of

_MOST_BODY = 16 << 20
"""Bytes of a request that is no package: a runtime_env may hold much."""
_FIELDS = frozenset(field.name for field in fields(JobSubmitRequest))
_REFUSAL = "Request failed with status code "
"""Beginning of errors of the client; the code follows."""
_ABNORMAL = 1011
"""WebSocket's code for an error of the server."""

Handler = Callable[[Request], Awaitable[Response]]


class _RefusedError(Exception):
    """A request that is not carried out. status: of HTTP."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class RayApi:
    """Answers the requests of Ray's clients.

    Args:
        process: it is in the cluster. client: of that cluster. packages: that clients upload.
        session: name of the cluster's session.

    Attributes:
        app: the ASGI application.
    """

    def __init__(
        self, process: CoreWorker, client: JobSubmissionClient, packages: UploadedPackages, session: str
    ) -> None:
        self._process = process
        self._client = client
        self._packages = packages
        self._session = session
        routes: list[tuple[str, str, Handler]] = [
            ("GET", "/api/version", self._version),
            ("GET", "/api/gcs_healthz", self._health),
            ("GET", "/api/cluster_status", self._cluster_status),
            ("GET", "/api/packages/{protocol}/{name}", self._has_package),
            ("PUT", "/api/packages/{protocol}/{name}", self._take_package),
            ("POST", "/api/jobs", self._submit),
            ("GET", "/api/jobs", self._list),
            ("GET", "/api/jobs/{job}", self._job),
            ("DELETE", "/api/jobs/{job}", self._delete),
            ("POST", "/api/jobs/{job}/stop", self._stop),
            ("GET", "/api/jobs/{job}/logs", self._logs),
        ]
        # Ray's clients write a slash behind the collection; people who call it by hand do not.
        routes += [(method, f"{path}/", handler) for method, path, handler in routes if path == "/api/jobs"]
        self.app = Starlette(
            routes=[
                *(Route(path, _answers(handler), methods=[method]) for method, path, handler in routes),
                WebSocketRoute("/api/jobs/{job}/logs/tail", self._tail),
            ]
        )
        self.app.router.redirect_slashes = False

    async def _version(self, request: Request) -> Response:
        version = await asyncio.to_thread(self._client.get_version)
        return JSONResponse(
            {"version": version, "ray_version": RAY_VERSION, "ray_commit": "hpcray", "session_name": self._session}
        )

    async def _health(self, request: Request) -> Response:
        await asyncio.to_thread(self._process.gcs.call, "cluster_resources")
        return PlainTextResponse("success")

    async def _cluster_status(self, request: Request) -> Response:
        status = await asyncio.to_thread(cluster_status, ProcessAsker(self._process))
        if request.query_params.get("format") == "1":
            return _told("Got formatted cluster status.", clusterStatus=show_status(status))
        return _told(
            "Got cluster status.",
            autoscalingStatus=None,
            autoscalingError=None,
            clusterStatus=_reports(status),
        )

    async def _has_package(self, request: Request) -> Response:
        protocol, name = request.path_params["protocol"], request.path_params["name"]
        if not self._packages.has(protocol, name):
            raise _RefusedError(404, f"Package {protocol}://{name} does not exist")
        return Response()

    async def _take_package(self, request: Request) -> Response:
        protocol, name = request.path_params["protocol"], request.path_params["name"]
        try:
            await self._packages.take(protocol, name, request.stream())
        except PackageTooLargeError as error:
            raise _RefusedError(413, str(error)) from None
        return Response()

    async def _submit(self, request: Request) -> Response:
        given = await _json_body(request)
        if "job_id" in given and not given.get("submission_id"):
            given["submission_id"] = given["job_id"]
        given.pop("job_id", None)
        if unknown := given.keys() - _FIELDS:
            raise TypeError(f"unknown fields: {', '.join(sorted(unknown))}; hint: {', '.join(sorted(_FIELDS))}")
        if "entrypoint" not in given:
            raise TypeError("entrypoint is missing")
        checked = JobSubmitRequest(**given)
        given["runtime_env"] = self._packages.local(checked.runtime_env)
        ident = await asyncio.to_thread(partial(self._client.submit_job, **given))
        return JSONResponse({"job_id": ident, "submission_id": ident})

    async def _list(self, request: Request) -> Response:
        rows = await asyncio.to_thread(self._client.list_jobs)
        return JSONResponse([_row(job) for job in rows])

    async def _job(self, request: Request) -> Response:
        return JSONResponse(_row(await self._of(request, self._client.get_job_info)))

    async def _delete(self, request: Request) -> Response:
        return JSONResponse({"deleted": await self._of(request, self._client.delete_job)})

    async def _stop(self, request: Request) -> Response:
        return JSONResponse({"stopped": await self._of(request, self._client.stop_job)})

    async def _logs(self, request: Request) -> Response:
        return JSONResponse({"logs": await self._of(request, self._client.get_job_logs)})

    async def _of(self, request: Request, ask: Callable[[str], Any]) -> Any:
        return await asyncio.to_thread(ask, request.path_params["job"])

    async def _tail(self, socket: WebSocket) -> None:
        """Send what a job prints until it has ended."""
        job = socket.path_params["job"]
        try:
            await asyncio.to_thread(self._client.get_job_info, job)
        except (RuntimeError, ConnectionError, RayError) as error:
            await socket.send_denial_response(_failure(error))
            return
        await socket.accept()
        gone = asyncio.create_task(_until_gone(socket))
        sending = asyncio.create_task(self._send_log(socket, job))
        try:
            await asyncio.wait({gone, sending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (gone, sending):
                task.cancel()
            await asyncio.gather(gone, sending, return_exceptions=True)

    async def _send_log(self, socket: WebSocket, job: str) -> None:
        try:
            async for text in self._client.tail_job_logs(job):
                await socket.send_text(text)
        except WebSocketDisconnect:
            return
        except (RuntimeError, ConnectionError, RayError) as error:
            await socket.close(_ABNORMAL, str(error)[:100])
            return
        await socket.close()


def _answers(handler: Handler) -> Handler:
    """The handler, with its errors as answers in the form in which Ray gives them."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except _RefusedError as error:
            return PlainTextResponse(str(error), error.status)
        except (TypeError, ValueError) as error:
            return PlainTextResponse(f"{type(error).__name__}: {error}", 400)
        except (RuntimeError, ConnectionError, RayError, OSError) as error:
            return _failure(error)

    return answer


def _failure(error: Exception) -> Response:
    """The answer for an error of the client, which may say itself what a server would have answered."""
    code, _, text = str(error).removeprefix(_REFUSAL).partition(": ")
    if str(error).startswith(_REFUSAL) and code.isdecimal():
        return PlainTextResponse(text.removesuffix("."), int(code))
    return PlainTextResponse(f"{type(error).__name__}: {error}", 500)


async def _json_body(request: Request) -> dict[str, Any]:
    """The JSON object in the body, without fields that are null."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MOST_BODY:
            raise _RefusedError(413, f"the request is larger than {_MOST_BODY >> 20} MiB")
    try:
        given = json.loads(body)
    except ValueError as error:
        raise ValueError(f"the body is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise TypeError(f"the body must be a JSON object, got {type(given).__name__}")
    return {name: value for name, value in given.items() if value is not None}


async def _until_gone(socket: WebSocket) -> None:
    """Return when the client has left. What it says meanwhile is ignored."""
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass


def _row(job: JobDetails) -> dict[str, Any]:
    """A job as JSON; numbers and texts alone."""
    row = job.dict()
    row["type"], row["status"] = job.type.value, job.status.value
    if row["error_type"] is not None:
        row["error_type"] = getattr(job.error_type, "value", str(job.error_type))
    return row


def _told(text: str, **data: Any) -> Response:
    """An answer of Ray's dashboard."""
    return JSONResponse({"result": True, "msg": text, "data": data})


def _reports(status: ClusterStatus) -> dict[str, Any]:
    """The state of the cluster in the form of Ray's two reports."""
    scaling = status.autoscaler
    usage = {name: [used, total] for name, (used, total, _, _) in usage_of(status.nodes).items()}
    by_node = {
        node.node_id: {name: [used, total] for name, (used, total, _, _) in usage_of([node]).items()}
        for node in status.nodes
    }
    active: dict[str, int] = {}
    for node in status.nodes:
        active[node.type_name] = active.get(node.type_name, 0) + 1
    return {
        "time": status.when,
        "gcsRequestTime": status.took,
        "loadMetricsReport": {
            "usage": usage,
            "usageByNode": by_node,
            "resourceDemand": [[dict(bundle), count] for bundle, (count, _) in status.tasks.items()],
            "pgDemand": [
                [{"strategy": strategy, "bundles": [[dict(bundle), 1] for bundle in bundles]}, 1]
                for bundles, strategy in status.groups
            ],
            "requestDemand": scaling["requested"] if scaling is not None else [],
        },
        "autoscalerReport": {
            "activeNodes": active,
            "idleNodes": None,
            "pendingNodes": [
                [row["instance"], row["type"], row["state"]] for row in (scaling["pending"] if scaling else [])
            ],
            "pendingLaunches": {},
            "failedNodes": [],
        },
    }


# ------------------------------------------------------------ packages
# Packages that clients upload before the job that needs them: directories of code, as zip files.

LARGEST = 512 << 20
"""Bytes of one package, as in Ray."""
_MOST = 4 * LARGEST
"""Bytes of all packages; those that were used last stay."""

_PROTOCOL = "gcs"
_SCHEME = f"{_PROTOCOL}://"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}\.(?:zip|whl|tar\.gz|tgz|jar)")
_PATHS = ("working_dir", "py_modules")


class PackageTooLargeError(ValueError):
    """A package is larger than one may be."""


class UploadedPackages:
    """The packages of one server, in files of their own.

    Args:
        directory: that may be made, and is removed by `close`.
        largest: bytes of one package. most: bytes of all.
    """

    def __init__(self, directory: str, largest: int = LARGEST, most: int = _MOST) -> None:
        self._directory = directory
        self._largest, self._most = largest, most
        make_private_directory(directory)

    def path_of(self, protocol: str, name: str) -> str:
        """Return where a package lies, or would.

        Raises:
            ValueError: this is no name of a package.
        """
        if protocol != _PROTOCOL or not _NAME.fullmatch(name):
            raise ValueError(f"{protocol}://{name} is no package of this cluster; hint: gcs://_ray_pkg_HASH.zip")
        return os.path.join(self._directory, name)

    def has(self, protocol: str, name: str) -> bool:
        """Return True if a package is here; it is kept before others then."""
        path = self.path_of(protocol, name)
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
            return True
        return False

    async def take(self, protocol: str, name: str, pieces: AsyncIterator[bytes]) -> None:
        """Keep a package that comes in pieces. Others see it whole or not at all.

        Raises:
            ValueError: this is no name of a package. PackageTooLargeError: it is too large. OSError: the disk is full.
        """
        path, size = self.path_of(protocol, name), 0
        fd, fresh = tempfile.mkstemp(dir=self._directory, suffix=".new")
        try:
            with open(fd, "wb") as file:
                async for piece in pieces:
                    size += len(piece)
                    if size > self._largest:
                        raise PackageTooLargeError(
                            f"{name} is larger than {self._largest >> 20} MiB; hint: `excludes` of the runtime_env, or "
                            "a path that all nodes see"
                        )
                    file.write(piece)
            os.replace(fresh, path)
        except BaseException:
            os.unlink(fresh)
            raise
        self._make_room(path)

    def local(self, runtime_env: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return a runtime_env with the paths of packages that were uploaded instead of their URIs.

        Raises:
            ValueError: a package that it names is not here.
        """
        found = dict(runtime_env or {})
        for field in _PATHS:
            if isinstance(found.get(field), str):
                found[field] = self._local(found[field])
            elif isinstance(found.get(field), list):
                found[field] = [self._local(uri) if isinstance(uri, str) else uri for uri in found[field]]
        return found if runtime_env is not None else None

    def close(self) -> None:
        """Remove all of them."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _local(self, uri: str) -> str:
        if not uri.startswith(_SCHEME):
            return uri
        name = uri.removeprefix(_SCHEME)
        if not self.has(_PROTOCOL, name):
            raise ValueError(f"the package {uri} is not here; hint: upload it by PUT /api/packages/gcs/{name} first")
        return self.path_of(_PROTOCOL, name)

    def _make_room(self, kept: str) -> None:
        """Remove those that were used longest ago, while all are too large together."""
        files = [entry for entry in os.scandir(self._directory) if _NAME.fullmatch(entry.name)]
        states = sorted((entry.stat().st_mtime, entry.stat().st_size, entry.path) for entry in files)
        total = sum(size for _, size, _ in states)
        for _, size, path in states:
            if total <= self._most:
                return
            if path != kept:
                os.unlink(path)
                total -= size
