"""`hpcray doctor`, `config`, `copy` and `version`: the platform, the settings of a site, and what is installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from msgspec import structs

from hpcray.cli import json_option, print_json
from hpcray.cli.job_option import errors_as_messages
from hpcray.common.config import SIZES, Config, format_setting
from hpcray.common.terminal_text import plain
from hpcray.launch.launch_line import SrunSite, compose_step, has_mpich, protocol, try_srun
from hpcray.platform.allocation import compress_nodes, read_allocation
from hpcray.platform.config_files import config_files, file_settings, setting_sources
from hpcray.platform.private_files import PrivateDirectory, UntrustedPathError, exposed_directory, open_private_file
from hpcray.platform.process_control import module_line
from hpcray.state.doctor import FAIL, NOTE, OK, WARN, DoctorFinding, DoctorRow, examine, merge, package_version
from hpcray.state.doctor_step import examine_job, examine_nodes, judge_clocks
from hpcray.state.reports import print_table

_MARKS = {OK: ("ok", "green"), NOTE: ("", ""), WARN: ("warn", "yellow"), FAIL: ("FAIL", "red")}


@click.command()
@json_option("an object: the version")
def version(as_json: bool) -> None:
    """Print the version."""
    text = package_version("hpcray", "a source directory, not installed")
    if as_json:
        print_json({"version": text})
    else:
        click.echo(text)


@click.command()
@click.option("--require-rdma", is_flag=True, help="Fail unless object bytes would go over RDMA.")
@json_option("a list of findings")
@click.option("--here", is_flag=True, help="Examine this host only, in an allocation too.")
def doctor(require_rdma: bool, as_json: bool, here: bool) -> None:
    """Examine the platform of a job: this host, or in a Slurm allocation every node of it.

    Exit code 1 if a finding is red: a job on several nodes could not start.
    """
    given = read_allocation()
    if given.in_step and given.rank:
        return  # srun hpcray doctor: the task of rank 0 examines all nodes
    rows = [DoctorRow(finding) for finding in examine(require_rdma)] if here or given.kind != "slurm" else []
    rows = rows or _examine_allocation(require_rdma)
    if as_json:
        print_json([{**asdict(row.finding), "nodes": row.nodes} for row in rows])
    else:
        _print_findings(rows, len(given.nodes))
    if any(row.finding.level == FAIL for row in rows):
        sys.exit(1)


def _examine_allocation(require_rdma: bool) -> list[DoctorRow]:
    """The rows about the job, then those about its nodes."""
    given = read_allocation()
    mpi = protocol(os.environ, has_mpich())
    slurm = SrunSite(given, os.environ, mpi, try_srun(mpi, os.environ))
    command = module_line("hpcray.state.doctor_step")
    command += ["--require-rdma"] if require_rdma else []
    command += ["--without-mpi"] if slurm.problem else []
    nodes = examine_nodes(compose_step(slurm, command), given.nodes)
    job = examine_job(given, mpi, slurm.problem, os.environ)
    if nodes.missing:
        why = nodes.complaint.splitlines()[0] if nodes.complaint else "no answer in time"
        hint = "is the directory of this Python on every node? Else see the site's log of the node"
        job.append(
            DoctorFinding("Slurm", "nodes without a report", f"{compress_nodes(nodes.missing)}: {why}", FAIL, hint)
        )
    return [*map(DoctorRow, job), DoctorRow(judge_clocks(nodes.offsets)), *merge(nodes.reports)]


def _print_findings(rows: list[DoctorRow], nodes: int) -> None:
    topic = ""
    for row in rows:
        finding = row.finding
        if finding.topic != topic:
            topic = finding.topic
            click.secho(topic, bold=True)
        mark, colour = _MARKS[finding.level]
        where = f"{compress_nodes(row.nodes)}: " if 0 < len(row.nodes) < nodes else ""
        click.echo(f"  {click.style(f'{mark:<4}', fg=colour or None)} {finding.name:<18} {where}{plain(finding.value)}")
        if finding.hint:
            click.echo(f"       {'':<18} hint: {plain(finding.hint)}")
    red = sum(row.finding.level == FAIL for row in rows)
    yellow = sum(row.finding.level == WARN for row in rows)
    click.echo(f"{red} red, {yellow} yellow")


# ------------------------------------------------------------ config
# `hpcray config show`: the settings that a job started here would have, and where each of them comes from.


@click.group()
def config() -> None:
    """Settings of the site, the user and the environment."""


@config.command()
@click.option("--changed", is_flag=True, help="Only settings that are not the default.")
@click.option("-p", "--partition", help="As a job in this partition has them.")
@json_option("a list of settings: name, value, source")
def show(changed: bool, partition: str | None, as_json: bool) -> None:
    """Print the settings that a job started here would have, each with its source.

    A source is a line of a configuration file, a variable of the environment, or the default. Options of commands and
    arguments of `init` come before all of them.
    """
    with errors_as_messages(ValueError):
        found = setting_sources(os.environ, partition)
        files = config_files(os.environ)
        partitions = sorted({row.partition for row in file_settings(os.environ)} - {""})
    shown = [row for row in found if not changed or row.source != "default"]
    if as_json:
        print_json([structs.asdict(row) for row in shown])
        return
    cells = [
        (row.name, format_setting(row.value) if row.name in SIZES else _shown(row.value), row.source) for row in shown
    ]
    print_table(("name", "value", "source"), cells)
    for text in Config.unknown_variables(os.environ):
        click.echo(f"warning: {text}", err=True)
    for path, named in files:
        state = "" if os.path.exists(path) else " (there is none)"
        click.echo(f"file: {path}{f', of ${named}' if named else ''}{state}")
    if partitions:
        click.echo(f"partitions with settings of their own: {', '.join(partitions)}; hint: --partition NAME")


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else str(value)


# ------------------------------------------------------------ copy
# Examples, templates of batch scripts and the documentation, as they stand beside the package in a clone, and in the
# package of a wheel.

_PACKAGE = Path(__file__).resolve().parent.parent
_LEFT_OUT = ("testcluster", "__pycache__")
_TITLE = re.compile(r'^(?:#(?!!) *|"""|<h1[^>]*>)(.+?)(?:\.?(?:"""|</h1>)?)$')


@click.command(name="copy")
@click.argument("name", required=False)
@click.argument("directory", metavar="[DIR]", required=False, type=click.Path(file_okay=False, path_type=Path))
@json_option("a list of what there is; with NAME an object: the directory and its files")
def copy_shipped(name: str | None, directory: Path | None, as_json: bool) -> None:
    """Copy an example, the templates of batch scripts (slurm) or the documentation (docs) to DIR, which is made.

    DIR is ./NAME unless it is given, and holds the files of NAME themselves. Without NAME: list what there is. A file
    that exists already is never written over. Exit code: 1 where there is no such name, or a file is in the way.
    """
    found = shipped()
    if name is None:
        rows = [(known, _title(path)) for known, path in found.items()]
        if as_json:
            print_json([{"name": known, "title": title} for known, title in rows])
        else:
            print_table(("name", "what it is"), rows)
        return
    source = found.get(name)
    if source is None:
        raise click.ClickException(f"there is no {plain(name)} to copy; hint: hpcray copy lists what there is")
    target = directory if directory is not None else Path(name.rpartition("/")[2])
    files = {path: target / path.relative_to(source if source.is_dir() else source.parent) for path in _files(source)}
    if taken := next((path for path in files.values() if os.path.lexists(path)), None):
        raise click.ClickException(f"{taken} exists already; hint: hpcray copy {name} DIR")
    with errors_as_messages(OSError):
        target.mkdir(parents=True, exist_ok=True)
        _need_own(target)
        for path, new in files.items():
            new.parent.mkdir(parents=True, exist_ok=True)
            fd = open_private_file(str(new), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            with open(path, "rb") as shipped_file, os.fdopen(fd, "wb") as copy:
                shutil.copyfileobj(shipped_file, copy)
                os.fchmod(fd, stat.S_IMODE(os.fstat(shipped_file.fileno()).st_mode))
    if as_json:
        print_json({"directory": str(target), "files": [str(new) for new in files.values()]})
    else:
        click.echo(f"{target}: {len(files)} file{'s' if len(files) > 1 else ''}")


def shipped() -> dict[str, Path]:
    """Return what can be copied, by name: files and directories of this installation."""
    root = _PACKAGE / "shipped"
    root = root if root.is_dir() else _PACKAGE.parent
    examples, gallery = root / "examples", root / "examples" / "gallery"
    found = {path.stem: path for path in sorted(examples.glob("*.py"))}
    found |= {f"gallery/{path.name}": path for path in sorted(gallery.glob("*/")) if (path / "README.md").exists()}
    found |= {name: root / name for name in ("slurm", "docs") if (root / name).is_dir()}
    return found


def _files(source: Path) -> Iterator[Path]:
    if not source.is_dir():
        yield source
        return
    for path in sorted(source.rglob("*")):
        left_out = {*path.relative_to(source).parts} & {*_LEFT_OUT} or (source.name == "docs" and path.suffix == ".py")
        if path.is_file() and not left_out:
            yield path


def _need_own(target: Path) -> None:
    """Raise UntrustedPathError where another user could exchange the programs and batch scripts that are copied: the
    directory is theirs, or a link of theirs leads to it."""
    try:
        PrivateDirectory.open(str(target), make=False).close()
    except UntrustedPathError:
        if exposed_directory(str(target)) is not None:  # else it is as /tmp is
            raise


def _title(path: Path) -> str:
    """Return the first line of a file or of a directory's README that says what it is."""
    if path.name == "slurm":
        return "Templates of batch scripts"
    with open(path / "README.md" if path.is_dir() else path, encoding="utf-8") as file:
        titles = (match[1] for line in file if (match := _TITLE.match(line.strip())))
        return next(titles, "")
