"""The table of `hpcray`'s commands, from which `--help` is made without loading any of them; and `hpcray copy`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from helpers.jobs import ROOT

from hpcray.cli import JSON_HELP
from hpcray.cli.__main__ import GROUPS, WITHOUT_JSON, main
from hpcray.cli.launch import main as launch_main
from hpcray.cli.site import copy_shipped, shipped
from hpcray.diagnostics.metrics_endpoint import parse_samples

NAMES = [name for rows in GROUPS.values() for name in rows]
HEAVY = {"asyncio", "numpy", "rich", "textual", "hpcray.api", "hpcray.runtime"}
"""What no program needs that only says which commands there are."""


@pytest.mark.parametrize("name", NAMES)
def test_each_command_of_the_table_is_there_under_its_name(name: str) -> None:
    found = main.get_command(click.Context(main), name)
    assert found is not None and found.name == name
    text = next(rows[name][1] for rows in GROUPS.values() if name in rows)
    assert found.hidden == (not text), "what the help does not show is hidden"


def test_no_command_is_in_two_groups_and_none_is_cut_in_the_help() -> None:
    assert len(NAMES) == len(set(NAMES))
    shown = CliRunner().invoke(main, ["--help"], terminal_width=80).output
    for title in GROUPS:
        assert f"\n{title}:\n" in shown
    said = " ".join(shown.split())
    assert all(f" {name} {text}" in said for rows in GROUPS.values() for name, (_, text) in rows.items() if text)


def test_an_unknown_command_is_an_error() -> None:
    done = CliRunner().invoke(main, ["nosuch"])
    assert done.exit_code == 2 and "No such command 'nosuch'" in done.output


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"], ["--version"]], ids=" ".join)
@pytest.mark.parametrize("installed", [False, True])
def test_help_and_version_load_nothing_that_takes_time(tmp_path: Path, words: list[str], installed: bool) -> None:
    code = "import atexit, sys; atexit.register(lambda: print('LOADED', *sys.modules))\n"
    if installed:
        (tmp_path / "bin").mkdir()
        script = tmp_path / "bin" / "hpcray"
        script.write_text(f"{code}from hpcray.cli.__main__ import main\nmain()\n")
        command = [sys.executable, str(script), *words]
    else:
        (tmp_path / "sitecustomize.py").write_text(code)
        command = [sys.executable, "-m", "hpcray.cli", *words]
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ, check=False)
    loaded = set(done.stdout.partition("LOADED")[2].split())
    assert "click" in loaded, f"{done.stdout}\n{done.stderr}"
    assert not {name for name in loaded if name in HEAVY or name.startswith(("hpcray.api.", "hpcray.runtime."))}


def test_a_program_that_is_called_hpcray_has_all_names(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "hpcray"
    script.write_text("import hpcray\nprint(hpcray.remote.__name__)\n")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script), "status"], capture_output=True, text=True, env=environ, check=True
    )
    assert done.stdout == "remote\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nodes", "add", "-N", "0"], "0 is not in the range x>=1"),
        (["nodes", "remove"], "which nodes? hint: hpcray nodes remove n7, or --idle"),
    ],
    ids=" ".join,
)
def test_a_command_without_anything_to_do_is_an_error(words: list[str], said: str) -> None:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2 and said in " ".join(done.output.split())


# ------------------------------------------------------------ --json


def commands_of(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """All commands that do something, hidden ones too, with the words that call them."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands_of(command, (*path, name))
        if not isinstance(command, click.Group) or command.invoke_without_command:
            yield " ".join((*path, name)), command


def without_json(group: click.Group) -> set[str]:
    """The commands that have no option `--json` that says what is printed."""
    return {
        name
        for name, command in commands_of(group)
        if not any(
            isinstance(one, click.Option) and one.opts == ["--json"] and (one.help or "").startswith(JSON_HELP)
            for one in command.params
        )
    }


def test_every_command_has_json_or_a_reason() -> None:
    assert without_json(main) == WITHOUT_JSON.keys()
    assert all(reason for reason in WITHOUT_JSON.values())


