"""Resources of a node: total, free, and held by each allocation, in bundles of placement groups and outside of them.

Each bundle is a resource pool of its own, filled from the node's. What is free in committed bundles is published under
the names in `common.resources`, apart from what is free on the node: requests outside of groups never see it.
All amounts are exact integers, in units.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, field

from hpcray.common.resources import (
    ACCELERATORS,
    ALL_SLOTS,
    ANY,
    ASSIGNED_ACCELERATORS,
    ASSIGNED_GPUS,
    RUNTIME_ENV,
    SLOTS,
    UNIT,
    Resources,
    add,
    fits,
    implicit,
    name_in,
    subtract,
    to_amounts,
)
from hpcray.core.raylet.lease_requests import UNLIMITED, LeaseRequest, WorkerEnv
from hpcray.protocol.messages import ActorSpec

GPU = "GPU"
"""Name of the resource."""


class DeviceAllocator:
    """The GPUs, or the accelerators of another kind, of one node or bundle: how many units of each are free.

    A device is an index into the node's list of their ids. A fraction is taken from the one where it fits most tightly;
    a request for n whole ones gets the first n free ones. Allocations never move, so a node can have enough units in
    sum and still no device with room for a request.

    Args:
        ids: device ids, opaque, as the vendor's variable takes them.
        units_each: units of each device that may be allocated; a bundle may have only a fraction of one.

    Attributes:
        ids: as given.
        free: free units of each device.
    """

    def __init__(self, ids: Sequence[str], units_each: int = UNIT) -> None:
        self.ids = tuple(ids)
        self._units_each = min(units_each, UNIT)
        self.free = [self._units_each] * len(self.ids)
        self._held_by_actors = [0] * len(self.ids)

    def free_by_id(self) -> Resources:
        """Free units of each GPU, by device id."""
        return dict(zip(self.ids, self.free, strict=True))

    def is_feasible(self, units: int) -> bool:
        """True if `units` would fit if every GPU were free: at most one GPU, or whole ones."""
        return _fit([self._units_each] * len(self.ids), units)

    def is_reachable(self, units: int) -> bool:
        """True if `units` would fit if every allocation but those of actors ended."""
        return _fit([self._units_each - held for held in self._held_by_actors], units)

    def fits(self, units: int, reserved: int = 0) -> bool:
        """True if `units` fit now.

        Args:
            reserved: units that are set aside for another request: as many of the emptiest GPUs are left to it.
        """
        kept = reserved // UNIT
        return _fit(sorted(self.free)[: len(self.free) - kept] if kept else self.free, units)

    def allocate(self, units: int, for_actor: bool) -> tuple[int, ...]:
        """Hold `units`; returns the indices of the GPUs.

        Raises:
            ValueError: they do not fit; nothing is held.
        """
        if not self.fits(units):
            raise ValueError(f"{units} units of GPU do not fit into {self.free}")
        if units < UNIT:
            tightest = min((left, index) for index, left in enumerate(self.free) if left >= units)
            gpus: tuple[int, ...] = (tightest[1],)
        else:
            gpus = tuple([index for index, left in enumerate(self.free) if left == UNIT][: units // UNIT])
        self._add_free(gpus, -units, for_actor)
        return gpus

    def release(self, gpus: Sequence[int], units: int, for_actor: bool) -> None:
        """Free what `allocate` returned for the same arguments."""
        self._add_free(gpus, units, for_actor)

    def check_invariants(self, held: Sequence[tuple[Sequence[int], int, bool]]) -> None:
        """Raise AssertionError unless exactly `held` is not free: GPU indices, units, and whether an actor has them."""
        free, held_by_actors = [self._units_each] * len(self.ids), [0] * len(self.ids)
        for gpus, units, for_actor in held:
            assert len(set(gpus)) == len(gpus) == max(1, units // UNIT), f"{units} units of GPU are held on {gpus}"
            for index in gpus:
                free[index] -= min(units, UNIT)
                held_by_actors[index] += min(units, UNIT) if for_actor else 0
        assert self.free == free, f"free units of GPUs are {self.free}, but {held} are held"
        assert min(self.free, default=0) >= 0, f"a GPU is over-committed: {self.free}"
        assert self._held_by_actors == held_by_actors, f"actors hold {self._held_by_actors} of GPUs, but {held} is held"

    def _add_free(self, gpus: Sequence[int], units: int, for_actor: bool) -> None:
        each = max(-UNIT, min(units, UNIT))
        for index in gpus:
            self.free[index] += each
            if for_actor:
                self._held_by_actors[index] -= each


def with_devices(env: WorkerEnv, ids: Mapping[str, Sequence[str]]) -> WorkerEnv:
    """`env` with the variables that name the devices of a worker, by their resource."""
    others = [f"{name}={','.join(ids[name])}" for name in sorted(ids) if name != GPU]
    if others:
        env = (*env, (ASSIGNED_ACCELERATORS, ";".join(others)))
    return (*env, (ASSIGNED_GPUS, ",".join(ids[GPU]))) if GPU in ids else env


def assigned_devices(env: WorkerEnv) -> frozenset[str]:
    """The devices that a worker with this environment has: the ids of GPUs, and `TPU=0` of other kinds."""
    found: list[str] = []
    for name, text in env[-2:]:
        if name == ASSIGNED_GPUS:
            found += text.split(",")
        elif name == ASSIGNED_ACCELERATORS:
            for one in text.split(";"):
                kind, _, ids = one.partition("=")
                found += [f"{kind}={index}" for index in ids.split(",")]
    return frozenset(found)


def strip_devices(env: WorkerEnv) -> WorkerEnv:
    """The environment as requested, without the assigned devices."""
    while env and env[-1][0] in (ASSIGNED_GPUS, ASSIGNED_ACCELERATORS):
        env = env[:-1]
    return env


def needs_setup(env: WorkerEnv) -> bool:
    """True if a worker takes long to start in `env`: a runtime environment has to be unpacked or created."""
    return any(name == RUNTIME_ENV for name, _ in env)


def _fit(free: Sequence[int], units: int) -> bool:
    if units <= UNIT:
        return any(left >= units for left in free)
    return units % UNIT == 0 and sum(left == UNIT for left in free) >= units // UNIT


RELEASED_WHILE_BLOCKED = "CPU"
"""The one resource that a worker releases while it waits in `get`; the memory of a GPU stays occupied."""

WAITING, GRANTED, ENDING, FREED = "waiting for worker", "granted", "ending", "freed"
ALLOCATION_TRANSITIONS: dict[str, set[str]] = {
    WAITING: {GRANTED, FREED},
    GRANTED: {ENDING, FREED},
    ENDING: {ENDING, FREED},
    FREED: set(),
}
"""States of an allocation. It is WAITING until a worker has joined for it, GRANTED while its holder may push tasks or
its actor lives, ENDING from the order to kill its worker to the worker's death, which alone frees its resources."""

