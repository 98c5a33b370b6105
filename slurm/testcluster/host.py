"""The first process of one host: makes the machine look like a machine of its own, starts its daemons, reaps orphans.

    host.py DIRECTORY HOST SOCKET_FD

It starts in fresh PID, mount, network, UTS and IPC namespaces. Over the socket it says `here`, waits until its network
cable is plugged in, and says `up`, or why it is not.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

_MS_BIND, _MS_MOVE, _MS_REC, _MS_PRIVATE = 0x1000, 0x2000, 0x4000, 0x40000
_LOGIN = "ctl"
_TMP = "mode=1777,size=4g"
_PMIX = Path("/usr/lib/x86_64-linux-gnu/pmix2/lib")
_PATIENCE = 60.0
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Boot, then stay."""
    directory, name = Path(sys.argv[1]), sys.argv[2]
    with socket.socket(fileno=int(sys.argv[3])) as parent:
        try:
            plan = json.loads((directory / "cluster.json").read_text())
            socket.sethostname(name)
            _mounts(directory, name, plan["shared"])
            parent.send(b"here")
            address = parent.recv(100).decode()
            _network(address)
            _daemons(directory, name, plan["accounting"])
        except Exception as error:
            parent.send(f"{type(error).__name__}: {error}".encode()[:4000])
            raise
        parent.send(b"up")
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.05)  # no child now; orphans come to us at any time


def _mounts(directory: Path, name: str, shared: list[list[str]]) -> None:
    """Own /tmp, /dev/shm and host files; a change of mounts is seen by this host only."""
    _mount("none", "/", flags=_MS_REC | _MS_PRIVATE)
    # What is shared may lie in the /tmp that we are about to hide: hold it somewhere else meanwhile.
    held = []
    for number, (source, target) in enumerate(shared):
        place = directory / "held" / f"{name}.{number}"
        place.mkdir(parents=True, exist_ok=True)
        _mount(source, str(place), flags=_MS_BIND | _MS_REC)
        held.append((str(place), target))
    _mount("tmpfs", "/tmp", "tmpfs", data=_TMP)
    _mount("tmpfs", "/dev/shm", "tmpfs", data=_TMP)
    for place_name, target in held:
        _make_walkable(Path(target))
        Path(target).mkdir(parents=True, exist_ok=True)
        _mount(place_name, target, flags=_MS_MOVE)
    etc = directory / "etc"
    for file in ("hosts", "passwd", "group"):
        _mount(str(etc / file), f"/etc/{file}", flags=_MS_BIND)
    Path("/etc/slurm").mkdir(exist_ok=True)
    _mount(str(etc / "slurm"), "/etc/slurm", flags=_MS_BIND)
    Path("/run/munge").mkdir(exist_ok=True)
    _mount("tmpfs", "/run/munge", "tmpfs", data="mode=755,size=1m")
    _name_libpmix(directory / "pmix" / name)


def _make_walkable(target: Path) -> None:
    """Where others may not enter a directory above a shared one, as /root, an empty one takes its place."""
    for directory in reversed(target.parents):
        if directory.exists() and not directory.stat().st_mode & 0o001:
            _mount("tmpfs", str(directory), "tmpfs", data="mode=755,size=1g")
            return


def _name_libpmix(place: Path) -> None:
    """Slurm's pmix plugin loads `libpmix.so`, a name that Debian only gives with the development files."""
    if not _PMIX.is_dir() or (_PMIX / "libpmix.so").exists():
        return
    place.mkdir(parents=True, exist_ok=True)
    _mount(str(_PMIX), str(place), flags=_MS_BIND)
    _mount("tmpfs", str(_PMIX), "tmpfs", data="mode=755,size=1m")
    for entry in place.iterdir():
        (_PMIX / entry.name).symlink_to(place / entry.name)
    (_PMIX / "libpmix.so").symlink_to(place / "libpmix.so.2")


def _network(address: str) -> None:
    lines = f"link set lo up\naddr add {address}/24 dev eth0\nlink set eth0 up\n"
    subprocess.run(["ip", "-batch", "-"], input=lines, text=True, check=True)


def _daemons(directory: Path, name: str, accounting: bool) -> None:
    _munge(directory, name)
    if name != _LOGIN:
        (directory / f"spool.{name}").mkdir(exist_ok=True)
        _start("slurmd", "-N", name)
        return
    if accounting:
        _accounting(directory)
    _start("slurmctld")


def _munge(directory: Path, name: str) -> None:
    place = directory / "munge" / name
    place.mkdir(parents=True, exist_ok=True)
    log = f"--log-file={directory}/log/munged.{name}"
    state = [f"--pid-file={place}/pid", f"--seed-file={place}/seed", "--num-threads=1"]
    _start("munged", "--force", f"--key-file={directory}/munge.key", "--socket=/run/munge/munge.socket.2", log, *state)


def _accounting(directory: Path) -> None:
    Path("/run/mysqld").mkdir(exist_ok=True)
    _mount("tmpfs", "/run/mysqld", "tmpfs", data="mode=755,size=1m")
    data, log = f"--datadir={directory}/mysql", (directory / "log" / "mariadb").open("ab")
    with log:
        _start("mariadb-install-db", "--user=root", data, "--auth-root-authentication-method=socket", "--skip-test-db")
        server = ["mariadbd", "--user=root", data, "--socket=/run/mysqld/mysqld.sock", "--skip-networking"]
        subprocess.Popen(server, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    _until(["mariadb", "-N", "-e", "select 'there'"], "there")
    _start("slurmdbd")
    cluster = json.loads((directory / "cluster.json").read_text())["name"]
    _until(["sacctmgr", "-i", "add", "cluster", cluster], "")
    _until(["sacctmgr", "-n", "-P", "show", "cluster"], cluster)  # -P: the whole name


def _start(*command: str) -> None:
    """Run what comes back once the daemon is there, or has failed to start."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-1000:]}")


def _until(command: list[str], wanted: str) -> None:
    """Run it again and again until it succeeds with `wanted` in its output."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE)
        if not done.returncode and wanted in done.stdout:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"{' '.join(command)} does not succeed: {done.stderr.strip()[-1000:]}")
        time.sleep(0.1)


def _mount(source: str, target: str, kind: str = "none", flags: int = 0, data: str = "") -> None:
    if _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode()):
        code = ctypes.get_errno()
        raise OSError(code, f"mount {source} on {target}: {os.strerror(code)}")


if __name__ == "__main__":
    main()
