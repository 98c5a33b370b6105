"""The setting `trace`: spans in files of OTLP's JSON encoding, which the OpenTelemetry Collector reads.

Each process has a file of its own, with one `ExportTraceServiceRequest` in a line, written when its span ends: a
process that is killed loses only the spans that are open. The encoding is here, and not OpenTelemetry's, because that
one needs protobuf.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpcray.common.config import OTLP_FILE
from hpcray.platform.private_files import UntrustedPathError, append_private_file, make_private_directory
from hpcray.runtime.core_worker.core_worker import need_process

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan


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
        here["hpcray.session"] = os.path.basename(process.session_dir)
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
        "scopeSpans": [{"scope": named, "spans": [_span(span)]}],
    }


def _span(span: ReadableSpan) -> dict[str, Any]:
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