PREPARED, COMMITTED, LEAVING, RETURNED = "prepared", "committed", "leaving", "returned"
BUNDLE_TRANSITIONS: dict[str, set[str]] = {
    PREPARED: {COMMITTED, LEAVING},
    COMMITTED: {LEAVING},
    LEAVING: {RETURNED},
    RETURNED: set(),
}
"""States of a bundle. It is PREPARED when its resources are held, COMMITTED when it may be used, LEAVING while its last
allocations end, RETURNED when its resources are the node's again."""


class ResourceAllocation(Struct, eq=False):
    """Resources held for one lease or one actor, from the decision to serve its request to the end of its worker.

    Attributes:
        id: the lease id, or the actor id.
        resources: units that it holds; in a bundle by the names inside.
        holder: the process that may push tasks; b"" once the lease has ended.
        env: environment that its worker must have; the assigned GPUs are added when they are known.
        worker: proc id of the worker, b"" while it has none.
        devices: indices of its GPUs and other accelerators, by resource.
        cpu_released: its worker blocks, and others may use its CPU.
        exit_reason: why its actor exits on purpose; "" while it does not.
        kill_reason: why its worker was killed; "" if it was not.
        bundle: the bundle that it is part of.
    """

    id: bytes
    lease_request: LeaseRequest
    resources: Resources
    holder: bytes
    scheduling_class: int
    env: WorkerEnv
    actor_spec: ActorSpec | None = None
    restarts: int = 0
    worker: bytes = b""
    devices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    cpu_released: bool = False
    exit_reason: str = ""
    kill_reason: str = ""
    bundle: Bundle | None = None
    state: str = WAITING

    def change_state(self, state: str) -> None:
        """Go on to `state`, as `ALLOCATION_TRANSITIONS` allows."""
        assert state in ALLOCATION_TRANSITIONS[self.state], f"allocation {self.id.hex()}: {self.state} -> {state}"
        self.state = state

    def held(self) -> Iterator[tuple[str, int]]:
        """The resources that others cannot have now."""
        released = RELEASED_WHILE_BLOCKED if self.cpu_released else None
        return ((name, units) for name, units in self.resources.items() if name != released)


