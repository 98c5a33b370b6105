"""The recipes in packaging/: they agree with pyproject.toml, and each is checked by its own tool where that is here."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.jobs import ROOT

from hpcray import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGING = ROOT / "packaging"
SPACK = "spack/spack_repo/hpcray/packages/py_hpcray/package.py"
EASYCONFIG = f"easybuild/hpcray-{__version__}-foss-2024a.eb"
MODULE = f"lmod/hpcray/{__version__}.lua"
IN_BUNDLES = {"click", "cloudpickle", "numpy", "pathspec", "rich", "threadpoolctl"}
"""What EasyBuild's Python-bundle-PyPI and SciPy-bundle have."""
LMOD = Path("/usr/share/lmod/lmod/libexec/lmod")


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return found


def requirements(lines: list[str]) -> dict[str, str]:
    """Lowest versions by name; of "tomli>=2; python_version < '3.11'" too."""
    pairs = [re.fullmatch(r"([\w-]+)>=([\d.]+)(;.*)?", line) for line in lines]
    assert all(pairs), lines
    return {pair[1].lower(): pair[2] for pair in pairs if pair is not None}


def tool(name: str, hint: str = "pip install 'hpcray[packaging]'") -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}; hint: {hint}")
    return found


def check(*command: str | Path, **environ: str) -> str:
    line = [str(word) for word in command]
    done = subprocess.run(
        line, cwd=ROOT, env={**os.environ, **environ}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=110,
    )  # fmt: skip
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def make_recipes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_recipes", PACKAGING / "make_recipes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------ agreement


class SpackPackage:
    """The directives of the package, as Spack would be told them."""

    def __init__(self, path: Path) -> None:
        self.told: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        names = ("depends_on", "license", "variant", "version")
        scope: dict[str, Any] = {"PythonPackage": object}
        for name in names:
            scope[name] = lambda *args, _name=name, **options: self.told.append((_name, args, options))
        code = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("from "))
        exec(compile(code, str(path), "exec"), scope)
        self.package = scope["PyHpcray"]

    def dependencies(self, when: str | None, kind: str) -> dict[str, str]:
        found = {}
        for name, args, options in self.told:
            if name == "depends_on" and options.get("when") == when and kind in options["type"]:
                package, _, version = args[0].partition("@")
                found[package.removeprefix("py-")] = version.rstrip(":")
        return found


def test_the_extras_of_libraries_have_what_ray_train_refuses_to_be_imported_without() -> None:
    """Tune, Train, Serve and RLlib import `ray.train`, which wants pydantic; `ray[tune]` is hpcray[tune]."""
    extras = project()["project"]["optional-dependencies"]

    def names(extra: str) -> set[str]:
        found = set()
        for requirement in extras[extra]:
            inner = re.fullmatch(r"hpcray\[(.+)\]", requirement)
            found |= names(inner[1]) if inner else {re.match(r"[\w-]+", requirement)[0]}  # type: ignore[index]
        return found

    assert [extra for extra in ("tune", "train", "serve", "rllib") if "pydantic" not in names(extra)] == []


def test_the_spack_package_needs_what_the_project_needs() -> None:
    package = SpackPackage(PACKAGING / SPACK)
    needed = requirements(project()["project"]["dependencies"])
    only_old = {"tomli": needed.pop("tomli")}
    extras = project()["project"]["optional-dependencies"]
    mpi = requirements([extras["mpi"][0]])
    found = package.dependencies(None, "run")
    assert found.pop("mpi") == "" and found.pop("python") == project()["project"]["requires-python"].lstrip(">=")
    assert found == needed | mpi
    assert package.dependencies("^python@:3.10", "run") == only_old
    assert package.dependencies("+slurm", "run") == requirements(extras["slurm"])
    assert package.dependencies("+observe", "run") == requirements(extras["observe"])
    build = requirements(project()["build-system"]["requires"])
    assert package.dependencies(None, "build").items() >= build.items()


def test_the_conda_recipe_needs_what_the_project_needs() -> None:
    yaml = pytest.importorskip("yaml")
    recipe = yaml.safe_load((PACKAGING / "conda" / "recipe.yaml").read_text())
    needed = requirements(project()["project"]["dependencies"])
    found = dict(re.fullmatch(r"([\w_-]+)(?: >=([\d.]+))?", line).groups() for line in recipe["requirements"]["run"])  # type: ignore[union-attr]
    assert found.pop("__linux") is None
    assert found.pop("python") == project()["project"]["requires-python"].lstrip(">=")
    assert found.pop("mpi4py") == "4.0"
    assert {name.replace("_", "-"): version for name, version in found.items()} == needed
    scripts = [f"{name} = {target}" for name, target in project()["project"]["scripts"].items()]
    assert recipe["build"]["python"]["entry_points"] == scripts


