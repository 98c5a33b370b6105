"""The order in which `init()` looks for a cluster. A pure function: what was seen goes in, what to do comes out.

1. the argument: `H:P` and URLs, `auto`, a session directory, `local`;
2. RAY_ADDRESS, HPCRAY_ADDRESS;
3. for `auto`: the job of the process that started this one (HPCRAY_SESSION);
4. the cluster that `ray start` made in this allocation;
5. the launcher's world (`srun`, `mpirun`);
6. a node of its own, or, for `auto`, the only job on this host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from hpcray.ray_start.clusters import (
    Asker,
    ClusterName,
    StartedCluster,
    StartedNode,
    clusters_named,
    only,
    parse_cluster_name,
    session_clusters,
)
from hpcray.ray_start.registry import FAILED, STARTING, StartCall

PLAIN, AUTO = "", "auto"
BLOCK_HINT = "where the site kills what a step leaves at its end, `ray start --block` keeps the step"
END_NOTE = (
    "; `ray start` was called in a step of Slurm's without --block: where the site kills what a step leaves at its "
    "end, as with cgroups, the node ends with its step; hint: ray start --block"
)
"""Text behind the reason of the end of such a node, in all errors and logs (the setting `end_note`)."""
_ORDERED = "it was sent SIG"


def unexpected_ends(reasons: Iterable[str]) -> tuple[list[str], str]:
    """The reasons of nodes that have ended without `ray stop` or another signal to them, and what helps, said once."""
    found = [reason for reason in reasons if _ORDERED not in reason]
    known = any(END_NOTE in reason for reason in found)
    return [reason.replace(END_NOTE, "") for reason in found], END_NOTE if known else f"; hint: {BLOCK_HINT}"


class Asked(Struct, frozen=True, kw_only=True):
    """The address that a program gives, and the variables that count.

    Attributes:
        address: the argument, else RAY_ADDRESS; "" for neither.
        ray_address: RAY_ADDRESS, which `auto` means too.
        hpcray_address: HPCRAY_ADDRESS. session: HPCRAY_SESSION.
    """

    address: str = PLAIN
    ray_address: str = ""
    hpcray_address: str = ""
    session: str = ""

    @property
    def name(self) -> ClusterName | None:
        """The cluster that the address names; None where it names none."""
        if self.address == AUTO and (named := parse_cluster_name(self.ray_address)):
            return named
        return parse_cluster_name(self.address) if self.address != AUTO else None

    @property
    def is_open(self) -> bool:
        """True if the address names nothing, and whatever is there decides."""
        if self.address not in (PLAIN, AUTO) or self.name is not None:
            return False
        return not self.hpcray_address and not (self.address == AUTO and self.session)


class Seen(Struct, frozen=True, kw_only=True):
    """The nodes, clusters and commands that were found.

    Attributes:
        asker: where the program runs.
        nodes: the started nodes of this host.
        known: the clusters of this user that the directory of secrets has; those of other hosts too.
        calls: the `ray start` commands of this allocation, with those that have ended without a word among them.
        gone: idents of those that have.
        where: the directory of secrets.
        machine: this boot of this host, as `StartCall.machine` has it.
    """

    asker: Asker
    nodes: Sequence[StartedNode] = ()
    known: Sequence[StartedCluster] = ()
    calls: Sequence[StartCall] = ()
    gone: frozenset[str] = frozenset()
    where: str = ""
    machine: str = ""


class Join(Struct, frozen=True):
    """Join the node with this session directory."""

    session_dir: str


class NoStartedCluster(Struct, frozen=True):
    """No started cluster is meant: the other rules decide."""


class Wait(Struct, frozen=True):
    """A node may come. What is said when it does not."""

    reason: str


class Refuse(Struct, frozen=True):
    """There is no such cluster, and none will come."""

    reason: str


Step = Join | NoStartedCluster | Wait | Refuse
_WAYS_OUT = (
    "hint: wait in the script until `ray status` says 0; or `ray start --address=H:P` on this host first; or "
    "init(address='local'), where one node is meant"
)


def next_step(asked: Asked, seen: Seen) -> Step:
    """Decide what `init()` does with what it sees now.

    Raises:
        SeveralClustersError: more than one cluster could be meant.
    """
    name = asked.name
    if name is None and not asked.is_open:
        return NoStartedCluster()
    if name is not None:
        found = clusters_named(name, [node.cluster for node in seen.nodes], seen.asker)
        what = name.text
    else:
        found, what = session_clusters(seen.nodes, seen.asker.allocation), "init()"
    cluster = only(what, found)
    coming = [call for call in seen.calls if call.state != FAILED and call.ident not in seen.gone]
    here = [node for node in seen.nodes if cluster is not None and node.cluster.ident == cluster.ident]
    own = seen.asker.allocation
    if here and not (own and coming and all(node.allocation != own for node in here)):
        return Join(here[0].session_dir)
    if here:  # two jobs of one name on the same hosts: this one's is on its way
        return Wait(
            f"{what} is here {here[0].cluster.line()}, and `ray start` was called in this allocation, too: "
            f"{_calls(coming)}; {_WAYS_OUT}"
        )
    ended = _endings(seen)
    if name is not None:
        return _of_name(name, seen, coming, ended)
    if not seen.asker.allocation:
        # What was called an hour ago, or on another host that shares the home, says nothing about this program.
        coming = [call for call in coming if call.state == STARTING and call.machine == seen.machine]
        ended = ""
    if coming:
        return Wait(f"`ray start` was called in this allocation, and no node on this host answers: {_calls(coming)}"
                    f"{_and(ended)}; {_WAYS_OUT}")  # fmt: skip
    if ended:
        return Refuse(f"`ray start` was called in this allocation, and no node has come of it: {ended}; {_WAYS_OUT}")
    return NoStartedCluster()


def _of_name(name: ClusterName, seen: Seen, coming: Sequence[StartCall], ended: str) -> Step:
    elsewhere = clusters_named(name, seen.known, seen.asker)
    if elsewhere:
        return Wait(
            f"{name.text} is {elsewhere[0].line()}, and no node of it is on this host{_and(ended)}; hint: ray start "
            f"--address={elsewhere[0].name} here first, or run this on one of its hosts"
        )
    if name.scheme == "ray" and not seen.asker.allocation and not coming and not name.is_local:
        return Refuse(
            f"{name.text}: a program outside of the job cannot be its driver; hint: run it on one of its nodes, such "
            "as by `ray job submit -- python program.py`, or srun --jobid=JOB --overlap -n 1 python program.py"
        )
    if coming:
        return Wait(f"{name.text} does not answer yet: {_calls(coming)}{_and(ended)}; {_WAYS_OUT}")
    if ended:
        return Refuse(f"there is no cluster {name.text}: {ended}; {_WAYS_OUT}")
    others = "; ".join(dict.fromkeys(node.cluster.line() for node in seen.nodes))
    return Wait(
        f"there is no cluster {name.text} of this user: no node on this host, and no file in {seen.where}"
        f"{f' (here are: {others})' if others else ''}; {_WAYS_OUT}"
    )


def _calls(calls: Sequence[StartCall]) -> str:
    return "; ".join(f"`{call.command}` on {call.host} is {call.state}" for call in calls[:4])


def _and(ended: str) -> str:
    return f"; {ended}" if ended else ""


def _endings(seen: Seen) -> str:
    """Why nodes did not come, or went without a word."""
    found = []
    for call in seen.calls:
        if call.state == FAILED:
            found.append(f"`{call.command}` on {call.host} failed: {call.reason}")
        elif call.ident in seen.gone and call.in_step:
            found.append(
                f"`{call.command}` on {call.host} was killed, as all processes of a step are at its end; hint: --block"
            )
        elif call.ident in seen.gone:
            found.append(f"`{call.command}` on {call.host} was killed; {BLOCK_HINT}")
    return "; ".join(found[:3])
