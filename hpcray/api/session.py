"""The session of this process: init, shutdown, is_initialized."""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from time import monotonic
from typing import Any, ClassVar, NoReturn

import msgspec

from hpcray.api.driver_job import LoggingConfig, announce, imported_libraries
from hpcray.api.options import NODE_RULES
from hpcray.common.config import Config
from hpcray.common.exceptions import JobDrainingError, RaySystemError, did_you_mean
from hpcray.common.ids import raylet_of
from hpcray.common.labels import labels_problem, labels_text
from hpcray.common.ray_version import RAY_VERSION
from hpcray.core.core_worker.object_entry import Waiter
from hpcray.core.core_worker.object_table import PENDING
from hpcray.diagnostics.introspection import ObjectInventory
from hpcray.notebooks import show_in_cells
from hpcray.platform.launcher_environment import JobVariables, session_of_parent
from hpcray.platform.log_format import check_rotation
from hpcray.platform.session_directory import ADDRESS, OWN_NAMESPACE, SessionInfo
from hpcray.platform.sockets import node_ip_address
from hpcray.processes.bootstrap import ClusterEntry, enter
from hpcray.processes.features import FEATURES
from hpcray.protocol.messages import EndReason, Exit
from hpcray.runtime.core_worker import interruptions
from hpcray.runtime.core_worker.core_worker import CoreWorker, connect, current
from hpcray.runtime.core_worker.interruptions import defer_interruptions, end_interruptions
from hpcray.runtime.core_worker.worker_output import HANDLERS, WorkerBars, WorkerOutputPrinter
from hpcray.runtime.node.options import NodeOptions
from hpcray.runtime_env.runtime_env import RuntimeEnv, unsupported_field_error, validated_runtime_env
from hpcray.runtime_env.submitted_runtime_env import (
    ACTOR_LIFETIME,
    RuntimeEnvs,
    merge_submitted_runtime_env,
    modify_runtime_env,
)
from hpcray.transport.startup import read_launch

# ------------------------------------------------------------ late address
# The address of a cluster that its program is still composing.


class LateAddress(str):
    """Address of a cluster of this interpreter, whose nodes start when they are needed.

    `init(address=...)` with it postpones the start to the first use of the session. Its text is for others (a program
    that this one starts, a variable of the environment): a call that reads the text starts the nodes.

    Attributes:
        newest: the address that `init()` without an argument takes; None for none.
        text: starts the nodes unless they run, and returns the address as plain text.
        started: returns True if the nodes run.
    """

    newest: ClassVar[LateAddress | None] = None
    text: Callable[[], str]
    started: Callable[[], bool]

    def __new__(cls, text: Callable[[], str], started: Callable[[], bool]) -> LateAddress:
        made = super().__new__(cls, f"cluster-{id(text):x}")
        made.text = text
        made.started = started
        return made

    def __str__(self) -> str:
        return self.text()

    def __format__(self, spec: str) -> str:
        return format(self.text(), spec)

    def __add__(self, other: str) -> str:
        return self.text() + other

    def __radd__(self, other: str) -> str:
        return other + self.text()

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        """Return the text as bytes; variables of the environment and command lines are made this way."""
        return self.text().encode(encoding, errors)

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.text(),)


# ------------------------------------------------------------ session


logger = logging.getLogger("hpcray")

_ENCODING = "RAY_LOGGING_CONFIG_ENCODING"
"""Variable: the encoding of a `LoggingConfig` where `init` gets none."""
_LAST_TASKS_TIMEOUT, _LAST_TASKS_CHECK = 0.5, 0.01  # seconds
_END_TEXT = 2000  # characters that are kept of the beginning, and of the end, of the text of a program's last error
_SETTINGS = frozenset(Config.__struct_fields__)


