"""A hook for `init(_tracing_startup_hook=...)`: writes the spans of each process to a file in `spans_dir`."""

from __future__ import annotations

import os

from hpcray.platform.private_files import OTHERS, PrivateDirectory

spans_dir = f"/tmp/hpcray-spans-{os.getuid()}/"
"""Where the files are: a directory for each user, which no other can read. Ray's is /tmp/spans, which belongs to the
user who came first."""


def setup_tracing() -> None:
    """Write each span that ends in this process as a line of JSON to `<pid>.txt` in `spans_dir`.

    Raises:
        ImportError: there is no OpenTelemetry; `pip install 'hpcray[tracing]'` brings it.
        PermissionError: another user has taken the name of the directory.
    """
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

    with PrivateDirectory.open(spans_dir, True, OTHERS) as directory:
        os.fchmod(directory.fd, 0o700)  # a program may have made it, for all to read
        out = os.fdopen(directory.open_file(f"{os.getpid()}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w")
    exporter = ConsoleSpanExporter(out=out, formatter=lambda span: span.to_json(indent=None) + os.linesep)
    if not isinstance(trace.get_tracer_provider(), TracerProvider):  # it can be set once in a process
        trace.set_tracer_provider(TracerProvider())
    provider = trace.get_tracer_provider()
    assert isinstance(provider, TracerProvider)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
