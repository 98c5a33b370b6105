"""Clusters: making, changing, entering and ending them. Everything that changes the machine happens here.

A cluster is one process, the keeper (keeper.py), and what lives in its PID namespace: a PID, mount, network, UTS and
IPC namespace for every host. None of the namespaces has a name, so nothing is left of them when the keeper dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from testcluster import conf
from testcluster.conf import LOGIN, USERS, Plan
from testcluster.registry import (
    BASE,
    ClusterError,
    acquire,
    is_free,
    lock_file,
    remove,
    remove_tree,
    running,
    wait_free,
    wait_until,
)

NEEDED = ("slurmctld", "slurmd", "srun", "munged", "ip", "tc", "unshare", "nsenter", "setpriv")
NEEDED_TO_ACCOUNT = ("slurmdbd", "mariadbd", "mariadb", "mariadb-install-db")
PACKAGES = "slurmctld slurmd slurm-client munge slurm-wlm-plugins libpmix2 iproute2"
PACKAGES_TO_ACCOUNT = "slurmdbd mariadb-server-core mariadb-client-core"
_HERE = Path(__file__).resolve().parent
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NAMESPACES = ("--pid", "--net", "--uts", "--ipc", "--mount")
_PATIENCE = 90.0
_LEAVING = 20.0


def why_not(accounting: bool = False) -> str:
    """Why no cluster (or none with accounting) can run on this machine, or ""."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a Slurm test cluster needs root on Linux (namespaces)"
    for names, packages in ((NEEDED, PACKAGES), (NEEDED_TO_ACCOUNT if accounting else (), PACKAGES_TO_ACCOUNT)):
        missing = [name for name in names if shutil.which(name, path=_PATH) is None]
        if missing:
            return f"no {', '.join(missing)}; hint: apt-get install --no-install-recommends {packages}"
    tried = subprocess.run(["unshare", *_NAMESPACES, "--fork", "--mount-proc", "true"], capture_output=True, text=True)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


