"""The commands that people want: `nox -l`. Each session has an environment of its own; `-R` uses it again."""

from __future__ import annotations

import nox

nox.options.sessions = ["lint", "tests"]
nox.options.reuse_existing_virtualenvs = True
TORCH = "torch==2.13.0"


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff, mypy, import contracts, generated pages."""
    session.install("-e", ".[all,test]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", "--strict", "hpcray")
    session.run("lint-imports")
    session.run("python", "docs/generate.py", "--check")


@nox.session
def tests(session: nox.Session) -> None:
    """The tests that run by default, or those named after `--`."""
    session.install("-e", ".[all,test,examples]", TORCH)
    session.run("pytest", "-n", "3", *session.posargs)


@nox.session(python=["3.10", "3.12", "3.13"])
def pythons(session: nox.Session) -> None:
    """The tests that run by default, on the other versions of Python that are installed here; without PyTorch."""
    session.install(".[all,test,examples]")
    session.run("hpcray-launch", "-n", "4", "examples/digits.py")
    session.run("pytest", "-n", "3", *session.posargs)


@nox.session
def slow(session: nox.Session) -> None:
    """The tests that take minutes."""
    session.install("-e", ".[all,test,examples]", TORCH)
    session.run("pytest", "-n", "2", "-m", "slow", *session.posargs)


@nox.session
def slurm(session: nox.Session) -> None:
    """The tests that boot a Slurm of their own: as root, with Slurm's programs."""
    session.install("-e", ".[all,test,examples]")
    session.run("pytest", "-m", "slurm and not slow", "tests/slurm", *session.posargs)


@nox.session
def packages(session: nox.Session) -> None:
    """Wheel, sdist and recipes."""
    session.install("-e", ".[test,packaging]")
    session.run("pytest", "-m", "", "tests/packaging", *session.posargs)
