"""Variables of the environment are a place for secrets: other users can read the arguments of a process, not these."""

from __future__ import annotations

import sys
from pathlib import Path

from helpers.jobs import Job
from helpers.leaks import LeakCheck, wait_until

from hpcray.platform.process_tree import descendants

PROGRAM = """\
import os, sys, time
import hpcray as ray
from hpcray.job_submission import JobSubmissionClient

place = sys.argv[1]
ray.init()


@ray.remote(num_cpus=0)
class Holder:
    def secrets(self):
        return os.environ["OF_THE_PROGRAM"], os.environ.get("OF_THE_ACTOR")


def wait(comm):
    open(f"{place}/rank{comm.Get_rank()}", "w").close()
    while not os.path.exists(place + "/go"):
        time.sleep(0.02)
    return os.environ["OF_THE_PROGRAM"]


ours = {"OF_THE_ACTOR": "of-the-actor-5309"}
envs = [
    {"env_vars": ours},
    {"env_vars": ours, "py_executable": f"env A=1 {sys.executable}"},
    {"env_vars": {**ours, "LD_LIBRARY_PATH": "/nowhere", "PYTHONHASHSEED": "5"}},
]
holders = [Holder.options(runtime_env=env).remote() for env in envs]
assert ray.get([holder.secrets.remote() for holder in holders]) == [("of-the-program-8675", "of-the-actor-5309")] * 3
client = JobSubmissionClient()
command = f"touch {place}/job; while [ ! -e {place}/go ]; do sleep 0.1; done"
client.submit_job(entrypoint=command, runtime_env=envs[0])
found = ray.remote(lambda: ray.mpi.run(wait, ranks=2, cpus_per_rank=0.5)).remote()
assert ray.get(found) == ["of-the-program-8675"] * 2
print("it works", flush=True)
"""


def test_no_process_of_a_job_has_a_variable_in_its_arguments(leak_check: LeakCheck, tmp_path: Path) -> None:
    """Workers with a Python of their own had the whole environment of the program there."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    line = [sys.executable, "-m", "hpcray.cli.launch", "-n", "2", "--cpus-per-node", "4", str(program), str(tmp_path)]
    seen: dict[str, bytes] = {}
    with Job(line, {"OF_THE_PROGRAM": "of-the-program-8675"}) as job:

        def are_up() -> bool:
            for pid in [job.pid, *descendants(job.pid)]:
                try:
                    words = Path(f"/proc/{pid}/cmdline").read_bytes()
                except OSError:
                    continue
                seen[f"{pid} {words[:60]!r}"] = words
            return job.child.poll() is not None or all((tmp_path / name).exists() for name in ("job", "rank0", "rank1"))

        wait_until(are_up, "all that the program starts")
        are_up()
        (tmp_path / "go").touch()
        ended = job.wait()
    assert (ended.code, ended.out.splitlines()[-1:]) == (0, ["it works"]), ended.err
    assert len(seen) >= 10
    for words in seen.values():
        assert b"-8675" not in words and b"-5309" not in words, words[-2000:]


WITHOUT_SESSION = """\
import os, shutil
import hpcray as ray
ray.init(num_cpus=1)
ray.get(ray.remote(os.getpid).remote())
shutil.rmtree(ray.get_runtime_context().gcs_address)
env = {"env_vars": {"PYTHONHASHSEED": "5"}}
print(ray.get(ray.remote(lambda: os.environ["PYTHONHASHSEED"]).options(runtime_env=env).remote(), timeout=30))
"""


def test_a_worker_takes_over_where_the_session_directory_was_removed(leak_check: LeakCheck, tmp_path: Path) -> None:
    """What it takes over is a file there."""
    program = tmp_path / "program.py"
    program.write_text(WITHOUT_SESSION)
    with Job([sys.executable, str(program)]) as job:
        ended = job.wait()
    assert (ended.code, ended.out) == (0, "5\n"), ended.err
