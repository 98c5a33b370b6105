"""Where further nodes come from: batch jobs of Slurm, or processes of this machine. Named as in Ray."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from hpcray.autoscaler.autoscaler import HELD, PENDING, RUNNING, InstanceState
from hpcray.autoscaler.batch_systems import HELD_BY_USER, WILL_NOT_START, batch_script, cancel_by_name
from hpcray.common.labels import TIME_LEFT, labels_text
from hpcray.common.resources import UNIT
from hpcray.core.gcs.node_types import DEFAULT_TYPE, NodeType
from hpcray.platform.accelerators import CUDA, HIP, LEVEL_ZERO, ROCR
from hpcray.platform.allocation import read_allocation
from hpcray.platform.config_files import launch_config
from hpcray.platform.launcher_environment import outside_of_job
from hpcray.platform.private_files import append_private_file
from hpcray.platform.process_tree import ProcessIdentity
from hpcray.runtime.node.join_token import NODE_TYPE, custom_resources, node_command
from hpcray.runtime.node.options import INSTANCE
from hpcray.runtime.raylet.event_loop import EventLoop

# ------------------------------------------------------------ process runner
# Commands of the batch system, run by a raylet without keeping it waiting.


_CODE = "hpcray-exit "
_WITH_CODE = f'"$@" 2>&1; echo "{_CODE}$?"'
"""The raylet reaps all children, in whatever order: a code that is printed is not lost."""
_NOT_RUN = 127
TIMEOUT = 60.0
"""Seconds that a command may take: a controller that is restarted answers late."""
Then = Callable[[int, str], None]


class ProcessRunner:
    """Runs commands at the same time, and calls back in the raylet's thread."""

    def __init__(self, loop: EventLoop, environ: Mapping[str, str]) -> None:
        self._loop = loop
        self._environ = dict(environ)
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, command: Sequence[str], then: Then, text: str = "") -> None:
        """Run a command with this standard input; then call `then(exit code, output and errors)`."""
        try:
            process = subprocess.Popen(
                ["sh", "-c", _WITH_CODE, "sh", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self._environ,
                start_new_session=True,
            )
        except OSError as error:
            then(_NOT_RUN, str(error))
            return
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.write(text.encode())  # less than a pipe holds
            process.stdin.close()
        fd, output = process.stdout.fileno(), bytearray()
        self._running[fd] = process
        self._loop.watch(fd, lambda event: self._read(fd, output, then))
        self._loop.call_at(self._loop.now + TIMEOUT, lambda: self._check(fd, process))

    def close(self) -> None:
        """Forget what still runs; it ends by itself."""
        for fd in list(self._running):
            self._end(fd)

    def _read(self, fd: int, output: bytearray, then: Then) -> None:
        if data := os.read(fd, 1 << 16):
            output += data
            return
        self._end(fd)
        text, mark, code = output.decode(errors="replace").rpartition(_CODE)
        if mark and code.strip().isdecimal():
            then(int(code), text)
        else:
            then(_NOT_RUN, f"no answer within {TIMEOUT:g} s: {code.strip()}")

    def _check(self, fd: int, process: subprocess.Popen[bytes]) -> None:
        if self._running.get(fd) is process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _end(self, fd: int) -> None:
        self._loop.unwatch(fd)
        process = self._running.pop(fd)
        assert process.stdout is not None
        process.stdout.close()
        process.poll()


# ------------------------------------------------------------ node provider


Launched = Callable[[list[str], str, bool], None]
"""Called with the names of the batch jobs; or with none, the reason, and whether that is how it will stay."""
MOST_AT_ONCE = 100
"""Nodes of one job array, at most."""
_TAIL = 2048
_LIVES = {"PENDING": PENDING, "REQUEUED": PENDING, "REQUEUE_HOLD": PENDING, "CONFIGURING": PENDING}
_LIVES |= dict.fromkeys(("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"), RUNNING)
_PERMANENT = re.compile(
    r"invalid|unrecogni[sz]ed|illegal|no such|not found|node configuration is not available|more processors|"
    r"cannot be satisfied|not permitted|denied",
    re.IGNORECASE,
)
_TRANSIENT = re.compile(r"limit|temporar|try again|timed out|unable to contact|connection|down, drained", re.IGNORECASE)
_NO_ARRAYS = re.compile(r"job array", re.IGNORECASE)


class NodeProvider(Protocol):
    """Starts and ends further nodes of one job."""

    def launch(self, node_type: NodeType, count: int, then: Launched) -> None:
        """Start nodes of a type."""

    def poll(self, then: Callable[[dict[str, InstanceState]], None]) -> None:
        """Call `then` with all batch jobs of this job; not where the batch system does not answer."""

    def terminate(self, instances: tuple[str, ...]) -> None:
        """Cancel batch jobs."""

    def close(self, everything: bool) -> None:
        """The node ends. everything: and with it the job, so that all of its batch jobs are cancelled."""


class JobNodeProvider:
    """Batch jobs of one node each, with the job's session in their name.

    Args:
        session: of the job.
        token: path of the job's join token; the output of the nodes goes beside it.
        end: when the job ends, as Unix time; 0: not known.
        environ: of the head, which shows its partition and account.
        inherits: whether there may be batch jobs of an earlier head.
    """

    def __init__(
        self,
        loop: EventLoop,
        session: str,
        token: str,
        end: float,
        environ: Mapping[str, str],
        inherits: bool,
    ) -> None:
        self._name = f"hpcray-nodes-{session}"
        self._token = token
        self._end = end
        self._outer = environ
        # The devices of the head are not those of other nodes; a batch job with GPUs gets variables of its own.
        devices = (CUDA, ROCR, HIP, LEVEL_ZERO, "GPU_DEVICE_ORDINAL")
        self._environ = {name: text for name, text in outside_of_job(environ).items() if name not in devices}
        self._commands = ProcessRunner(loop, self._environ)
        self._arrays = True
        self._submitted = inherits
        self._asked = False
        self._details: dict[str, str] = {}

    def launch(self, node_type: NodeType, count: int, then: Launched) -> None:
        """Submit a job array of nodes; `then` may get fewer names than `count`."""
        self._submitted = True
        count = min(count, MOST_AT_ONCE if self._arrays else 1)
        resources = node_type.resources if not node_type.measured else {}
        line = node_command(
            self._token,
            _amount(node_type, "CPU"),
            resources=custom_resources(resources),
            settings={"labels": _labels(node_type)},
        )
        script = batch_script(self._options(node_type, count), self._token, line, node_type.name)

        def answered(code: int, text: str) -> None:
            found = re.search(r"^(\d+)(?:;|\s*$)", text, re.MULTILINE)
            if code == 0 and found is not None:
                job = found[1]
                then([job] if count == 1 else [f"{job}_{index}" for index in range(1, count + 1)], "", False)
            elif count > 1 and _NO_ARRAYS.search(text):
                self._arrays = False
                self.launch(node_type, 1, then)
            else:
                reason = " ".join(text.split()) or f"sbatch ended with {code}"
                permanent = bool(_PERMANENT.search(reason)) and not _TRANSIENT.search(reason)
                then([], f"sbatch refused it: {reason}", permanent)

        self._commands.start(["sbatch", "--parsable"], answered, script)

    def _options(self, node_type: NodeType, count: int) -> dict[str, str | int | bool | None]:
        outer, config = self._outer, node_type.node_config
        place = config.get("partition", outer.get("SLURM_JOB_PARTITION"))
        configured = launch_config(outer, str(place) if place else None)
        own_partition = config.get("partition", outer.get("SLURM_JOB_PARTITION")) == outer.get("SLURM_JOB_PARTITION")
        cpus, gpus = (math.ceil(node_type.resources.get(name, 0) / UNIT) for name in ("CPU", "GPU"))
        if node_type.name == DEFAULT_TYPE:
            cpus = max((cpus, *read_allocation(outer).cpus_per_node[:1]))  # the whole share of the first node
        gpus_given = any(name.startswith("gpus") or name == "gres" for name in config)
        folder = os.path.dirname(self._token)
        return {
            "job-name": self._name,
            "comment": node_type.name,
            "nodes": 1,
            "ntasks-per-node": 1,
            "array": None if count == 1 else f"1-{count}",
            "partition": outer.get("SLURM_JOB_PARTITION") or configured.partition or None,
            "account": outer.get("SLURM_JOB_ACCOUNT") or configured.account or None,
            "constraint": configured.constraint or None,
            "qos": outer.get("SLURM_JOB_QOS"),
            "time": self._minutes_left() if own_partition else None,
            "cpus-per-task": cpus or None,
            "gpus-per-node": gpus if gpus and not gpus_given else None,
            "mem": f"{outer['SLURM_MEM_PER_NODE']}M" if outer.get("SLURM_MEM_PER_NODE", "0") != "0" else None,
            "output": os.path.join(folder, "nodes-%j.out" if count == 1 else "nodes-%A_%a.out"),
            "no-requeue": True,
            **config,
        }

    def _minutes_left(self) -> int | None:
        """Minutes until the job ends: no node is of use for longer."""
        return max(1, math.ceil((self._end - time.time()) / 60)) if self._end else None

    def poll(self, then: Callable[[dict[str, InstanceState]], None]) -> None:
        """Ask squeue."""
        if self._asked:
            return
        self._asked = True

        def answered(code: int, text: str) -> None:
            self._asked = False
            if code == 0:
                then({name: self._state(name, *rest) for name, *rest in _rows(text)})

        self._commands.start(
            ["squeue", "--me", "--array", "--noheader", "--states=all", f"--name={self._name}",
             "--format=%i|%T|%k|%r"],
            answered,
        )  # fmt: skip

    def _state(self, name: str, word: str, node_type: str, reason: str) -> InstanceState:
        state = _LIVES.get(word, word)
        if state == PENDING:
            held = reason in WILL_NOT_START and reason != HELD_BY_USER  # whoever holds it may have a purpose
            return InstanceState(node_type, HELD if held else PENDING, reason)
        if state != RUNNING and name not in self._details:
            self._details[name] = _last_line(os.path.join(os.path.dirname(self._token), f"nodes-{name}.out"))
        return InstanceState(node_type, state, self._details.get(name, ""))

    def terminate(self, instances: tuple[str, ...]) -> None:
        """Run scancel."""
        self._commands.start(["scancel", *instances], lambda code, text: None)

    def close(self, everything: bool) -> None:
        """Cancel by name: also what sbatch was still submitting."""
        self._commands.close()
        if everything and self._submitted:
            cancel_by_name(self._name, self._environ)


def _amount(node_type: NodeType, name: str) -> float | None:
    """Return what its nodes have; None: what there is."""
    units = node_type.resources.get(name)
    return None if units is None else units / UNIT


def _labels(node_type: NodeType) -> str:
    return labels_text({key: text for key, text in node_type.labels.items() if key != TIME_LEFT})


def _rows(text: str) -> list[list[str]]:
    rows = [[field.strip() for field in line.split("|", 3)] for line in text.splitlines()]
    return [row for row in rows if len(row) == 4]


def _last_line(path: str) -> str:
    """The last line that a node has written, without its prefix."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        if lines:
            return lines[-1].strip().removeprefix("hpcray: ")
    return ""


class LocalNodeProvider:
    """Processes of this machine, for trying things out.

    Args:
        token: path of the job's join token; the output of the nodes goes beside it.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._environ = outside_of_job(os.environ)
        self._nodes: dict[str, tuple[ProcessIdentity | None, str]] = {}
        self._started = 0

    def launch(self, node_type: NodeType, count: int, then: Launched) -> None:
        """Start processes."""
        resources = node_type.resources
        line = node_command(
            self._token,
            _amount(node_type, "CPU"),
            _amount(node_type, "GPU"),
            custom_resources(resources) if not node_type.measured else None,
            {"labels": _labels(node_type)},
        )
        names = []
        for _ in range(count):
            self._started += 1
            name = f"{os.getpid()}-{self._started}"
            environ = {**self._environ, INSTANCE: name, NODE_TYPE: node_type.name}
            with os.fdopen(append_private_file(self._log(name)), "ab") as log:
                child = subprocess.Popen(
                    line, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, start_new_session=True
                )
            self._nodes[name] = ProcessIdentity.of(child.pid), node_type.name
            names.append(name)
        then(names, "", False)

    def _log(self, name: str) -> str:
        return os.path.join(os.path.dirname(self._token), f"node-{name}.out")

    def poll(self, then: Callable[[dict[str, InstanceState]], None]) -> None:
        """Look at the processes."""
        rows = {}
        for name, (process, node_type) in self._nodes.items():
            lives = process is not None and process.alive
            rows[name] = InstanceState(
                node_type, RUNNING if lives else "FAILED", "" if lives else _last_line(self._log(name))
            )
        then(rows)

    def terminate(self, instances: tuple[str, ...]) -> None:
        """Send SIGTERM."""
        for name in instances:
            process, _ = self._nodes.get(name, (None, ""))
            if process is not None and process.alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)

    def close(self, everything: bool) -> None:
        """Send SIGTERM to all."""
        if everything:
            self.terminate(tuple(self._nodes))


def has_slurm(environ: Mapping[str, str]) -> bool:
    """Return whether nodes come from Slurm: this is a job of it, or sbatch is there and configured."""
    if environ.get("SLURM_JOB_ID"):
        return True
    return shutil.which("sbatch") is not None and any(
        os.path.exists(path) for path in (environ.get("SLURM_CONF", ""), "/etc/slurm/slurm.conf") if path
    )
