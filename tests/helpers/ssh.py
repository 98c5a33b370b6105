"""A login through ssh to this host: an sshd of this user's own on a loopback port, with keys made for it."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

import pytest

_PATIENCE = 30.0
_SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class SshServer:
    """A context manager.

    Attributes:
        options: what `ssh` needs before the name of the host.
    """

    def __init__(self, place: Path) -> None:
        if _SSHD is None or not shutil.which("ssh"):
            pytest.skip("neither sshd nor ssh here")
        self._place = place
        for name in ("host", "user"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(place / name)]
            subprocess.run(command, check=True, timeout=_PATIENCE)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        settings = {
            "Port": self._port, "ListenAddress": "127.0.0.1", "HostKey": place / "host", "PidFile": "none",
            "AuthorizedKeysFile": place / "user.pub", "StrictModes": "no", "UsePAM": "no", "PermitRootLogin": "yes",
            "AllowTcpForwarding": "yes", "AllowStreamLocalForwarding": "yes",
        }  # fmt: skip
        (place / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        if os.geteuid() == 0:  # it gives up rights only where it has them, and wants this place then
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        command = [_SSHD, "-D", "-e", "-f", str(place / "sshd_config")]
        with open(place / "sshd.log", "wb") as log:
            self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.options = [
            "-p", str(self._port), "-i", str(place / "user"), "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no",
            "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR", "-o", "ExitOnForwardFailure=yes",
            "-l", getpass.getuser(),
        ]  # fmt: skip
        deadline = time.monotonic() + _PATIENCE
        while not self._answers():
            assert self._child.poll() is None and time.monotonic() < deadline, (place / "sshd.log").read_text()
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=1) as sock:
                return sock.recv(3) == b"SSH"
        except OSError:
            return False

    def __enter__(self) -> SshServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.terminate()
        self._child.wait(_PATIENCE)
