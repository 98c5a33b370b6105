"""The parts of `ray start` without a cluster: allocations, their end, CPUs, options, files, the bell, the registry."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from helpers.jobs import ROOT
from helpers.strangers import UID, as_stranger, needs_stranger, stranger_says

from hpcray.common.exceptions import StartupError
from hpcray.platform.sockets import node_ip_address
from hpcray.ray_start import head_search
from hpcray.ray_start.allocation_watch import AllocationWatch, allocation_is_over, step_daemons
from hpcray.ray_start.clusters import StartedCluster, parse_cluster_name
from hpcray.ray_start.flags import START_FLAGS, parse_resources, parse_start_labels, without_meaning
from hpcray.ray_start.head_search import (
    BELL,
    NOTHING,
    STRANGER,
    Bell,
    HeadProbe,
    HeadSearch,
    is_of_this_host,
    longest_wait,
    node_of,
    who_listens,
)
from hpcray.ray_start.keeper import Door, run_in_node
from hpcray.ray_start.lookup import look
from hpcray.ray_start.order import BLOCK_HINT, END_NOTE, Asked, unexpected_ends
from hpcray.ray_start.presence import is_being_called, may_mean_started
from hpcray.ray_start.registry import FAILED, UP, Registry, StartCall, machine_id
from hpcray.ray_start.session_files import SessionFiles, temporary_directory
from hpcray.ray_start.start import StartRequest, start_and_return
from hpcray.ray_start.surroundings import (
    absent_devices,
    allocation_of,
    allocation_of_ancestors,
    cpus_of_allocation,
    dies_with_step,
    step_of_ancestors,
)
from hpcray.ray_start.symmetric import split_words

# `ray start --help` of Ray 2.60, and the hidden ones.
RAY_2_60 = """--node-ip-address --address --port --node-name --redis-username --redis-password --redis-shard-ports
    --object-manager-port --node-manager-port --min-worker-port --max-worker-port --worker-port-list
    --ray-client-server-port --memory --object-store-memory --num-cpus --num-gpus --resources --head
    --include-dashboard --dashboard-host --dashboard-port --dashboard-agent-listen-port --dashboard-agent-grpc-port
    --runtime-env-agent-port --block --plasma-directory --object-spilling-directory --autoscaling-config
    --no-redirect-output --temp-dir --system-config --enable-object-reconstruction --metrics-export-port
    --no-monitor --tracing-startup-hook --ray-debugger-external --disable-usage-stats --labels --labels-file
    --include-log-monitor --enable-resource-isolation --system-reserved-cpu --system-reserved-memory --cgroup-path
    --proxy-server-url --log-style --log-color --verbose -v"""
CGROUP2 = "0::/system.slice/slurmstepd.scope/job_17/step_batch/user/task_0\n"
CGROUP1 = "5:devices:/slurm/uid_1000/job_17/step_0\n4:cpu:/\n"
ADOPTED = "0::/system.slice/slurmstepd.scope/job_17/step_extern/user/task_special\n"


def test_the_allocation_comes_from_the_environment_else_from_the_cgroup() -> None:
    assert allocation_of({"SLURM_JOB_ID": "9"}, CGROUP2) == "slurm-9"
    assert allocation_of({"PBS_JOBID": "3.pbs"}, "") == "pbs-3.pbs"
    assert {allocation_of({}, text) for text in (CGROUP1, CGROUP2, ADOPTED)} == {"slurm-17"}
    assert allocation_of({}, "0::/user.slice\n") == ""


def test_without_variables_and_cgroups_the_allocation_is_that_of_the_daemon_above(tmp_path: Path) -> None:
    above = {
        "9": ("python) x", "7", "python"),
        "7": ("bash", "5", "bash"),
        "5": ("slurmstepd", "1", "slurmstepd: [17.0]"),
    }
    for pid, (name, parent, line) in {**above, "8": ("bash", "1", "bash")}.items():
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "stat").write_text(f"{pid} ({name}) S {parent} 0 0")
        (tmp_path / pid / "cmdline").write_text(f"{line}\0")
    assert allocation_of_ancestors(9, str(tmp_path)) == "slurm-17"
    assert allocation_of_ancestors(8, str(tmp_path)) == "" == allocation_of_ancestors(3, str(tmp_path))
    assert step_of_ancestors(9, str(tmp_path)) == ("17", "0")
    for name in ("batch", "extern"):  # these last as long as the job
        (tmp_path / "5" / "cmdline").write_text(f"slurmstepd: [17.{name}]\0")
        assert step_of_ancestors(9, str(tmp_path)) == ("17", "")


def test_what_slurm_kills_at_the_end_of_a_step() -> None:
    assert dies_with_step(CGROUP1) and dies_with_step(CGROUP2)
    assert not dies_with_step(ADOPTED) and not dies_with_step("0::/user.slice\n")


@pytest.mark.parametrize(
    ("code", "text", "error", "over"),
    [
        (0, "RUNNING\n", "", False),
        (0, "COMPLETING\n", "", True),
        (0, "", "", True),
        (1, "", "slurm_load_jobs error: Invalid job id specified\n", True),
        (1, "", "slurm_load_jobs error: Unable to contact slurm controller\n", False),
        (0, "Job Id: 3\n    job_state = R\n", "", False),
        (0, "Job Id: 3\n    job_state = F\n", "", True),
        (153, "", "qstat: Unknown Job Id 3.pbs\n", True),
    ],
)
def test_answers_of_batch_systems(code: int, text: str, error: str, over: bool) -> None:
    assert allocation_is_over(code, text, error) is over


def test_where_no_process_of_slurm_is_here_it_is_asked_soon_and_then_seldom() -> None:
    asked: list[Sequence[str]] = []

    def ask(command: Sequence[str]) -> tuple[int, str, str]:
        asked.append(command)
        return 0, "RUNNING\n", ""

    watch = AllocationWatch("slurm-4294967290", ask)
    now, times = 100.0, []
    for _ in range(7):
        assert not watch.is_over(now)
        times.append(now)
        now += watch.wait(now)
    assert asked[0] == ["squeue", "--noheader", "--format=%T", "--jobs", "4294967290"]
    assert [after - before for before, after in itertools.pairwise(times)] == [0.5, 1.0, 2.0, 4.0, 10.0, 10.0]
    assert not watch.is_over(now - 1.0) and len(asked) == 7


def test_processes_of_slurm_are_those_of_the_job(tmp_path: Path) -> None:
    for pid, line in {"5": "slurmstepd: [17.batch]", "6": "slurmstepd: [171.0]", "7": "slurmstepd: [17.0]"}.items():
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "comm").write_text("slurmstepd\n")
        (tmp_path / pid / "cmdline").write_text(line)
    assert sorted(step_daemons("17", str(tmp_path))) == [5, 7]
    if os.getuid() == 0:  # another user has given a process that name, for a node that never ends
        os.chown(tmp_path / "7", UID, UID)
        assert step_daemons("17", str(tmp_path)) == [5]


def test_network_devices_that_no_host_here_has_are_known(tmp_path: Path) -> None:
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    (tmp_path / "net" / "ib0").mkdir(parents=True)
    answers = {"mlx5_0:1,mlx5_9:1": "", "ib0": "", "mlx5_9:1": "mlx5_9:1", "^mlx5_9:1": "", "all": "", "": ""}
    for given, answer in answers.items():
        assert absent_devices({"UCX_NET_DEVICES": given}, str(tmp_path)) == answer


def test_a_node_offers_what_the_job_has_on_its_host() -> None:
    job = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_CPUS_PER_NODE": "4(x2),8"}
    assert [cpus_of_allocation(job, host, 64) for host in ("n1", "n3", "n9")] == [4, 8, None]
    assert cpus_of_allocation({**job, "SLURMD_NODENAME": "n3"}, "other", 64) == 8
    assert cpus_of_allocation(job, "n3", 6) == 6
    assert cpus_of_allocation({}, "n1", 64) is None
    assert cpus_of_allocation({**job, "SLURM_JOB_CPUS_PER_NODE": "x"}, "n1", 64) is None


def test_options_of_rays_are_all_taken_and_each_once() -> None:
    names = [name for row in START_FLAGS for name in row.names]
    assert len(names) == len(set(names))
    assert set(RAY_2_60.split()) <= set(names)


def test_the_documentation_says_what_each_option_does() -> None:
    page = (ROOT / "docs" / "how-to" / "bring-your-script.md").read_text()
    assert [name for row in START_FLAGS for name in row.names if f"`{name}`" not in page] == []


def test_options_without_a_meaning_are_told_and_those_of_habit_are_not() -> None:
    given = {"node_manager_port": 5, "dashboard_host": "0.0.0.0", "verbose": True, "num_cpus": 2.0, "no_monitor": False}
    assert without_meaning(given) == ["--dashboard-host", "--node-manager-port"]


def test_resources_and_labels_are_read_as_ray_writes_them(tmp_path: Path) -> None:
    assert parse_resources('{"worker_units": 8}') == {"worker_units": 8.0} and parse_resources(None) == {}
    for wrong in ("{", "[1]", '{"a": "b"}'):
        with pytest.raises(ValueError, match="JSON object"):
            parse_resources(wrong)
    file = tmp_path / "labels.yaml"
    file.write_text("region: us\ntier: a\n")
    assert parse_start_labels("tier=b", str(file)) == "region=us,tier=b"
    assert parse_start_labels('{"tier": "c"}', None) == "tier=c"
    assert parse_start_labels(None, None) == ""


def request(**given: object) -> StartRequest:
    return StartRequest({row.key: None for row in START_FLAGS} | given, {})


def test_wrong_requests_are_refused_before_anything_starts() -> None:
    for given, text in (
        ({}, "`--address` is a required flag"),
        ({"address": "n1:6379", "port": 6379}, "`--port` should only be specified"),
        ({"address": "n1"}, "H:P"),
        ({"head": True, "port": 70000}, "is no port"),
        ({"head": True, "resources": "x"}, "JSON object"),
    ):
        with pytest.raises(ValueError, match=text):
            request(**given)


def test_a_request_describes_its_node() -> None:
    node = request(head=True, num_cpus=2.0, num_gpus=1.0, memory=5, node_name="x", object_store_memory=1 << 27).node
    assert (node.num_cpus, node.num_gpus, node.memory, node.node_name) == (2.0, 1.0, 5, "x")
    assert node.config["object_store_memory"] == 1 << 27 and node.config["elastic"] and not node.distributed
    assert request(head=True, node_ip_address="10.88.0.1").node.address == "10.88.0.1"
    for given in ("localhost", "0.0.0.0", "::1"):
        assert request(head=True, node_ip_address=given).node.address == node_ip_address()


def test_the_longest_wait_counts() -> None:
    assert longest_wait({}, 300.0) == 300.0
    assert longest_wait({"RAY_raylet_start_wait_time_s": "900", "RAY_NUM_REDIS_GET_RETRIES": "x"}, 300.0) == 900.0


def test_the_words_of_symmetric_run() -> None:
    words = ["--address", "n1:6379", "--min-nodes=3", "--num-cpus", "4", "--", "python", "x.py", "--address", "y"]
    assert split_words(words) == (["--num-cpus", "4"], ["python", "x.py", "--address", "y"])
    with pytest.raises(ValueError, match="No separator"):
        split_words(["--address", "n1:6379"])


def test_a_bell_accepts_says_nothing_and_closes() -> None:
    bell = Bell(0)
    stop = threading.Event()

    def serve() -> None:
        while not stop.wait(0.01):
            bell.serve()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert who_listens("127.0.0.1", bell.port) == BELL
        with pytest.raises(OSError, match="in use"):
            Bell(bell.port)
    finally:
        stop.set()
        thread.join()
        bell.close()
    assert who_listens("127.0.0.1", bell.port) == NOTHING


def test_who_keeps_a_connection_or_speaks_is_a_stranger() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert who_listens("127.0.0.1", silent.getsockname()[1]) == STRANGER
    with socket.create_server(("127.0.0.1", 0)) as talking:
        port = talking.getsockname()[1]

        def talk() -> None:
            line, _ = talking.accept()
            line.sendall(b"SSH-2.0")
            line.close()

        thread = threading.Thread(target=talk)
        thread.start()
        assert who_listens("127.0.0.1", port) == STRANGER
        thread.join()


def test_the_temporary_directory_is_rays(tmp_path: Path) -> None:
    assert temporary_directory("/x/y", {"RAY_TMPDIR": "/z"}) == ("/x/y", True)
    assert temporary_directory(None, {"RAY_TMPDIR": "/z"}) == ("/z/ray", True)
    assert temporary_directory(None, {"TMPDIR": "/w"}) == ("/w/ray", False)


def test_session_latest_leads_to_the_logs_and_goes_unless_the_user_chose_the_place(tmp_path: Path) -> None:
    for keep in (False, True):
        top = tmp_path / str(keep) / "ray"
        first = SessionFiles(str(top), keep)
        first.point_here("n1:6379")
        second = SessionFiles(str(top), keep)
        Path(second.logs, "worker.out").write_text("said")
        second.point_here("n1:6380")
        assert (top / "session_latest" / "logs" / "worker.out").read_text() == "said"
        assert (top / "ray_current_cluster").read_text() == "n1:6380"
        first.close()
        assert (top / "session_latest").exists() and (top / "ray_current_cluster").exists()
        second.close()
        assert not (top / "ray_current_cluster").exists()
        assert (top / "session_latest" / "logs" / "worker.out").exists() is keep and top.exists() is keep


def test_a_temporary_directory_that_all_can_write_to_is_not_used(tmp_path: Path) -> None:
    top = tmp_path / "ray"
    top.mkdir()
    top.chmod(0o777)
    files = SessionFiles(str(top), False)
    assert files.top == f"{top}-{os.getuid()}" and "can be written by others" in files.note
    files.close()


def test_a_node_keeps_its_logs_at_home_where_no_directory_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full /tmp, or one that is gone."""
    (tmp_path / "full").touch()
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    files = SessionFiles(str(tmp_path / "full" / "ray"), keep=False)
    assert files.top == f"{tmp_path}/home/.hpcray/ray" and "Not a directory" in files.note and files.top in files.note
    files.open_log().close()
    files.close()


