"""A hook for `init(_tracing_startup_hook=...)`: writes the spans of each process to a file below /tmp/spans."""

from __future__ import annotations

import os

spans_dir = "/tmp/spans/"


def setup_tracing() -> None:
    """Write each span that ends in this process as a line of JSON to `/tmp/spans/<pid>.txt`.

    Raises:
        ImportError: there is no OpenTelemetry; `pip install 'hpcray[tracing]'` brings it.
    """
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

    os.makedirs(spans_dir, exist_ok=True)
    out = open(f"{spans_dir}{os.getpid()}.txt", "w")  # noqa: SIM115 - open as long as the process
    exporter = ConsoleSpanExporter(out=out, formatter=lambda span: span.to_json(indent=None) + os.linesep)
    if not isinstance(trace.get_tracer_provider(), TracerProvider):  # it can be set once in a process
        trace.set_tracer_provider(TracerProvider())
    provider = trace.get_tracer_provider()
    assert isinstance(provider, TracerProvider)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
