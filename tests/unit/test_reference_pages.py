"""docs/reference is what docs/generate.py makes of the code, and the code gives each page all that belongs there."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from helpers.jobs import ROOT

sys.path.insert(0, str(ROOT / "docs"))

import generate

from hpcray.common.config import Config, LaunchConfig
from hpcray.protocol.messages import Message

MESSAGES = frozenset(kind.__name__ for kind in get_args(Message))
READ_WHERE_CONNECTIONS_BEGIN = {"Hello"}


def test_the_pages_are_those_that_the_code_gives_now() -> None:
    # In a process of its own: the stubs show what modules have, and a test may have imported more into one.
    done = subprocess.run([sys.executable, ROOT / "docs" / "generate.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_page_that_differs_or_is_missing_is_stale(tmp_path: Path) -> None:
    made = {tmp_path / name: name for name in ("same.md", "differs.md", "missing.md")}
    (tmp_path / "same.md").write_text("same.md")
    (tmp_path / "differs.md").write_text("other text")
    assert generate.stale(made) == [str(tmp_path / "differs.md"), str(tmp_path / "missing.md")]


def test_the_check_exits_with_an_error_that_names_the_stale_pages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(generate, "pages", lambda: {tmp_path / "missing.md": ""})
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    with pytest.raises(SystemExit, match=r"stale: .*missing\.md; run: python docs/generate\.py"):
        generate.main()


# ------------------------------------------------------------ stubs


def test_every_module_of_ray_has_a_stub_and_no_other_is_left() -> None:
    assert set(generate.STUBS.rglob("*.pyi")) == set(generate.stubs())


# ------------------------------------------------------------ settings


def test_every_setting_has_a_row_with_a_meaning() -> None:
    rows = [line.split(" | ") for line in generate.settings().splitlines() if line.startswith("| `HPCRAY_")]
    assert [row[0] for row in rows] == [
        f"| `HPCRAY_{name.upper()}`" for name in (*Config.__struct_fields__, *LaunchConfig.__struct_fields__)
    ]
    assert not [row[0] for row in rows if len(row[3].strip(" |")) < 10]


def test_the_meaning_of_a_setting_is_read_to_the_end_of_its_entry() -> None:
    text = "Times in seconds.\n\nAttributes:\n    one: first\n        and second line.\n    two: other.\n"
    assert generate.attributes(text) == {"one": "first and second line.", "two": "other."}


# ------------------------------------------------------------ protocol


def handlers_of(code: str, path: str = "core/gcs/x.py") -> list[tuple[str, str]]:
    return [(name, ".".join(names)) for name, names, _ in generate.handler_entries(ast.parse(code), MESSAGES)]


def test_every_message_has_a_handler() -> None:
    assert MESSAGES - generate.handlers(MESSAGES).keys() == READ_WHERE_CONNECTIONS_BEGIN


def test_handlers_name_methods_that_exist() -> None:
    found = [handler for handlers in generate.handlers(MESSAGES).values() for handler in handlers]
    assert not [
        str(handler)
        for handler in found
        if handler.name.rpartition(".")[2] not in (ROOT / "hpcray" / handler.path).read_text()
    ]
    assert len([handler for handler in found if handler.name[0].isupper()]) > 0.9 * len(found)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("HANDLERS = {m.Seal: Store.seal}", [("Seal", "Store.seal")]),
        ("TABLE: dict = {Seal: lambda p: p.store.on_seal}", [("Seal", "p.store.on_seal")]),
        ("t = {m.Seal: lambda p: lambda _, msg: p.store.on_seal(msg.id)}", [("Seal", "p.store.on_seal")]),
        ("t = {m.Seal: lambda src, msg: [Send(src, self.queries.reply(msg))]}", [("Seal", "self.queries.reply")]),
        ("self.handlers[m.Seal] = self._seal", [("Seal", "self._seal")]),
        ("h = dict.fromkeys((m.Seal, m.Free), self._store)", [("Seal", "self._store"), ("Free", "self._store")]),
        (
            "class A:\n    def handle(self): ...\nHANDLES = (m.Seal, m.Free)",
            [("Seal", "self.handle"), ("Free", "self.handle")],
        ),
        ("sizes = {'Seal': self.size}\nlimits[m.Seal] = self.limit", []),
    ],
)
def test_the_tables_of_handlers_are_found_in_any_form(code: str, expected: list[tuple[str, str]]) -> None:
    assert handlers_of(code) == expected


@pytest.mark.parametrize(
    ("docstring", "way", "meaning"),
    [
        ("p→own r: allocate `size` bytes.", "process → own raylet", "allocate `size` bytes."),
        ("r→p, r→r: a process is gone.", "raylet → process, raylet → raylet", "a process is gone."),
        ("g→every r→every p. All of them.", "GCS → every raylet → every process", "All of them."),
        ("owner→own r→the rs of `nodes`: gone.", "owner → own raylet → the raylets of `nodes`", "gone."),
        ("One row.", "", "One row."),
    ],
)
def test_the_arrow_of_a_docstring_is_spelled_out(docstring: str, way: str, meaning: str) -> None:
    assert generate.way_and_meaning(docstring) == (way, meaning)


# ------------------------------------------------------------ states


def test_messages_with_a_hint_are_found_in_any_form() -> None:
    code = """
def f(x):
    \'\'\'A docstring; hint: none.\'\'\'
    raise ValueError(f"{x!r} is no size, "
                     f"of {len(x)}; hint: write 2g")
    print("nothing is there yet. hint: wait a moment")
"""
    assert sorted(generate.message_texts(ast.parse(code))) == [
        "nothing is there yet. hint: wait a moment",
        "… is no size, of …; hint: write 2g",
    ]


def test_every_table_of_states_is_drawn() -> None:
    code = "".join(path.read_text() for path in (ROOT / "hpcray").rglob("*.py"))
    tables = [line for line in code.splitlines() if "TRANSITIONS:" in line or "TRANSITIONS = {" in line]
    page = generate.states()
    assert page.count("```mermaid") == len(tables) >= 8
    titles = [line for line in page.splitlines() if line.startswith("## ")]
    assert sorted(set(titles)) == sorted(titles), "give a table a docstring that begins with: States of a ..."


def test_a_table_of_states_is_drawn_with_its_first_and_last_states() -> None:
    code = "TRANSITIONS = {\n    # Open.\n    OPEN: (OPEN, SHUT),\n    _S.SHUT: frozenset(),\n}\n"
    code += "'States of a door. More.'\n"
    (found,) = generate.state_tables(generate.Module("core/x.py", code, ast.parse(code)))
    assert found.title == "Door" and found.meanings == {"OPEN": "Open.", "SHUT": ""}
    assert generate.diagram(found).splitlines()[2:-1] == [
        "    [*] --> OPEN",
        "    OPEN --> OPEN",
        "    OPEN --> SHUT",
        "    SHUT --> [*]",
    ]
