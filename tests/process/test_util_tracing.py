"""`init(_tracing_startup_hook=...)`: spans of OpenTelemetry around calls and their execution."""

from __future__ import annotations

import json
import subprocess
import sys

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


OTLP_PROGRAM = """
import os, sys
import engine_under_test as ray

@ray.remote
def child(a):
    if a == 3:
        raise ValueError("as the test wants it")
    return a

@ray.remote
def parent(a):
    os.chdir("/")  # the directory of the files stays where the program began
    return ray.get(child.remote(a))

if __name__ == "__main__":
    ray.init(num_cpus=2)
    print(ray.get([parent.remote(i) for i in range(3)]))
    try:
        ray.get(parent.remote(3))
    except ValueError:
        print("failed")
    ray.kill(ray.remote(type("A", (), {"ready": lambda self: 1})).remote())
    os.kill(os.getpid(), 9) if "killed" in sys.argv else ray.shutdown()
"""


def test_trace_writes_lines_that_the_collector_reads(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(OTLP_PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPCRAY_TRACE", "otlp-file:spans-%j")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    done = run_script(tmp_path / "script.py")
    assert done.stdout.split("\n")[-3:-1] == ["[0, 1, 2]", "failed"], done.stderr
    files = list((tmp_path / "spans-17").glob("*.jsonl"))
    assert len(files) >= 2 and {oct(file.stat().st_mode & 0o777) for file in files} == {"0o600"}
    spans, services, pids = {}, set(), set()
    for file in files:
        for line in file.read_text().splitlines():
            (of_resource,) = json.loads(line)["resourceSpans"]
            resource = {one["key"]: one["value"] for one in of_resource["resource"]["attributes"]}
            services.add(resource["service.name"]["stringValue"])
            pids.add(int(resource["process.pid"]["intValue"]))
            for span in of_resource["scopeSpans"][0]["spans"]:
                assert len(span["traceId"]) == 32 and int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
                spans[span["spanId"]] = span
    assert services == {"hpcray"} and len(pids) == len(files)
    executed = [one for one in spans.values() if one["name"].endswith("child ray.remote_worker")]
    assert len(executed) == 4 and {one["kind"] for one in executed} == {5}  # consumers
    for one in executed:
        names = []
        while "parentSpanId" in one:
            above = spans[one["parentSpanId"]]
            assert above["traceId"] == one["traceId"]
            names.append(above["name"].partition(".")[2])
            one = above
        assert names == ["child ray.remote", "parent ray.remote_worker", "parent ray.remote"]
    (failed,) = (one for one in executed if one["status"]["code"] == 2)
    assert failed["events"][0]["name"] == "exception" and "as the test wants it" in json.dumps(failed["events"])


def test_spans_that_ended_before_a_kill_are_in_the_files(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(OTLP_PROGRAM)
    monkeypatch.setenv("HPCRAY_TRACE", f"otlp-file:{tmp_path}/spans")
    done = run_script(tmp_path / "script.py", "killed")
    assert done.returncode == -9
    text = "".join(file.read_text() for file in (tmp_path / "spans").iterdir())
    assert text.count("parent ray.remote_worker") == 4 and text.endswith("\n")


@pytest.mark.parametrize(
    ("value", "before", "expected"),
    [
        ("otlp-file:DIR", "sys.modules['opentelemetry.sdk'] = None", "hint: pip install 'hpcray[tracing]'"),
        ("otlp-file:/proc/none", "", "hint: HPCRAY_TRACE=otlp-file:DIRECTORY"),
        ("otlp-file:", "", "names no directory; hint: HPCRAY_TRACE=otlp-file:DIRECTORY"),
        ("jaeger", "", "names no directory; hint: HPCRAY_TRACE=otlp-file:DIRECTORY"),
    ],
)
def test_what_cannot_be_traced_is_refused_by_init(tmp_path, monkeypatch, value, before, expected):
    script = tmp_path / "script.py"
    script.write_text(f"import sys\n{before}\nimport engine_under_test as ray\nray.init(num_cpus=1)\n")
    monkeypatch.setenv("HPCRAY_TRACE", value.replace("DIR", str(tmp_path)))
    done = run_script(script)
    assert done.returncode == 1 and expected in done.stderr.splitlines()[-1]


def test_the_directory_of_spans_may_have_been_made_by_the_program(tmp_path):
    (tmp_path / "spans").mkdir(mode=0o755)
    program = (
        "from hpcray.util.tracing import setup_local_tmp_tracing as setup\n"
        f"setup.spans_dir = {str(tmp_path / 'spans')!r}\n"
        "setup.setup_tracing()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert (tmp_path / "spans").stat().st_mode & 0o777 == 0o700
