"""Jobs submitted into a running session: `hpcray.job_submission`."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine import ROOT, alive, eventually, ray

from hpcray.job_submission import DriverInfo, JobDetails, JobStatus, JobSubmissionClient, JobType, cluster_address
from hpcray.ray_start.surroundings import is_this_host
from hpcray.runtime.core_worker.core_worker import current
from hpcray.runtime.core_worker.gcs_client import GcsClient
from hpcray.util.state import get_log, list_jobs

pytestmark = pytest.mark.usefixtures("session")
INIT = {"num_cpus": 2, "resources": {"mark": 1}, "runtime_env": {"env_vars": {"OF_THE_FIRST": "1"}}}


@pytest.fixture
def client() -> JobSubmissionClient:
    return JobSubmissionClient()


def ended(client: JobSubmissionClient, job: str) -> JobDetails:
    eventually(lambda: client.get_job_status(job).is_terminal(), f"the end of {job}")
    return client.get_job_info(job)


def running(client: JobSubmissionClient, job: str, text: str) -> None:
    eventually(lambda: f"\n{text}" in client.get_job_logs(job), f"{text} of {job}")


def test_an_entrypoint_joins_the_cluster_as_a_driver_of_its_own(client, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import ray\nray.init()\nprint('answer', ray.get(ray.remote(lambda: 6 * 7).remote()), "
        "ray.cluster_resources()['mark'], ray.get_runtime_context().get_job_id())\n"
    )
    job = client.submit_job(entrypoint=f"{sys.executable} {script}", metadata={"k": "v"})
    assert job.startswith("raysubmit_") and len(job) == len("raysubmit_") + 16
    found = ended(client, job)
    assert (found.status, found.message) == (JobStatus.SUCCEEDED, "Job finished successfully.")
    assert (found.type, found.submission_id, found.metadata) == (JobType.SUBMISSION, job, {"k": "v"})
    assert found.driver_exit_code == 0
    assert found.driver_node_id == ray.get_runtime_context().get_node_id()
    assert isinstance(found.driver_info, DriverInfo) and found.driver_info.id == found.job_id != "01000000"
    assert found.start_time <= found.end_time <= time.time() * 1000
    assert f"answer 42 1.0 {found.job_id}" in client.get_job_logs(job)
    assert client.get_job_info(found.job_id) == found
    assert [(row.job_id, row.status) for row in list_jobs() if row.submission_id == job] == [
        (found.job_id, "SUCCEEDED")
    ]


def test_the_environment_is_the_jobs_and_not_that_of_the_first_driver(client):
    job = client.submit_job(
        entrypoint="env; sleep 0.1", runtime_env={"env_vars": {"OWN": "word", "LONG": "${OWN_TOO}x"}}
    )
    assert ended(client, job).status == "SUCCEEDED"
    lines = client.get_job_logs(job).splitlines()
    assert {"OWN=word", "LONG=x", f"RAY_ADDRESS={client.get_address()}"} <= set(lines)
    assert not [line for line in lines if line.startswith(("OF_THE_FIRST=", "OMP_NUM_THREADS=", "HPCRAY_RUNTIME_ENV"))]


def test_packages_outlive_the_client_and_reach_the_drivers_tasks(tmp_path):
    code, module = tmp_path / "code", tmp_path / "somewhere" / "helper_of_job"
    code.mkdir(), module.mkdir(parents=True)
    (module / "__init__.py").write_text("WORD = 'helped'\n")
    (code / "data.txt").write_text("data\n")
    (code / "left_out.bin").write_text("")
    (code / "main.py").write_text(
        "import os, ray, helper_of_job\nray.init()\n"
        "@ray.remote\ndef f():\n    import helper_of_job\n"
        "    return helper_of_job.WORD, open('data.txt').read(), os.environ['OWN'], os.path.exists('left_out.bin')\n"
        "print(ray.get(f.remote()), open('data.txt').read(), helper_of_job.WORD)\n"
    )
    submitting = tmp_path / "submitting.py"
    submitting.write_text(
        "from hpcray.job_submission import JobSubmissionClient\n"
        f"print(JobSubmissionClient().submit_job(entrypoint={sys.executable + ' main.py'!r}, runtime_env={{"
        f"'working_dir': {str(code)!r}, 'py_modules': [{str(module)!r}], 'env_vars': {{'OWN': 'word'}}, "
        "'excludes': ['*.bin']}))\n"
    )
    out = subprocess.run(
        [sys.executable, submitting], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr
    client, job = JobSubmissionClient("auto"), out.stdout.strip()
    found = ended(client, job)
    assert found.status == "SUCCEEDED", found.message
    assert found.runtime_env["working_dir"].startswith("gcs://_ray_pkg_")
    assert "('helped', 'data\\n', 'word', False) data\n helped" in client.get_job_logs(job)


def test_a_failure_is_told_with_the_last_lines(client):
    job = client.submit_job(entrypoint="for i in 1 2 3 4 5 6 7 8 9 10 11; do echo line $i; done; exit 7")
    found = ended(client, job)
    assert (found.status, found.driver_exit_code) == ("FAILED", 7)
    assert found.error_type == "JOB_ENTRYPOINT_COMMAND_ERROR"
    assert found.message == (
        "Job entrypoint command failed with exit code 7, last available logs (truncated to 20,000 chars):\n"
        + "".join(f"line {i}\n" for i in range(2, 12))
    )


def test_an_environment_that_cannot_be_made_is_a_failure_with_the_reason(client):
    job = client.submit_job(entrypoint="echo never", runtime_env={"pip": ["/no/such/package"]})
    found = ended(client, job)
    assert (found.status, found.error_type) == ("FAILED", "RUNTIME_ENV_SETUP_FAILURE")
    assert found.message.startswith("runtime_env setup failed: pip") and "/no/such/package" in found.message


def test_stop_ends_all_processes_and_kills_those_that_stay(client, tmp_path):
    stubborn = (
        f"{sys.executable} -c \"import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(600)\""
    )
    job = client.submit_job(
        entrypoint=f"sleep 600 & echo $! > {tmp_path}/pid; {stubborn} & echo $! >> {tmp_path}/pid; wait",
        runtime_env={"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "1"}},
    )
    running(client, job, "up")
    pids = [int(word) for word in (tmp_path / "pid").read_text().split()]
    assert len(pids) == 2 and all(map(alive, pids))
    with pytest.raises(RuntimeError, match="non-terminal state RUNNING"):
        client.delete_job(job)
    assert client.stop_job(job) is True
    found = ended(client, job)
    assert (found.status, found.message) == ("STOPPED", "Job was intentionally stopped.")
    assert not any(map(alive, pids))
    assert client.stop_job(job) is False
    assert client.delete_job(job) is True
    with pytest.raises(RuntimeError, match=f"404: Job {job} does not exist"):
        client.get_job_info(job)


def test_a_job_that_waits_for_resources_can_be_stopped(client):
    job = client.submit_job(entrypoint="echo never", entrypoint_resources={"mark": 1}, entrypoint_num_cpus=64)
    found = client.get_job_info(job)
    assert found.status == "PENDING" and "waiting for resources" in found.message
    assert client.get_job_logs(job) == ""
    assert client.stop_job(job) is True
    assert client.get_job_status(job) == "STOPPED"


def test_entrypoints_with_resources_wait_for_each_other(client):
    jobs = [client.submit_job(entrypoint="date +%s.%N; sleep 1", entrypoint_resources={"mark": 1}) for _ in range(2)]
    assert [ended(client, job).status for job in jobs] == ["SUCCEEDED"] * 2
    first, second = sorted(float(client.get_job_logs(job).splitlines()[-1]) for job in jobs)
    assert second - first >= 1


def test_a_dead_supervisor_takes_its_entrypoint_along(client, tmp_path):
    job = client.submit_job(entrypoint=f"echo up; sleep 600 & echo $! > {tmp_path}/pid; wait")
    running(client, job, "up")
    pid = int((tmp_path / "pid").read_text())
    supervisor = ray.get_actor(f"_ray_internal_job_actor_{job}", namespace="SUPERVISOR_ACTOR_RAY_NAMESPACE")
    ray.kill(supervisor)
    found = ended(client, job)
    assert (found.status, found.error_type) == ("FAILED", "JOB_SUPERVISOR_ACTOR_DIED")
    assert found.message.startswith("Job supervisor actor died: ")
    eventually(lambda: not alive(pid), "the end of the entrypoint")


def test_what_an_entrypoint_leaves_behind_ends_with_it(client, tmp_path):
    job = client.submit_job(entrypoint=f"(trap '' TERM HUP; exec sleep 600) & echo $! > {tmp_path}/pid")
    assert ended(client, job).status == "SUCCEEDED"
    pid = int((tmp_path / "pid").read_text())
    eventually(lambda: not alive(pid), "the end of a background process")


def test_a_script_may_end_its_own_group(client):
    job = client.submit_job(entrypoint="trap 'exit 3' TERM; sleep 600 & kill -TERM 0; wait")
    found = ended(client, job)
    assert (found.status, found.driver_exit_code) == ("FAILED", 3)


def test_logs_are_followed_to_the_end(client):
    job = client.submit_job(entrypoint="for i in 1 2 3; do echo ä$i; sleep 0.3; done")
    assert client.get_job_status(job) in ("PENDING", "RUNNING")

    async def follow() -> list[str]:
        return [piece async for piece in client.tail_job_logs(job)]

    pieces = asyncio.run(asyncio.wait_for(follow(), 60))
    assert len(pieces) > 1
    assert "".join(pieces) == client.get_job_logs(job)
    assert "".join(pieces).endswith("ä1\nä2\nä3\n")
    node = ray.get_runtime_context().get_node_id()
    assert "".join(get_log(submission_id=job, node_id=node, tail=2)) == "ä2\nä3\n"


def test_ids_are_used_once(client):
    assert client.submit_job(entrypoint="true", submission_id="chosen") == "chosen"
    with pytest.raises(RuntimeError, match="Job with submission_id chosen already exists"):
        client.submit_job(entrypoint="true", submission_id="chosen")
    assert ended(client, "chosen").status == "SUCCEEDED"


def test_drivers_are_listed_and_cannot_be_stopped(client):
    found = {job.job_id: job for job in client.list_jobs() if job.type is JobType.DRIVER}
    assert found["01000000"].status is JobStatus.RUNNING and found["01000000"].driver_info.pid == str(os.getpid())
    for call in (client.stop_job, client.delete_job, client.get_job_logs):
        with pytest.raises(RuntimeError, match="submission type jobs"):
            call("01000000")


@pytest.mark.parametrize(
    "wrong",
    [
        {"entrypoint": 3},
        {"entrypoint": "x", "metadata": {"a": 1}},
        {"entrypoint": "x", "metadata": {1: "a"}},
        {"entrypoint": "x", "entrypoint_num_cpus": "1"},
        {"entrypoint": "x", "entrypoint_memory": 1.5},
        {"entrypoint": "x", "entrypoint_resources": {"a": "b"}},
        {"entrypoint": "x", "runtime_env": {"env_vars": {"a": 1}}},
    ],
)
def test_wrong_types_are_refused(client, wrong):
    with pytest.raises(TypeError):
        client.submit_job(**wrong)


def test_what_cannot_be_had_is_refused(client):
    with pytest.raises(ValueError, match="conda"):
        client.submit_job(entrypoint="x", runtime_env={"conda": "env"})
    with pytest.raises(ValueError, match="not a valid path"):
        client.submit_job(entrypoint="x", runtime_env={"working_dir": "/no/such/directory"})
    with pytest.raises(RuntimeError, match="400"):
        client.submit_job(entrypoint="x", entrypoint_label_selector={"a": "in("})


def test_a_list_of_many_jobs_asks_the_cluster_as_often_as_one_of_few(client, monkeypatch):
    calls = []
    ask = GcsClient.call
    monkeypatch.setattr(GcsClient, "call", lambda self, *args: calls.append(args[0]) or ask(self, *args))

    def needed() -> int:
        calls.clear()
        assert {row.submission_id for row in client.list_jobs()} >= set(jobs)
        return len(calls)

    jobs = [client.submit_job(entrypoint="true") for _ in range(2)]
    for job in jobs:
        ended(client, job)
    few = needed()
    jobs += [client.submit_job(entrypoint="true") for _ in range(4)]
    for job in jobs:
        ended(client, job)
    assert needed() == few


def test_who_follows_a_log_joins_the_cluster_once(client):
    job = client.submit_job(entrypoint="for i in 1 2 3 4; do echo line $i; sleep 0.5; done")
    code = """