def easyconfig() -> dict[str, Any]:
    tree = ast.parse((PACKAGING / EASYCONFIG).read_text())
    scope: dict[str, Any] = {}
    exec(compile(tree, EASYCONFIG, "exec"), scope)
    return scope


def test_the_easyconfig_brings_what_its_bundles_have_not() -> None:
    needed = set(requirements(project()["project"]["dependencies"])) - {"tomli"}  # its Python is newer
    brought = {name for name, *_ in easyconfig()["exts_list"]}
    assert brought == (needed - IN_BUNDLES) | {"hpcray"}


@pytest.mark.parametrize(
    "path", ["CITATION.cff", *(f"packaging/{name}" for name in (SPACK, EASYCONFIG, "conda/recipe.yaml"))]
)
def test_version_and_home_are_the_projects(path: str) -> None:
    text = (ROOT / path).read_text()
    assert __version__ in text
    assert project()["project"]["urls"]["Homepage"] in text


def test_the_changelog_has_this_version() -> None:
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_license_is_the_whole_apache_license() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "TERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION" in text and "END OF TERMS" in text


def test_recipes_of_a_release_have_its_checksum(tmp_path: Path, make_recipes: ModuleType) -> None:
    sdist = tmp_path / "hpcray-7.8.9.tar.gz"
    sdist.write_bytes(b"an sdist")
    made = make_recipes.make_recipes(sdist, tmp_path / "out")
    texts = {path.relative_to(tmp_path / "out").as_posix(): path.read_text() for path in made}
    assert {"easybuild/hpcray-7.8.9-foss-2024a.eb", "lmod/hpcray/7.8.9.lua"} < set(texts)
    checksum = hashlib.sha256(b"an sdist").hexdigest()
    assert sum(checksum in text for text in texts.values()) == 3
    assert not [name for name, text in texts.items() if make_recipes.UNKNOWN in text or __version__ in text]
    with pytest.raises(ValueError, match="no sdist of hpcray"):
        make_recipes.make_recipes(tmp_path / "other.zip", tmp_path / "out")


# ------------------------------------------------------------ their own tools


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ("citation-file-format", "CITATION.cff"),
        ("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/bug.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/idea.yml"),
        ("github-workflows", ".github/workflows/ci.yml"),
    ],
)
def test_a_file_for_others_has_their_schema(schema: str, path: str) -> None:
    check(tool("check-jsonschema"), "--builtin-schema", f"vendor.{schema}", ROOT / path)


def test_the_workflow_runs_the_whole_check_and_every_supported_python() -> None:
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    ran = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert ran["check"][-1] == "bash .ci/run" and os.access(ROOT / ".ci" / "run", os.R_OK)
    assert ran["pythons"][-1].startswith("pytest") and ran["packages"][-1] == "nox -s packages"
    names = [line.rpartition(" ")[2] for line in project()["project"]["classifiers"] if ":: 3." in line]
    assert {*jobs["pythons"]["strategy"]["matrix"]["python"], "3.11"} == set(names)  # Debian 12 has 3.11
    files = {path.name for path in (ROOT / ".github" / "ISSUE_TEMPLATE").iterdir()}
    assert files == {"bug.yml", "config.yml", "idea.yml"}


def test_the_modulefile_is_lua() -> None:
    check(tool("luac", "apt-get install lua5.4"), "-o", os.devnull, "-p", PACKAGING / MODULE)