class ClientContext(Mapping[str, Any]):
    """Result of `init`: addresses of the session. As a context manager it shuts the session down at its end.

    Attributes:
        address_info: addresses and directories by Ray's names. The context itself is a mapping with the same items.
        python_version, ray_version: versions of Python and of the Ray that hpcray follows.
        ray_commit: always "".
    """

    def __init__(self) -> None:
        self.python_version = "{}.{}.{}".format(*sys.version_info[:3])
        self.ray_version = RAY_VERSION
        self.ray_commit = ""
        if not current.postponed:
            self.address_info  # noqa: B018  # lasts longer than the session

    @property
    def dashboard_url(self) -> str:
        """Where `hpcray dashboard` listens on this node, while it runs: `127.0.0.1:8265` or `unix:PATH`; else ""."""
        from hpcray.processes.running_jobs import dashboard_address  # few programs ask

        process = current.process
        return dashboard_address(process.place.session_dir) if process is not None else ""

    @functools.cached_property
    def address_info(self) -> dict[str, Any]:
        process, address = require_session(), node_ip_address()
        return {
            "node_ip_address": address,
            "raylet_ip_address": address,
            "redis_address": None,
            "object_store_address": None,
            "raylet_socket_name": os.path.join(process.place.session_dir, "r.s"),
            "webui_url": "",
            "session_dir": process.place.session_dir,
            "metrics_export_port": 0,
            "gcs_address": process.place.session_dir,
            "address": process.place.session_dir,
            "dashboard_agent_listen_port": 0,
            "node_id": process.place.node_id,
        }

    def __getitem__(self, key: str) -> Any:
        return self.address_info[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.address_info)

    def __len__(self) -> int:
        return len(self.address_info)

    def __enter__(self) -> ClientContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()

    def disconnect(self) -> None:
        """Shut the session down, as `shutdown()`."""
        shutdown()

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        from hpcray.state.job_widget import context_bundle  # only notebooks need it

        return context_bundle(self)

    def __repr__(self) -> str:
        return f"ClientContext(session={self.address_info['session_dir']!r})"


class _Session:
    entry: ClusterEntry | None = None
    variables: JobVariables | None = None
    printer: WorkerOutputPrinter | None = None
    exit_code = 0
    hooked = False


