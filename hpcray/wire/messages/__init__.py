"""Every message of hpcray, one file per conversation. Each is a tagged msgspec struct, encoded as a msgpack array.

`p` process (driver or worker), `r` raylet, `g` the GCS (in raylet 0). All ids are bytes (`base.ids`), resource amounts
are units (`base.resources`), times are seconds, sizes are bytes. A tag is never used twice.
"""

from __future__ import annotations

from typing import Union

import msgspec

from hpcray.wire.messages.gcs import (
    ActorGone, ActorLeaving, ActorOutOfScope, ActorReady, ActorSpec, ActorState, ArgRef, BecomeActor,
    BundlesPrepared, CommitBundles, CreateActor, CreateGroup, GcsCall, GcsReply, GroupSpec, GroupState, KillActor,
    PrepareBundles, RemoveGroup, ReturnBundles, StartActor, StartActorRefused, TerminateActor, WatchActor,
    WatchGroup,
)  # fmt: skip
from hpcray.wire.messages.nodes import (
    ActorSaved, Drain, DrainOver, DrainReady, DrainRequest, Heartbeat, NodeDied, NodeHello, NodeInfo, NodeReady,
    NodeStopped, NodeTable, SaveActor, Stop,
)  # fmt: skip
from hpcray.wire.messages.ownership import (
    AddLocation, BorrowAck, BorrowAdd, BorrowAsk, BorrowDrop, BorrowEnd, BorrowTake, FreeAsked, ListRefs, ObjectGet,
    ObjectReady,
)  # fmt: skip
from hpcray.wire.messages.processes import Exit, Hello, JobInfo, ProcDied, RunInfo, SetJob, Undeliverable, Welcome
from hpcray.wire.messages.scheduling import (
    Blocked, Demand, GrantFor, GrantRefused, Infeasible, LeaseGranted, LeaseReturn, LeaseRevoked, NodeView,
    ReclaimIdle, Unblocked, Unmet,
)  # fmt: skip
from hpcray.wire.messages.shapes import Resources, Shape
from hpcray.wire.messages.store import (
    Create, Created, Free, ListStore, Open, Opened, Pull, PullRefused, Release, Seal, StoreError, Unpin,
)  # fmt: skip
from hpcray.wire.messages.tasks import (
    ActorCall, CallOptions, CancelRef, CancelTask, FunctionDef, Leased, PushTask, Returned, StreamItem, StreamTaken,
    TakeBack, TakenBack, TaskDone, TaskReply,
)  # fmt: skip

Message = Union[
    Hello, Welcome, SetJob, Exit, ProcDied, Undeliverable,
    Demand, LeaseGranted, LeaseReturn, ReclaimIdle, Blocked, Unblocked, Infeasible, LeaseRevoked,
    Unmet, GrantFor, GrantRefused, NodeView,
    NodeHello, NodeTable, NodeReady, Stop, NodeStopped, Heartbeat, NodeDied,
    DrainRequest, Drain, DrainReady, SaveActor, ActorSaved, DrainOver,
    CreateActor, StartActor, StartActorRefused, BecomeActor, ActorReady, ActorGone, WatchActor, ActorState, KillActor,
    ActorOutOfScope, TerminateActor, GcsCall, GcsReply, ActorLeaving,
    CreateGroup, WatchGroup, GroupState, RemoveGroup, PrepareBundles, BundlesPrepared, CommitBundles, ReturnBundles,
    Create, Created, StoreError, Seal, Open, Opened, Release, Free, Pull, PullRefused, Unpin, ListStore,
    FunctionDef, PushTask, ActorCall, TaskDone, TaskReply, TakeBack, TakenBack, CancelTask, Leased,
    CancelRef, CallOptions, StreamItem, StreamTaken,
    ObjectGet, ObjectReady, BorrowAdd, BorrowAck, BorrowDrop, AddLocation, BorrowTake, BorrowAsk, BorrowEnd,
    FreeAsked, ListRefs,
]  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[list[Message]] = msgspec.msgpack.Decoder(list[Message])

encode = _encoder.encode
decode = _decoder.decode

__all__ = [
    "ActorCall", "ActorGone", "ActorLeaving", "ActorOutOfScope", "ActorReady", "ActorSaved", "ActorSpec",
    "ActorState", "AddLocation", "ArgRef", "BecomeActor", "Blocked", "BorrowAck", "BorrowAdd", "BorrowAsk",
    "BorrowDrop", "BorrowEnd", "BorrowTake", "BundlesPrepared", "CallOptions", "CancelRef", "CancelTask",
    "CommitBundles", "Create", "CreateActor", "CreateGroup", "Created", "Demand", "Drain", "DrainOver",
    "DrainReady", "DrainRequest", "Exit", "Free", "FreeAsked", "FunctionDef", "GcsCall", "GcsReply", "GrantFor",
    "GrantRefused", "GroupSpec", "GroupState", "Heartbeat", "Hello", "Infeasible", "JobInfo", "KillActor",
    "LeaseGranted", "LeaseReturn", "LeaseRevoked", "Leased", "ListRefs", "ListStore", "NodeDied", "NodeHello",
    "NodeInfo", "NodeReady", "NodeStopped", "NodeTable", "NodeView", "ObjectGet", "ObjectReady", "Open", "Opened",
    "PrepareBundles", "ProcDied", "Pull", "PullRefused", "PushTask", "ReclaimIdle", "Release", "RemoveGroup",
    "Resources", "ReturnBundles", "Returned", "RunInfo", "SaveActor", "Seal", "SetJob", "Shape", "StartActor",
    "StartActorRefused", "Stop", "StoreError", "StreamItem", "StreamTaken", "TakeBack", "TakenBack", "TaskDone",
    "TaskReply", "TerminateActor", "Unblocked", "Undeliverable", "Unmet", "Unpin", "WatchActor", "WatchGroup",
    "Welcome", "Message", "decode", "encode",
]  # fmt: skip
