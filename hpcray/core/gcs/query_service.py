"""Answers to `GcsCall`. Arguments are a msgpack array, values are msgpack.

====================  =============================================  ==============================================
method                arguments                                      value
====================  =============================================  ==============================================
nodes                 []                                             rows in the form of `ray.nodes()`, plus "Index"
draining_nodes        []                                             {node id: Unix time in ms at which it leaves; 0:
                                                                     not known}
cluster_resources     []                                             {name: amount}
available_resources   []                                             {name: amount}
named_actor           [name, namespace]                              what a handle needs; not ok: "no actor ..."
list_named_actors     [all_namespaces, namespace]                    [{"name", "namespace"}]
actors                []                                             one row per actor
status                []                                             {"nodes", "unmet", "demand" (leases that the
                                                                     processes of each node lack), "waiting_actors",
                                                                     "actors", "draining" (as far as known),
                                                                     "autoscaler" (nil where none is)}
placement_groups      []                                             one row per group
placement_group       [id, name, namespace]                          the row of one; not ok: "no placement group ..."
kv_put                [key, value, overwrite, namespace]             whether the key was new
kv_get                [key, namespace]                               value or nil
kv_del, kv_exists     [key, namespace]                               whether it was there
kv_keys               [prefix, namespace]                            [key]
kv_items              [prefix, namespace]                            [[key, value]]
====================  =============================================  ==============================================
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import msgspec

from hpcray.common.resources import Resources, add, plain, to_amounts
from hpcray.core.gcs import state_log as rows
from hpcray.core.gcs.actor_manager import DEAD, ActorManager
from hpcray.core.gcs.cluster_resources import ClusterResources, NodeResources, node_labels
from hpcray.core.gcs.cluster_scheduler import ClusterScheduler
from hpcray.core.gcs.node_types import TYPE_LABEL
from hpcray.core.gcs.placement_group_manager import GcsPlacementGroup, PlacementGroupManager
from hpcray.core.gcs.state_log import DirtyRows
from hpcray.protocol.messages import GcsCall, GcsReply, NodeInfo


class KeyValueStore:
    """Small facts that `_internal_kv` and libraries leave for other processes.

    Args:
        dirty_rows: where changed rows are noted for the state log; their keys: `row_key`.
    """

    def __init__(self, dirty_rows: DirtyRows) -> None:
        self._dirty_rows = dirty_rows
        self._spaces: dict[str, dict[bytes, bytes]] = {}

    def put(self, key: bytes, value: bytes, overwrite: bool, namespace: str) -> bool:
        """Store a value; an existing one stays unless `overwrite`. Returns whether the key was new."""
        row = row_key(key, namespace)
        space = self._spaces.setdefault(namespace, {})
        new = key not in space
        if new or overwrite:
            space[key] = value
            self._dirty_rows.add(rows.VALUE, row)
        return new

    def get(self, key: bytes, namespace: str) -> bytes | None:
        """The value, or None."""
        return self._spaces.get(namespace, {}).get(key)

    def delete(self, key: bytes, namespace: str) -> bool:
        """Remove a key. Returns whether it was there."""
        self._dirty_rows.add(rows.VALUE, row_key(key, namespace))
        return self._spaces.get(namespace, {}).pop(key, None) is not None

    def exists(self, key: bytes, namespace: str) -> bool:
        """Whether the key is there."""
        return key in self._spaces.get(namespace, {})

    def keys(self, prefix: bytes, namespace: str) -> list[bytes]:
        """All keys that begin with `prefix`, sorted."""
        return sorted(key for key in self._spaces.get(namespace, {}) if key.startswith(prefix))

    def items(self, prefix: bytes, namespace: str) -> list[tuple[bytes, bytes]]:
        """All keys that begin with `prefix`, sorted, with their values."""
        space = self._spaces.get(namespace, {})
        return [(key, space[key]) for key in self.keys(prefix, namespace)]

    def row(self, row: bytes) -> bytes | None:
        """The value of a row, by its key."""
        key, namespace = _split(row)
        return self.get(key, namespace)

    def restore_row(self, row: bytes, value: bytes) -> None:
        """Take in a row from the tables of another head."""
        key, namespace = _split(row)
        self._spaces.setdefault(namespace, {})[key] = value

    def row_keys(self) -> list[bytes]:
        """The keys of all rows."""
        return [row_key(key, namespace) for namespace, space in self._spaces.items() for key in space]


def row_key(key: bytes, namespace: str) -> bytes:
    """The key of a row: the namespace, its length before it, and the key."""
    space = namespace.encode()
    return len(space).to_bytes(4, "big") + space + key


def _split(row: bytes) -> tuple[bytes, str]:
    end = 4 + int.from_bytes(row[:4], "big")
    return row[end:], row[4:end].decode()


CHANGING_METHODS = frozenset({"kv_put", "kv_del"})
"""Methods whose replies are cached: they change something."""
REPLIES_KEPT = 128
"""Cached replies of one process: as many as it may have threads that wait for one."""
_NUMBER_BYTES = 8


class QueryError(Exception):
    """A query that cannot be answered; its sender gets the text."""


class ReplyCache:
    """Replies to calls that change something, so that a call that is sent twice is executed once.

    A process sends a call again when the head has moved: the reply may have been lost with the old head after the
    change was logged. A call is identified by its sender and number.

    Args:
        dirty_rows: where changed rows are noted for the state log; their keys: sender and number.
    """

    def __init__(self, dirty_rows: DirtyRows) -> None:
        self._dirty_rows = dirty_rows
        self._replies: dict[bytes, dict[int, bytes]] = {}

    def reply_once(self, src: bytes, call: GcsCall, answer: Callable[[GcsCall], GcsReply]) -> GcsReply:
        """The reply of `answer`; the cached one if the same call was answered before."""
        if call.method not in CHANGING_METHODS:
            return answer(call)
        mine = self._replies.setdefault(src, {})
        known = mine.get(call.req)
        if known is not None:
            return GcsReply(call.req, True, known)
        reply = answer(call)
        if reply.ok:
            mine[call.req] = reply.value
            self._dirty_rows.add(rows.ANSWER, _reply_key(src, call.req))
            if len(mine) > REPLIES_KEPT:
                self._drop(src, next(iter(mine)))
        return reply

    def forget_process(self, proc: bytes) -> None:
        """The process is dead: drop its replies."""
        for number in list(self._replies.get(proc, ())):
            self._drop(proc, number)
        self._replies.pop(proc, None)

    def row(self, key: bytes) -> bytes | None:
        """The reply of a row, by its key."""
        return self._replies.get(key[:-_NUMBER_BYTES], {}).get(int.from_bytes(key[-_NUMBER_BYTES:], "big"))

    def row_keys(self) -> list[bytes]:
        """The keys of all rows."""
        return [_reply_key(src, number) for src, replies in self._replies.items() for number in replies]

    def restore_row(self, key: bytes, value: bytes) -> None:
        """Take in a row from the tables of another head, in its order."""
        self._replies.setdefault(key[:-_NUMBER_BYTES], {})[int.from_bytes(key[-_NUMBER_BYTES:], "big")] = value

    def _drop(self, src: bytes, number: int) -> None:
        del self._replies[src][number]
        self._dirty_rows.add(rows.ANSWER, _reply_key(src, number))


def _reply_key(src: bytes, number: int) -> bytes:
    return src + number.to_bytes(_NUMBER_BYTES, "big")


class QueryService:
    """Answers calls from the GCS's tables. Nothing here is on the path of a task.

    Attributes:
        kv: the key-value store.
        replies: what was answered to calls that change something.
        infos: all nodes in the order of their indices, dead ones too.
        draining: the nodes that are about to leave, with the time (Unix, in ms) at which they do; 0: not known.
        asked_draining: a process has asked for these since they were last set. watches_draining: one ever has.
    """

    def __init__(
        self,
        resources: ClusterResources,
        scheduler: ClusterScheduler,
        actors: ActorManager,
        groups: PlacementGroupManager,
        dirty_rows: DirtyRows,
    ) -> None:
        self._resources = resources
        self._scheduler = scheduler
        self._actors = actors
        self._groups = groups
        self.kv = KeyValueStore(dirty_rows)
        self.replies = ReplyCache(dirty_rows)
        self.infos: list[NodeInfo] = []
        self.draining: dict[int, int] = {}
        self.asked_draining = self.watches_draining = False
        self.autoscalers: list[Callable[[], dict[str, Any] | None]] = []
        self._now = 0.0
        self._methods: dict[str, Callable[..., Any]] = {
            "nodes": self._nodes,
            "draining_nodes": self._draining_nodes,
            "cluster_resources": self._cluster_resources,
            "available_resources": self._available_resources,
            "named_actor": self._named_actor,
            "list_named_actors": self._list_named_actors,
            "actors": lambda: self._actors.actor_rows(self._now),
            "status": self._status,
            "placement_groups": lambda: self._group_rows(self._groups.all_groups()),
            "placement_group": self._placement_group,
            "kv_put": self.kv.put,
            "kv_get": self.kv.get,
            "kv_del": self.kv.delete,
            "kv_exists": self.kv.exists,
            "kv_keys": self.kv.keys,
            "kv_items": self.kv.items,
        }

    def set_nodes(self, infos: Iterable[NodeInfo]) -> None:
        """Add nodes, or replace what is known of them."""
        known = {info.index: info for info in (*self.infos, *infos)}
        self.infos = [known[index] for index in sorted(known)]

    def reply_once(self, src: bytes, call: GcsCall, now: float = 0.0) -> GcsReply:
        """The reply to a call; a call that is sent again gets the same reply again."""
        self._now = now
        return self.replies.reply_once(src, call, self.answer)

    def answer(self, call: GcsCall) -> GcsReply:
        """The reply to a call; a wrong call gets an error that says what is wrong."""
        method = self._methods.get(call.method)
        if method is None:
            text = f"unknown query {call.method!r}; hint: one of {', '.join(self._methods)}"
            return GcsReply(call.req, False, text.encode())
        try:
            args = msgspec.msgpack.decode(call.args) if call.args else []
            return GcsReply(call.req, True, msgspec.msgpack.encode(method(*args)))
        except QueryError as error:
            return GcsReply(call.req, False, str(error).encode())
        except (TypeError, ValueError, msgspec.DecodeError) as error:
            return GcsReply(call.req, False, f"query {call.method!r} got wrong arguments: {error}".encode())
        except Exception as error:  # a question is no reason for the head to end
            text = f"the head cannot answer the query {call.method!r}: {type(error).__name__}: {error}"
            return GcsReply(call.req, False, text.encode())

    def _nodes(self) -> list[dict[str, Any]]:
        return [self._node_row(info, self._resources.nodes.get(info.index)) for info in self.infos]

    def _draining_nodes(self) -> dict[str, int]:
        self.asked_draining = self.watches_draining = True
        living = self._resources.nodes
        draining = self.draining
        return {
            info.node_id: draining[info.index] for info in self.infos if info.index in draining and info.index in living
        }

    def _node_row(self, info: NodeInfo, state: NodeResources | None) -> dict[str, Any]:
        return {
            "NodeID": info.node_id,
            "Alive": state is not None,
            "NodeManagerAddress": info.address,
            "NodeManagerHostname": info.host,
            "NodeName": info.name or info.address,
            "NodeManagerPort": 0, "ObjectManagerPort": 0, "MetricsExportPort": 0,
            "ObjectStoreSocketName": "", "RayletSocketName": "",
            "Resources": to_amounts(_with_node_names(info, info.total)) if state is not None else {},
            "Labels": node_labels(info),
            "DeathReason": self._resources.dead.get(info.index, ""),
            "Index": info.index,
        }  # fmt: skip

    def _cluster_resources(self) -> dict[str, float]:
        total: Resources = {}
        for state in self._resources.nodes.values():
            add(total, _with_node_names(state.info, state.info.total))
        return to_amounts(total)

    def _available_resources(self) -> dict[str, float]:
        total: Resources = {}
        for state in self._resources.nodes.values():
            free = {name: max(0, units) for name, units in state.available.items() if name not in state.implicit}
            add(total, _with_node_names(state.info, free))
        return {name: amount for name, amount in to_amounts(total).items() if amount}

    def _named_actor(self, name: str, namespace: str) -> dict[str, Any]:
        actor = self._actors.find_by_name(name, namespace)
        if actor is None:
            raise QueryError(f"no actor named {name!r} in namespace {namespace!r}")
        spec = actor.spec
        return {
            "actor": spec.actor,
            "class_name": spec.class_name,
            "methods": spec.methods,
            "max_concurrency": spec.max_concurrency,
            "max_task_retries": spec.max_task_retries,
            "max_pending_calls": spec.max_pending_calls,
            "out_of_order": spec.out_of_order,
            "max_restarts": spec.max_restarts,
            "detached": spec.detached,
            "name": spec.name,
            "namespace": spec.namespace,
            "state": actor.state,
        }

    def _list_named_actors(self, all_namespaces: bool, namespace: str) -> list[dict[str, str]]:
        return [
            {"name": name, "namespace": space}
            for space, name in sorted(self._actors.names)
            if (all_namespaces or space == namespace) and self._actors.find_by_name(name, space) is not None
        ]

    def _placement_group(self, group: bytes, name: str, namespace: str) -> dict[str, Any]:
        found = self._groups.find(group) if group else self._groups.find_by_name(name, namespace)
        if found is None:
            raise QueryError(f"no placement group {name or group.hex()!r}")
        return self._group_rows([found])[0]

    def _group_rows(self, groups: Iterable[GcsPlacementGroup]) -> list[dict[str, Any]]:
        ids = {info.index: info.node_id for info in self.infos}
        return [
            {
                "group": group.spec.group,
                "name": group.spec.name,
                "strategy": group.spec.strategy,
                "state": group.state,
                "bundles": [to_amounts(amounts) for amounts in group.spec.bundles],
                "node_ids": [ids.get(node, "") for node in group.nodes],
                "nodes": group.nodes,
                "attempts": group.attempt,
                "detached": not group.spec.owner,
                "scheduling_state": self._groups.scheduling_state(group),
            }
            for group in groups
        ]

    def _status(self) -> dict[str, Any]:
        hosts = hosts_of_actors(self._actors)
        counts: dict[str, int] = {}
        for actor in self._actors.actors.values():
            counts[actor.state] = counts.get(actor.state, 0) + 1
        return {
            "nodes": [
                {
                    "index": state.index,
                    "host": state.info.host,
                    "joined": state.info.joined,
                    "world": state.info.world,
                    "type": state.labels.get(TYPE_LABEL, ""),
                    "idle": is_idle(state, hosts),
                    "total": to_amounts(state.info.total),
                    "available": to_amounts(state.available),
                }
                for _, state in sorted(self._resources.nodes.items())
            ],
            "dead_nodes": [
                {"index": index, "reason": reason} for index, reason in sorted(self._resources.dead.items())
            ],
            "unmet": self._scheduler.unmet_by_shape(),
            "demand": {str(node): count for node, count in sorted(self._scheduler.unmet_by_node().items())},
            "waiting_actors": [
                {
                    "actor": actor.spec.actor,
                    "class_name": actor.spec.class_name,
                    "resources": to_amounts(plain(dict(actor.spec.place.resources))),
                    "feasible": bool(self._resources.feasible(actor.spec.place))
                    or self._resources.node_types.may_come(actor.spec.place),
                }
                for actor in self._actors.waiting_actors()
            ],
            "actors": counts,
            "draining": {str(node): left for node, left in self.draining.items()},
            "autoscaler": next((describe() for describe in self.autoscalers), None),
        }


def _with_node_names(info: NodeInfo, amounts: Resources) -> Resources:
    """Add the resource "node:<address>" that Ray gives every node, unless it is counted already."""
    unit = {f"node:{info.address}": 10_000}
    if info.index == 0:
        unit["node:__internal_head__"] = 10_000
    return {**unit, **amounts}


def hosts_of_actors(actors: ActorManager) -> set[int]:
    """The nodes that have actors, or are about to have some."""
    return {actor.node for actor in actors.actors.values() if actor.node >= 0 and actor.state != DEAD}


def is_idle(state: NodeResources, hosts: Collection[int]) -> bool:
    """Return whether nothing runs on a node. Objects there are no obstacle.

    Args:
        hosts: the nodes that have actors.
    """
    return state.index not in hosts and all(
        state.available.get(name, 0) >= units
        for name, units in state.info.total.items()
        if name != "object_store_memory"
    )