class ResourcePool:
    """The resources of a node outside of bundles, or of one bundle.

    Args:
        total: units of each resource.
        ids: of its devices, by resource. units_each: units of each device that belong to the pool.

    Attributes:
        total: units of each resource; in a node's pool also of what committed bundles publish.
        available: free units; negative only where workers that were blocked have taken their CPUs back.
        held_by_actors: units that actors and bundles hold.
        devices: who has which GPUs and other accelerators, by resource.
    """

    __slots__ = ("available", "devices", "held_by_actors", "total")

    def __init__(
        self, total: Resources, ids: Mapping[str, Sequence[str]], units_each: Mapping[str, int] | None = None
    ) -> None:
        self.total = total
        self.available = dict(total)
        self.held_by_actors: Resources = {}
        each = units_each or {}
        self.devices = {name: DeviceAllocator(ids[name], each.get(name, UNIT)) for name in ids if ids[name]}

    def add_implicit(self, resources: Resources) -> None:
        """Have 1 of each implicit resource in a request from now on."""
        for name in implicit(resources):
            if name not in self.available:
                self.total[name] = self.available[name] = UNIT

    def is_feasible(self, resources: Resources) -> bool:
        """True if the pool could serve `resources` if it were unused."""
        return fits(resources, self.total) and (
            not self.devices
            or all(one.is_feasible(resources[name]) for name, one in self.devices.items() if name in resources)
        )

    def capacity(self, resources: Resources) -> int:
        """For how many times `resources` the pool has CPUs."""
        each, total = resources.get(RELEASED_WHILE_BLOCKED, 0), self.total.get(RELEASED_WHILE_BLOCKED, 0)
        return round(total / each) if each and total else UNLIMITED

    def utilisation(self, resources: Resources) -> float:
        """The largest used share of any of `resources` and of CPU."""
        worst = 0.0
        for name in (RELEASED_WHILE_BLOCKED, *resources):
            if total := self.total.get(name, 0):
                worst = max(worst, 1.0 - self.available.get(name, 0) / total)
        return worst

    def is_reachable(self, resources: Resources) -> bool:
        """True if `resources` would fit if every lease ended and only the actors stayed."""
        actors = self.held_by_actors
        if any(self.total.get(name, 0) - actors.get(name, 0) < units for name, units in resources.items()):
            return False
        return not self.devices or all(
            one.is_reachable(resources[name]) for name, one in self.devices.items() if name in resources
        )

    def fits(self, resources: Resources) -> bool:
        """True if `resources` are free."""
        return fits(resources, self.available) and (not self.devices or self.devices_fit(resources))

    def devices_fit(self, resources: Resources, reserved: Mapping[str, int] | None = None) -> bool:
        """True if there are devices for `resources`. reserved: what is set aside for another request."""
        kept = reserved or {}
        return all(
            one.fits(resources[name], kept.get(name, 0)) for name, one in self.devices.items() if name in resources
        )

    def allocate(self, allocation: ResourceAllocation) -> None:
        """Hold the allocation's resources; where it needs devices, assign them.

        Raises:
            ValueError: the devices do not fit.
        """
        for_actor = allocation.actor_spec is not None
        if self.devices:
            allocation.devices = self.take_devices(allocation.resources, for_actor)
            if allocation.devices:
                allocation.env = with_devices(allocation.env, self.ids_of(allocation.devices))
        subtract(self.available, allocation.resources)
        if for_actor:
            add(self.held_by_actors, allocation.resources)

    def free(self, allocation: ResourceAllocation) -> None:
        """Free what the allocation still holds."""
        for_actor = allocation.actor_spec is not None
        add(self.available, allocation.resources)
        if allocation.devices:
            self.release_devices(allocation.devices, allocation.resources, for_actor)
            allocation.devices = {}
        if for_actor:
            subtract(self.held_by_actors, allocation.resources)
        self.reacquire_cpu(allocation)

    def take_devices(self, resources: Resources, for_actor: bool) -> dict[str, tuple[int, ...]]:
        """Hold the devices that `resources` needs; returns their indices by resource.

        Raises:
            ValueError: they do not fit; nothing is held.
        """
        if not self.devices_fit(resources):
            free = {name: one.free for name, one in self.devices.items() if name in resources}
            raise ValueError(f"{resources} do not fit into the devices {free}")
        return {
            name: one.allocate(resources[name], for_actor) for name, one in self.devices.items() if name in resources
        }

    def release_devices(self, held: Mapping[str, Sequence[int]], resources: Resources, for_actor: bool) -> None:
        """Free what `take_devices` returned for the same arguments."""
        for name, indices in held.items():
            self.devices[name].release(indices, resources[name], for_actor)

    def ids_of(self, held: Mapping[str, Sequence[int]]) -> dict[str, list[str]]:
        """The ids of devices, by resource."""
        return {name: [self.devices[name].ids[index] for index in indices] for name, indices in held.items()}

    def release_cpu(self, allocation: ResourceAllocation) -> bool:
        """Let others use the CPU of a worker that blocks; False if they may already, or it holds none."""
        if allocation.cpu_released or RELEASED_WHILE_BLOCKED not in allocation.resources:
            return False
        allocation.cpu_released = True
        self.available[RELEASED_WHILE_BLOCKED] += allocation.resources[RELEASED_WHILE_BLOCKED]
        return True

    def reacquire_cpu(self, allocation: ResourceAllocation) -> None:
        """Take a released CPU back at once, even if another allocation got it meanwhile."""
        if allocation.cpu_released:
            allocation.cpu_released = False
            self.available[RELEASED_WHILE_BLOCKED] -= allocation.resources[RELEASED_WHILE_BLOCKED]

    def check_invariants(self, allocations: Iterable[ResourceAllocation], bundles: Iterable[Bundle] = ()) -> None:
        """Raise AssertionError unless free and held units are the total, for each resource and each GPU."""
        held: Resources = {}
        by_actors: Resources = {}
        devices: dict[str, list[tuple[Sequence[int], int, bool]]] = {name: [] for name in self.devices}
        for one in allocations:
            for_actor = one.actor_spec is not None
            add(held, dict(one.held()))
            add(by_actors, one.resources if for_actor else {})
            for name, indices in one.devices.items():
                devices[name].append((indices, one.resources[name], for_actor))
        for bundle in bundles:
            add(held, bundle.resources)
            add(by_actors, bundle.resources)
            for name, indices in bundle.devices.items():
                devices[name].append((indices, bundle.resources[name], True))
        for name, units in self.available.items():
            assert units + held.get(name, 0) == self.total.get(name, 0), (
                f"{name}: {units} free and {held.get(name, 0)} held are not {self.total.get(name, 0)}"
            )
            assert units >= 0 or name == RELEASED_WHILE_BLOCKED, f"{name} is over-committed: {units} free"
            assert self.held_by_actors.get(name, 0) == by_actors.get(name, 0), (
                f"{name}: actors hold {by_actors.get(name, 0)}, not {self.held_by_actors.get(name, 0)}"
            )
        for name, allocator in self.devices.items():
            allocator.check_invariants(devices[name])


