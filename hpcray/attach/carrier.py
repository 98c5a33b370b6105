"""The pipe to a job: the process that carries it (`hpcray bridge`, here or behind ssh), until its first record.

    bridge → near end   \\x1ehpcray-bridge {who and where it is, or why it is not}
    near end → bridge   {which attachment, new or not}
    bridge → near end   \\x1ehpcray-line {why not, if so}

and from then on records (`attach.line`). What comes before the first mark is of profiles, and is skipped. No command
line and no variable has any of this: what names an attachment goes through the pipe, which is this user's alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import subprocess
import sys
import time
from importlib import metadata
from typing import TypeVar

import msgspec

from hpcray.platform.process_control import die_with_parent, module_line

S = TypeVar("S", bound=msgspec.Struct)
PROTOCOL = 1
"""Number of this way to speak; a bridge of another one is refused."""
MARK, LINE_MARK = b"\x1ehpcray-bridge ", b"\x1ehpcray-line "
START_TIMEOUT = 60.0
"""Seconds within which a bridge has to answer; Slurm may have to start a step."""
_MOST_NOISE, _MOST_COMPLAINT = 1 << 20, 4096
_TERMINATION = 2.0


class JobPlace(msgspec.Struct, frozen=True):
    """Where a job is, and the way there.

    Attributes:
        address: as the user gave it.
        host: the login node that ssh leads to; "": Slurm's commands are here.
        job: Slurm's id of the job; "auto": the only one of this user that runs hpcray.
        command: of hpcray on that login node. options: of ssh.
        bridge: what is run instead of `hpcray bridge`; () as a rule.
        node, session: host and session directory of the node; "": the first one.
        resume: an attachment there goes on. node_id: of that node.
    """

    address: str
    host: str = ""
    job: str = "auto"
    command: str = ""
    options: tuple[str, ...] = ()
    bridge: tuple[str, ...] = ()
    node: str = ""
    session: str = ""
    resume: bool = False
    node_id: str = ""

    def again(self, far: Far, elsewhere: bool = False) -> JobPlace:
        """Return the way to where this one has led. elsewhere: to any node of that job, which may know of its end."""
        job = far.slurm_job or self.job
        node, session = ("", "") if elsewhere and far.step_host else (far.step_host, far.session_dir)
        return msgspec.structs.replace(self, job=job, node=node, session=session, resume=True, node_id=far.node_id)

    def words(self) -> list[str]:
        """Return the arguments of `hpcray bridge`."""
        words = ["--job", self.job]
        words += ["--host", self.node] if self.node else []
        return words + (["--session", self.session] if self.session else [])

    def line(self) -> list[str]:
        """Return the command line of the process that carries the pipe."""
        if self.bridge:
            return [*self.bridge, *self.words()]
        if not self.host:
            return module_line("hpcray.cli", "bridge", *self.words())
        there = f"exec {self.command or 'hpcray'} bridge {shlex.join(self.words())}"
        shell = f'exec "${{SHELL:-/bin/sh}}" -lc {shlex.quote(there)}'
        ours = ["-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "EscapeChar=none"]
        return ["ssh", *ours, *self.options, self.host, shell]


class Far(msgspec.Struct, frozen=True):
    """A bridge, as it describes itself.

    Attributes:
        error: why there is none; "" as a rule. final: and no other attempt can succeed.
        version, python: of hpcray, and of Python there. protocol: PROTOCOL there.
        host: of the node. step_host: its name for Slurm.
        session_dir, session_name, slurm_job, node, node_id, nodes, end: as in `SessionInfo`.
    """

    error: str = ""
    final: bool = False
    protocol: int = 0
    version: str = ""
    python: str = ""
    host: str = ""
    step_host: str = ""
    session_dir: str = ""
    session_name: str = ""
    slurm_job: str = ""
    node: int = 0
    node_id: str = ""
    nodes: int = 1
    end: float = 0.0

    def name(self) -> str:
        """Return what it is called in messages."""
        return f"{f'job {self.slurm_job}' if self.slurm_job else 'the job'} on {self.host}"


class Request(msgspec.Struct, frozen=True):
    """Request of the near end: a new attachment, or one that a node has; how long that waits for a pipe."""

    ident: str
    resume: bool
    wait: float
    node_id: str = ""


class BridgeAnswer(msgspec.Struct, frozen=True):
    """Reply to it: error is "" where the line begins. final: no other attempt can succeed."""

    error: str = ""
    final: bool = False


class CarrierError(ConnectionError):
    """There is no pipe. final: no other attempt can succeed."""

    def __init__(self, text: str, final: bool = False) -> None:
        super().__init__(text)
        self.final = final


class Carrier:
    """A process that carries a pipe.

    Args:
        place: where to. ident: of the attachment. wait: seconds that it waits for a pipe.

    Attributes:
        far: what the bridge has said. rest: what came behind its answer.
        input, output: descriptors to write to, and to read from.
    """

    far: Far

    def __init__(self, place: JobPlace, ident: str, wait: float) -> None:
        self.ident, self.rest = ident, b""
        self._place, self._wait = place, wait
        self._said, self._complaint = b"", b""
        self._asked = False
        self._deadline = time.monotonic() + START_TIMEOUT
        parent = os.getpid()
        try:
            # In a session of its own: Ctrl-C and Ctrl-Z of the driver's terminal are not for it.
            self._child = subprocess.Popen(
                place.line(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
                start_new_session=True, preexec_fn=lambda: die_with_parent(parent, 15),
            )  # fmt: skip
        except OSError as error:
            raise CarrierError(f"{place.address}: {place.line()[0]} cannot be run: {error}", final=True) from None
        assert self._child.stdin and self._child.stdout and self._child.stderr
        self.input, self.output = self._child.stdin.fileno(), self._child.stdout.fileno()
        self._errors = self._child.stderr.fileno()
        for fd in (self.output, self._errors):
            os.set_blocking(fd, False)

    @property
    def running(self) -> bool:
        """True while its process runs."""
        return self._child.poll() is None

    def wait_until_open(self) -> None:
        """Wait for the first record.

        Raises:
            CarrierError: none will come.
        """
        while not self.advance():
            select.select([self.output, self._errors], [], [], 0.2)

    def advance(self) -> bool:
        """Go on with the opening, without waiting. True: the pipe is open.

        Raises:
            CarrierError: it will not open.
        """
        ended = False
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.output, 1 << 16)
            ended = not data
            self._said += data
        if not self._asked and (line := self._line(MARK)) is not None:
            self._check(_decoded(line, Far))
            request = Request(self.ident, self._place.resume, self._wait, self._place.node_id)
            try:
                os.write(self.input, msgspec.json.encode(request) + b"\n")
            except OSError as error:
                raise CarrierError(f"{self._place.address}: {self.complaint() or error}") from None
            self._asked = True
        if self._asked and (line := self._line(LINE_MARK)) is not None:
            answer = _decoded(line, BridgeAnswer)
            if answer.error:
                raise CarrierError(f"{self._place.address}: {answer.error}", answer.final)
            self.rest = self._said
            return True
        if ended or len(self._said) > _MOST_NOISE:
            self._child.wait(_TERMINATION) if ended else None
            said = self.complaint() or self._said[-200:].decode(errors="replace").strip()
            raise CarrierError(self._failure(said))
        if time.monotonic() > self._deadline:
            raise CarrierError(f"{self._place.address}: no answer within {START_TIMEOUT:g} s; {self.complaint()}")
        return False

    def _line(self, mark: bytes) -> bytes | None:
        """Return a line that begins with a mark, and remove it with all before it."""
        start = self._said.find(mark)
        end = self._said.find(b"\n", start)
        if start < 0 or end < 0:
            return None
        line, self._said = self._said[start + len(mark) : end], self._said[end + 1 :]
        return line

    def _failure(self, said: str) -> str:
        place = self._place
        text = f"Failed to connect to Ray at address: {place.address}. {said or 'the bridge has ended without a word'}"
        if "Permission denied" in said or "Host key verification" in said:
            text += (
                f"; hint: `ssh {place.host} true` must work without a question: an agent (ssh-add), or a line that is "
                f"open (ControlMaster)"
            )
        elif "not found" in said and place.host:
            text += "; hint: HPCRAY_ATTACH_COMMAND is the path of hpcray there, or the profile puts it on PATH"
        return text

    def _check(self, far: Far) -> None:
        if far.error:
            raise CarrierError(f"Failed to connect to Ray at address: {self._place.address}. {far.error}", far.final)
        own = "{}.{}".format(*sys.version_info[:2])
        version = own_version()
        if far.protocol != PROTOCOL or far.version != version:
            raise CarrierError(
                f"{self._place.address}: the job on {far.host} runs hpcray {far.version}, this program has {version}; "
                f"hint: pip install hpcray=={far.version} here",
                final=True,
            )
        if ".".join(far.python.split(".")[:2]) != own:
            raise CarrierError(
                f"{self._place.address}: the job on {far.host} runs Python {far.python}, this program "
                f"{'.'.join(map(str, sys.version_info[:3]))}: functions that one pickles the other cannot read; hint: "
                f"an environment with Python {'.'.join(far.python.split('.')[:2])} here",
                final=True,
            )
        self.far = far

    def complaint(self) -> str:
        """Return what the process has said on standard error, on one line."""
        with contextlib.suppress(OSError):
            while data := os.read(self._errors, 1 << 16):
                self._complaint = (self._complaint + data)[-_MOST_COMPLAINT:]
        lines = self._complaint.decode(errors="replace").splitlines()
        return "; ".join(line.strip() for line in lines[-5:] if line.strip())

    def say_bye(self, data: bytes, patience: float) -> None:
        """Write the last bytes."""
        deadline = time.monotonic() + patience
        while data and (left := deadline - time.monotonic()) > 0:
            if not select.select([], [self.input], [], left)[1]:
                return
            try:
                data = data[os.write(self.input, data) :]
            except OSError:
                return

    def end(self, patience: float) -> None:
        """End the process, after at most so many seconds in which it may do so itself."""
        child = self._child
        with contextlib.suppress(OSError):
            if child.stdin is not None:
                child.stdin.close()
        for limit, stop in ((patience, child.terminate), (_TERMINATION, child.kill), (_TERMINATION, None)):
            try:
                child.wait(limit)
                break
            except subprocess.TimeoutExpired:
                if stop is not None:
                    stop()
        for stream in (child.stdout, child.stderr):
            if stream is not None:
                stream.close()


def _decoded(line: bytes, kind: type[S]) -> S:
    try:
        return msgspec.json.decode(line.strip(), type=kind)
    except msgspec.MsgspecError as error:
        raise CarrierError(f"the bridge has said what is not understood: {error}: {line[:200]!r}") from None


def own_version() -> str:
    """Return the version of hpcray here."""
    try:
        return metadata.version("hpcray")
    except metadata.PackageNotFoundError:
        return "unknown"
