"""Messages to and from the GCS: actors, names, queries, placement groups."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from hpcray.protocol.messages.leases import Resources, Shape


class ArgRef(Struct, array_like=True):
    """An argument (or value) that is in node stores: take it from one of `nodes`."""

    id: bytes
    size: int
    nodes: list[int]


class ActorSpec(Struct, array_like=True):
    """All that it takes to make an actor. `cls` is the pickled class, `args` the pickled (args, kwargs).

    place: what its node is chosen by, and must have in all; one CPU unless `num_cpus` says otherwise. hold: what it
    takes there, which must be free, and keeps while it lives: no CPU if its options ask for nothing but memory."""

    actor: bytes
    class_name: str
    cls: bytes
    args: bytes
    refs: list[ArgRef]
    place: Shape
    hold: Shape
    name: str
    namespace: str
    detached: bool
    max_restarts: int
    max_task_retries: int
    max_concurrency: int
    methods: dict[str, dict[str, Any]]
    max_pending_calls: int = -1
    inline: list[bytes] | None = None
    concurrency_groups: dict[str, int] = {}
    out_of_order: bool = False
    max_runtime: float = 0.0


class CreateActor(Struct, array_like=True, tag=40):
    """p→g: register an actor. Answer: GcsReply(req), ok with b"" when registered, or an error (name taken). ready
    False: the arguments of the constructor are missing; the actor is registered, and placed when the same message
    comes with them."""

    req: int
    spec: ActorSpec
    ready: bool = True


class StartActor(Struct, array_like=True, tag=41):
    """g→r: place this actor on the receiver's node."""

    spec: ActorSpec
    restarts: int


class StartActorRefused(Struct, array_like=True, tag=42):
    """r→g: the actor does not fit any more (or no worker could be started: reason non-empty)."""

    actor: bytes
    reason: str


class BecomeActor(Struct, array_like=True, tag=43):
    """r→worker: run the constructor, then serve this actor for life."""

    spec: ActorSpec
    restarts: int


class ActorReady(Struct, array_like=True, tag=44):
    """worker→g: the constructor has returned. error: b"" or the pickled exception of the constructor
    (`protocol.serialization` error blob). pid: of the worker. repr_name: the object's repr, where its class has one of
    its own."""

    actor: bytes
    error: bytes
    borrowed: list[bytes]
    pid: int = 0
    repr_name: str = ""


class ActorGone(Struct, array_like=True, tag=45):
    """r→g: the actor's process is gone. intended: exit_actor, terminate or kill (no restart)."""

    actor: bytes
    worker: bytes
    reason: str
    intended: bool


class WatchActor(Struct, array_like=True, tag=46):
    """p→g: send the sender this actor's state, now and at each change."""

    actor: bytes


class ActorStateUpdate(Struct, array_like=True, tag=47):
    """g→watchers: the state of an actor: PENDING, ALIVE, RESTARTING, DEAD. error: the constructor's exception, if
    it raised. unavailable: it was lost and restarts: calls that run at most once fail meanwhile. pid, ip: of a dead
    one, where it ran; name, namespace: its own."""

    actor: bytes
    state: str
    worker: bytes
    restarts: int
    reason: str
    error: bytes
    unavailable: bool = False
    pid: int = 0
    ip: str = ""
    name: str = ""
    namespace: str = ""


class KillActor(Struct, array_like=True, tag=48):
    """p→g→r: kill the actor's worker. no_restart: for good."""

    actor: bytes
    no_restart: bool
    reason: str


class ActorOutOfScope(Struct, array_like=True, tag=49):
    """owner→g: the last handle is gone; let queued calls finish, then end it."""

    actor: bytes


class TerminateActor(Struct, array_like=True, tag=50):
    """g→worker of the actor: finish what is queued, then leave."""

    actor: bytes


class GcsCall(Struct, array_like=True, tag=51):
    """p→g: one query. method: see `core.gcs.query_service`; args and value are msgpack."""

    req: int
    method: str
    args: bytes


class GcsReply(Struct, array_like=True, tag=52):
    """g→p: answer to a request with this number. ok False: `value` is a UTF-8 message."""

    req: int
    ok: bool
    value: bytes


class ProcLeaving(Struct, array_like=True, tag=53):
    """p→own r: it ends on purpose (exit_actor, shutdown, a cancelled task); the exit that follows is no crash."""

    reason: str


class GroupSpec(Struct, array_like=True):
    """A placement group as its creator defines it. bundles: units. owner: the process whose end removes it, b"" for
    the job. selectors: for each bundle a strategy with conditions on labels, "" for none; empty for no conditions
    at all. preferred: id of the node that should hold it. same: a label of which all its nodes have the same value."""

    group: bytes
    bundles: list[Resources]
    strategy: str
    name: str = ""
    namespace: str = ""
    owner: bytes = b""
    selectors: list[str] = []
    preferred: str = ""
    same: str = ""


class CreateGroup(Struct, array_like=True, tag=130):
    """p→g: register a placement group. Answer: GcsReply(req) when req is not 0; the creator gets a
    PlacementGroupStateUpdate at each change."""

    req: int
    spec: GroupSpec


class WatchGroup(Struct, array_like=True, tag=131):
    """p→g: send the sender this group's state, now and at each change."""

    group: bytes


class PlacementGroupStateUpdate(Struct, array_like=True, tag=132):
    """g→watchers, r→p with tasks for a removed group: the state of a placement group: PENDING, CREATED,
    RESCHEDULING, REMOVED."""

    group: bytes
    state: str
    reason: str = ""


class RemoveGroup(Struct, array_like=True, tag=133):
    """p→g: end what runs in the group, and give its resources back."""

    group: bytes


class PrepareBundles(Struct, array_like=True, tag=134):
    """g→r: hold these bundles (by index), all or none. Answer: BundlesPrepared. commit: no other node takes part,
    so the bundles may be used at once. reservation: seconds for which room may be reserved for them until there is
    enough; 0: they fit at once or are refused."""

    group: bytes
    attempt: int
    bundles: dict[int, Resources]
    commit: bool
    reservation: float = 0.0


class BundlesPrepared(Struct, array_like=True, tag=135):
    """r→g: answer to PrepareBundles. ok False: there is no room, nothing is held."""

    group: bytes
    attempt: int
    ok: bool


class CommitBundles(Struct, array_like=True, tag=136):
    """g→r: every bundle of the group has a node; those that the receiver prepared may be used."""

    group: bytes


class ReturnBundles(Struct, array_like=True, tag=137):
    """g→r: give these bundles back, prepared or committed, and kill what runs in them."""

    group: bytes
    indices: list[int]
    reason: str
