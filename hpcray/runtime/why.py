"""What an object waits for, from its owner down to the process that works on it or the resource that is missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcray.base.ids import node_of, number_of, owner_of, raylet_of, show_proc
from hpcray.runtime import progress
from hpcray.runtime.diagnosis import PATIENCE, Diagnosis, Someone, show_kernel
from hpcray.runtime.stacks import is_users

if TYPE_CHECKING:
    from hpcray.runtime.process import Process

_DEEPEST = 40
_MOST = 3
_MOST_HOLDERS = 5


@dataclass
class Finding:
    """One line of the answer. depth: how far down from the object that was asked for."""

    depth: int
    text: str


class Why:
    """Asks on behalf of one process. Everything that is asked is asked once; the answers are minutes old at most."""

    def __init__(self, process: Process, patience: float = PATIENCE) -> None:
        self._process = process
        self._diagnosis = Diagnosis(process, patience)
        self._people: dict[bytes, Someone] | None = None
        self._seen: set[bytes] = set()
        self._told_processes: set[bytes] = set()
        self._out: list[Finding] = []

    def explain(self, oid: bytes) -> list[Finding]:
        """What this object waits for."""
        self._out = []
        self._object(oid, 0)
        return self._out

    def everything(self) -> list[Finding]:
        """What the drivers' `get`s wait for; when none does, what those of the tasks and actors do."""
        people = self._all()
        told = self._diagnosis.ask([proc for proc, one in people.items() if one.kind != "raylet"], "waiting")
        chosen = {proc: told[proc] for proc in told if people[proc].kind != "worker" and told[proc]}
        chosen = chosen or {proc: waits for proc, waits in told.items() if waits}
        self._out = []
        for proc, waits in chosen.items():
            for seconds, oids in waits:
                known = f" for {seconds:.0f} s" if seconds else ""
                self._say(0, f"{people[proc].title} waits{known} in get for {_count(oids)}")
                self._objects(oids, 1)
        if not chosen:
            self._say(0, "no get waits in any process that answers")
        return self._out

    # ------------------------------------------------------------ objects

    def _objects(self, oids: list[bytes], depth: int) -> None:
        for oid in oids[:_MOST]:
            self._object(oid, depth)
        if len(oids) > _MOST:
            self._say(depth, f"and {len(oids) - _MOST} more")

    def _object(self, oid: bytes, depth: int) -> None:
        if oid in self._seen:
            self._say(depth, f"{oid.hex()}: see above")
            return
        self._seen.add(oid)
        if depth > _DEEPEST:
            self._say(depth, f"{oid.hex()}: too deep to follow")
            return
        owner = owner_of(oid)
        if not number_of(owner):
            self._say(depth, f"{oid.hex()}: no process owns it; hint: is this the id of an ObjectRef?")
            return
        told = self._diagnosis.ask([owner], "explain", [oid])
        if owner not in told:
            self._say(depth, f"{oid.hex()}: its owner, {self._name(owner)}, does not answer{self._kernel(owner)}")
            return
        known = told[owner][0]
        if known is None:
            text = "does not know it: it was freed, as no ref to it was left, or never was"
            self._say(depth, f"{oid.hex()}: its owner, {self._name(owner)}, {text}")
            return
        self._say(depth, f"{oid.hex()} (owner {self._name(owner)}): {known['what']} {known['text']}".rstrip())
        self._follow(oid, owner, known, depth + 1)

    def _follow(self, oid: bytes, owner: bytes, known: dict[str, Any], depth: int) -> None:
        state = known["state"]
        if state in (progress.FETCHED, progress.READY):
            self._stored(oid, known, depth)
        elif state == progress.ARGUMENTS:
            self._objects(known["open"], depth)
            if not known["open"] and known["actor"]:
                self._actor(known["actor"], depth)
        elif state == progress.QUEUED:
            if known["env"]:
                self._environments(depth)
            self._resources(known["resources"], depth)
        elif state == progress.GROUP:
            self._group(known["group"], depth)
        elif state == progress.SENT:
            self._sent(known["worker"], known["task"], depth)
        elif state == progress.ACTOR:
            self._actor(known["actor"], depth)

    def _stored(self, oid: bytes, known: dict[str, Any], depth: int) -> None:
        """Which nodes have it, and who is fetching it."""
        nodes = {one.node for one in self._all().values() if one.kind == "raylet"}
        told = self._diagnosis.ask([raylet_of(node) for node in sorted(nodes)], "object", oid)
        for raylet, row in told.items():
            if row is None:
                continue
            what = {
                "memory": "has it in memory",
                "both": "has it in memory and on disk",
                "spilled": "has it on disk; it is read back when somebody asks for it",
                "restoring": "is reading it back from disk",
                "waiting": "wants it, and waits for room in its store; hint: hpcray memory",
                "pulling": "is receiving it",
                "creating": "has room for it, into which it is being written",
            }.get(row["state"], row["state"])
            self._say(depth, f"node {node_of(raylet)} {what}")
        for node in known["nodes"]:
            if raylet_of(node) not in told:
                self._say(depth, f"node {node}, which has a copy, does not answer")

    # ------------------------------------------------------------ processes

    def _sent(self, worker: bytes, task: bytes, depth: int) -> None:
        """What the process does to which a task was sent."""
        told = self._diagnosis.ask([worker], "stack").get(worker)
        if told is None:
            self._say(depth, f"{self._name(worker)} does not answer{self._kernel(worker)}")
            return
        mine = next((call for call in told["calls"] if call["task"] == task), None)
        shown = mine or next(iter(told["calls"]), None)
        if shown is None and told["sets_up"]:
            since = f"has been setting up its runtime_env for {told['sets_up']:.1f} s"
            self._say(depth, f"{self._name(worker)} {since}{_innermost(told)}")
            return
        if shown is None:
            self._say(depth, f"{self._name(worker)} runs nothing now: the task or its result is on the way")
            return
        where = _where(told, shown)
        runs = f"runs {shown['name']}" if mine else f"has it in its queue, behind {shown['name']}, which runs"
        self._say(depth, f"{self._name(worker)} {runs} for {shown['seconds']:.1f} s{where}")
        if told["waiting"] and worker not in self._told_processes:
            self._told_processes.add(worker)
            self._say(depth + 1, f"it waits in get for {_count(told['waiting'])}")
            self._objects(told["waiting"], depth + 2)

    def _actor(self, actor: bytes, depth: int) -> None:
        row = next((row for row in self._process.gcs.call("actors") if row["actor"] == actor), None)
        if row is None:
            self._say(depth, f"the head does not know actor {actor.hex()}")
            return
        name = f" {row['name']!r}" if row["name"] else ""
        place = f"node {row['node']}" if row["node"] >= 0 else "no node yet"
        reason = f" ({row['reason']})" if row["reason"] else ""
        restarts = f", restarted {row['restarts']} times" if row["restarts"] else ""
        self._say(depth, f"actor {row['class_name']}{name} is {row['state']} on {place}{restarts}{reason}")
        worker = row["worker"] or self._starting(row, depth + 1)
        if worker:
            self._sent(worker, actor, depth + 1)
            return
        waiting = self._process.gcs.call("status")["waiting_actors"]
        wanted = next((other["resources"] for other in waiting if other["actor"] == actor), None)
        if wanted is not None:
            self._resources(wanted, depth + 1)
        elif not row.get("complete", True):
            self._say(depth + 1, "the arguments of its constructor are not ready")

    def _starting(self, row: dict[str, Any], depth: int) -> bytes:
        """The worker in which an actor's constructor runs: the head does not know it yet, its raylet does."""
        if row["node"] < 0:
            return b""
        raylet = raylet_of(row["node"])
        core = self._diagnosis.ask([raylet], "core").get(raylet, {})
        found = next((other["worker"] for other in core.get("actors", ()) if other["actor"] == row["actor"]), b"")
        if not found and core:
            self._say(depth, f"node {row['node']} has no worker process for it yet: {_pool(core['pool'])}")
        return bytes(found)

    # ------------------------------------------------------------ resources

    def _environments(self, depth: int) -> None:
        """The workers that cannot be asked yet: their Python is being made."""
        raylets = [one.proc for one in self._all().values() if one.kind == "raylet"]
        for raylet, core in self._diagnosis.ask(raylets, "core").items():
            node = node_of(raylet)
            for row in core["pool"]["workers"]:
                if row["sets_up_since"]:
                    seconds = max(0.0, core["now"] - row["sets_up_since"])
                    pid = f", pid {row['pid']}" if row["pid"] else ""
                    text = f"process {node}.{row['number']}{pid}, has been setting up a runtime_env for {seconds:.1f} s"
                    self._say(depth, f"a worker on node {node}, {text}")

    def _group(self, group: bytes, depth: int) -> None:
        """Where its bundles are, and what those need that have no place."""
        row = next((row for row in self._process.gcs.call("placement_groups") if row["group"] == group), None)
        if row is None:
            self._say(depth, f"the head does not know placement group {group.hex()}")
            return
        name = f" {row['name']!r}" if row["name"] else ""
        count = len(row["bundles"])
        self._say(depth, f"placement group{name} is {row['state']}: {count} bundles, strategy {row['strategy']}")
        if row["state"] == "PENDING" and count:
            largest = max(row["bundles"], key=lambda bundle: sum(bundle.values()))
            self._resources(largest, depth + 1)

    def _resources(self, wanted: dict[str, float], depth: int) -> None:
        """What each node lacks for a request, and who has it."""
        status = self._process.gcs.call("status")
        lacking: set[str] = set()
        for node in status["nodes"]:
            short = [name for name, amount in wanted.items() if node["available"].get(name, 0) < amount]
            never = [name for name, amount in wanted.items() if node["total"].get(name, 0) < amount]
            if never:
                self._say(depth, f"node {node['index']} can never serve it: {_amounts(never, wanted, node['total'])}")
            elif short:
                lacking.update(short)
                self._say(depth, f"node {node['index']} lacks {_amounts(short, wanted, node['available'])}")
            else:
                self._say(depth, f"node {node['index']} has what it needs; a worker process may be starting there")
        for node in status["dead_nodes"]:
            self._say(depth, f"node {node['index']} is dead: {node['reason']}")
        if lacking:
            self._holders(lacking, depth)

    def _holders(self, names: set[str], depth: int) -> None:
        raylets = [one.proc for one in self._all().values() if one.kind == "raylet"]
        cores = self._diagnosis.ask(raylets, "core")
        held = [
            (lease["worker"], lease["resources"], lease["blocked"])
            for core in cores.values()
            for lease in core["leases"]
            if names & set(lease["resources"])
        ]
        runs = self._diagnosis.ask([worker for worker, _, _ in held[:_MOST_HOLDERS]], "calls")
        for worker, resources, lent in held[:_MOST_HOLDERS]:
            calls = runs.get(worker)
            doing = f"runs {calls[0]['name']} for {calls[0]['seconds']:.1f} s" if calls else "runs nothing now"
            doing = "does not answer" if calls is None else doing
            holds = ", ".join(f"{name}: {amount:g}" for name, amount in resources.items())
            self._say(depth, f"{self._name(worker)} holds {holds}{' (lent: it waits)' if lent else ''} and {doing}")
        if len(held) > _MOST_HOLDERS:
            self._say(depth, f"and {len(held) - _MOST_HOLDERS} more; hint: hpcray stack")
        actors = [row for core in cores.values() for row in core["actors"]]
        if actors:
            classes = ", ".join(sorted({row["class"] for row in actors}))
            self._say(depth, f"{len(actors)} actors hold for life what they asked for: {classes}")

    # ------------------------------------------------------------ inside

    def _say(self, depth: int, text: str) -> None:
        self._out.append(Finding(depth, text))

    def _all(self) -> dict[bytes, Someone]:
        if self._people is None:
            self._people = {one.proc: one for one in self._diagnosis.people()}
        return self._people

    def _name(self, proc: bytes) -> str:
        one = self._all().get(proc)
        return one.title if one is not None else show_proc(proc)

    def _kernel(self, proc: bytes) -> str:
        one = self._all().get(proc)
        if one is None:
            return ": it is not there any more"
        told = show_kernel(self._diagnosis.kernel([one])[proc])
        return f" within {self._diagnosis.patience:g} s; the kernel says: {told}"


