"""Who may look at a dashboard: links that are good once, keys, names of the server, pages of other sites."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")

from helpers.asgi import Answered, request

from hpcray.dashboard.access import DashboardAccess, is_from_here, is_loopback_host
from hpcray.dashboard.app import ACTIONS, QUESTIONS, DashboardApp


class FakePages:
    """A job that answers with next to nothing."""

    def __init__(self) -> None:
        self.ended = ""
        self.killed: list[str] = []

    def about(self) -> dict[str, Any]:
        return {"job": "j1"}

    def kill_actor(self, actor: str) -> str:
        self.killed.append(actor)
        return "done"


class Dashboard:
    """An application, the links that it has announced, and requests to it."""

    def __init__(self, allow_actions: bool = False) -> None:
        self.links: list[str] = []
        self.pages = FakePages()
        access = DashboardAccess(self.links.append)
        self.app = DashboardApp(self.pages, access, "/s", allow_actions)  # type: ignore[arg-type]
        access.open()

    def ask(self, path: str, bearer: str = "", method: str = "GET", body: bytes = b"", **headers: str) -> Answered:
        given = {name.replace("_", "-"): text for name, text in headers.items()}
        given |= {"authorization": f"Bearer {bearer}"} if bearer else {}
        return request(self.app, path, given, method, body)

    def enter(self) -> str:
        key: str = self.ask("/api/enter", self.links[-1], "POST").json["key"]
        return key


@pytest.fixture
def board() -> Iterator[Dashboard]:
    made = Dashboard()
    yield made
    made.app.cache.close()


def test_a_link_is_good_for_one_browser_and_the_next_is_announced(board: Dashboard) -> None:
    (link,) = board.links
    first = board.enter()
    assert len(board.links) == 2 and board.links[1] != link
    assert board.ask("/api/enter", link, "POST").status == 401, "it was used"
    second = board.enter()
    assert board.ask("/api/about", first).json["job"] == board.ask("/api/about", second).json["job"] == "j1"


@pytest.mark.parametrize("name", [*QUESTIONS, *ACTIONS])
def test_nothing_is_answered_without_a_key(board: Dashboard, name: str) -> None:
    method = "POST" if name in ACTIONS else "GET"
    board.enter()
    for bearer in ("", "wrong", "ünicode", board.links[-1]):
        assert board.ask(f"/api/{name}", bearer.encode().decode("latin-1"), method).status == 401


@pytest.mark.parametrize(
    ("host", "good"),
    [
        ("localhost:8265", True), ("127.0.0.1:9", True), ("[::1]:80", True), ("LOCALHOST", True), ("[::1]", True),
        ("evil.example:8265", False), ("localhost.evil.example", False), ("", False), ("localhost:x", False),
        ("127.0.0.1.nip.io:8265", False), ("10.0.0.1:8265", False),
    ],
)  # fmt: skip
def test_only_names_of_loopback_are_answered(board: Dashboard, host: str, good: bool) -> None:
    assert is_loopback_host(host) == good
    key = board.enter()
    assert board.ask("/api/about", key, host=host).status == (200 if good else 403)
    assert board.ask("/", host=host).status == (200 if good else 403)


def test_pages_of_other_sites_are_refused(board: Dashboard) -> None:
    key = board.enter()
    assert board.ask("/api/about", key, sec_fetch_site="same-origin", origin="http://localhost:8265").status == 200
    assert board.ask("/api/about", key, sec_fetch_site="cross-site").status == 403
    assert board.ask("/api/about", key, sec_fetch_site="same-site").status == 403, "another port of localhost"
    assert board.ask("/api/about", key, origin="http://localhost:9999").status == 403
    assert board.ask("/api/enter", board.links[-1], "POST", origin="http://evil.example").status == 403
    assert not is_from_here("", "null", "localhost:1")


def test_the_page_has_a_strict_policy_and_names_no_other_server(board: Dashboard) -> None:
    answer = board.ask("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert answer.headers["referrer-policy"] == "no-referrer" and answer.headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in answer.headers
    text = answer.body.decode()
    assert "http://" not in text and "https://" not in text and "style=" not in text
    assert "<script>" not in text, "scripts are files"
    assert board.ask("/../app.py").status in (400, 404)
    assert board.ask("/js/main.js").status == 200


def test_actions_are_refused_unless_they_are_allowed(board: Dashboard) -> None:
    body = b'{"actor": "%s"}' % (b"0" * 26)
    refused = board.ask("/api/actions/kill-actor", board.enter(), "POST", body)
    assert refused.status == 403 and "--allow-actions" in refused.json["error"] and not board.pages.killed
    allowed = Dashboard(allow_actions=True)
    key = allowed.enter()
    assert allowed.ask("/api/actions/kill-actor", key).status == 404, "not by following a link"
    for wrong in (b"{", b"[]", b'{"actor": "x"}', b"{}"):
        assert allowed.ask("/api/actions/kill-actor", key, "POST", wrong).status == 400
    assert allowed.ask("/api/actions/kill-actor", key, "POST", b" " * 20_000).status == 413
    assert allowed.ask("/api/actions/kill-actor", key, "POST", body).json == {"said": "done"}
    assert allowed.pages.killed == ["0" * 26]
    allowed.app.cache.close()


def test_a_job_that_has_ended_is_said_to_have(board: Dashboard) -> None:
    key = board.enter()
    board.pages.ended = "the raylet is gone"
    answer = board.ask("/api/about", key)
    assert answer.status == 410 and answer.json == {"error": "the raylet is gone", "ended": True}