def test_lmod_loads_the_module(tmp_path: Path) -> None:
    if not LMOD.exists():
        pytest.skip("no Lmod; hint: apt-get install lmod")
    modules, root = tmp_path / "modules", tmp_path / "hpcray"
    (modules / "hpcray").mkdir(parents=True)
    for name in ("python", "openmpi"):
        (modules / f"{name}.lua").write_text(f'setenv("LOADED_{name.upper()}", "1")\n')
    text = (PACKAGING / MODULE).read_text().replace('"/apps/hpcray"', f'"{tmp_path}/hpcray"')
    (modules / "hpcray" / f"{__version__}.lua").write_text(text)
    (root / __version__ / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    (root / __version__ / "etc").mkdir()
    (root / __version__ / "etc" / "hpcray.toml").write_text("")
    shell = f'eval "$({LMOD} bash load hpcray)"; env'
    clean = {"LMOD_CMD": "", "LOADEDMODULES": "", "_LMFILES_": "", "LMOD_SYSTEM_DEFAULT_MODULES": ""}
    found = check("bash", "-c", shell, MODULEPATH=str(modules), **clean).splitlines()
    assert {f"HPCRAY_ROOT={root / __version__}", "LOADED_PYTHON=1", "LOADED_OPENMPI=1"} <= set(found)
    assert f"HPCRAY_CONFIG={root / __version__}/etc/hpcray.toml" in found
    assert next(line for line in found if line.startswith("PATH=")).startswith(f"PATH={root / __version__}/bin:")
    packages = root / __version__ / "lib" / "python3.11" / "site-packages"
    assert next(line for line in found if line.startswith("PYTHONPATH=")).startswith(f"PYTHONPATH={packages}")
    (packages / "hpcray").symlink_to(ROOT / "hpcray")
    code = "import os; from hpcray.state.doctor import installation; print(installation(os.environ).way)"
    shell = f"eval \"$({LMOD} bash load hpcray)\"; cd /; '{sys.executable}' -c '{code}'"
    way = check("bash", "-c", shell, MODULEPATH=str(modules), **clean).strip()
    assert way.startswith(f"environment module hpcray/{__version__} at {root / __version__}"), way


def test_the_apptainer_definition_is_parsed_whole() -> None:
    pytest.importorskip("spython", reason="no spython; hint: pip install 'hpcray[packaging]'")
    from spython.main.parse.parsers import SingularityParser

    stages = SingularityParser(str(PACKAGING / "apptainer" / "hpcray.def")).parse()
    recipe = stages if not isinstance(stages, dict) else next(iter(stages.values()))
    assert recipe.fromHeader == "debian:bookworm-slim"
    assert any("mpi4py" in line for line in recipe.install)
    tested = [line for line in recipe.install if "/tests.sh" in line]  # spython's way to keep the section %test
    assert recipe.test.endswith("/tests.sh") and any("hpcray version" in line for line in tested)


def test_the_files_that_the_container_needs_exist() -> None:
    text = (PACKAGING / "apptainer" / "hpcray.def").read_text()
    section = text.partition("%files\n")[2].partition("\n\n")[0]
    for line in section.splitlines():
        assert (ROOT / line.split()[0]).exists()


@pytest.mark.slow
def test_easybuild_resolves_the_easyconfig_and_likes_its_style(tmp_path: Path) -> None:
    eb = Path(tool("eb", "pip install easybuild pycodestyle"))
    if not LMOD.exists():
        pytest.skip("no Lmod, which EasyBuild needs; hint: apt-get install lmod")
    python = eb.with_name("python3") if eb.with_name("python3").exists() else sys.executable
    line = [python, "-m", "easybuild.main", "--prefix", tmp_path]
    line += ["--allow-use-as-root-and-accept-consequences"] if os.geteuid() == 0 else []
    environ = {"LMOD_CMD": str(LMOD), "PATH": f"{eb.parent}{os.pathsep}{os.environ['PATH']}"}
    shown = check(*line, "--robot", "--dry-run-short", PACKAGING / EASYCONFIG, **environ)
    assert f"(module: hpcray/{__version__}-foss-2024a)" in shown and "mpi4py-4.0.1-gompi-2024a" in shown
    assert "All style checks PASSed" in check(*line, "--check-style", PACKAGING / EASYCONFIG, **environ)


def test_rattler_build_renders_the_conda_recipe() -> None:
    rattler = pytest.importorskip("rattler_build", reason="no py-rattler-build; hint: pip install 'hpcray[packaging]'")
    recipe = rattler.Stage0Recipe.from_file(str(PACKAGING / "conda" / "recipe.yaml"))
    (variant,) = recipe.render(rattler.VariantConfig(), rattler.RenderConfig())
    shown = str(variant)
    assert "hpcray" in shown and __version__ in shown


def test_hooks_are_valid() -> None:
    check(tool("pre-commit"), "validate-config", ROOT / ".pre-commit-config.yaml")