def test_a_log_that_cannot_be_opened_is_the_reason_why_a_node_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(files: SessionFiles) -> object:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), files.log)

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("HPCRAY_START_DIR", str(tmp_path / "clusters"))
    monkeypatch.setattr(SessionFiles, "open_log", full)
    with pytest.raises(StartupError, match="No space left on device: .*ray_start.log"):
        start_and_return(StartRequest({"head": True}, os.environ))


def cluster(ident: str) -> StartedCluster:
    return StartedCluster(ident=ident, session="s", allocation="slurm-7", host="n1", names=("n1",), address="10.0.0.1")


def call(ident: str, **more: object) -> StartCall:
    fields = {"command": "ray start", "allocation": "slurm-7", "host": socket.gethostname(), "pid": os.getpid()}
    given = {"started": 0, "machine": machine_id(), "begun": time.time(), **fields, **more}
    return msgspec.convert({"ident": ident, **given}, StartCall)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry({"HPCRAY_START_DIR": str(tmp_path / "clusters")})


def test_a_clusters_file_is_a_join_token_that_nobody_else_can_read(registry: Registry) -> None:
    registry.write_cluster(cluster("a"), b'{"secret": "AAAA"}')
    (known,) = registry.clusters()
    assert known.cluster == cluster("a") and known.path == registry.path_of("a")
    assert os.stat(known.path).st_mode & 0o777 == 0o600 and os.stat(registry.path).st_mode & 0o777 == 0o700
    assert msgspec.json.decode(Path(known.path).read_bytes())["secret"] == "AAAA"
    registry.remove_cluster("a")
    assert registry.clusters() == []


