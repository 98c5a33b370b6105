"""The command `ray`, on a cluster that is there for submitted jobs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine import PATIENCE, ROOT, alive, eventually

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The session directory of a cluster without a program of its own."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-m", "hpcray.job_submission"], env=environ, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        line = holder.stdout.readline()
        assert line.startswith("ready for jobs: ray job submit --address /"), line
        yield line.split()[7]
        holder.send_signal(signal.SIGTERM)
        assert holder.wait(PATIENCE) == 0


@pytest.fixture
def command(cluster: str) -> Command:
    def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "HPCRAY_ADDRESS": cluster, **env}
        line = [sys.executable, "-m", "hpcray.cli.ray", *words]
        return subprocess.run(line, env=environ, capture_output=True, text=True, timeout=3 * PATIENCE, check=False)

    return run


def test_submit_prints_the_output_and_ends_as_the_job_does(command: Command, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import os, sys\nprint(sys.argv[1:], os.environ['WORD'], os.listdir())\n")
    done = command(
        "job", "submit", "--working-dir", str(tmp_path), "--runtime-env-json", '{"env_vars": {"WORD": "said"}}',
        "--metadata-json", '{"k": "v"}', "--submission-id", "first", "--", sys.executable, "program.py", "a b", "--c",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Job 'first' submitted successfully" in done.stdout and "Next steps" in done.stdout
    assert "['a b', '--c'] said ['program.py']" in done.stdout
    assert "Job 'first' succeeded" in done.stdout
    shown = command("job", "status", "first")
    assert shown.returncode == 0 and "Job 'first' succeeded" in shown.stdout
    assert "said" in command("job", "logs", "first").stdout
    assert "said" in command("logs", "job", "--id", "first", "--tail", "1").stdout
    rows = json.loads(command("list", "jobs", "--format", "json").stdout)
    assert [row["status"] for row in rows if row["submission_id"] == "first"] == ["SUCCEEDED"]
    assert "job-driver-first.log" in command("logs").stdout
    assert "'k': 'v'" in command("job", "list").stdout
    assert "deleted successfully" in command("job", "delete", "first").stdout
    gone = command("job", "status", "first")
    assert gone.returncode == 1 and "Job first does not exist" in gone.stderr


def test_a_job_that_fails_is_a_command_that_fails(command: Command) -> None:
    done = command("job", "submit", "--", "sh", "-c", "echo 'last words'; exit 4")
    assert done.returncode == 1
    assert "failed with exit code 4" in done.stdout and "last words" in done.stdout


def test_a_job_is_stopped(command: Command) -> None:
    started = command("job", "submit", "--no-wait", "--submission-id", "long", "--", "sleep", "600")
    assert started.returncode == 0 and "Tailing" not in started.stdout
    stopped = command("job", "stop", "long")
    assert stopped.returncode == 0 and "Job 'long' was stopped" in stopped.stdout


@pytest.mark.parametrize("name", ["up", "down", "dashboard", "submit"])
def test_what_has_no_meaning_here_says_what_has(command: Command, name: str) -> None:
    done = command(name, "--head", "--port=6379")
    assert done.returncode == 1 and f"ray {name}: " in done.stderr and "hint: " in done.stderr


def test_the_other_commands_are_hpcrays(command: Command, tmp_path: Path) -> None:
    assert command("--version").stdout == "ray, version 2.60.0\n"
    (node,) = json.loads(command("list", "nodes", "--format", "json").stdout)
    assert json.loads(command("get", "nodes", node["node_id"]).stdout)["state"] == "ALIVE"
    missing = command("get", "actors", "00")
    assert missing.returncode == 1 and "not found" in missing.stderr
    trace = tmp_path / "trace.json"
    assert command("timeline", str(trace)).returncode == 0 and trace.exists()


def test_status_is_rays_text_and_hpcrays_stays_a_table(command: Command, cluster: str) -> None:
    (node,) = json.loads(command("list", "nodes", "--format", "json").stdout)
    for words in (["status"], ["status", "--address", "127.0.0.1:6379"], ["status", "--address", cluster]):
        lines = command(*words).stdout.splitlines()
        assert lines[0].startswith("======== Autoscaler status: ") and lines[0].endswith(" ========")
        assert lines[1:5] == ["Node status", "-" * len(lines[0]), "Active:", f" 1 node_{node['node_id']}"]
        assert any(line.startswith(" 0.0/") and line.endswith(" CPU") for line in lines)
    assert "GCS request time: " in command("status", "-v").stdout
    table = [sys.executable, "-m", "hpcray.cli", "status", "--job", cluster]
    assert "node 0 " in subprocess.run(table, capture_output=True, text=True, check=True).stdout


def test_health_is_an_exit_code(command: Command, tmp_path: Path) -> None:
    def code(*words: str, **env: str) -> int:
        return command("health-check", *words, **env).returncode

    assert code() == code("--address", "localhost:6379") == code("--component", "ray_client_server") == 0
    assert code("--skip-version-check") == 0
    assert code("--component", "serve_of_old") == 1
    assert code(HPCRAY_ADDRESS="", HPCRAY_TMPDIR=str(tmp_path)) == 1


KEPT = "check-open-ports drain-node get-auth-token global-gc kuberay-autoscaler local-dump sanity-check serve"


@pytest.mark.parametrize("name", KEPT.split())
def test_commands_of_rays_that_nobody_needs_have_a_hint(name: str) -> None:
    line = [sys.executable, "-m", "hpcray.cli.ray", name, "--option", "word"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and f"ray {name}: " in done.stderr and "hint: " in done.stderr


def test_usage_statistics_are_disabled_already() -> None:
    line = [sys.executable, "-m", "hpcray.cli.ray", "disable-usage-stats"]
    assert "disabled" in subprocess.run(line, capture_output=True, text=True, check=True).stdout


def test_variables_and_arguments_of_ray_are_taken_without_a_word() -> None:
    """Those of scripts and programs in public use."""
    code = (
        "import hpcray as ray\n"
        "ray.init(num_cpus=1, _redis_password='x', _redis_username='u', _node_ip_address='10.1.1.1',\n"
        "         include_dashboard=False, dashboard_host='0.0.0.0', dashboard_port=8265, _temp_dir='/tmp/x')\n"
        "print(ray.get(ray.remote(lambda: 42).remote()))\n"
    )
    settings = {
        "raylet_start_wait_time_s": "600", "num_heartbeats_timeout": "300", "gcs_server_request_timeout_seconds": "60",
        "CGRAPH_get_timeout": "300", "memory_usage_threshold": "0.98", "record_ref_creation_sites": "true",
        "DEDUP_LOGS": "0", "DISABLE_IMPORT_WARNING": "1", "ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "enable_metrics": "0",
        "health_check_timeout_ms": "100000", "max_direct_call_object_size": "102400", "BACKEND_LOG_LEVEL": "debug",
    }  # fmt: skip
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **{f"RAY_{name}": text for name, text in settings.items()}}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "42\n", "")


@pytest.mark.parametrize("name", ["status", "health-check"])
def test_without_a_cluster_the_answer_is_1_and_no_step_of_slurm_is_started(
    command: Command, tmp_path: Path, name: str
) -> None:
    """Scripts ask until there is one; in an allocation each step for that took five seconds."""
    srun = tmp_path / "srun"
    srun.write_text(f"#!/bin/sh\ntouch {tmp_path}/called\nsleep 60\n")
    srun.chmod(0o755)
    (tmp_path / "squeue").symlink_to(srun)
    nowhere = {"HPCRAY_ADDRESS": "", "HPCRAY_TMPDIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    nowhere["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    for words in ([name], [name, "--address", "auto"], [name, "--address", "192.0.2.199:6379"]):
        done = command(*words, **nowhere)
        assert done.returncode == 1 and "Could not find any running Ray instance" in done.stderr
        assert "Traceback" not in done.stderr and not done.stdout
    done = command(name, RAY_ADDRESS="127.0.0.1:6379", **nowhere)
    assert done.returncode == 1 and "127.0.0.1:6379" in done.stderr
    assert not (tmp_path / "called").exists()


def test_ray_address_names_the_cluster_for_all_commands(command: Command, cluster: str) -> None:
    for address in ("127.0.0.1:6379", "http://localhost:8265", cluster):
        for words in (["list", "nodes"], ["logs"], ["status"], ["memory"]):
            assert command(*words, RAY_ADDRESS=address).returncode == 0, (address, words)
    elsewhere = command("list", "nodes", RAY_ADDRESS="http://192.0.2.199:8265")
    assert elsewhere.returncode == 1 and "192.0.2.199" in elsewhere.stderr
    # An option comes first, but for the commands about jobs, where the variable replaces it as in Ray.
    assert command("list", "nodes", "--address", cluster, RAY_ADDRESS="http://192.0.2.199:8265").returncode == 0
    assert command("job", "list", "--address", cluster, RAY_ADDRESS="http://192.0.2.199:8265").returncode == 1


def test_all_options_of_rays_job_commands_are_taken(command: Command) -> None:
    common = ["-v", "--verbose", "--log-style", "pretty", "--log-color", "false", "--verify", "false"]
    common += ["--headers", '{"Authorization": "Bearer x"}']
    done = command(
        "job", "submit", *common, "--submission-id", "all-options", "--entrypoint-num-cpus", "1",
        "--entrypoint-num-gpus", "0", "--entrypoint-memory", "1000000", "--entrypoint-resources", "{}",
        "--entrypoint-label-selector", "{}", "--metadata-json", "{}", "--runtime-env-json", "{}", "--", "true",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name in ("status", "logs", "stop", "delete"):
        assert command("job", name, *common, "all-options").returncode == 0, name
    assert command("job", "list", *common).returncode == 0
    assert command("job", "list", "--headers", "no JSON").returncode == 2
    assert command("job", "list", "--log-style", "wild").returncode == 2


def test_lines_of_the_record_style_have_their_time(command: Command) -> None:
    done = command("job", "submit", "--log-style=record", "--log-color=true", "--", "echo", "said by the job")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    own = [line for line in lines if re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\tINFO job\.py -- ", line)]
    assert "said by the job" in lines and any("succeeded" in line for line in own)
    assert all(line in own for line in lines if "ray job " in line or "submitted successfully" in line)


def test_without_a_cluster_the_error_says_where_to_run(command: Command, tmp_path: Path) -> None:
    done = command("job", "list", HPCRAY_ADDRESS="", HPCRAY_TMPDIR=str(tmp_path))
    assert done.returncode == 1 and "hint: " in done.stderr and "Traceback" not in done.stderr


def test_the_environment_has_the_command_when_the_stand_in_is_installed(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    paths = os.pathsep.join([str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))])
    environ = {**os.environ, "PYTHONPATH": paths}
    subprocess.run([python, "-m", "hpcray.compat", "install"], env=environ, check=True)
    script = tmp_path / "venv" / "bin" / "ray"
    shown = subprocess.run([script, "--version"], env=environ, capture_output=True, text=True, check=True)
    assert shown.stdout == "ray, version 2.60.0\n"
    subprocess.run([python, "-m", "hpcray.compat", "uninstall"], env=environ, check=True)
    assert not script.exists()


def test_the_end_of_the_cluster_ends_its_jobs(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-m", "hpcray.job_submission"], env=environ, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        address = holder.stdout.readline().split()[7]
        line = [sys.executable, "-m", "hpcray.cli.ray", "job", "submit", "--no-wait", "--address", address, "--"]
        subprocess.run([*line, "sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 600"], env=environ, check=True)
        pid = int(eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
        holder.send_signal(signal.SIGINT)
        assert holder.wait(PATIENCE) == 0
    eventually(lambda: not alive(pid), "the end of the entrypoint")