class Cluster:
    """One cluster that is up.

    Attributes:
        plan: what it is made of.
        directory: its state, logs and home directories, at the same path on every host.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.directory = Path(plan.directory)

    # ------------------------------------------------------------ coming and going

    @classmethod
    def up(
        cls,
        name: str = "lab",
        nodes: int = 4,
        gpus: int = 2,
        shared: Sequence[tuple[str, str]] = (),
        accounting: bool = False,
        binding: bool = False,
        owner: int = 0,
        topology: str = "",
        uplink: str = "1gbit",
    ) -> Cluster:
        """Boot a cluster; returns when all nodes are idle.

        Args:
            name: of the cluster; several can be up under different names.
            nodes: compute nodes.
            gpus: pretended GPUs of each.
            shared: (directory here, path on the hosts) of what lies in /tmp, or should be seen under another path.
            accounting: run slurmdbd.
            binding: let Slurm bind tasks to cores.
            owner: pid of a process with whose end the cluster ends; 0 for none.
            topology: leaf switches, as `s1=n1-n2,s2=n3-n4`; "": one switch.
            uplink: bandwidth of the link between the first switch, at which the login host is, and each other one.

        Raises:
            ClusterError: it cannot run here, one of this name is up, or it does not come up; nothing is left then.
        """
        if reason := why_not(accounting):
            raise ClusterError(reason)
        if nodes < 1 or nodes > 200:
            raise ClusterError(f"{nodes} nodes: it can be 1 to 200")
        for source, target in shared:
            if not os.path.isdir(source) or not os.path.isabs(target):
                raise ClusterError(f"shared {source} at {target}: a directory and an absolute path are needed")
        try:
            switches = conf.read_switches(topology, nodes)
        except ValueError as error:
            raise ClusterError(str(error)) from None
        plan = Plan(name, str(BASE / name), nodes, gpus, tuple(shared), accounting, binding, switches, uplink)
        lock = acquire(name)
        if lock is None:
            raise ClusterError(f"cluster {name!r} is up already; hint: `--name {name} down`, or another --name")
        cluster = cls(plan)
        try:
            cluster._write_files()
            cluster._start_keeper(lock, owner)
            cluster._link_switches()
        except BaseException:
            remove_tree(cluster.directory)
            lock_file(name).unlink(missing_ok=True)
            raise
        finally:
            os.close(lock)
        try:
            cluster.boot(LOGIN)
            cluster.boot(*plan.hosts[1:])
            cluster.wait_idle()
        except BaseException:
            cluster.down()
            raise
        return cluster

    @classmethod
    def find(cls, name: str = "lab") -> Cluster:
        """A cluster that is up.

        Raises:
            ClusterError: there is none of this name.
        """
        if is_free(name):
            raise ClusterError(f"no cluster {name!r} is up; there are: {', '.join(running()) or 'none'}; hint: up")
        told = json.loads((BASE / name / "cluster.json").read_text())
        told["shared"] = tuple(tuple(pair) for pair in told["shared"])
        told["switches"] = tuple((name, tuple(nodes)) for name, nodes in told["switches"])
        return cls(Plan(**told))

    def down(self) -> None:
        """End every process of it and remove its directory."""
        name = self.plan.name
        with contextlib.suppress(OSError, ValueError):
            keeper = os.pidfd_open(self.pid_of("keeper"))
            try:
                if not is_free(name):  # else the pid may be somebody else's by now
                    signal.pidfd_send_signal(keeper, signal.SIGTERM)
                    if not wait_free(name, _LEAVING):
                        signal.pidfd_send_signal(keeper, signal.SIGKILL)
                        wait_free(name, _LEAVING)
            finally:
                os.close(keeper)
        remove(name)
        # What started the keeper and the hosts stands outside, and ends a moment after them.
        wait_until(lambda: not self._starters(), _LEAVING)

    def _starters(self) -> list[int]:
        """Pids of the processes that started the keeper and the hosts, those that are ours reaped."""
        _children[:] = [child for child in _children if child.poll() is None]
        marks = [f"{_HERE / script}.py\0{self.directory}\0".encode() for script in ("keeper", "host")]
        found = []
        for pid in [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]:
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                if any(mark in line for mark in marks):
                    found.append(pid)
        return found

    # ------------------------------------------------------------ hosts

    def boot(self, *hosts: str) -> None:
        """Boot hosts that are not up; returns when their daemons run.

        Raises:
            ClusterError: one is up already, or does not come up.
        """
        for host in hosts:
            if self.is_up(host):
                raise ClusterError(f"{host} is up; hint: crash {host} first")
        booting = [(host, self._start_host(host)) for host in hosts]
        try:
            for host, parent in booting:
                pid = self._said(host, parent, b"here")
                self._plug_in(host, pid)
                (self.directory / f"{host}.pid").write_text(str(pid))
                parent.send(conf.address_of(host).encode())
            for host, parent in booting:
                self._said(host, parent, b"up")
        finally:
            for _, parent in booting:
                parent.close()

    def crash(self, host: str, silent: bool = False) -> None:
        """Kill a host with all its processes at once.

        Args:
            host: which one.
            silent: as a loss of power: its peers hear nothing, not even that connections are closed.
        """
        pid = self.pid_of(host)
        if silent:
            self.cut(host)
        os.kill(pid, signal.SIGKILL)
        (self.directory / f"{host}.pid").unlink()
        wait_until(lambda: not os.path.exists(f"/proc/{pid}"), _LEAVING)

    def cut(self, host: str) -> None:
        """Pull the host's network cable."""
        self._ip(f"link set {_port(host)} down")

    def heal(self, host: str) -> None:
        """Plug the host's network cable in again."""
        self._ip(f"link set {_port(host)} up")

    def rate(self, host: str, rate: str) -> None:
        """Limit the bandwidth of a host in both directions: "100mbit", "1gbit"; "off" for no limit."""
        for pid, device in ((self.pid_of("keeper"), _port(host)), (self.pid_of(host), "eth0")):
            tc = ["nsenter", "-t", str(pid), "--net", "tc", "qdisc"]
            subprocess.run([*tc, "del", "dev", device, "root"], capture_output=True)
            if rate != "off":
                _run([*tc, "add", "dev", device, "root", "tbf", "rate", rate, "burst", "1mb", "latency", "50ms"])

    def traffic(self) -> dict[str, int]:
        """Bytes that have crossed the link of each switch but the first, both ways, since the cluster came up."""
        counters = _run([*self._in_switch(), "cat", "/proc/net/dev"])
        rows = {line.split(":")[0].strip(): line.split(":")[1].split() for line in counters.splitlines() if ":" in line}
        links = ((name, rows[f"up{number}"]) for number, (name, _) in enumerate(self.plan.switches) if number)
        return {name: int(row[0]) + int(row[8]) for name, row in links}

    def is_up(self, host: str) -> bool:
        """Whether the host runs."""
        with contextlib.suppress(ClusterError):
            return os.path.exists(f"/proc/{self.pid_of(host)}")
        return False

    def pid_of(self, host: str) -> int:
        """Pid, outside of the cluster, of the first process of a host (or of "keeper").

        Raises:
            ClusterError: there is no such host, or it is not up.
        """
        try:
            return int((self.directory / f"{host}.pid").read_text())
        except FileNotFoundError:
            known = host in self.plan.hosts
            hint = f"hint: boot {host}" if known else f"hosts: {', '.join(self.plan.hosts)}"
            raise ClusterError(f"{host} is {'not up' if known else 'no host of this cluster'}; {hint}") from None

    # ------------------------------------------------------------ inside

    def command(self, host: str, command: Sequence[str], user: str = "root", cwd: str = "") -> list[str]:
        """The command line that runs `command` on a host; what runs there dies with the process of this line.

        Raises:
            ClusterError: the host is not up, or there is no such user.
        """
        pid = str(self.pid_of(host))
        enter = ["nsenter", "-t", pid, *_NAMESPACES, f"--wd={cwd or os.getcwd()}"]
        if user == "root":
            return [*enter, "setpriv", "--pdeathsig", "KILL", "--", *command]
        if user not in USERS:
            raise ClusterError(f"no user {user!r}; there are: root, {', '.join(USERS)}")
        uid = str(USERS[user])
        become = ["setpriv", "--reuid", uid, "--regid", uid, "--clear-groups", "--pdeathsig", "KILL", "--"]
        return [*enter, *become, *command]

    def environment(self, environ: Mapping[str, str], user: str = "root") -> dict[str, str]:
        """`environ` as a user of the cluster has it: nothing of a job around us, a home, no TMPDIR of this machine."""
        drop = ("SLURM", "PMI", "OMPI_", "OPAL_", "PRTE_", "TMPDIR", "XDG_")
        kept = {name: value for name, value in environ.items() if not name.startswith(drop)}
        if user != "root":
            kept |= {"HOME": conf.home_of(self.plan.directory, user), "USER": user, "LOGNAME": user}
        return kept

    def wait_idle(self, timeout: float = _PATIENCE) -> None:
        """Wait until every node is idle.

        Raises:
            ClusterError: it is not so after `timeout` seconds.
        """
        command = self.command(LOGIN, ["sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D"], cwd="/")
        wanted = str(self.plan.nodes)
        said = ""

        def idle() -> bool:
            nonlocal said
            done = subprocess.run(command, capture_output=True, text=True, env={"PATH": _PATH})
            said = done.stdout + done.stderr
            return done.stdout.strip() == wanted

        if not wait_until(idle, timeout, 0.05):
            raise ClusterError(f"not all {wanted} nodes were idle after {timeout:g} s; idle: {said.strip() or 'none'}")

    # ------------------------------------------------------------ parts of up and boot

    def _write_files(self) -> None:
        plan, top = self.plan, self.directory
        remove_tree(top)
        for name in ("", "etc", "etc/slurm", "state", "log", "dev", "home", "shared"):
            (top / name).mkdir(mode=0o755)
        (top / "shared").chmod(0o1777)
        for user, uid in USERS.items():
            home = Path(conf.home_of(plan.directory, user))
            home.mkdir(mode=0o700)
            os.chown(home, uid, uid)
        for number in range(plan.gpus):
            os.mknod(top / "dev" / f"nvidia{number}", 0o666 | 0o020000, os.makedev(1, 3))
        key = os.open(top / "munge.key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(key, os.urandom(1024))
        os.close(key)
        slurm = top / "etc" / "slurm"
        (slurm / "slurm.conf").write_text(conf.slurm_conf(plan))
        if plan.switches:
            (slurm / "topology.conf").write_text(conf.topology_conf(plan))
        (slurm / "gres.conf").write_text(conf.gres_conf(plan))
        (slurm / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # unused; v1 starts without systemd and dbus
        if plan.accounting:
            (slurm / "slurmdbd.conf").write_text(conf.slurmdbd_conf(plan))
            (slurm / "slurmdbd.conf").chmod(0o600)
        (top / "etc" / "hosts").write_text(conf.hosts_file(plan.hosts))
        (top / "etc" / "passwd").write_text(conf.passwd_file(Path("/etc/passwd").read_text(), plan.directory))
        (top / "etc" / "group").write_text(conf.group_file(Path("/etc/group").read_text()))
        (top / "cluster.json").write_text(json.dumps(plan.as_dict()))

    def _start_keeper(self, lock: int, owner: int) -> None:
        owner_fd = os.pidfd_open(owner) if owner else -1
        parent, child = _socketpair()
        try:
            # The lock goes to the keeper: it is held exactly as long as that lives.
            fds = [lock, child.fileno(), *([owner_fd] if owner else [])]
            numbers = [str(lock), str(child.fileno()), str(owner_fd)]
            told = [str(self.directory), str(lock_file(self.plan.name)), *numbers]
            self._spawn([*("unshare", "--pid", "--net"), *_UNSHARE_CHILD], "keeper", told, fds)
        finally:
            child.close()
            if owner:
                os.close(owner_fd)
        with parent:
            (self.directory / "keeper.pid").write_text(str(self._said("keeper", parent, b"here")))

    def _start_host(self, host: str) -> socket.socket:
        parent, child = _socketpair()
        inside = ["nsenter", "-t", str(self.pid_of("keeper")), "--pid", "unshare", *_NAMESPACES, "--mount-proc"]
        with child:
            told = [str(self.directory), host, str(child.fileno())]
            self._spawn([*inside, *_UNSHARE_CHILD], "host", told, [child.fileno()], log=host)
        return parent

    def _spawn(self, prefix: list[str], script: str, told: list[str], fds: list[int], log: str = "keeper") -> None:
        command = [*prefix, sys.executable, "-I", str(_HERE / f"{script}.py"), *told]
        with (self.directory / "log" / f"boot.{log}").open("ab") as output:
            environ = {"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8"}
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environ,
                cwd="/",
                pass_fds=fds,
                start_new_session=True,
            )
        _children.append(child)

    def _said(self, who: str, parent: socket.socket, wanted: bytes) -> int:
        """Wait for a message of a first process; returns its pid as we see it."""
        try:
            said, ancillary, _, _ = parent.recvmsg(4096, socket.CMSG_SPACE(12))
        except TimeoutError:
            said, ancillary = b"nothing in time", []
        if said != wanted:
            log = (self.directory / "log" / f"boot.{who}").read_text()[-1000:]
            raise ClusterError(f"{who} of cluster {self.plan.name!r} does not come up: {said.decode()!r}\n{log}")
        return int(struct.unpack("3i", ancillary[0][2])[0])

    def _plug_in(self, host: str, pid: int) -> None:
        port = _port(host)
        with contextlib.suppress(ClusterError):
            self._ip(f"link del {port}")  # of an earlier life of the host
        bridge = f"br{self.plan.bridge_of(host)}"
        self._ip(f"link add {port} type veth peer name eth0 netns {pid}", f"link set {port} master {bridge} up")

    def _link_switches(self) -> None:
        """Make the bridges of further switches, each with a link of limited bandwidth to the first one."""
        for number in range(1, len(self.plan.switches)):
            up, down, bridge = f"up{number}", f"down{number}", f"br{number}"
            self._ip(
                f"link add {bridge} type bridge", f"link set {bridge} up", f"link add {up} type veth peer name {down}",
                f"link set {up} master br0 up", f"link set {down} master {bridge} up",
            )  # fmt: skip
            for device in (up, down):
                limit = ["rate", self.plan.uplink, "burst", "1mb", "latency", "50ms"]
                _run([*self._in_switch(), "tc", "qdisc", "add", "dev", device, "root", "tbf", *limit])

    def _in_switch(self) -> list[str]:
        return ["nsenter", "-t", str(self.pid_of("keeper")), "--net"]

    def _ip(self, *lines: str) -> None:
        """Run `ip` commands in the switch."""
        _run([*self._in_switch(), "ip", "-batch", "-"], "\n".join([*lines, ""]))


_UNSHARE_CHILD = ("--fork", "--kill-child")
_children: list[subprocess.Popen[bytes]] = []  # what started the keeper and the hosts; reaped when a cluster ends


def _socketpair() -> tuple[socket.socket, socket.socket]:
    """Ours tells the pid of who writes into the other."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    ours.settimeout(_PATIENCE)
    return ours, theirs


def _port(host: str) -> str:
    return f"v-{host}"


def _run(command: Sequence[str], told: str = "") -> str:
    done = subprocess.run(command, input=told, capture_output=True, text=True)
    if done.returncode:
        raise ClusterError(f"{' '.join(command)}: {done.stderr.strip()} {told}")
    return done.stdout