def test_files_that_others_could_have_written_are_no_clusters(registry: Registry) -> None:
    registry.write_cluster(cluster("a"), b"{}")
    os.chmod(registry.path_of("a"), 0o644)
    assert registry.clusters() == []
    os.chmod(registry.path, 0o755)
    with pytest.raises(StartupError, match="HPCRAY_START_DIR"):
        registry.clusters()


def test_what_killed_processes_have_left_is_removed_by_the_next_start_here(registry: Registry) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for ident, more in {
        "killed": {"pid": ended.pid, "state": UP}, "elsewhere": {"host": "n9", "state": UP},
        "failed": {"state": FAILED, "reason": "why"}, "other": {"allocation": "slurm-8", "state": FAILED},
        "rebooted": {"machine": "other pid:[1]", "state": UP},
        "container": {"machine": machine_id() + "1", "state": UP},
    }.items():  # fmt: skip
        registry.write_call(call(ident, **more))
        registry.write_cluster(cluster(ident), b"{}")
    assert {found.ident: found.is_gone() for found in registry.calls("slurm-7")} == {
        "killed": True, "elsewhere": False, "failed": True, "rebooted": True, "container": False,
    }  # fmt: skip
    registry.sweep("slurm-7")
    assert [known.cluster.ident for known in registry.clusters()] == ["container", "elsewhere"]
    assert [found.ident for found in registry.calls("slurm-8")] == ["other"]