def init(
    address: str | None = None,
    *,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    resources: dict[str, float] | None = None,
    labels: dict[str, str] | None = None,
    object_store_memory: float | None = None,
    local_mode: bool = False,
    ignore_reinit_error: bool = False,
    include_dashboard: bool | None = None,
    dashboard_host: str = "127.0.0.1",
    dashboard_port: int | None = None,
    job_config: Any = None,
    configure_logging: bool = True,
    logging_level: int | str = "info",
    logging_format: str | None = None,
    logging_config: LoggingConfig | None = None,
    log_to_driver: bool | None = None,
    namespace: str | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    object_spilling_directory: str | None = None,
    **settings: Any,
) -> ClientContext:
    """Start or join a session.

    Under `mpirun` or `srun` every rank calls `init`: on rank 0 it returns when all nodes are up; on the other ranks it
    serves the job and never returns. Without a launcher it starts one node on this machine. In a script that
    `hpcray-launch` or `python -m hpcray` started it joins that job.

    Args:
        address: None, "local" (start a node), "auto" (the running session of this machine), a session directory, or
            that of a `cluster_utils.Cluster`.
        num_cpus, num_gpus, resources, object_store_memory: resources of this node, memory in bytes; detected by
            default. Under mpirun or srun each rank's node has them. A process that joins a running job logs a warning;
            with the argument `address` they are refused.
        namespace: namespace of named actors; by default RAY_NAMESPACE, else a new one.
        runtime_env: default runtime environment of tasks and actors. Fields that it lacks are taken from the variable
            RAY_JOB_CONFIG_JSON_ENV_VAR, which job submission sets.
        job_config: provides `runtime_env` and `ray_namespace` where these arguments are not given, and the default
            lifetime of actors.
        configure_logging, logging_level, logging_format: logging of hpcray's own messages in this process. False: no
            handlers of Ray's logger.
        logging_config: a `LoggingConfig` for the root loggers of this process and its workers, whose output then has no
            prefixes. By default one with the encoding of RAY_LOGGING_CONFIG_ENCODING, where that is set.
        ignore_reinit_error: return the context of the running session instead of raising RuntimeError.
        log_to_driver: print the output of workers in the driver. By default what RAY_LOG_TO_DRIVER says, else True.
        labels: labels of this node, for `label_selector` and `NodeLabelSchedulingStrategy`.
        object_spilling_directory: where objects go for which the object store has no room: the setting `spill_dir`.
        local_mode, include_dashboard, dashboard_host, dashboard_port: without effect; `local_mode` logs a warning.
        settings: any field of `hpcray.common.config.Config`. Of Ray's internals three take effect: `_memory` (bytes for
            tasks with `memory=`), `_node_name`, and `_system_config` as far as hpcray has the settings in it.

    Returns:
        The addresses of the session.

    Raises:
        RuntimeError: the process has joined a session (unless `ignore_reinit_error`), or an argument is unknown.
        RaySystemError: the interpreter ends, and this is a destructor.
        ConnectionError: there is no session to join. StartupError: a node did not start.
        ValueError, TypeError: an option is not valid. NotImplementedError: the runtime_env is not supported.
    """
    if is_initialized():
        if current.postponed or require_session().dead is None:
            return _running_session(ignore_reinit_error)
        shutdown()
    if local_mode:
        logger.warning(
            "hpcray: local_mode has no effect: tasks and actors run in workers as ever; hint: num_cpus=1 runs one task "
            "at a time"
        )
    _check_settings(settings)
    if job_config is not None:
        runtime_env = runtime_env or getattr(job_config, "runtime_env", None)
        namespace = namespace or getattr(job_config, "ray_namespace", None)
    namespace = namespace if namespace is not None else os.environ.get("RAY_NAMESPACE") or None
    runtime_env = merge_submitted_runtime_env(runtime_env, os.environ)
    if not settings.get("_skip_env_hook"):
        runtime_env = modify_runtime_env(runtime_env, os.environ)
    check_namespace(namespace)
    check_rotation()
    if logging_config is not None and not isinstance(logging_config, LoggingConfig):
        raise TypeError(f"logging_config must be a LoggingConfig, got {type(logging_config)}")
    _configure_logging(configure_logging, logging_level, logging_format)
    if logging_config is None and os.environ.get(_ENCODING):
        logging_config = LoggingConfig(os.environ[_ENCODING])
    if logging_config is not None:
        logging_config._apply()
    else:
        logging_config = getattr(job_config, "py_logging_config", None)
    given: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": num_gpus, "resources": resources}
    memory: float | None = settings.get("_memory")
    if isinstance(object_store_memory, float):
        object_store_memory = int(object_store_memory)  # 100e6
    described = {"memory": memory, "runtime_env": runtime_env, "object_store_memory": object_store_memory}
    _check_options({**given, **described}, labels)
    environment = validated_runtime_env(runtime_env)
    if unsupported_field_error(environment):
        raise NotImplementedError(unsupported_field_error(environment))
    if object_spilling_directory is not None:
        os.makedirs(object_spilling_directory, exist_ok=True)
        settings["spill_dir"] = object_spilling_directory
    lifetime = getattr(job_config, "_default_actor_lifetime", "")
    if log_to_driver is None and (shown := os.environ.get("RAY_LOG_TO_DRIVER")):
        log_to_driver = shown.lower() in ("1", "true")
    config = _node_config(settings, object_store_memory, labels, log_to_driver)
    options = NodeOptions(
        config=config, num_cpus=num_cpus, num_gpus=num_gpus, memory=memory, resources=resources or {},
        node_name=settings.get("_node_name") or "",
    )  # fmt: skip
    system_config = settings.get("_system_config") or None
    given |= {"labels": labels, "object_store_memory": object_store_memory, "_system_config": system_config}
    address = address or os.environ.get("RAY_ADDRESS") or None
    _enter_session(address, options, given, lambda process, inherited: _start_driver(
        process, namespace or inherited or None, environment, logging_config, lifetime, log_to_driver, settings
    ))  # fmt: skip
    return ClientContext()


start_hooks: list[Callable[[CoreWorker, Mapping[str, Any]], None]] = []
"""Called when this process joins a job as a driver, with the settings of `init`; an error ends the session again."""
post_init_hooks: list[Callable[[], object]] = []
"""Called when this process has joined a job as a driver."""


def _enter_session(
    address: str | None, options: NodeOptions, given: dict[str, Any], start: Callable[[CoreWorker, str], None]
) -> None:
    """Join or start a session, now or, where its nodes do not run yet, at its first use.

    Args:
        given: the arguments of `init` that describe a node.
        start: called when it has joined: with the process, and the namespace of the process that has started this one
            ("": it joins another job, or begins one).

    Raises:
        ValueError: `given` has values, and the address names a cluster.
    """
    if sys.is_finalizing():  # no thread could be started, and nobody would end the session
        raise RaySystemError("a destructor uses hpcray after its end: shutdown() was called, and the interpreter ends")
    late = address if isinstance(address, LateAddress) else LateAddress.newest if address in (None, "auto") else None
    if late is not None or address not in (None, "local", os.environ.get("RAY_ADDRESS")):
        _refuse_node_arguments(given)

    def join() -> None:
        where = late.text() if late is not None else address
        parent = _job_of_parent(given) if where is None else None
        if parent is not None:
            where = parent.path
        if where and where != "local":
            logger.info("Connecting to existing Ray cluster at address: %s...", where)
        entry, process = _join(where, options)
        if entry.node is None:
            # `announce` heeds log_to_driver.
            _warn_of_ignored_arguments({**given, **options.config, "log_to_driver": None})
        try:
            start(process, "" if parent is None else os.environ.get(OWN_NAMESPACE, ""))
            logger.info("Connected to Ray cluster." if entry.node is None else "Started a local Ray instance.")
            for hook in post_init_hooks:
                hook()
        except BaseException:
            current.forget_postponed()
            current.process = process
            shutdown()  # so that the program may call `init` again
            raise

    if late is not None and not late.started():
        current.postpone(join)
    else:
        join()


