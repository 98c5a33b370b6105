"""OpenTelemetry spans around the submission and the execution of tasks and calls; their context travels with the call.

Tracing is off unless `init(_tracing_startup_hook="module:function")` turns it on, and costs nothing then.
"""

from __future__ import annotations

__all__: list[str] = []