def test_outside_of_an_allocation_only_what_runs_here_counts(registry: Registry) -> None:
    from hpcray.platform.process_tree import ProcessIdentity

    me = ProcessIdentity.of(os.getpid())
    assert me is not None
    registry.write_call(call("runs", allocation="", started=me.started))
    registry.write_call(call("failed", allocation="", started=me.started, state=FAILED))
    registry.write_call(call("elsewhere", allocation="", host="n9"))
    assert [found.ident for found in registry.calls("")] == ["runs"]


def test_settings_of_started_clusters_have_defaults() -> None:
    from hpcray.common.config import LaunchConfig

    found = msgspec.structs.asdict(LaunchConfig.from_env({"HPCRAY_START_BELL": "0", "HPCRAY_JOIN_WAIT": "5"}))
    assert (found["start_bell"], found["join_wait"], found["head_wait"]) == (False, 5.0, 300.0)


def test_what_a_killed_node_has_left_there_goes_with_the_next(tmp_path: Path) -> None:
    top = tmp_path / "ray"
    killed = SessionFiles(str(top), False)
    with killed.open_log():
        SessionFiles(str(top), False).close()
        assert Path(killed.logs).exists()
    other = top / "session_2026-01-01_00-00-00_000000_1" / "logs"  # of Ray
    other.mkdir(parents=True)
    files = SessionFiles(str(top), False)
    assert not Path(killed.logs).exists() and other.exists()
    files.close()