def _job_of_parent(given: Mapping[str, Any]) -> SessionInfo | None:
    """Return the node that a process joins which a program or a worker of a job has started, by any way.

    Args:
        given: the arguments of `init` that describe a node. Where there are such, a job of its own is meant, as in Ray.
    """
    if ADDRESS in os.environ or read_launch(os.environ).size > 1:
        return None
    found = session_of_parent(os.environ)
    described = [name for name, value in given.items() if value is not None]
    if found is not None and described:
        logger.warning(
            "hpcray: init() starts a job of its own beside that of its parent process, as %s describes a node; hint: "
            "init() without it joins that job, init(address='local') says that another one is meant",
            ", ".join(described),
        )
        return None
    return found


_ARGUMENTS = tuple(inspect.signature(init).parameters)


def _running_session(ignore_reinit_error: bool) -> ClientContext:
    """Return the context of the session that this process has joined already; without the flag raise RuntimeError."""
    if ignore_reinit_error:
        logger.info("init() was called before; this call has no effect")
        return ClientContext()
    raise RuntimeError(
        "Maybe you called ray.init twice by accident? This error can be suppressed by passing in "
        "'ignore_reinit_error=True' or by calling 'ray.shutdown()' prior to 'ray.init()'."
    )


def _node_config(
    settings: Mapping[str, Any],
    object_store_memory: float | None,
    labels: dict[str, str] | None,
    log_to_driver: bool | None,
) -> dict[str, Any]:
    config = Config.from_system_config(settings.get("_system_config") or {})
    config |= {name: value for name, value in settings.items() if name in _SETTINGS}
    if object_store_memory is not None:
        config["object_store_memory"] = object_store_memory
    if labels:
        config["labels"] = labels_text(labels)
    if log_to_driver is not None:
        config["log_to_driver"] = log_to_driver
    return config


def _start_driver(
    process: CoreWorker,
    namespace: str | None,
    environment: RuntimeEnv,
    logging_config: LoggingConfig | None,
    actor_lifetime: str,
    log_to_driver: bool | None,
    settings: Mapping[str, Any],
) -> None:
    job_fields = announce(process, namespace, environment.env_vars(), log_to_driver)
    if _Session.variables is not None and process.place.job is not None:
        _Session.variables.name_namespace(process.place.job.namespace)
    if not _Session.hooked:
        _Session.hooked = True
        atexit.register(shutdown, _exiting_interpreter=True)
        _hook_exit_code()
    runtime_envs = RuntimeEnvs.of(process)
    runtime_envs.job = {**runtime_envs.fields(environment), **job_fields}
    if logging_config is not None:
        runtime_envs.job["logging_config"] = logging_config.to_dict()
        if _Session.printer is not None:
            _Session.printer.drop_prefixes()
    if actor_lifetime == "detached":
        runtime_envs.job[ACTOR_LIFETIME] = actor_lifetime
    for hook in start_hooks:
        hook(process, settings)
    if process.config.end_hangs:
        from hpcray.hangs.watcher import watch_for_hangs

        watch_for_hangs(process)


def _check_settings(settings: Mapping[str, Any]) -> None:
    unknown = [name for name in settings if name not in _SETTINGS and not name.startswith("_")]
    if unknown:
        raise RuntimeError(
            f"Unknown keyword argument(s): {', '.join(unknown)}.{did_you_mean(unknown, (*_SETTINGS, *_ARGUMENTS))} "
            f"Besides Ray's, the settings are {sorted(_SETTINGS)}"
        )
    if settings.get("_metrics_export_port"):
        logger.warning(
            "hpcray: _metrics_export_port has no effect: no port is opened; hint: hpcray metrics, or the Unix socket "
            "metrics.s in the session directory, which serves HTTP"
        )