import asyncio, hpcray.runtime.core_worker.core_worker as core_worker
from hpcray.job_submission import JobSubmissionClient
connect, count = core_worker.connect, []
core_worker.connect = lambda *args: count.append(1) or connect(*args)

async def follow():
    return "".join([text async for text in JobSubmissionClient().tail_job_logs(%r)])

print(asyncio.run(follow()).splitlines()[-4:], len(count))
import hpcray
hpcray.init(num_cpus=1)
print(hpcray.get(hpcray.remote(lambda: 6 * 7).remote()))
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": client.get_address()}
    told = subprocess.run([sys.executable, "-c", code % job], env=environ, capture_output=True, text=True, timeout=60)
    assert told.stdout.splitlines() == [str([f"line {number}" for number in range(1, 5)]) + " 1", "42"], told.stderr


def test_addresses(client, monkeypatch):
    own = ray.get_runtime_context().gcs_address
    forms = (None, "auto", own, "http://127.0.0.1:8265", "http://localhost:8265/", "127.0.0.1:8265")
    for address in (*forms, "ray://127.0.0.1:10001", f"https://{socket.gethostname()}:8265", "127.0.0.5:6379"):
        assert JobSubmissionClient(address).get_address() == own
    for address in ("http://elsewhere.example:8265", "http://192.0.2.199:8265", "/no/such/session"):
        with pytest.raises(ConnectionError):
            JobSubmissionClient(address)
    with pytest.raises(ValueError, match="not valid"):
        JobSubmissionClient("ftp://127.0.0.1")
    monkeypatch.setenv("RAY_ADDRESS", "/no/such/session")
    with pytest.raises(ConnectionError):
        JobSubmissionClient(own)