@pytest.mark.parametrize(
    ("line", "in_step", "called"),
    [
        ("/env/bin/python -m hpcray.cli.ray start --head", False, True),
        ("/bin/sh /env/bin/ray start --head --block", True, True),
        ("srun -N1 -n1 -w n1 ray start --head", False, True),
        ("/env/bin/python -m ray.scripts.scripts start --head", True, True),
        ("srun|/env/bin/python|-m|ray.scripts.scripts|start|--head", False, True),
        ("srun|bash|-c|python -m ray.scripts.scripts start --head", False, True),
        ("/usr/bin/srun|-N1|bash|-c|sleep 3; ray start --head --block", False, True),
        ("/usr/bin/srun|bash|-c|ray start --head; python program.py", True, False),  # of this program's own step
        ("bash|-c|ray start --head; python program.py", False, False),  # what a shell does after this program
        ("vim notes on ray start.txt", False, False),
        ("python ray_start.py --head", False, False),
        ("ray status", False, False),
    ],
)
def test_a_script_that_is_about_to_call_ray_start_is_seen(
    tmp_path: Path, line: str, in_step: bool, called: bool
) -> None:
    (tmp_path / "7").mkdir()
    text = line.replace("|", "\0") if "|" in line else line.replace(" ", "\0")
    (tmp_path / "7" / "cmdline").write_text(text + "\0")
    (tmp_path / "7" / "environ").write_text("A=b\0SLURM_JOB_ID=3\0")
    job = {"SLURM_JOB_ID": "3", **({"SLURM_STEP_ID": "0"} if in_step else {})}
    assert is_being_called(job, str(tmp_path)) is called
    assert not is_being_called({}, str(tmp_path))
    assert not is_being_called({"SLURM_JOB_ID": "33"}, str(tmp_path)), "it is another job's"


