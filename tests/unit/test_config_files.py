"""Configuration files of the site and the user: their order, what they may hold, and what is said of a wrong one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.documents import blocks

from hpcray.autoscaler.node_provider import JobNodeProvider
from hpcray.common import config as config_module
from hpcray.common.config import Config, LaunchConfig
from hpcray.common.exceptions import SubmitError
from hpcray.core.gcs.node_types import NodeType
from hpcray.jobs import submission
from hpcray.jobs.submission import JobRequest, check_request, with_configured_place
from hpcray.jobs.submitted_job import jobs_folder
from hpcray.launch.launch_line import LaunchOptions, with_configured_launcher
from hpcray.platform import config_files
from hpcray.platform.config_files import (
    ConfigFileError,
    configured_environment,
    launch_config,
    node_config,
    setting_sources,
)
from hpcray.platform.session_directory import session_root
from hpcray.platform.spill_files import tmp_directories
from hpcray.runtime.node.options import NodeOptions

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the places of all files; the environment of the process names them."""
    monkeypatch.setattr(config_files, "SYSTEM_FILE", str(tmp_path / "system.toml"))
    for name in [name for name in os.environ if name.startswith(("HPCRAY_", "SLURM_", "RAY_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    (tmp_path / "user" / "hpcray").mkdir(parents=True)
    return tmp_path


def write(site: Path, which: str, text: str) -> None:
    path = {"system": "system.toml", "module": "module.toml", "user": "user/hpcray/config.toml"}[which]
    (site / path).write_text(text)
    if which == "module":
        os.environ["HPCRAY_CONFIG"] = str(site / path)  # the fixture's monkeypatch has recorded that it is not set
    config_files._read.clear()


def test_later_files_win_then_the_environment_then_arguments(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCRAY_CONFIG", "")
    write(site, "system", "tick = 1\nnode_timeout = 11\nhead_timeout = 12\nmin_nodes = 1\nmax_nodes = 1")
    write(site, "module", "node_timeout = 21\nhead_timeout = 22\nmin_nodes = 2\nmax_nodes = 2")
    write(site, "user", "head_timeout = 32\nmin_nodes = 3\nmax_nodes = 3")
    found = node_config({**os.environ, "HPCRAY_MIN_NODES": "4", "HPCRAY_MAX_NODES": "4"}, max_nodes=5)
    assert (found.tick, found.node_timeout, found.head_timeout) == (1, 21, 32)
    assert (found.min_nodes, found.max_nodes) == (4, 5)


def test_every_setting_says_where_it_comes_from(site: Path) -> None:
    write(site, "system", "# the site's\n\nbind = false\ntask_oom_retries = 7\npartition = 'cpu'\n")
    environ = {**os.environ, "RAY_task_oom_retries": "3", "HPCRAY_TICK": "0.25"}
    rows = {row.name: row for row in setting_sources(environ)}
    assert list(rows) == list(config_files.SETTINGS)
    assert (rows["bind"].value, rows["bind"].source) == (False, f"{site}/system.toml:3")
    assert (rows["task_oom_retries"].value, rows["task_oom_retries"].source) == (3, "RAY_task_oom_retries")
    assert (rows["tick"].value, rows["tick"].source) == (0.25, "HPCRAY_TICK")
    assert (rows["partition"].value, rows["partition"].source) == ("cpu", f"{site}/system.toml:5")
    assert (rows["spin"].value, rows["spin"].source) == (Config().spin, "default")


def test_without_files_the_environment_is_used_as_it_is(site: Path) -> None:
    config_files._read.clear()
    environ = {"HPCRAY_TICK": "1"}
    assert configured_environment(environ) is environ


def test_a_file_is_read_once(site: Path) -> None:
    write(site, "user", "tick = 1")
    assert node_config(os.environ).tick == 1
    (site / "user/hpcray/config.toml").write_text("tick = 0.5")
    assert node_config(os.environ).tick == 1


def test_a_partition_has_settings_of_its_own(site: Path) -> None:
    write(site, "system", "network_devices = 'mlx5_0:1'\n[partitions.gpu]\nnetwork_devices = 'mlx5_0:1,mlx5_1:1'\n")
    assert launch_config(os.environ).network_devices == "mlx5_0:1"
    assert launch_config(os.environ, "gpu").network_devices == "mlx5_0:1,mlx5_1:1"
    in_job = {**os.environ, "SLURM_JOB_PARTITION": "gpu"}
    assert launch_config(in_job).network_devices == "mlx5_0:1,mlx5_1:1"
    assert launch_config({**os.environ, "PBS_QUEUE": "gpu"}).network_devices == "mlx5_0:1,mlx5_1:1"
    write(site, "user", "network_devices = 'lo'")
    assert launch_config(in_job).network_devices == "lo", "a later file wins over the partition of an earlier one"


def test_paths_may_name_variables_and_count_only_where_these_are_set(site: Path) -> None:
    write(site, "system", "spill_dir = '/tmp'\ncheckpoint_dir = '~/checkpoints'\nlabels = 'a=$B'\n")
    write(site, "user", "spill_dir = '$SCRATCH/${JOB}/spill'\n")
    environ = {**os.environ, "HOME": str(site)}
    assert node_config(environ).spill_dir == "/tmp", "there is no $SCRATCH here"
    assert node_config({**environ, "SCRATCH": "/s", "JOB": "7"}).spill_dir == "/s/7/spill"
    assert node_config(environ).checkpoint_dir == os.path.expanduser("~/checkpoints")
    assert node_config(environ).labels == "a=$B", "only paths have variables"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tick = 'abc'", ":2: tick = 'abc' is not a valid float; hint: times are in seconds"),
        ("tick = -1", ":2: tick = -1 is not a valid float"),
        ("\nbind = 1", ":3: bind = 1 is not a valid bool; hint: .* true and false"),
        ("object_store_memory = '2x'", ":2: object_store_memory = '2x' is not a valid int"),
        ("max_nodes = '2g'", ":2: max_nodes = '2g' is not a valid int"),
        ("launcher = 'sru'", ":2: launcher = 'sru' is not .*; hint: one of auto, srun, openmpi"),
        ("spil_dir = '/x'", ":2: spil_dir is no setting; hint: spill_dir\\?"),
        ("HPCRAY_TICK = 1", ":2: HPCRAY_TICK is no setting; hint: tick\\?"),
        ("[partitions.gpu]\ntick = 1\nspin = 'x'", ":4: spin = 'x' is not a valid float"),
        ("[partition.gpu]\ntick = 1", r":2: there is no table \[partition\]; hint: \[partitions.gpu\]"),
        ("[slurm]\ntick = 1", r":2: there is no table \[slurm\]; hint: \[partitions.gpu\]"),
        ("partitions = 3", r":2: partitions is a table of tables; hint: \[partitions.gpu\]"),
        ("[partitions]\ngpu = 1", r":3: gpu is no table; hint: \[partitions.gpu\]"),
        ("partition = cpu", ":2: .*; hint: text needs quotes"),
        ("tick = 1\ntick = 2", ":3: .*"),
        ("x = '", ":[23]: .*"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_file_line_and_hint(site: Path, text: str, message: str) -> None:
    write(site, "user", f"# settings\n{text}\n")
    with pytest.raises(ConfigFileError, match=f"^{re.escape(str(site))}/user/hpcray/config.toml{message}") as caught:
        configured_environment(os.environ)
    assert "hint: " in str(caught.value)
    with pytest.raises(ValueError, match="hint: "):
        NodeOptions().settings()


def test_a_file_that_cannot_be_read_is_named(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = site / "user/hpcray/config.toml"
    path.write_bytes(b"tick = 1\nlabels = '\xff'\n")
    config_files._read.clear()
    with pytest.raises(ConfigFileError, match=f"{path}:2: this is not UTF-8; hint: "):
        configured_environment(os.environ)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigFileError, match=f"{path} cannot be read: Is a directory; hint: "):
        configured_environment(os.environ)
    path.rmdir()
    monkeypatch.setenv("HPCRAY_CONFIG", str(site / "none.toml"))
    with pytest.raises(ConfigFileError, match="HPCRAY_CONFIG names .*/none.toml, which does not exist; hint: "):
        configured_environment(os.environ)
    monkeypatch.setenv("HPCRAY_CONFIG", "none.toml")
    with pytest.raises(ConfigFileError, match="HPCRAY_CONFIG='none.toml' is not an absolute path; hint: /"):
        configured_environment(os.environ)


def test_every_setting_of_commands_is_a_known_variable() -> None:
    names = {name.upper() for name in LaunchConfig.__struct_fields__}
    assert names <= set(config_module._OTHER_VARIABLES)
    assert not names & {name.upper() for name in Config.__struct_fields__}


def test_directories_of_the_configuration_are_used(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TMPDIR", "LOCAL_SCRATCH", "LOCALSCRATCH"):
        monkeypatch.delenv(name, raising=False)
    (site / "t").mkdir()
    write(site, "user", f"tmpdir = '{site}/t'\njobs = '~/jobs'\n")
    assert tmp_directories()[0].path == f"{site}/t"
    assert jobs_folder() == Path("~/jobs").expanduser()
    monkeypatch.setenv("HPCRAY_JOBS", "/j")
    assert jobs_folder() == Path("/j")
    write(site, "user", "tmpdir = '/var/tmp'")
    assert session_root(os.environ) == f"/var/tmp/hpcray-{os.getuid()}"
    assert session_root({**os.environ, "HPCRAY_TMPDIR": "/tmp"}) == f"/tmp/hpcray-{os.getuid()}"


def request(**given: object) -> JobRequest:
    names = ("gpus_per_node", "cpus_per_node", "mem", "time", "partition", "env", "sbatch")
    return check_request(**{"name": "j", "nodes": 1, "requeue": False, **dict.fromkeys(names), **given})  # type: ignore[arg-type]


def test_submitted_jobs_have_the_configured_partition_account_and_constraint(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "partition = 'cpu'\naccount = 'a1'\n[partitions.gpu]\naccount = 'g1'\nconstraint = 'a100'\n"
    write(site, "system", text)
    monkeypatch.setenv("SLURM_JOB_PARTITION", "gpu")  # of the job that submits, not of the new one
    found = with_configured_place(request())
    assert (found.partition, found.sbatch) == ("cpu", {"account": "a1"})
    found = with_configured_place(request(partition="gpu"))
    assert (found.partition, found.sbatch) == ("gpu", {"account": "g1", "constraint": "a100"})
    found = with_configured_place(request(sbatch={"--partition": "gpu", "account": "mine"}))
    assert (found.partition, found.sbatch) == ("", {"account": "mine", "constraint": "a100", "partition": "gpu"})
    write(site, "user", "account = 3")
    with pytest.raises(SubmitError, match="config.toml:1: account = 3 is not a valid str; hint: "):
        with_configured_place(request())


def test_the_configured_executor_replaces_auto(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission.shutil, "which", lambda name: f"/bin/{name}")
    write(site, "user", "executor = 'local'")
    assert submission.choose_executor("auto") == "local"
    assert submission.choose_executor("slurm") == "slurm"
    monkeypatch.setenv("HPCRAY_EXECUTOR", "everywhere")
    with pytest.raises(SubmitError, match="HPCRAY_EXECUTOR='everywhere' is not .*hint: one of auto, slurm"):
        submission.choose_executor("auto")


def test_further_nodes_of_a_job_have_the_configured_constraint(site: Path) -> None:
    write(
        site, "system", "partition = 'cpu'\nconstraint = 'ib'\naccount = 'a1'\n[partitions.big]\nconstraint = 'fat'\n"
    )

    def options(outer: dict[str, str], **config: str | int | bool | None) -> dict[str, str | int | bool | None]:
        environ = {**os.environ, **outer}
        provider = JobNodeProvider(None, "s1", "/x/s1.join-token", 0.0, environ, False)  # type: ignore[arg-type]
        found = provider._options(NodeType("t", {"CPU": 10000}, node_config=config), 1)
        return {name: found[name] for name in ("partition", "account", "constraint")}

    assert options({}) == {"partition": "cpu", "account": "a1", "constraint": "ib"}
    own = {"SLURM_JOB_ID": "1", "SLURM_JOB_PARTITION": "big", "SLURM_JOB_ACCOUNT": "b"}
    assert options(own) == {"partition": "big", "account": "b", "constraint": "fat"}
    assert options(own, partition="cpu", constraint="x") == {"partition": "cpu", "account": "b", "constraint": "x"}


def test_the_configured_launcher_counts_where_the_command_line_leaves_it_open() -> None:
    bare = LaunchOptions(NodeOptions(driver=["x.py"]))

    def launcher(configured: str, kind: str = "", flux: bool = False, options: LaunchOptions = bare) -> str:
        return with_configured_launcher(options, LaunchConfig(launcher=configured), kind, flux).launcher  # type: ignore[arg-type]

    assert launcher("mpich") == "mpich"
    assert launcher("srun") == "auto" and launcher("srun", "slurm") == "srun"
    assert launcher("flux") == "auto" and launcher("flux", flux=True) == "flux"
    assert launcher("mpich", options=LaunchOptions(bare.node, hosts=("a",))) == "auto"
    assert launcher("mpich", options=LaunchOptions(bare.node, mpirun="/m/mpirun")) == "auto"
    assert launcher("mpich", options=LaunchOptions(bare.node, launcher="openmpi")) == "openmpi"


def test_no_toml_parser_is_imported_without_a_file(site: Path) -> None:
    code = "import sys, os; from hpcray.platform.config_files import node_config; node_config(os.environ); "
    code += "print('tomllib' in sys.modules or 'tomli' in sys.modules)"

    def imported() -> str:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout

    if not os.path.exists("/etc/hpcray.toml"):
        assert imported() == "False\n"
    write(site, "user", "tick = 1")
    assert imported() == "True\n"


def test_the_command_prints_values_and_sources(site: Path) -> None:
    write(site, "user", "tick = 1\n[partitions.gpu]\naccount = 'g1'\n")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "hpcray.cli", *words]
        return subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "HPCRAY_SPIN": "0"})

    path = f"{site}/user/hpcray/config.toml"
    rows = {row["name"]: row for row in json.loads(run("config", "show", "--json", "-p", "gpu").stdout)}
    assert rows["account"] == {"name": "account", "value": "g1", "source": f"{path}:3"}
    assert rows["spin"]["source"] == "HPCRAY_SPIN"
    text = run("config", "show", "--changed").stdout
    assert re.search(rf"^tick +1\.0 +{path}:1$", text, re.MULTILINE) and f"file: {path}\n" in text
    assert "account" not in text and "gpu; hint: --partition" in text
    write(site, "user", "tik = 1")
    for command in (["config", "show"], ["jobs"], ["status"]):
        found = run(*command)
        assert found.returncode == 1 and found.stderr == f"Error: {path}:1: tik is no setting; hint: tick?\n"


def test_the_configuration_files_in_the_docs_are_valid(site: Path) -> None:
    found = [block for block in blocks() if block.language == "toml"]
    assert len(found) >= 5
    for block in found:
        write(site, "user", block.text)
        assert configured_environment(os.environ) is not os.environ