def show_lines(findings: list[Finding]) -> list[str]:
    """For people: the deeper, the further to the right."""
    return ["  " * finding.depth + finding.text for finding in findings]


def _where(told: dict[str, Any], call: dict[str, Any]) -> str:
    """`, at file.py:12 in f`: the innermost line of the user's."""
    frames: list[list[Any]]
    if call["thread"]:
        frames = next((row["frames"] for row in told["threads"] if row["ident"] == call["thread"]), [])
    else:
        frames = next((row["frames"] for row in told["coroutines"] if row["task"] == call["task"]), [])
    theirs = [frame for frame in frames if is_users(frame)]
    frame = next(reversed(theirs or frames), None)
    return f", at {frame[0]}:{frame[1]} in {frame[2]}" if frame is not None else ""


def _innermost(told: dict[str, Any]) -> str:
    """Where its main thread is: `, at file.py:12 in f`."""
    frames: list[list[Any]] = next((row["frames"] for row in told["threads"] if row["name"] == "MainThread"), [])
    return f", at {frames[-1][0]}:{frames[-1][1]} in {frames[-1][2]}" if frames else ""


def _amounts(names: list[str], wanted: dict[str, float], there: dict[str, float]) -> str:
    rows = [(name, wanted[name], max(0.0, there.get(name, 0))) for name in sorted(names)]
    return ", ".join(f"{name}: {amount:g} wanted, {free:g} there" for name, amount, free in rows)


def _pool(pool: dict[str, Any]) -> str:
    counts = ", ".join(f"{count} {state}" for state, count in pool["counts"].items() if count)
    failed = f"; the last failure: {pool['last_failure']}" if pool["last_failure"] else ""
    return f"{counts or 'none'} of at most {pool['limit']} workers{failed}"


def _count(oids: list[bytes]) -> str:
    return "one object" if len(oids) == 1 else f"{len(oids)} objects"