def _check_options(options: Mapping[str, Any], labels: dict[str, str] | None) -> None:
    for name, value in options.items():
        NODE_RULES[name].validate(name, value)
    problem = labels_problem(labels) if labels else None
    if problem:
        raise ValueError(problem)


def _join(address: str | None, options: NodeOptions) -> tuple[ClusterEntry, CoreWorker]:
    """Start or find the node of this process, and connect this process to it.

    Raises:
        ConnectionError: there is no session to join. StartupError: a node did not start.
    """
    entry = enter(_started_session(address) or address, _preloading(options))
    process = None
    try:
        process = connect(entry.session_dir, entry.kind, ObjectInventory, FEATURES)
        current.process = process
        printer = WorkerOutputPrinter(process.engine, show_in_cells(process))
        process.start((printer, HANDLERS))
        interruptions.defer_sigint(process.engine)
        interruptions.forward_to_raylet(process)
        interruptions.exit_at_drain_deadline(process)
        defer_interruptions(process.engine, interruptions.in_our_code)
    except BaseException:
        current.process = None
        if process is not None:
            interruptions.restore()
            process.close()
        if entry.node is not None:
            entry.node.leave(1.0)
        raise
    _Session.entry, _Session.printer = entry, printer
    _Session.variables = JobVariables(os.environ, entry.session_dir, entry.for_children)
    return entry, process


def _started_session(address: str | None) -> str | None:
    """The session directory of the node of a cluster of `ray start` that an address means; None: it means none."""
    from hpcray.ray_start.presence import may_mean_started  # a room above the kernel

    if not may_mean_started(address, os.environ):
        return None
    from hpcray.ray_start.lookup import find_session

    return find_session(address, os.environ)


def _preloading(options: NodeOptions) -> NodeOptions:
    """A node that is started here imports once what the program has of Ray's libraries: seconds less in each worker."""
    modules = imported_libraries()
    if not modules:
        return options
    return msgspec.structs.replace(options, config={"preload": ",".join(modules), **options.config})


def _configure_logging(wanted: bool, level: int | str, line_format: str | None) -> None:
    """Set level and format of hpcray's messages; in programs that say `import ray`, of Ray's logger, which has them.

    Args:
        wanted: False: the program configures the logger itself, and finds no handlers there.
    """
    target = logger.parent if logger.parent is not None and logger.parent.name == "ray" else logger
    if not wanted:
        target.handlers.clear()
        return
    target.setLevel(level.upper() if isinstance(level, str) else level)
    if not line_format:
        return
    if not target.handlers:
        target.addHandler(logging.StreamHandler())
        target.propagate = False
    for handler in target.handlers:
        handler.setFormatter(logging.Formatter(line_format))