def test_an_address_of_another_interface_is_known_by_the_heads_host(monkeypatch):
    """A node of the cluster that is not the head knows one address of each node; of others it asks the head's host."""
    monkeypatch.setattr(cluster_address, "is_this_host", _is_nowhere)
    monkeypatch.setattr(cluster_address, "addresses_of", lambda name: [name])
    process = current.process
    assert process is not None
    assert cluster_address._has_host(process, ray.nodes()[0]["NodeManagerAddress"])
    assert cluster_address._has_host(process, socket.gethostname().upper())
    monkeypatch.setattr(cluster_address, "is_this_host", is_this_host)  # as the head's host has it
    assert cluster_address._has_host(process, "127.0.0.77")
    assert not cluster_address._has_host(process, "192.0.2.199")


def _is_nowhere(name: str) -> bool:
    raise AssertionError(f"{name}: a task has asked without need")


def test_a_url_stands_for_the_only_cluster(tmp_path: Path):
    ask = (
        "from hpcray.job_submission import JobSubmissionClient\n"
        "try:\n    print(JobSubmissionClient('http://127.0.0.1:8265').get_address())\n"
        "except ConnectionError as error:\n    print(error)\n"
    )

    def answer(**more: str) -> str:
        environ = {**os.environ, "PYTHONPATH": str(ROOT), **more}
        return subprocess.run([sys.executable, "-c", ask], env=environ, capture_output=True, text=True).stdout

    own = ray.get_runtime_context().gcs_address
    assert answer(HPCRAY_SESSION="").strip() == own
    code = "import hpcray as ray, sys\nray.init('local', num_cpus=1)\nprint('up', flush=True)\nsys.stdin.read()\n"
    with subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as other:  # fmt: skip
        assert other.stdout.readline() == b"up\n"
        text, of_the_program = answer(HPCRAY_SESSION=""), answer()
        other.stdin.close()
    assert "2 jobs of this user" in text and own in text and "hint" in text
    assert of_the_program.strip() == own, "a program that this one starts means the job of this one"


def test_the_end_of_the_cluster_is_the_end_of_its_jobs(tmp_path: Path):
    code = (
        "import hpcray as ray, time, os\nfrom hpcray.job_submission import JobSubmissionClient\n"
        "ray.init('local', num_cpus=1)\nclient = JobSubmissionClient()\n"
        f"job = client.submit_job(entrypoint='setsid sleep 600 & echo $! > {tmp_path}/pid; sleep 600')\n"
        f"while not os.path.exists('{tmp_path}/pid') or not open('{tmp_path}/pid').read(): time.sleep(0.05)\n"
        "os._exit(9)\n"
    )
    environ = {name: text for name, text in os.environ.items() if name != "RAY_ADDRESS"} | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environ).returncode == 9
    pid = int((tmp_path / "pid").read_text())
    eventually(lambda: not alive(pid), "the end of the entrypoint")


@pytest.mark.parametrize("ident", ["a/b", "../x", "a\nb", "x" * 300])
def test_a_submission_id_that_is_no_name_of_a_file_is_refused_with_the_reason(
    client: JobSubmissionClient, ident: str
) -> None:
    with pytest.raises(RuntimeError, match="is no submission_id.*no slash"):
        client.submit_job(entrypoint="true", submission_id=ident)
