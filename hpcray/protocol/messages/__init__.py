"""Every message of hpcray, one file per conversation. Each is a tagged msgspec struct, encoded as a msgpack array.

The first line of a message's docstring begins with `sender→receiver`: `p` is a process (driver or worker), `r` a
raylet, `g` the GCS (in the head's raylet). All ids are bytes (`common.ids`), resource amounts are units
(`common.resources`), times are seconds, sizes are bytes. A tag is never used twice.
"""

from __future__ import annotations

from typing import Union

import msgspec

from hpcray.protocol.messages.gcs import *
from hpcray.protocol.messages.leases import *
from hpcray.protocol.messages.nodes import *
from hpcray.protocol.messages.objects import *
from hpcray.protocol.messages.processes import *
from hpcray.protocol.messages.tasks import *

Message = Union[
    Hello, Welcome, SetJob, Exit, ExitRefused, ProcDied, Undeliverable, ProbeViaRaylet, CollectGarbage,
    RequestGarbageCollection,
    RequestLeases, LeaseGranted, ReturnLease, ReclaimIdle, Blocked, Unblocked, Infeasible, LeaseRevoked, LeasesCapped,
    UnmetLeaseRequest, GrantLeases, GrantLeasesRefused, PeerLeaseRequest, PeerLeasesRefused, PlacementGroupNodes,
    NodeView, ResourceContention,
    RegisterNode, NodeTable, NodeReady, Stop, NodeStopped, Heartbeat, NodeDied, PeerFailed, Ping, HeadMoved,
    NodeInventory,
    StartDriver, DriverRegistered, DriverEnded,
    NodeJoined, NodeAcquainted, ClusterGrew, OpenJob,
    RemoveNode, LeaveRequest, Leave, LeaveIdle, NodeOccupied, NodeIdle, Evacuate, Evacuated,
    DrainRequest, Drain, DrainReady, SaveActor, ActorSaved, DrainOver,
    CreateActor, StartActor, StartActorRefused, BecomeActor, ActorReady, ActorGone, WatchActor, ActorStateUpdate,
    KillActor,
    ActorOutOfScope, TerminateActor, GcsCall, GcsReply, ProcLeaving,
    CreateGroup, WatchGroup, PlacementGroupStateUpdate, RemoveGroup, PrepareBundles, BundlesPrepared, CommitBundles,
    ReturnBundles,
    Create, Created, StoreError, Seal, Open, Opened, Release, Free, Pull, PullElsewhere, PullRefused, Unpin, ListStore,
    RaisePriority, Prefetch, OnDisk, DiskRead, ReplicaPinned,
    FunctionDef, PushTask, ActorCall, TaskDone, TaskReply, ReturnTasks, TasksReturned, CancelTask, LeaseAttached,
    CancelRef, CallOptions, StreamItem, StreamTaken, ResidentMoved,
    ObjectGet, ObjectReady, BorrowAdd, BorrowAck, BorrowDrop, AddLocation, BorrowTake, KeepCopies, SettleBorrows,
    BorrowsSettled,
    FreeRequest, ListRefs, ObjectLost,
    WorkerOutput, OutputPrinted, FlushOutput, OutputFlushed, OutputLost,
    Introspect, ListRetriableTasks, RetriableTasks, LastFigures, EndReason, ExtensionMessage,
    StateLogAppend, StateLogAck, HeadLost, NewHead,
    FrameSlots, SlotFrame, FrameRead, ReclaimFrameSlots, FrameSlotsReturned,
]  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[list[Message]] = msgspec.msgpack.Decoder(list[Message])

encode = _encoder.encode
decode = _decoder.decode