class Bundle(Struct, eq=False):
    """Resources that the node holds for one bundle of a placement group.

    Attributes:
        group: id in hex.
        resources, devices: units that the node gave, and the indices of its GPUs and other accelerators, by resource.
        pool: which of its allocations has what of it.
        allocations: leases and actors that run in it, or are about to.
        state: see `BUNDLE_TRANSITIONS`.
    """

    group: str
    index: int
    resources: Resources
    devices: Mapping[str, tuple[int, ...]]
    pool: ResourcePool
    allocations: set[ResourceAllocation] = field(default_factory=set)
    state: str = PREPARED

    def change_state(self, state: str) -> None:
        """Go on to `state`, as `BUNDLE_TRANSITIONS` allows."""
        assert state in BUNDLE_TRANSITIONS[self.state], f"bundle {self.group} {self.index}: {self.state} -> {state}"
        self.state = state

    def fits(self, resources: Resources) -> bool:
        """True if there is room now for a request by the names inside."""
        return self.state == COMMITTED and self.pool.fits(resources)

    def published_names(self, name: str) -> tuple[str, str]:
        """The names of a resource in this bundle, and in all bundles of the group."""
        return name_in(self.group, self.index, name), name_in(self.group, ANY, name)


class BundleResources:
    """All bundles of one node.

    Args:
        node: index of the node. node_pool: where their resources come from.

    Attributes:
        available: free units in the bundles that may be used, by published names.
    """

    def __init__(self, node: int, node_pool: ResourcePool) -> None:
        self._node = node
        self._node_pool = node_pool
        self._groups: dict[str, dict[int, Bundle]] = {}
        self.available: Resources = {}
        self._unreported: set[str] = set()
        self._names_of_group: dict[str, set[str]] = {}

    def __iter__(self) -> Iterator[Bundle]:
        return (bundle for bundles in self._groups.values() for bundle in bundles.values())

    def of_group(self, group: str) -> list[Bundle]:
        """The bundles of a group here."""
        return list(self._groups.get(group, {}).values())

    def has(self, group: str, index: int) -> bool:
        """True if this bundle is here, perhaps with allocations in it that have not ended yet."""
        return index in self._groups.get(group, ())

    @property
    def has_unreported(self) -> bool:
        """True if any of `available` has changed since the GCS heard of it."""
        return bool(self._unreported)

    def are_unreported(self, names: frozenset[str]) -> bool:
        """True if any of these has changed since the GCS heard of it."""
        return not names.isdisjoint(self._unreported)

    def reset_reported(self) -> None:
        """A new head knows nothing of `available`."""
        self._unreported.update(self.available)

    def take_unreported(self) -> Resources:
        """The part of `available` that has changed since the last call."""
        changed = {name: self.available[name] for name in self._unreported if name in self.available}
        self._unreported.clear()
        return changed

    def snapshot(self) -> dict[str, dict[str, float]]:
        """Return the amounts that all bundles here hold, and those that are free in them; in the units of users."""
        held: Resources = {}
        free: Resources = {}
        for bundle in self:
            add(held, bundle.resources)
            add(free, {name: bundle.pool.available.get(name, 0) for name in bundle.resources})
        for amounts in (held, free):
            amounts.pop(SLOTS, None)
        return {"held": to_amounts(held), "free": to_amounts(free)}

    # ------------------------------------------------------------ the life of a bundle

    def prepare(self, group: str, index: int, resources: Resources) -> Bundle:
        """Take a bundle's resources from the node; the caller has checked that they fit.

        Raises:
            ValueError: the node has this bundle already, or its devices do not fit; nothing is held.
        """
        node_pool, bundles = self._node_pool, self._groups.get(group, {})
        if index in bundles:
            raise ValueError(f"node {self._node} has bundle {index} of group {group} already")
        devices = node_pool.take_devices(resources, for_actor=True)
        ids = node_pool.ids_of(devices)
        subtract(node_pool.available, resources)
        add(node_pool.held_by_actors, resources)
        pool = ResourcePool({**resources, SLOTS: ALL_SLOTS}, ids, resources)
        bundle = Bundle(group, index, dict(resources), devices, pool)
        self._groups.setdefault(group, {})[index] = bundle
        return bundle

    def commit(self, bundle: Bundle) -> None:
        """Let leases and actors use the bundle; a repeated commit changes nothing."""
        if bundle.state != PREPARED:
            return
        bundle.change_state(COMMITTED)
        first_of_group = bundle.group not in self._names_of_group
        names = self._names_of_group.setdefault(bundle.group, set())
        names.update(name_in(bundle.group, ANY, name) for name in bundle.pool.total)
        for name, units in bundle.pool.total.items():
            for published in bundle.published_names(name):
                self._node_pool.total[published] = self._node_pool.total.get(published, 0) + units
                self.available[published] = self.available.get(published, 0) + units
                if not first_of_group:  # else it is unused, as the GCS knows
                    self._unreported.add(published)

    def end(self, bundle: Bundle) -> None:
        """Let nothing new use the bundle; it is the node's again when its last allocation has ended."""
        if bundle.state in (LEAVING, RETURNED):
            return
        was_committed = bundle.state == COMMITTED
        bundle.change_state(LEAVING)
        if was_committed:
            self._unpublish(bundle)
        self._return_if_unused(bundle)

    # ------------------------------------------------------------ allocations in bundles

    def fits(self, request: LeaseRequest) -> bool:
        """True if one bundle has room for all of a request."""
        return self._bundle_for(request) is not None

    def allocate(self, allocation: ResourceAllocation) -> None:
        """Hold resources in the bundle that the request names, or else in the first one with room, better without GPUs.

        Raises:
            ValueError: there is no room; nothing is held.
        """
        request = allocation.lease_request
        bundle = self._bundle_for(request)
        if bundle is None:
            raise ValueError(f"{request.resources} do not fit into a bundle of node {self._node}")
        allocation.bundle = bundle
        allocation.resources = request.resources_in_bundle
        bundle.allocations.add(allocation)
        bundle.pool.allocate(allocation)
        self._publish(bundle, allocation.resources)

    def free(self, allocation: ResourceAllocation, bundle: Bundle) -> None:
        """Free what the allocation holds of its bundle."""
        allocation.bundle = None
        bundle.allocations.discard(allocation)
        bundle.pool.free(allocation)
        self._publish(bundle, allocation.resources)
        if bundle.state == LEAVING:
            self._return_if_unused(bundle)

    def release_cpu(self, allocation: ResourceAllocation, bundle: Bundle) -> bool:
        """Let others in the bundle use the allocation's CPU; False if they may already, or it holds none."""
        changed = bundle.pool.release_cpu(allocation)
        self._publish(bundle, allocation.resources)
        return changed

    def reacquire_cpu(self, allocation: ResourceAllocation, bundle: Bundle) -> None:
        """Take a released CPU back."""
        bundle.pool.reacquire_cpu(allocation)
        self._publish(bundle, allocation.resources)

    def check_invariants(self, allocations: Iterable[ResourceAllocation]) -> None:
        """Raise AssertionError unless each bundle is consistent, and what is published of them is what they have.

        Args:
            allocations: all of the node.
        """
        inside: dict[int, list[ResourceAllocation]] = {}
        for one in allocations:
            if one.bundle is not None:
                inside.setdefault(id(one.bundle), []).append(one)
        available: Resources = {}
        total: Resources = {}
        actors: Resources = {}
        for bundle in self:
            mine = inside.pop(id(bundle), [])
            assert set(mine) == bundle.allocations, f"bundle {bundle.group} {bundle.index}: allocations are not its own"
            assert mine or bundle.state != LEAVING, f"bundle {bundle.group} {bundle.index} is unused and still leaving"
            bundle.pool.check_invariants(mine)
            for name in bundle.pool.total if bundle.state == COMMITTED else ():
                for published in bundle.published_names(name):
                    available[published] = available.get(published, 0) + bundle.pool.available[name]
                    total[published] = total.get(published, 0) + bundle.pool.total[name]
                    actors[published] = actors.get(published, 0) + bundle.pool.held_by_actors.get(name, 0)
        assert not inside, "an allocation is in a bundle that the node does not have"
        assert self.available == available, f"published as free in bundles: {self.available}, not {available}"
        pool = self._node_pool
        assert {n: units for n, units in pool.total.items() if n not in pool.available} == total, (
            f"published of bundles: {pool.total}, not {total}"
        )
        for name in total:
            assert pool.held_by_actors.get(name, 0) == actors.get(name, 0), (
                f"{name}: published as held by actors {pool.held_by_actors.get(name, 0)}, not {actors.get(name, 0)}"
            )

    def _bundle_for(self, request: LeaseRequest) -> Bundle | None:
        assert request.bundle is not None
        group, index = request.bundle
        bundles = self._groups.get(group)
        if bundles is None:
            return None
        inside = request.resources_in_bundle
        if index != ANY:
            bundle = bundles.get(index)
            return bundle if bundle is not None and bundle.fits(inside) else None
        fitting = (bundles[index] for index in sorted(bundles) if bundles[index].fits(inside))
        if GPU in inside:
            return next(fitting, None)
        # GPUs are kept free for those who ask for them. Of equal ones, `min` takes the first.
        return min(fitting, key=lambda bundle: bundle.pool.available.get(GPU, 0) > 0, default=None)

    def _publish(self, bundle: Bundle, names: Iterable[str]) -> None:
        if bundle.state != COMMITTED:
            return
        for published, inside in (
            (self.available, bundle.pool.available),
            (self._node_pool.held_by_actors, bundle.pool.held_by_actors),
        ):
            for name in names:
                of_bundle, of_group = bundle.published_names(name)
                difference = inside.get(name, 0) - published.get(of_bundle, 0)
                if difference:
                    published[of_bundle] = published.get(of_bundle, 0) + difference
                    published[of_group] = published.get(of_group, 0) + difference
                    self._unreported |= {of_bundle, of_group}

    def _unpublish(self, bundle: Bundle) -> None:
        publications = (self._node_pool.total, self.available, self._node_pool.held_by_actors)
        names = [bundle.published_names(name) for name in bundle.pool.total]
        last = not any(other.state == COMMITTED for other in self._groups[bundle.group].values())
        for published in publications:
            for of_bundle, of_group in names:
                units = published.pop(of_bundle, 0)
                if not last and of_group in published:
                    published[of_group] -= units
                    self._unreported.add(of_group)
        if last:
            for name in self._names_of_group.pop(bundle.group):
                for published in publications:
                    published.pop(name, None)

    def _return_if_unused(self, bundle: Bundle) -> None:
        """Return a leaving bundle to the node, unless an allocation in it has not ended."""
        if bundle.allocations:
            return
        bundle.change_state(RETURNED)
        node_pool = self._node_pool
        bundles = self._groups[bundle.group]
        del bundles[bundle.index]
        if not bundles:
            del self._groups[bundle.group]
        add(node_pool.available, bundle.resources)
        subtract(node_pool.held_by_actors, bundle.resources)
        node_pool.release_devices(bundle.devices, bundle.resources, for_actor=True)


