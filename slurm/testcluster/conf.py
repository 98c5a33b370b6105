"""The configuration files of a cluster, as texts. Pure: everything comes in as arguments."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

LOGIN = "ctl"
"""The host that runs slurmctld and from which users submit."""

USERS = {"ada": 6001, "bob": 6002}
"""Plain users that every host of a cluster knows: name to uid (and gid)."""

SUBNET = "10.99.0"
LOGIN_ADDRESS = f"{SUBNET}.254"
TOP = "s0"
"""The switch above all others, of a cluster with a topology."""
CPUS = 4
MEMORY_MB = 8000

_SLURM = """\
ClusterName={name}
SlurmctldHost={login}({address})
SlurmUser=root
AuthType=auth/munge
# A requeued job waits as long as a credential is valid: 120 s elsewhere. Started earlier, by hand, it may fail at once.
AuthInfo=cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/log/slurmctld
SlurmdLogFile={directory}/log/slurmd.%n
# linuxproc follows parents only: what a job detaches from its step stays alive, so that tests see it.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/{task}
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU={memory_per_cpu}
# More CPUs and memory than the machine may have.
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
SlurmdTimeout=20
MessageTimeout=10
TCPTimeout=2
KillWait=30
InactiveLimit=0
UnkillableStepTimeout=10
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
JobCompType=jobcomp/filetxt
JobCompLoc={directory}/log/completed
{accounting}
{topology}
GresTypes=gpu
NodeName=n[1-{nodes}] NodeAddr={subnet}.[1-{nodes}] CPUs={cpus} RealMemory={memory} Gres=gpu:{gpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
# A job of `main` takes the nodes of a job of `scavenge`, which is requeued: SIGTERM, then SIGKILL after the grace time.
PartitionName=scavenge Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
"""

_ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={login}
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5"""

_SLURMDBD = """\
AuthType=auth/munge
DbdHost={login}
SlurmUser=root
LogFile={directory}/log/slurmdbd
PidFile={directory}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
"""


@dataclass(frozen=True)
class Plan:
    """What a cluster is made of.

    Attributes:
        name: of the cluster, also of its directory.
        directory: its state, configuration, logs and home directories; the same path on every host.
        nodes: number of compute nodes.
        gpus: pretended GPUs of each.
        shared: directories that every user of every host sees: (where it is, where the hosts find it). /tmp is each
            host's own, so what lies there has to be named, and what lies under a closed directory such as /root too.
        accounting: whether slurmdbd runs, so that sacct works.
        binding: whether Slurm binds tasks to cores, as most sites have it. A node then has the machine's CPUs, not 4.
        switches: (name, nodes) of each leaf switch; () for one switch that Slurm is told nothing about.
        uplink: bandwidth of the link between two switches, as tc has it.
    """

    name: str
    directory: str
    nodes: int = 4
    gpus: int = 2
    shared: tuple[tuple[str, str], ...] = field(default=())
    accounting: bool = False
    binding: bool = False
    switches: tuple[tuple[str, tuple[str, ...]], ...] = ()
    uplink: str = "1gbit"

    def as_dict(self) -> dict[str, object]:
        """For cluster.json."""
        return asdict(self)

    @property
    def hosts(self) -> list[str]:
        """All hosts: the login host first."""
        return [LOGIN, *(f"n{i + 1}" for i in range(self.nodes))]

    def bridge_of(self, host: str) -> int:
        """Number of the switch that a host is plugged into; the login host is at the first one."""
        return next((number for number, (_, nodes) in enumerate(self.switches) if host in nodes), 0)


def read_switches(text: str, nodes: int) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Read `s1=n1-n2,s2=n3-n4,n6`: the nodes of each switch, as ranges or one by one.

    Raises:
        ValueError: it has another form, or a node is at no switch, or at two.
    """
    found: dict[str, list[str]] = {}
    name = ""
    for word in filter(None, (part.strip() for part in text.split(","))):
        before, equals, span = word.rpartition("=")
        name = before if equals else name
        first, _, last = span.partition("-")
        if not name or not first[1:].isdigit() or not (last or first)[1:].isdigit() or name == TOP:
            raise ValueError(f"--topology {text!r}: {word!r} is not like s1=n1-n2 (and not {TOP}, the top)")
        found.setdefault(name, []).extend(f"n{i}" for i in range(int(first[1:]), int((last or first)[1:]) + 1))
    every = sorted(node for some in found.values() for node in some)
    if found and every != sorted(f"n{i + 1}" for i in range(nodes)):
        raise ValueError(f"--topology {text!r}: each of n1 to n{nodes} has to be at one switch")
    return tuple((switch, tuple(some)) for switch, some in found.items())


def address_of(host: str) -> str:
    """IP address of a host."""
    return LOGIN_ADDRESS if host == LOGIN else f"{SUBNET}.{int(host[1:])}"


def slurm_conf(plan: Plan) -> str:
    """slurm.conf."""
    cpus = (os.cpu_count() or 1) if plan.binding else CPUS
    return _SLURM.format(
        name=plan.name,
        directory=plan.directory,
        nodes=plan.nodes,
        gpus=plan.gpus,
        accounting=_ACCOUNTING.format(login=LOGIN) if plan.accounting else "",
        login=LOGIN,
        address=LOGIN_ADDRESS,
        subnet=SUBNET,
        task="affinity" if plan.binding else "none",
        cpus=cpus,
        memory=MEMORY_MB,
        memory_per_cpu=MEMORY_MB // cpus,
        topology="TopologyPlugin=topology/tree" if plan.switches else "",
    )


def topology_conf(plan: Plan) -> str:
    """topology.conf: the leaf switches, and one above them, without which no job could span two."""
    lines = [f"SwitchName={name} Nodes={','.join(nodes)}" for name, nodes in plan.switches]
    return "\n".join([*lines, f"SwitchName={TOP} Switches={','.join(name for name, _ in plan.switches)}", ""])


def gres_conf(plan: Plan) -> str:
    """gres.conf: Slurm wants a device node for each GPU."""
    if not plan.gpus:
        return ""
    return f"NodeName=n[1-{plan.nodes}] Name=gpu File={plan.directory}/dev/nvidia[0-{plan.gpus - 1}]\n"


def slurmdbd_conf(plan: Plan) -> str:
    """slurmdbd.conf."""
    return _SLURMDBD.format(login=LOGIN, directory=plan.directory)


def hosts_file(hosts: Sequence[str]) -> str:
    """/etc/hosts."""
    return "".join(["127.0.0.1 localhost\n", *(f"{address_of(host)} {host}\n" for host in hosts)])


def passwd_file(machine: str, directory: str) -> str:
    """/etc/passwd: the machine's and our users."""
    ours = [f"{name}:x:{uid}:{uid}::{home_of(directory, name)}:/bin/bash\n" for name, uid in USERS.items()]
    return "".join([machine, *ours])


def group_file(machine: str) -> str:
    """/etc/group: the machine's and one group for each of our users."""
    return "".join([machine, *(f"{name}:x:{gid}:\n" for name, gid in USERS.items())])


def home_of(directory: str, user: str) -> str:
    """Home directory of one of our users; every host sees it."""
    return str(Path(directory) / "home" / user)
