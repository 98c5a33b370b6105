"""Answers to `GcsCall`. Arguments are a msgpack array, values are msgpack.

====================  =============================================  ==============================================
method                arguments                                      value
====================  =============================================  ==============================================
nodes                 []                                             rows in the form of `ray.nodes()`, plus "Index"
cluster_resources     []                                             {name: amount}
available_resources   []                                             {name: amount}
named_actor           [name, namespace]                              what a handle needs; not ok: "no actor ..."
list_named_actors     [all_namespaces, namespace]                    [{"name", "namespace"}]
actors                []                                             one row per actor
status                []                                             {"nodes", "unmet", "demand" (leases that the
                                                                     processes of each node lack), "waiting_actors",
                                                                     "actors"}
placement_groups      []                                             one row per group
placement_group       [id, name, namespace]                          the row of one; not ok: "no placement group ..."
kv_put                [key, value, overwrite, namespace]             whether the key was new
kv_get                [key, namespace]                               value or nil
kv_del, kv_exists     [key, namespace]                               whether it was there
kv_keys               [prefix, namespace]                            [key]
====================  =============================================  ==============================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from hpcray.base.bundle_names import plain
from hpcray.base.resources import Resources, add, to_amounts
from hpcray.core.gcs.actors import ActorTable
from hpcray.core.gcs.answers import Answers
from hpcray.core.gcs.groups import Group
from hpcray.core.gcs.kv import KeyValue
from hpcray.core.gcs.placement_groups import PlacementGroups
from hpcray.core.scheduler.cluster import ClusterScheduler
from hpcray.core.scheduler.nodes import NodeState, node_labels
from hpcray.core.scheduler.placement import ClusterView
from hpcray.wire.messages import GcsCall, GcsReply, NodeInfo


class QueryError(Exception):
    """A query that cannot be answered; the text goes to whom asked."""


class Queries:
    """Reads the head's tables. Nothing here is on the path of a task."""

    def __init__(
        self, view: ClusterView, scheduler: ClusterScheduler, actors: ActorTable, groups: PlacementGroups
    ) -> None:
        self._view = view
        self._scheduler = scheduler
        self._actors = actors
        self._groups = groups
        self.kv = KeyValue()
        self.answers = Answers()
        self.infos: list[NodeInfo] = []
        self._methods: dict[str, Callable[..., Any]] = {
            "nodes": self._nodes,
            "cluster_resources": self._cluster_resources,
            "available_resources": self._available_resources,
            "named_actor": self._named_actor,
            "list_named_actors": self._list_named_actors,
            "actors": self._actors.rows,
            "status": self._status,
            "placement_groups": lambda: self._group_rows(self._groups.all()),
            "placement_group": self._placement_group,
            "kv_put": self.kv.put,
            "kv_get": self.kv.get,
            "kv_del": self.kv.delete,
            "kv_exists": self.kv.exists,
            "kv_keys": self.kv.keys,
        }

    def answer_once(self, src: bytes, call: GcsCall) -> GcsReply:
        """The reply to a call; the same again when it comes again."""
        return self.answers.once(src, call, self.answer)

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

    def _nodes(self) -> list[dict[str, Any]]:
        return [self._node_row(info, self._view.nodes.get(info.index)) for info in self.infos]

    def _node_row(self, info: NodeInfo, state: NodeState | None) -> dict[str, Any]:
        return {
            "NodeID": info.node_id,
            "Alive": state is not None,
            "NodeManagerAddress": info.address,
            "NodeManagerHostname": info.host,
            "NodeName": info.address,
            "NodeManagerPort": 0,
            "ObjectManagerPort": 0,
            "ObjectStoreSocketName": "",
            "RayletSocketName": "",
            "MetricsExportPort": 0,
            "Resources": to_amounts(_with_node_names(info, info.total)) if state is not None else {},
            "Labels": node_labels(info),
            "DeathReason": self._view.dead.get(info.index, ""),
            "Index": info.index,
        }

    def _cluster_resources(self) -> dict[str, float]:
        total: Resources = {}
        for state in self._view.nodes.values():
            add(total, _with_node_names(state.info, state.info.total))
        return to_amounts(total)

    def _available_resources(self) -> dict[str, float]:
        total: Resources = {}
        for state in self._view.nodes.values():
            free = {name: max(0, units) for name, units in state.available.items()}
            add(total, _with_node_names(state.info, free))
        return {name: amount for name, amount in to_amounts(total).items() if amount}

    def _named_actor(self, name: str, namespace: str) -> dict[str, Any]:
        actor = self._actors.named(name, namespace)
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
            if (all_namespaces or space == namespace) and self._actors.named(name, space) is not None
        ]

    def _placement_group(self, group: bytes, name: str, namespace: str) -> dict[str, Any]:
        found = self._groups.find(group) if group else self._groups.named(name, namespace)
        if found is None:
            raise QueryError(f"no placement group {name or group.hex()!r}")
        return self._group_rows([found])[0]

    def _group_rows(self, groups: Iterable[Group]) -> list[dict[str, Any]]:
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
            }
            for group in groups
        ]

    def _status(self) -> dict[str, Any]:
        counts: dict[str, int] = {}
        for actor in self._actors.actors.values():
            counts[actor.state] = counts.get(actor.state, 0) + 1
        return {
            "nodes": [
                {
                    "index": state.index,
                    "host": state.info.host,
                    "total": to_amounts(state.info.total),
                    "available": to_amounts(state.available),
                }
                for _, state in sorted(self._view.nodes.items())
            ],
            "dead_nodes": [{"index": index, "reason": reason} for index, reason in sorted(self._view.dead.items())],
            "unmet": self._scheduler.pending(),
            "demand": {str(node): count for node, count in sorted(self._scheduler.demand().items())},
            "waiting_actors": [
                {
                    "actor": actor.spec.actor,
                    "class_name": actor.spec.class_name,
                    "resources": to_amounts(plain(dict(actor.spec.place.resources))),
                    "feasible": bool(self._view.feasible(actor.spec.place)),
                }
                for actor in self._actors.waiting()
            ],
            "actors": counts,
        }


def _with_node_names(info: NodeInfo, amounts: Resources) -> Resources:
    """Add the resource "node:<address>" that Ray gives every node, unless it is counted already."""
    unit = {f"node:{info.address}": 10_000}
    if info.index == 0:
        unit["node:__internal_head__"] = 10_000
    return {**unit, **amounts}
