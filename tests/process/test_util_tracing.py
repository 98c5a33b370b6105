"""`init(_tracing_startup_hook=...)`: spans of OpenTelemetry around calls and their execution."""

from __future__ import annotations

import json

import pytest
from engine import hpcray_only, run_script

pytest.importorskip("opentelemetry.sdk")
pytestmark = hpcray_only

HOOK = """
import json, os
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

def set_up():
    out = open(os.path.join(os.environ["SPANS"], str(os.getpid())), "a")
    exporter = ConsoleSpanExporter(out=out, formatter=lambda span: span.to_json(indent=None) + "\\n")
    trace.set_tracer_provider(TracerProvider())
    trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(exporter))
"""
PROGRAM = """
import engine_under_test as ray

@ray.remote
def child(a, *, b=1):
    return a + b

@ray.remote
def parent(a):
    return ray.get(child.remote(a, b=2))

@ray.remote
def numbers():
    yield from range(3)

@ray.remote
class Base:
    @ray.method(num_returns=2)
    def two(self, x, **more):
        return x, len(more)

    async def wrong(self):
        raise ValueError("as the test wants it")

    @staticmethod
    def free():
        return "free"

    def stream(self):
        yield 1

if __name__ == "__main__":
    ray.init(num_cpus=4, _tracing_startup_hook="spans_hook:set_up")
    actor = Base.options(name="base").remote()
    try:
        ray.get(actor.wrong.remote())
    except ValueError:
        pass
    results = [
        ray.get(parent.remote(1)), ray.get(child.options(num_cpus=0).remote(5)),
        [ray.get(ref) for ref in numbers.remote()], ray.get(actor.two.remote(4, k=0)), ray.get(actor.free.remote()),
        [ray.get(ref) for ref in actor.stream.remote()],
    ]
    print(results)
    ray.shutdown()
"""


def test_spans_of_nested_calls_are_one_trace(tmp_path, monkeypatch):
    (tmp_path / "spans_hook.py").write_text(HOOK)
    (tmp_path / "script.py").write_text(PROGRAM)
    (tmp_path / "spans").mkdir()
    monkeypatch.setenv("SPANS", str(tmp_path / "spans"))
    done = run_script(tmp_path / "script.py")
    assert done.stdout.strip().endswith("[3, 6, [0, 1, 2], [4, 1], 'free', [1]]"), done.stderr
    spans = [json.loads(line) for file in (tmp_path / "spans").iterdir() for line in file.read_text().splitlines()]
    by_id = {span["context"]["span_id"]: span for span in spans}

    def lineage(span):
        names = [span["name"].partition(".")[2]]
        while span["parent_id"] is not None:
            span = by_id[span["parent_id"]]
            names.append(span["name"].partition(".")[2])
        return names

    nested = "child ray.remote_worker,child ray.remote,parent ray.remote_worker,parent ray.remote"
    found = sorted(",".join(lineage(span)) for span in spans)
    assert nested in found
    assert found.count("child ray.remote_worker,child ray.remote") == 1
    assert "two ray.remote_worker,two ray.remote" in found and "__init__ ray.remote_worker,__init__ ray.remote" in found
    assert [name for name in found if "numbers" in name or "stream" in name] == [
        "numbers ray.remote",
        "stream ray.remote",
    ]
    (failed,) = (span for span in spans if span["name"] == "Base.wrong ray.remote_worker")
    assert failed["status"]["status_code"] == "ERROR" and failed["attributes"]["ray.actor_method"] == "wrong"
    child = next(span for span in spans if span["name"].endswith("child ray.remote_worker"))
    assert child["attributes"]["ray.task_id"] and child["attributes"]["ray.remote"] == "function"


def test_without_a_hook_nothing_of_it_is_loaded(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nimport engine_under_test as ray\n"
        "ray.init(num_cpus=1)\n"
        "loaded = lambda: [name for name in sys.modules if 'opentelemetry' in name or 'tracing' in name]\n"
        "print(loaded(), ray.get(ray.remote(loaded).remote()))\n"
    )
    done = run_script(script)
    assert done.stdout.strip().endswith("[] []"), done.stderr


def test_a_hook_that_is_none_is_refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import engine_under_test as ray\nray.init(num_cpus=1, _tracing_startup_hook='no_colon')\n")
    done = run_script(script)
    assert done.returncode and "must be in format" in done.stderr
