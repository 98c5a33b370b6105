"""Spans of OpenTelemetry: `start` gives `remote()` of functions, actor classes and methods a form that opens them.

Then the user's function or class is submitted in a wrapper. In the worker, the wrapper turns tracing on and opens a
span around the execution, a child of the submitter's span. Generator functions run without a span of their own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from hpcray.api.actor import ActorClass, make_actor_class
from hpcray.api.actor_handle import METHOD, SIGNATURE, ActorMethod
from hpcray.api.remote_function import RemoteFunction
from hpcray.api.runtime_context import get_runtime_context
from hpcray.common.config import OTLP_FILE
from hpcray.platform.private_files import UntrustedPathError, append_private_file, make_private_directory
from hpcray.runtime.core_worker.core_worker import current, need_process

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

Context = dict[str, str]

_CONTEXT = "_ray_trace_ctx"
"""Keyword argument by which a call carries the context of its span."""
_TRACED_AS = "traced_as"
"""Option of a method: its name in spans."""


class _ImportFromStringError(Exception):
    """The name of a hook is not "module:function", or there is no such module or function."""


class _Tracing:
    """The state of this process.

    Attributes:
        enabled: calls open spans.
        hook: name of the function that sets up tracing in a process; "": none.
        functions, classes: what is submitted in place of the program's remote functions and actor classes.
    """

    enabled = False
    hook = ""
    functions: ClassVar[WeakKeyDictionary[RemoteFunction[..., Any], RemoteFunction[..., Any]]] = WeakKeyDictionary()
    classes: ClassVar[WeakKeyDictionary[ActorClass[Any], ActorClass[Any]]] = WeakKeyDictionary()


def start(hook: str) -> None:
    """Set up tracing in this process, unless that was done before, and open spans from now on.

    Args:
        hook: "module:function"; the function takes no arguments, and sets the tracer provider and its exporters. It is
            called in this process, and in each worker before the first traced call.

    Raises:
        ImportError: OpenTelemetry is not installed. _ImportFromStringError: there is no such function.
    """
    function = _import_from_string(hook)
    modules = [sys.modules[name] for name in ("hpcray", "ray") if name in sys.modules]
    if not all(vars(module).get("__traced__", False) for module in modules):
        function()
        for module in modules:
            module.__traced__ = True  # type: ignore[attr-defined]
    _Tracing.hook = hook
    _enable_tracing()


def _is_tracing_enabled() -> bool:
    """Return True if calls of this process open spans."""
    return _Tracing.enabled


def _enable_tracing() -> None:
    """Open spans from now on. Raises ImportError where OpenTelemetry is not installed."""
    _trace()
    if not _Tracing.enabled:
        _Tracing.enabled = True
        RemoteFunction.remote = _submitting(RemoteFunction.remote)  # type: ignore[method-assign]
        ActorClass.remote = _creating(ActorClass.remote)  # type: ignore[method-assign]
        ActorMethod.remote = _calling(ActorMethod.remote)  # type: ignore[method-assign]


def _import_from_string(name: str) -> Callable[[], Any]:
    module, _, path = name.partition(":")
    if not module or not path:
        raise _ImportFromStringError(f'Import string "{name}" must be in format "<module>:<attribute>".')
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        if error.name != module:
            raise
        raise _ImportFromStringError(f'Could not import module "{module}".') from error
    try:
        for part in path.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise _ImportFromStringError(f'Attribute "{path}" not found in module "{module}".') from error
    return found  # type: ignore[no-any-return]


def _trace() -> Any:
    try:
        return importlib.import_module("opentelemetry.trace")
    except ImportError as error:
        raise ImportError(
            "tracing needs OpenTelemetry; hint: pip install 'hpcray[tracing]'", name="opentelemetry"
        ) from error


# -------------------------------------------------------------------- spans


@contextlib.contextmanager
def _span(name: str, kind: str, attributes: dict[str, str]) -> Iterator[Any]:
    trace = _trace()
    tracer = trace.get_tracer(__name__)
    with tracer.start_as_current_span(name, kind=trace.SpanKind[kind], attributes=attributes) as span:
        yield span


@contextlib.contextmanager
def _executing(hook: str, name: str, attributes: dict[str, str], parent: Context) -> Iterator[None]:
    """Open the span of an execution, as a child of the submitter's."""
    if not _Tracing.enabled:
        if hook:
            start(hook)
        else:
            _enable_tracing()
    from opentelemetry import context, propagate

    token = context.attach(propagate.extract(parent))
    try:
        with _span(f"{name} ray.remote_worker", "CONSUMER", _here(attributes)):
            yield
    finally:
        context.detach(token)


class _DictPropagator:
    """The context of the current span as a dictionary, for those who carry it to another process themselves."""

    @staticmethod
    def inject_current_context() -> Context:
        """Return the context."""
        from opentelemetry import propagate

        carrier: Context = {}
        propagate.inject(carrier)
        return carrier

    @staticmethod
    def extract(context_dict: Context) -> Any:
        """Return the context as OpenTelemetry's."""
        from opentelemetry import propagate

        return propagate.extract(context_dict)


