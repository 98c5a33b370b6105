"""The import contracts of pyproject.toml hold, and each is seen to be broken by an import that it is about."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers.house_figures import STRINGS
from helpers.house_laws import LAZY_TABLES, string_arrows
from helpers.jobs import ROOT
from helpers.source_laws import tree

pytest.importorskip("importlinter", reason="no import-linter; 2.16 and later need Python 3.11")

import grimp
from importlinter import api as importlinter
from importlinter.contracts.acyclic_siblings import AcyclicSiblingsContract
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.independence import IndependenceContract
from importlinter.contracts.layers import LayersContract
from importlinter.domain.contract import Contract

OPTIONS = importlinter.read_configuration(str(ROOT / "pyproject.toml"))
KINDS: dict[str, type[Contract]] = {
    kind.type_name: kind for kind in (LayersContract, IndependenceContract, ForbiddenContract, AcyclicSiblingsContract)
}


@cache
def graph() -> grimp.ImportGraph:
    """Every import of hpcray, those inside functions and under TYPE_CHECKING too."""
    return grimp.build_graph("hpcray", include_external_packages=True, cache_dir=None)


@cache
def contracts() -> dict[str, Contract]:
    return {
        given["id"]: KINDS[given["type"]](given["name"], OPTIONS["session_options"], given)
        for given in OPTIONS["contracts_options"]
    }


def kept(contract: str, *imports: tuple[str, str]) -> bool:
    """Whether the contract holds for hpcray with these imports added, each as (importer, imported)."""
    changed = copy.deepcopy(graph())
    for names in imports:
        for name in names:
            if name not in changed.modules:
                changed.add_module(name, is_squashed=not name.startswith("hpcray"))
        changed.add_import(importer=names[0], imported=names[1], line_number=1, line_contents="")
    return contracts()[contract].check(changed, verbose=False).kept


@pytest.mark.parametrize("contract", [given["id"] for given in OPTIONS["contracts_options"]])
def test_the_contract_holds(contract: str) -> None:
    assert kept(contract), f"run: lint-imports --contract {contract}"


def test_the_contracts_hold_with_the_modules_that_strings_name() -> None:
    arrows = [arrow for arrow in string_arrows(tree()) if arrow[0] not in LAZY_TABLES]
    arrows = [arrow for arrow in arrows if " -> ".join(arrow) not in STRINGS]
    assert [contract for contract in contracts() if not kept(contract, *arrows)] == []


@pytest.mark.parametrize(
    ("contract", "importer", "imported"),
    [
        ("layers", "hpcray.common.x", "hpcray.protocol.frames"),
        ("layers", "hpcray.core.x", "hpcray.platform.arena"),
        ("layers", "hpcray.core.x", "hpcray.transport.base"),
        ("layers", "hpcray.platform.x", "hpcray.runtime.core_worker.core_worker"),
        ("layers", "hpcray.api.x", "hpcray.launch.launch_line"),
        ("layers", "hpcray.protocol.x", "hpcray.runtime"),
        ("layers", "hpcray.runtime.core_worker.x", "hpcray"),
        ("layers", "hpcray.state.x", "hpcray.cli.observe"),
        ("layers", "hpcray.without_a_layer", "hpcray.common.ids"),
        ("layers", "hpcray.runtime.core_worker.x", "hpcray.tensors.x"),
        ("layers", "hpcray.runtime.worker.x", "hpcray.graphs.x"),
        ("layers", "hpcray.core.raylet.x", "hpcray.autoscaler.x"),
        ("layers", "hpcray.transport.x", "hpcray.diagnostics.x"),
        ("layers", "hpcray.platform.x", "hpcray.runtime_env.x"),
        ("layers", "hpcray.tensors.x", "hpcray.graphs.x"),
        ("layers", "hpcray.tensors.x", "hpcray.processes.x"),
        ("runtime-layers", "hpcray.runtime.core_worker.x", "hpcray.runtime.worker.x"),
        ("runtime-layers", "hpcray.runtime.worker.x", "hpcray.runtime.node.x"),
        ("runtime-layers", "hpcray.runtime.without_a_room", "hpcray.common.ids"),
        ("runtime-independence", "hpcray.runtime.worker.x", "hpcray.runtime.raylet.x"),
        ("runtime-independence", "hpcray.runtime.raylet.x", "hpcray.runtime.worker.x"),
        ("raylet-process", "hpcray.runtime.raylet.x", "hpcray.runtime.core_worker.x"),
        ("core-independence", "hpcray.core.gcs.x", "hpcray.core.raylet.x"),
        ("core-independence", "hpcray.core.object_store.x", "hpcray.core.core_worker.x"),
        ("core-independence", "hpcray.core.without_a_place", "hpcray.common.ids"),
        ("purity", "hpcray.core.x", "time"),
        ("purity", "hpcray.core.gcs.x", "os"),
        ("purity", "hpcray.core.gcs.x", "random"),
        ("purity", "hpcray.tensors.tensor_pulls", "threading"),
        ("purity", "hpcray.diagnostics.record_replay", "time"),
    ],
)
def test_an_import_upwards_or_sideways_breaks_the_contract(contract: str, importer: str, imported: str) -> None:
    assert not kept(contract, (importer, imported))


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("hpcray.runtime.node.x", "hpcray.core.raylet"),
        ("hpcray.runtime.node.x", "hpcray.common.ids"),
        ("hpcray.runtime.node.x", "hpcray.runtime.raylet.x"),
        ("hpcray.util.x", "hpcray.platform.sockets"),
        ("hpcray.core.gcs.x", "hpcrayish"),
    ],
)
def test_an_import_downwards_breaks_no_contract(importer: str, imported: str) -> None:
    assert all(kept(contract, (importer, imported)) for contract in contracts())


def test_a_core_that_reaches_a_thread_over_three_imports_breaks_purity() -> None:
    chain = ["hpcray.core.gcs.x", "hpcray.protocol.x", "hpcray.common.x", "threading"]
    assert not kept("purity", *pairwise(chain))


def test_two_modules_that_import_each_other_break_the_contract_on_cycles() -> None:
    first, second = "hpcray.core.gcs.first", "hpcray.core.gcs.second"
    assert kept("acyclic", (first, second))
    assert not kept("acyclic", (first, second), (second, first))


def test_two_packages_that_import_each_other_break_the_contract_on_cycles() -> None:
    there, back = ("hpcray.util.dask.x", "hpcray.util.joblib.x"), ("hpcray.util.joblib.y", "hpcray.util.dask.y")
    assert kept("acyclic", there)
    assert not kept("acyclic", there, back)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    made = tmp_path / "made_up_package"
    made.mkdir()
    (made / "__init__.py").touch()
    (made / "used.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    yield made
    sys.modules.pop(made.name, None)


@pytest.mark.parametrize(
    "code",
    [
        "from made_up_package import used",
        "from . import used",
        "def function():\n    from made_up_package.used import name",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from made_up_package.used import name",
    ],
)
def test_an_import_counts_wherever_it_stands(package: Path, code: str) -> None:
    (package / "user.py").write_text(code)
    made: Any = grimp.build_graph(package.name, cache_dir=None)
    assert made.find_modules_directly_imported_by("made_up_package.user") == {"made_up_package.used"}