class LocalResources:
    """The resources of one node, and who has what of them.

    Args:
        total: units of each resource; the pool keeps this dict.
        gpu_ids: device ids of its GPUs, as many as `total` says; by default they are numbered.
        device_ids: the same as `gpu_ids` for other accelerators, by resource.

    Attributes:
        pool: the node's resources outside of bundles. bundles: those inside.

    Raises:
        ValueError: there are more or fewer ids than devices.
    """

    def __init__(
        self,
        node: int,
        total: Resources,
        gpu_ids: Sequence[str] = (),
        device_ids: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        given = {**(device_ids or {}), GPU: gpu_ids}
        ids: dict[str, tuple[str, ...]] = {}
        for name in ACCELERATORS:
            count, part = divmod(total.get(name, 0), UNIT)
            if part:
                continue  # a share of a device has no id
            ids[name] = tuple(given.get(name, ())) or tuple(str(index) for index in range(count))
            if len(ids[name]) != count:
                raise ValueError(f"node {node} has {count} {name}s, but the ids {', '.join(ids[name])}")
        self.gpu_ids = ids.get(GPU, ())
        self.device_ids = {name: ids[name] for name in ids if ids[name] and name != GPU}
        self.node = node
        self.pool = ResourcePool(total, ids)
        self.bundles = BundleResources(node, self.pool)

    def allocate(self, allocation: ResourceAllocation) -> None:
        """Hold the allocation's resources, in a bundle if its request is for one.

        Raises:
            ValueError: no bundle has room, or the GPUs do not fit.
        """
        if allocation.lease_request.bundle is not None:
            self.bundles.allocate(allocation)
        else:
            self.pool.allocate(allocation)

    def free(self, allocation: ResourceAllocation) -> None:
        """Free what the allocation still holds."""
        if allocation.bundle is not None:
            self.bundles.free(allocation, allocation.bundle)
        else:
            self.pool.free(allocation)

    def release_cpu(self, allocation: ResourceAllocation) -> bool:
        """Let others use the CPU of a worker that blocks; False if they may already, or it holds none."""
        if allocation.bundle is not None:
            return self.bundles.release_cpu(allocation, allocation.bundle)
        return self.pool.release_cpu(allocation)

    def reacquire_cpu(self, allocation: ResourceAllocation) -> None:
        """Take a released CPU back at once, even if another allocation got it meanwhile."""
        if allocation.bundle is not None:
            self.bundles.reacquire_cpu(allocation, allocation.bundle)
        else:
            self.pool.reacquire_cpu(allocation)

    def check_invariants(self, allocations: Sequence[ResourceAllocation]) -> None:
        """Raise AssertionError unless what is free and what is held is all that the node has.

        Args:
            allocations: all of the node, in bundles and outside, each once.
        """
        self.pool.check_invariants([one for one in allocations if one.bundle is None], self.bundles)
        self.bundles.check_invariants(allocations)


def lease_id(node: int, count: int) -> bytes:
    """Id of a node's `count`-th lease: node u16 | counter u48, so that `ids.node_of` names where to return it."""
    return node.to_bytes(2, "big") + count.to_bytes(6, "big")