def _with_context(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Add the context of the current span to the keyword arguments of a call."""
    return {**kwargs, _CONTEXT: _DictPropagator.inject_current_context()}


def _here(attributes: dict[str, str]) -> dict[str, str]:
    """Add what is known of this process to the attributes of a span."""
    context = get_runtime_context()
    found = {
        **attributes,
        "ray.pid": str(os.getpid()),
        "ray.job_id": context.get_job_id(),
        "ray.node_id": context.get_node_id(),
        "ray.worker_id": context.get_worker_id(),
    }
    if current.worker is not None:
        actor = attributes["ray.remote"] == "actor"
        ident = context.get_actor_id() if actor else context.get_task_id()
        if ident:
            found["ray.actor_id" if actor else "ray.task_id"] = ident
    return found


def _of_function(name: str) -> dict[str, str]:
    return {"ray.remote": "function", "ray.function": name}


def _of_method(cls: str, method: str) -> dict[str, str]:
    function = f"{cls}.{method}"
    return {"ray.remote": "actor", "ray.actor_class": cls, "ray.actor_method": method, "ray.function": function}


# -------------------------------------------------------------------- submission


def _submitting(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def remote(self: RemoteFunction[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        name = _function_name(self._function)
        with _span(f"{name} ray.remote", "PRODUCER", _here(_of_function(name))):
            if _streams(self._function):
                return plain(self, *args, **kwargs)
            traced = _Tracing.functions.get(self)
            if traced is None:
                traced = RemoteFunction(_traced_function(self._function, _Tracing.hook), self._options)
                _Tracing.functions[self] = traced
            return plain(traced, *args, **_with_context(kwargs))

    return remote


def _creating(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def remote(self: ActorClass[Any], /, *args: Any, **kwargs: Any) -> Any:
        cls = self.__ray_actor_class__
        name = cls.__qualname__
        with _span(f"{name}.__init__ ray.remote", "PRODUCER", _here(_of_method(name, "__init__"))) as span:
            traced = _Tracing.classes.get(self)
            if traced is None:
                traced = _Tracing.classes[self] = make_actor_class(_traced_class(cls, _Tracing.hook), self._options)
            handle = plain(traced, *args, **_with_context(kwargs))
            span.set_attribute("ray.actor_id", handle._actor_id.hex())
            return handle

    return remote


def _calling(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def remote(self: ActorMethod[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        given, handle = self._plan.given, self._handle
        cls = given.get(_TRACED_AS, handle._class_name)
        with _span(f"{cls}.{self._name} ray.remote", "PRODUCER", _here(_of_method(cls, self._name))) as span:
            span.set_attribute("ray.actor_id", handle._actor_id.hex())
            if _CONTEXT in given.get(SIGNATURE, ""):  # else the actor is not traced
                kwargs = _with_context(kwargs)
            return plain(self, *args, **kwargs)

    return remote


# -------------------------------------------------------------------- execution


def _traced_function(function: Callable[..., Any], hook: str) -> Callable[..., Any]:
    name = _function_name(function)

    def traced(*args: Any, _ray_trace_ctx: Context | None = None, **kwargs: Any) -> Any:
        if _ray_trace_ctx is None:
            return function(*args, **kwargs)
        with _executing(hook, name, _of_function(name), _ray_trace_ctx):
            return function(*args, **kwargs)

    return _as(traced, function)


def _traced_class(cls: type, hook: str) -> type:
    """Make a subclass of the same name whose methods open spans."""
    body: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    for name, member in inspect.getmembers(cls, inspect.isfunction):
        special = name.startswith("__") and name.endswith("__") and name not in ("__init__", "__call__")
        if special or isinstance(inspect.getattr_static(cls, name), staticmethod) or _streams(member):
            continue
        body[name] = _traced_method(cls, name, member, hook)
    if "__init__" not in body:
        inherited: Any = cls.__init__  # type: ignore[misc]

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            inherited(self, *args, **kwargs)

        takes_nothing = not any("__new__" in vars(base) for base in cls.__mro__[:-1])
        if takes_nothing:
            __init__.__signature__ = inspect.signature(lambda self: None)  # type: ignore[attr-defined]
        body["__init__"] = _traced_method(cls, "__init__", __init__, hook)
    return type(cls)(cls.__name__, (cls,), body)


def _traced_method(cls: type, name: str, method: Callable[..., Any], hook: str) -> Callable[..., Any]:
    short = cls.__name__
    attributes = _of_method(short, name)

    def traced(self: Any, *args: Any, _ray_trace_ctx: Context | None = None, **kwargs: Any) -> Any:
        if _ray_trace_ctx is None:
            return method(self, *args, **kwargs)
        with _executing(hook, f"{short}.{name}", attributes, _ray_trace_ctx):
            return method(self, *args, **kwargs)

    async def traced_async(self: Any, *args: Any, _ray_trace_ctx: Context | None = None, **kwargs: Any) -> Any:
        if _ray_trace_ctx is None:
            return await method(self, *args, **kwargs)
        with _executing(hook, f"{short}.{name}", attributes, _ray_trace_ctx):
            return await method(self, *args, **kwargs)

    wrapper = _as(traced_async if inspect.iscoroutinefunction(method) else traced, method)
    setattr(wrapper, METHOD, {**getattr(method, METHOD, {}), _TRACED_AS: cls.__qualname__})
    return wrapper


def _as(wrapper: Callable[..., Any], wrapped: Callable[..., Any]) -> Callable[..., Any]:
    """Give a wrapper the name and attributes of what it wraps, and its signature with one keyword more."""
    signature = inspect.signature(wrapped)
    functools.update_wrapper(wrapper, wrapped)
    parameters = list(signature.parameters.values())
    last = len(parameters) - (bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    parameters.insert(last, inspect.Parameter(_CONTEXT, inspect.Parameter.KEYWORD_ONLY, default=None))
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return wrapper


def _streams(function: Callable[..., Any]) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _function_name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return f"{getattr(function, '__module__', '')}.{name}"


# ------------------------------------------------------------ otlp file
# The setting `trace`: spans in files of OTLP's JSON encoding, which the OpenTelemetry Collector reads.
#
# Each process has a file of its own, with one `ExportTraceServiceRequest` in a line, written when its span ends: a
# process that is killed loses only the spans that are open. The encoding is here, and not OpenTelemetry's, because that
# one needs protobuf.


def set_up() -> None:
    """Write each span that ends in this process to a file in the directory that the job's setting `trace` names.

    Raises:
        ImportError: OpenTelemetry's SDK is not installed.
        OSError: the file cannot be made; the message has a hint.
    """
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
    except ImportError as error:
        raise ImportError(
            f"HPCRAY_TRACE needs OpenTelemetry's SDK ({error}); hint: pip install 'hpcray[tracing]'", name=error.name
        ) from error
    process = need_process()
    file = _open(process.config.trace.removeprefix(OTLP_FILE))

    class Exporter(SpanExporter):  # type: ignore[misc]
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            line = json.dumps({"resourceSpans": [_resource_spans(span) for span in spans]}, separators=(",", ":"))
            try:
                os.write(file, line.encode() + b"\n")  # one write, so that no line of a forked child is inside it
            except OSError:
                return SpanExportResult.FAILURE  # the file system is full: the program goes on
            return SpanExportResult.SUCCESS

    if not isinstance(trace.get_tracer_provider(), TracerProvider):  # it can be set once in a process
        here: dict[str, str | int] = {"host.name": socket.gethostname(), "process.pid": os.getpid()}
        here["service.instance.id"] = process.me.hex()
        here["hpcray.session"] = os.path.basename(process.place.session_dir)
        if not os.environ.get("OTEL_SERVICE_NAME"):
            here["service.name"] = "hpcray"
        trace.set_tracer_provider(TracerProvider(resource=Resource.create(here)))
    provider = trace.get_tracer_provider()
    assert isinstance(provider, TracerProvider)
    provider.add_span_processor(SimpleSpanProcessor(Exporter()))


def _open(directory: str) -> int:
    directory = os.path.abspath(directory.replace("%j", os.environ.get("SLURM_JOB_ID", "0")))
    name = os.path.join(directory, f"{socket.gethostname()}-{os.getpid()}.jsonl")
    try:
        make_private_directory(directory)
        return append_private_file(name)
    except UntrustedPathError:
        raise
    except OSError as error:
        raise type(error)(
            error.errno, f"{error.strerror}; hint: HPCRAY_TRACE={OTLP_FILE}DIRECTORY names one that you may write", name
        ) from None


def _resource_spans(span: ReadableSpan) -> dict[str, Any]:
    scope = span.instrumentation_scope
    named = {"name": scope.name, "version": scope.version or ""} if scope is not None else {}
    return {
        "resource": {"attributes": _attributes(span.resource.attributes)},
        "scopeSpans": [{"scope": named, "spans": [_otlp_span(span)]}],
    }


def _otlp_span(span: ReadableSpan) -> dict[str, Any]:
    """Encode a span: ids are hexadecimal, 64-bit numbers are text, and kinds count from 1."""
    context = span.get_span_context()
    assert context is not None
    found: dict[str, Any] = {
        "traceId": f"{context.trace_id:032x}",
        "spanId": f"{context.span_id:016x}",
        "name": span.name,
        "kind": span.kind.value + 1,
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _attributes(span.attributes or {}),
        "status": {"code": span.status.status_code.value, "message": span.status.description or ""},
    }
    if span.parent is not None:
        found["parentSpanId"] = f"{span.parent.span_id:016x}"
    if span.events:
        found["events"] = [
            {
                "timeUnixNano": str(event.timestamp),
                "name": event.name,
                "attributes": _attributes(event.attributes or {}),
            }
            for event in span.events
        ]
    if span.links:
        found["links"] = [
            {
                "traceId": f"{link.context.trace_id:032x}",
                "spanId": f"{link.context.span_id:016x}",
                "attributes": _attributes(link.attributes or {}),
            }
            for link in span.links
        ]
    return found


def _attributes(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _value(value)} for name, value in attributes.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return {"arrayValue": {"values": [_value(one) for one in value]}}
    return {"stringValue": str(value)}
