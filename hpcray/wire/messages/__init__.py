"""Every message of hpcray, one file per conversation. Each is a tagged msgspec struct, encoded as a msgpack array.

`p` process (driver or worker), `r` raylet, `g` the GCS (in the head's raylet). All ids are bytes (`base.ids`), resource
amounts are units (`base.resources`), times are seconds, sizes are bytes. A tag is never used twice.
"""

from __future__ import annotations

from typing import Union

import msgspec

from hpcray.wire.messages.diagnosis import *
from hpcray.wire.messages.gcs import *
from hpcray.wire.messages.nodes import *
from hpcray.wire.messages.ownership import *
from hpcray.wire.messages.processes import *
from hpcray.wire.messages.scheduling import *
from hpcray.wire.messages.shapes import *
from hpcray.wire.messages.store import *
from hpcray.wire.messages.succession import *
from hpcray.wire.messages.tasks import *

Message = Union[
    Hello, Welcome, SetJob, Exit, ProcDied, Undeliverable, Knock,
    Demand, LeaseGranted, LeaseReturn, ReclaimIdle, Blocked, Unblocked, Infeasible, LeaseRevoked,
    Unmet, GrantFor, GrantRefused, NodeView, OthersWait,
    NodeHello, NodeTable, NodeReady, Stop, NodeStopped, Heartbeat, NodeDied, PeerFailed, Ping, HeadMoved, Held,
    DriverMayStart, DriverIs, DriverEnded,
    DrainRequest, Drain, DrainReady, SaveActor, ActorSaved, DrainOver,
    CreateActor, StartActor, StartActorRefused, BecomeActor, ActorReady, ActorGone, WatchActor, ActorState, KillActor,
    ActorOutOfScope, TerminateActor, GcsCall, GcsReply, ActorLeaving,
    CreateGroup, WatchGroup, GroupState, RemoveGroup, PrepareBundles, BundlesPrepared, CommitBundles, ReturnBundles,
    Create, Created, StoreError, Seal, Open, Opened, Release, Free, Pull, PullElsewhere, PullRefused, Unpin, ListStore,
    Hurry, Prefetch, OnDisk, DiskRead, Kept,
    FunctionDef, PushTask, ActorCall, TaskDone, TaskReply, TakeBack, TakenBack, CancelTask, Leased,
    CancelRef, CallOptions, StreamItem, StreamTaken,
    ObjectGet, ObjectReady, BorrowAdd, BorrowAck, BorrowDrop, AddLocation, BorrowTake, BorrowAsk, BorrowEnd,
    FreeAsked, ListRefs, ObjectLost,
    Ask, AskRetries, Retries,
    Rows, RowsKept, HeadLost, NewHead,
]  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[list[Message]] = msgspec.msgpack.Decoder(list[Message])

encode = _encoder.encode
decode = _decoder.decode