def test_a_directory_of_one_host_is_known_by_its_file_system(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/sda / ext4 rw 0 0\nhome:/vol /home nfs4 rw 0 0\ntmpfs /home/me/own tmpfs rw 0 0\n"
        "x /mnt/a\\040b lustre rw 0 0\n"
    )
    places = {"/tmp/x": True, "/home/me": False, "/home/me/own/c": True, "/homes": True, "/mnt/a b/c": False}
    assert {place: is_of_this_host(place, str(mounts)) for place in places} == places


def test_a_node_waits_for_the_head_of_its_own_job_where_another_job_has_one_of_that_name(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_search, "who_listens", lambda host, port: BELL)  # of the other job's head
    monkeypatch.setattr(head_search, "_BELL_INTERVAL", 0.0)
    monkeypatch.setattr(head_search, "_AFTER_BELL", -1.0)
    registry.write_cluster(
        msgspec.structs.replace(cluster("other"), allocation="slurm-8", names=("n1", "10.0.0.1"), host="n1"), b"{}"
    )
    job = {"SLURM_JOB_NODELIST": "n[1-2]", "HPCRAY_HEAD_WAIT": "60"}
    search = HeadSearch(registry, "n1:6379", "slurm-7", job, print)
    assert search.next() is None and search.next() is None
    elsewhere = HeadSearch(registry, "n1:6379", "slurm-7", {**job, "SLURM_JOB_NODELIST": "n[5-6]"}, print)
    found = elsewhere.next()  # the head is in a job of its own
    assert found is not None and found.cluster.ident == "other"
    registry.write_cluster(
        msgspec.structs.replace(cluster("own"), allocation="slurm-7", names=("n1", "10.0.0.1"), host="n1"), b"{}"
    )
    found = search.next()
    assert found is not None and found.cluster.ident == "own"