def test_a_new_command_without_json_is_found() -> None:
    group = click.Group("new", commands={"one": click.Command("one"), "two": click.Group("two")})
    group.commands["two"].add_command(click.Command("three", params=[click.Option(["--json"], is_flag=True)]))  # type: ignore[attr-defined]
    assert without_json(group) == {"one", "two three"}


def test_the_documentation_has_one_table_of_what_each_command_prints() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    table = page.partition("## JSON")[2].partition("\n## ")[0]
    shown = {name for name, command in commands_of(main) if not command.hidden}
    assert {
        line.split("`")[1].removeprefix("hpcray ") for line in table.splitlines() if line.startswith("| `")
    } == shown


@pytest.mark.parametrize(
    "words",
    [
        ["version"], ["config", "show"], ["copy"], ["doctor", "--here"], ["jobs"], ["cancel", "nosuch"],
        ["jobs", "rm", "nosuch"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_with_json_standard_output_is_one_value(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)


def test_a_copy_says_its_files_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert json.loads(copy("digits", "--json")[1]) == {"directory": "digits", "files": ["digits/digits.py"]}


def test_samples_of_metrics_are_parsed() -> None:
    text = (
        '# HELP a_total things\n# TYPE a_total counter\na_total{node="0",what="x, \\"y\\" {1}"} 3.0\n'
        '# HELP b b\n# TYPE b histogram\nb_bucket{le="+Inf"} 2\nb_sum NaN\n'
    )
    assert parse_samples(text) == [
        {"name": "a_total", "type": "counter", "labels": {"node": "0", "what": 'x, "y" {1}'}, "value": 3.0},
        {"name": "b_bucket", "type": "histogram", "labels": {"le": "+Inf"}, "value": 2.0},
        {"name": "b_sum", "type": "histogram", "labels": {}, "value": None},
    ]


# ------------------------------------------------------------ copy


def copy(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(copy_shipped, words)
    return done.exit_code, done.output


def test_what_can_be_copied_is_listed_with_what_it_is() -> None:
    rows = json.loads(copy("--json")[1])
    assert {"digits", "gallery/ising", "slurm", "docs"} <= {row["name"] for row in rows}
    assert all(row["title"] for row in rows)
    shown = copy()[1]
    assert all(row["name"] in shown for row in rows)


def test_a_copy_holds_the_files_themselves_in_a_directory_that_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert copy("digits") == (0, "digits: 1 file\n")
    assert (tmp_path / "digits" / "digits.py").read_bytes() == (ROOT / "examples" / "digits.py").read_bytes()
    assert copy("gallery/sort", "a/b")[0] == 0
    assert {path.name for path in (tmp_path / "a" / "b").iterdir()} >= {"README.md", "sort.py"}
    assert copy("slurm")[0] == 0
    assert (tmp_path / "slurm" / "cpu.sbatch").exists() and not (tmp_path / "slurm" / "testcluster").exists()
    assert copy("docs")[0] == 0
    assert (tmp_path / "docs" / "how-to" / "hangs.md").exists() and not list((tmp_path / "docs").rglob("*.py"))


def test_a_copy_never_writes_over_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "gpu.sbatch").write_text("mine")
    code, text = copy("slurm")
    assert code == 1 and "slurm/gpu.sbatch exists already; hint: hpcray copy slurm DIR" in text
    assert [path.name for path in (tmp_path / "slurm").iterdir()] == ["gpu.sbatch"], "nothing else was copied either"
    (tmp_path / "digits").write_text("a file")
    assert copy("digits")[0] == 1


def test_an_unknown_name_is_an_error_with_a_hint() -> None:
    code, text = copy("nosuch")
    assert code == 1 and "hint: hpcray copy lists" in text


def test_each_example_is_shipped_under_its_name() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} <= shipped().keys()


def test_a_working_directory_that_was_removed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    done = CliRunner().invoke(main, ["jobs"])
    assert done.exit_code == 1 and "the working directory was removed; hint: cd" in done.output
    assert launch_main(["program.py"]) == 2 and "the working directory is gone" in capsys.readouterr().err
