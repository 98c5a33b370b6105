"""init, shutdown, is_initialized, and who this interpreter is in the job."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import uuid
from collections.abc import Mapping
from typing import Any, NoReturn

from hpcray.api.client_context import ClientContext
from hpcray.api.environments import environments_of, with_submitted
from hpcray.api.logging_config import LoggingConfig
from hpcray.api.option_rules import ACTOR_RULES
from hpcray.base.config import Config
from hpcray.base.drain_errors import JobDrainingError
from hpcray.base.ids import raylet_of
from hpcray.base.labels import labels_problem, labels_text
from hpcray.host.relocation import Relocation
from hpcray.host.runtime_env import checked, refusal
from hpcray.runtime import interrupts
from hpcray.runtime.bootstrap import Entry, enter
from hpcray.runtime.environment import log_as
from hpcray.runtime.options import NodeOptions
from hpcray.runtime.process import Process, connect
from hpcray.runtime.refs import current
from hpcray.wire.messages import Exit, JobInfo

logger = logging.getLogger("hpcray")

_SETTINGS = frozenset(Config.__dataclass_fields__)


class _Session:
    entry: Entry | None = None
    exit_code = 0
    hooked = False


def init(
    address: str | None = None,
    *,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    resources: dict[str, float] | None = None,
    labels: dict[str, str] | None = None,
    object_store_memory: int | None = None,
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
    **settings: Any,
) -> ClientContext:
    """Start or join a session.

    Under `mpirun` or `srun` every rank calls it: on rank 0 it returns when all nodes are up, on the others it serves
    the job and never returns. Without a launcher it starts one node on this machine. In a script that `hpcray-launch`
    or `python -m hpcray` started it joins that job.

    Args:
        address: None, "local" (a node of its own), "auto" (the running session of this machine), or a session
            directory.
        num_cpus, num_gpus, resources, object_store_memory: of this node; found out where not given. Bytes for memory.
            Under mpirun or srun: of every rank's node. Without effect, and said so, when a running job is joined.
        namespace: of named actors; RAY_NAMESPACE or a fresh one when not given.
        runtime_env: for every task and actor that does not say otherwise. What RAY_JOB_CONFIG_JSON_ENV_VAR says, as a
            submitter of jobs may set it, holds where this says nothing.
        job_config: its `runtime_env` and `ray_namespace` are used where the arguments of these names are not given.
        configure_logging, logging_level, logging_format: how hpcray's own messages are logged in this process.
        logging_config: how the root loggers of this process and of its workers write, a `LoggingConfig`.
        labels: of this node, for `label_selector` and `NodeLabelSchedulingStrategy`.
        local_mode, include_dashboard, dashboard_host, dashboard_port: accepted, without effect; the first says so.
        settings: any field of `hpcray.base.config.Config`. Names with a leading underscore, which Ray takes for its
            internals, are accepted and have no effect.

    Raises:
        RuntimeError: already initialized (unless `ignore_reinit_error`), or an argument is unknown.
        ConnectionError: nothing to attach to. StartupError: a node did not come up. ValueError: an option is not valid.
    """
    if current.process is not None and current.process.dead is None:
        if ignore_reinit_error:
            logger.info("init() was called before; this call has no effect")
            return ClientContext(current.process)
        raise RuntimeError(
            "Maybe you called ray.init twice by accident? This error can be suppressed by passing in "
            "'ignore_reinit_error=True' or by calling 'ray.shutdown()' prior to 'ray.init()'."
        )
    if current.process is not None:
        shutdown()
    if local_mode:
        logger.warning(
            "hpcray: local_mode has no effect: tasks and actors run in workers as ever; hint: num_cpus=1 runs one task "
            "at a time"
        )
    unknown = [name for name in settings if name not in _SETTINGS and not name.startswith("_")]
    if unknown:
        raise RuntimeError(
            f"Unknown keyword argument(s): {', '.join(unknown)}; hint: besides Ray's, the settings are "
            f"{sorted(_SETTINGS)}"
        )
    if job_config is not None:
        runtime_env = runtime_env or getattr(job_config, "runtime_env", None)
        namespace = namespace or getattr(job_config, "ray_namespace", None)
    namespace = namespace if namespace is not None else os.environ.get("RAY_NAMESPACE") or None
    runtime_env = with_submitted(runtime_env, os.environ)
    check_namespace(namespace)
    if logging_config is not None and not isinstance(logging_config, LoggingConfig):
        raise TypeError(f"logging_config must be a LoggingConfig, got {type(logging_config)}")
    if configure_logging:
        _configure_logging(logging_level, logging_format)
    given = {"num_cpus": num_cpus, "num_gpus": num_gpus, "resources": resources, "runtime_env": runtime_env}
    for name, value in {**given, "object_store_memory": object_store_memory}.items():
        ACTOR_RULES[name].check(name, value)
    problem = labels_problem(labels) if labels else None
    if problem:
        raise ValueError(problem)
    environment = checked(runtime_env)
    if refusal(environment):
        raise NotImplementedError(refusal(environment))
    config: dict[str, Any] = {name: value for name, value in settings.items() if name in _SETTINGS}
    if object_store_memory is not None:
        config["object_store_memory"] = int(object_store_memory)
    if labels:
        config["labels"] = labels_text(labels)
    if log_to_driver is not None:
        config["log_to_driver"] = log_to_driver
    entry = enter(
        address or os.environ.get("RAY_ADDRESS") or None,
        NodeOptions(config=config, num_cpus=num_cpus, num_gpus=num_gpus, resources=resources or {}),
    )
    try:
        process = connect(entry.session_dir, entry.kind)
        current.process = process
        process.start()
        interrupts.install(process.engine)
        interrupts.pass_on(process)
        interrupts.obey(process)
    except BaseException:
        current.process = None
        if entry.node is not None:
            entry.node.leave(1.0)
        raise
    _Session.entry = entry
    if entry.node is None:
        _say_ignored({"num_cpus": num_cpus, "num_gpus": num_gpus, "resources": resources, **config})
    _announce(process, entry, namespace, environment.env_vars())
    if not _Session.hooked:
        _Session.hooked = True
        atexit.register(shutdown, _exiting_interpreter=True)
        _hook_exit_code()
    try:
        environments = environments_of(process)
        environments.job = environments.fields(environment)
        if logging_config is not None:
            environments.job["logging_config"] = logging_config.to_dict()
            log_as(process, environments.job["logging_config"])
    except BaseException:
        shutdown()
        raise
    return ClientContext(process)


def _configure_logging(level: int | str, line_format: str | None) -> None:
    """hpcray's own messages: from this level on, in this form."""
    logger.setLevel(level.upper() if isinstance(level, str) else level)
    if line_format and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(line_format))
        logger.addHandler(handler)
        logger.propagate = False