def test_a_command_without_a_directory_for_its_secret_leaves_the_reason_on_its_host(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    environ = {"HPCRAY_START_DIR": str(tmp_path / "open"), "HPCRAY_TMPDIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    registry = Registry(environ)
    assert not may_mean_started(None, environ)
    for ident, more in {
        "on-its-way": {},
        "mine": {"state": FAILED},
        "other": {"allocation": "slurm-8", "state": FAILED},
    }.items():
        registry.write_call(call(ident, **more))
    assert [found.ident for found in registry.refused("slurm-7")] == ["mine"]
    assert may_mean_started(None, environ)
    assert [found.ident for found in look(Asked(), environ).calls] == ["mine"]
    registry.sweep("slurm-7", reasons=False)
    assert registry.refused("slurm-7")
    registry.sweep("slurm-7")
    assert not registry.refused("slurm-7") and registry.refused("slurm-8")
    registry.sweep("slurm-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["open"]


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30.0
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    assert condition()


def test_a_head_without_a_bell_is_looked_for_in_every_job_of_this_user_on_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = {
        "squeue": 'case "$*" in *--me*) printf "7 x[1-2]\\n8 x9\\n9 x[3-4]\\n10 x4\\n";; esac',
        "srun": f'echo "$*" >> {tmp_path}/steps; case "$*" in *jobid=10*) exit 0;; esac; exec sleep 60',
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    name = parse_cluster_name("x4.cluster:6379")
    assert name is not None
    probe = HeadProbe(name, "slurm-7", {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "x[1-2]"})
    probe.look()
    eventually(lambda: probe.is_up)
    assert "--jobid=9 --nodelist=x4" in (steps := (tmp_path / "steps").read_text()) and "--jobid=8" not in steps
    probe.close()


def test_a_head_is_looked_for_again_where_its_job_begins_later_and_on_the_first_node_where_nobody_knows_its_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = tmp_path / "steps"
    steps.touch()
    for name, body in {"squeue": f"cat {tmp_path}/jobs", "srun": f'echo "$*" >> {steps}; exec sleep 60'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    name = parse_cluster_name("198.51.100.7:6379")
    assert name is not None
    probe = HeadProbe(name, "slurm-7", {})
    (tmp_path / "jobs").write_text(f"7 x[1-2]\n8 {socket.gethostname()}\n")
    probe.look()
    (tmp_path / "jobs").write_text("7 x[1-2]\n9 x[3-4]\n")
    probe.look()
    probe.look()
    eventually(lambda: len(steps.read_text().splitlines()) == 2)
    assert not probe.is_up
    probe.close()
    assert [line.split()[:2] for line in sorted(steps.read_text().splitlines())] == [
        ["--jobid=7", "--nodelist=x1"], ["--jobid=9", "--nodelist=x3"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("n1", "n1"),
        ("n1-ib0", "n1"),
        ("n10-ib0", "n10"),
        ("n1.fabric.site", "n1"),
        ("n10i", "n10"),
        ("m1", ""),
        ("n12", ""),
    ],
)
def test_names_of_other_networks_begin_with_that_of_the_node(name: str, node: str) -> None:
    assert node_of([name], ["n1", "n10", "n11"]) == node


def test_what_helps_nodes_that_have_ended_is_said_once() -> None:
    ordered, killed = "host a: it was sent SIGTERM", f"host b: cut{END_NOTE}"
    assert unexpected_ends([ordered]) == ([], f"; hint: {BLOCK_HINT}")
    assert unexpected_ends([ordered, killed, "host c: cut"]) == (["host b: cut", "host c: cut"], END_NOTE)
    assert unexpected_ends(["host c: cut"]) == (["host c: cut"], f"; hint: {BLOCK_HINT}")


def test_a_command_from_another_container_runs_at_the_node_and_no_other_user_opens_the_door(tmp_path: Path) -> None:
    ident = os.urandom(8).hex()
    door = Door(ident, "/nowhere")
    try:
        code = (
            f"import sys; from hpcray.ray_start.keeper import run_in_node\nsys.exit(run_in_node({ident!r}, %s, {{}}))"
        )
        for words, ended in ((["--version"], 0), (["no-such-command"], 2)):
            line = [sys.executable, "-c", code % words]
            done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, timeout=60)
            assert (done.returncode, bool(done.stdout), bool(done.stderr)) == (ended, not ended, bool(ended)), done
        needs_stranger()
        said = (
            "import socket\nline = socket.socket(socket.AF_UNIX)\nline.connect('\\0hpcray-' + sys.argv[1])\n"
            "try:\n    line.sendall(b'x'); print(line.recv(9))\nexcept ConnectionError:\n    print(b'')\n"
        )
        assert stranger_says(said, ident) == "b''\n"
        theirs = (
            "line = socket.socket(socket.AF_UNIX)\nline.bind('\\0hpcray-' + sys.argv[1]); line.listen()\n"
            "print('listens', flush=True); sys.stdin.read()\n"
        )
        stranger = as_stranger(theirs, "theirs" + ident)
        assert stranger.stdout is not None and stranger.stdout.readline() == "listens\n"
        with pytest.raises(PermissionError, match="another user"):
            run_in_node("theirs" + ident, ["status"], {})
        stranger.communicate(timeout=30)
    finally:
        door.close()