def _refuse_node_arguments(requested: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments of `init` that describe a node, where it only joins the cluster that it names."""
    for names in (("num_cpus", "num_gpus"), *((one,) for one in requested if not one.startswith("num_"))):
        if any(requested[name] is not None for name in names):
            raise ValueError(f"When connecting to an existing cluster, {' and '.join(names)} must not be provided.")


def _warn_of_ignored_arguments(requested: dict[str, Any]) -> None:
    """Warn of arguments of `init` that have no effect, because the process joined a running job."""
    ignored = [name for name, value in requested.items() if value is not None]
    if ignored:
        logger.warning(
            "hpcray: init() joins a job that runs already: %s has no effect; hint: options of hpcray-launch, "
            "python -m hpcray, or HPCRAY_* variables",
            ", ".join(ignored),
        )


def _hook_exit_code() -> None:
    """Record exit code 1 for an uncaught exception, which atexit handlers cannot see."""
    previous = sys.excepthook

    def hook(kind: Any, value: Any, trace: Any) -> None:
        _Session.exit_code = 1
        WorkerBars.close()
        process = current.process
        if process is not None:
            _explain_end(process, value)
        previous(kind, value, trace)
        if process is not None and isinstance(value, JobDrainingError):
            leave_unfinished(process)

    sys.excepthook = hook


def _explain_end(process: CoreWorker, error: BaseException) -> None:
    """Report why the program ends, for later questions."""
    with contextlib.suppress(Exception):  # the text may be a program's
        kind = "interrupt" if isinstance(error, KeyboardInterrupt) else "exception"
        text = f"{type(error).__name__}: {error}"
        shown = text if len(text) <= 2 * _END_TEXT else f"{text[:_END_TEXT]} ... {text[-_END_TEXT:]}"
        with process.engine.lock:
            process.engine.send(raylet_of(process.node), EndReason(kind, shown))
            process.engine.flush()


def shutdown(_exiting_interpreter: bool = False) -> None:
    """Leave the session. A session that this process started ends, with all of its processes and files."""
    current.forget_postponed()
    process, entry = current.process, _Session.entry
    variables, _Session.variables = _Session.variables, None
    current.process = None
    _Session.entry = None
    if process is None or current.worker is not None:
        return
    try:
        if _exiting_interpreter and process.dead is None and not _Session.exit_code:
            _await_last_tasks(process)
        process.drain_client.wait_for_checkpoints()  # KeyboardInterrupt ends the wait
    finally:
        interruptions.restore()
        try:
            _leave(process, entry, _exiting_interpreter)
        finally:
            if variables is not None:
                variables.restore()


def _await_last_tasks(process: CoreWorker) -> None:
    """Let tasks and calls that the program has submitted and not waited for end, if they do within half a second.

    Ray sleeps as long, so that what they print is seen.
    """
    engine, entries = process.engine, process.table.entries

    def is_open(oid: bytes) -> bool:
        entry = entries.get(oid)
        return entry is not None and entry.state == PENDING and entry.task is not None

    with engine.lock:
        deadline = monotonic() + _LAST_TASKS_TIMEOUT
        left = [oid for oid in entries if is_open(oid)]
        while left and process.dead is None and (now := monotonic()) < deadline:
            engine.wait(Waiter(), min(deadline, now + _LAST_TASKS_CHECK))
            while left and not is_open(left[-1]):
                left.pop()


def _leave(process: CoreWorker, entry: ClusterEntry | None, exiting: bool) -> None:
    printer, _Session.printer = _Session.printer, None
    if process.dead is None and printer is not None:
        dead = process.table.dead_nodes
        printer.finish(node for node in range(process.place.cluster_size) if node not in dead)
    WorkerBars.close()
    if process.dead is None and entry is not None and entry.node is not None:
        with process.engine.lock:
            process.engine.send(raylet_of(process.node), Exit(_Session.exit_code))
    process.close(exiting)
    end_interruptions()
    if entry is not None and entry.node is not None:
        entry.node.leave()


def leave_unfinished(process: CoreWorker) -> NoReturn:
    """End a program that the drain of its job interrupted: write checkpoints, then exit with `drain_exit_code`."""
    # Before SystemExit drops the frames that hold actor handles, which would end the actors.
    process.drain_client.wait_for_checkpoints()
    _Session.exit_code = process.place.run.exit_code
    raise SystemExit(process.place.run.exit_code)


def alive() -> None:
    """Say that this process makes progress, though it uses next to no CPU and neither reads nor writes: a job that runs
    with --end-hangs is not taken for hung then. Call it more often than the option says; it takes a microsecond.
    """
    if _Heartbeat.file < 0:
        _Heartbeat.file = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.write(_Heartbeat.file, b"alive")  # the watch counts the bytes that processes write


class _Heartbeat:
    file = -1


def check_namespace(namespace: Any) -> None:
    """Raise TypeError or ValueError for a namespace that is neither None nor a non-empty string."""
    if namespace is None:
        return
    if not isinstance(namespace, str):
        raise TypeError(f"namespace must be None or a string, got {type(namespace)}.")
    if not namespace:
        raise ValueError('"" is not a valid namespace. Pass None to not specify a namespace.')


def is_initialized() -> bool:
    """Return True if this process has joined a session, or joins the nodes of a `Cluster` when they start."""
    return current.postponed or current.process is not None


class AutoInit:
    """The first use of the API calls `init()` where the program has not, as in Ray.

    Attributes:
        enabled: False: it raises instead. At first, what RAY_ENABLE_AUTO_CONNECT says.
    """

    enabled = os.environ.get("RAY_ENABLE_AUTO_CONNECT", "") != "0"


def enable_auto_init(enabled: bool) -> None:
    """Set `AutoInit.enabled`."""
    AutoInit.enabled = bool(enabled)


def require_session() -> CoreWorker:
    """Return the process of this interpreter; calls `init()` where no session has been joined, as Ray does.

    Raises:
        RaySystemError: no session has been joined, and RAY_ENABLE_AUTO_CONNECT is 0.
    """
    process = current.process
    if process is None:
        if not AutoInit.enabled:
            raise RaySystemError("Ray has not been started yet. You can start Ray with 'ray.init()'.")
        init()
        process = current.process
        assert process is not None
    return process