def _say_ignored(wanted: dict[str, Any]) -> None:
    """A script that asks for CPUs when it is run alone may run in a job as it is, but must not believe it got them."""
    ignored = [name for name, value in wanted.items() if value is not None]
    if ignored:
        logger.warning(
            "hpcray: init() joins a job that runs already: %s has no effect; hint: options of hpcray-launch, "
            "python -m hpcray, or HPCRAY_* variables",
            ", ".join(ignored),
        )


def _announce(process: Process, entry: Entry, namespace: str | None, env: dict[str, str]) -> None:
    """Tell the workers what they need of this driver.

    A second driver adds its paths and variables and leaves the rest to the first one: workers serve both. It shares the
    first one's namespace unless it asks for its own, which then holds for what it names itself.
    """
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    paths = [os.path.dirname(os.path.abspath(script))] if script else []
    moved = Relocation.of(os.environ)
    paths += [moved.original(os.path.abspath(path)) if path else os.getcwd() for path in sys.path]
    known = process.job
    job = JobInfo(
        known.job_id if known else "01000000",
        known.namespace if known else namespace or str(uuid.uuid4()),
        tuple(dict.fromkeys([*paths, *(known.sys_path if known else ())])),
        known.cwd if known else os.getcwd(),
        tuple(sorted({**dict(known.env if known else ()), **env}.items())),
    )
    process.set_job(job, namespace or job.namespace)


def _hook_exit_code() -> None:
    """An uncaught exception makes the exit code 1; atexit handlers cannot see that by themselves."""
    previous = sys.excepthook

    def hook(kind: Any, value: Any, trace: Any) -> None:
        _Session.exit_code = 1
        previous(kind, value, trace)
        process = current.process
        if process is not None and isinstance(value, JobDrainingError):
            leave_unfinished(process)

    sys.excepthook = hook


def shutdown(_exiting_interpreter: bool = False) -> None:
    """Leave the session. A session that this process started ends, with every process and file of it."""
    process, entry = current.process, _Session.entry
    current.process = None
    _Session.entry = None
    if process is None or current.worker is not None:
        return
    try:
        process.ending.settle()  # a KeyboardInterrupt ends the wait
    finally:
        interrupts.remove()
        _leave(process, entry)


def _leave(process: Process, entry: Entry | None) -> None:
    if process.dead is None and entry is not None and entry.node is not None:
        with process.engine.lock:
            process.engine.send(raylet_of(process.node), Exit(_Session.exit_code))
    process.close()
    if entry is not None and entry.node is not None:
        entry.node.leave()


def leave_unfinished(process: Process) -> NoReturn:
    """End a program that the end of its job has interrupted: checkpoints are written, and the exit code says so."""
    # Before the frames that hold actor handles are gone, and with them the actors.
    process.ending.settle()
    _Session.exit_code = process.run.exit_code
    raise SystemExit(process.run.exit_code)


def check_namespace(namespace: Any) -> None:
    """Raise TypeError or ValueError if it is neither None nor a name."""
    if namespace is None:
        return
    if not isinstance(namespace, str):
        raise TypeError(f"namespace must be None or a string, got {type(namespace)}.")
    if not namespace:
        raise ValueError('"" is not a valid namespace. Pass None to not specify a namespace.')


def is_initialized() -> bool:
    """Whether this process takes part in a session."""
    return current.process is not None


def ensure() -> Process:
    """The process of this interpreter; `init()` is called if need be, as in Ray."""
    process = current.process
    if process is None:
        init()
        process = current.process
        assert process is not None
    return process
