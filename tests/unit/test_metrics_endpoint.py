"""Metrics: what is refused, what is added up, and the text that Prometheus reads."""

from __future__ import annotations

import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcray.diagnostics.metrics_endpoint import MetricsEndpoint, read_metrics, write_metrics
from hpcray.util.metrics import Counter, Gauge, Histogram


class TestChecks:
    def test_an_invalid_metric_name_is_refused_or_discarded(self) -> None:
        with pytest.raises(ValueError, match="Empty name"):
            Counter("")
        with pytest.warns(UserWarning, match=r"Invalid metric name: a\.b"):
            Counter("a.b").inc()

    @pytest.mark.parametrize("keys", ["abc", ["a"], (1,)], ids=str)
    def test_tag_keys_that_are_not_a_tuple_of_str_are_refused(self, keys: Any) -> None:
        with pytest.raises(TypeError):
            Gauge("g", tag_keys=keys)

    def test_values_that_are_not_positive_numbers_are_refused(self) -> None:
        for value in (0, -1):
            with pytest.raises(ValueError, match="value must be >0"):
                Counter("c").inc(value)
        for bad in ("1", None, []):
            with pytest.raises(TypeError, match="must be int or float"):
                Counter("c").inc(bad)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            Histogram("h", boundaries=[1]).observe("x")  # type: ignore[arg-type]
        Gauge("g").set(None)

    def test_missing_unknown_and_non_str_tags_are_refused(self) -> None:
        counter = Counter("c", tag_keys=("a", "b"))
        with pytest.raises(ValueError, match=r"Missing value for tag key\(s\): a,b"):
            counter.inc()
        with pytest.raises(TypeError, match="Tag values must be str"):
            counter.inc(1, {"a": "x", "b": 2})  # type: ignore[dict-item]
        with pytest.raises(ValueError, match="Unrecognized tag key z"):
            counter.set_default_tags({"z": "1"})
        assert counter.set_default_tags({"a": "1"}) is counter
        counter.inc(1, {"b": "2"})

    def test_a_histogram_without_positive_boundaries_is_refused(self) -> None:
        for boundaries in (None, []):
            with pytest.raises(ValueError, match="boundaries argument should be provided"):
                Histogram("h", boundaries=boundaries)
        with pytest.raises(ValueError, match=r"at index 1.*positive"):
            Histogram("h", boundaries=[1, 0])

    def test_a_metric_has_the_same_info_after_pickling(self) -> None:
        histogram = Histogram("h", "text", [1.0], ("a",)).set_default_tags({"a": "x"})
        wanted = {"name": "h", "description": "text", "tag_keys": ("a",), "default_tags": {"a": "x"}}
        assert histogram.info == {**wanted, "boundaries": [1.0]}
        assert pickle.loads(pickle.dumps(histogram)).info == histogram.info


def row(kind: str, *samples: Any, **more: Any) -> dict[str, Any]:
    return {"name": f"a_{kind}", "kind": kind, "help": "h\\\n", "boundaries": [], "samples": list(samples), **more}


@pytest.fixture
def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_metrics_of_all_processes_of_a_node_are_added_up_in_one_text(tmp_path: Path, dead_pid: int) -> None:
    buckets = {"boundaries": [1, 2.5]}
    write_metrics(str(tmp_path), "w1", os.getpid(), [
        row("counter", [[["who", 'x"\n']], 2]), row("gauge", [[], 1.5]),
        row("histogram", [[], [1, 0, 1, 9]], **buckets),
    ])  # fmt: skip
    write_metrics(str(tmp_path), "w2", dead_pid, [
        row("counter", [[["who", 'x"\n']], 3]), row("gauge", [[], 7]), row("histogram", [[], [0, 1, 0, 2]], **buckets),
    ])  # fmt: skip
    endpoint = MetricsEndpoint(str(tmp_path), {"NodeId": "n"}, lambda: None)
    wanted = [
        "# HELP ray_a_counter_total h\\\\\\n",
        "# TYPE ray_a_counter_total counter",
        'ray_a_counter_total{NodeId="n",who="x\\"\\n"} 5',
        "# HELP ray_a_gauge h\\\\\\n",
        "# TYPE ray_a_gauge gauge",
        'ray_a_gauge{NodeId="n",WorkerId="w1"} 1.5',
        "# HELP ray_a_histogram h\\\\\\n",
        "# TYPE ray_a_histogram histogram",
        'ray_a_histogram_bucket{NodeId="n",le="1"} 1',
        'ray_a_histogram_bucket{NodeId="n",le="2.5"} 2',
        'ray_a_histogram_bucket{NodeId="n",le="+Inf"} 3',
        'ray_a_histogram_sum{NodeId="n"} 11',
        'ray_a_histogram_count{NodeId="n"} 3',
    ]
    assert endpoint.text()[0].splitlines() == wanted
    assert not (tmp_path / "metrics" / "w2.json").exists()
    assert endpoint.text()[0].splitlines() == wanted  # what the dead one counted is kept


def test_one_process_serves_the_metrics_and_another_takes_over(tmp_path: Path) -> None:
    assert read_metrics(str(tmp_path)) == ""
    assert not MetricsEndpoint(str(tmp_path), {}, lambda: None).try_to_serve()  # nothing is measured here
    write_metrics(str(tmp_path), "w1", os.getpid(), [row("counter", [[], 1])])
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
         "print('held', flush=True); sys.stdin.read()", str(tmp_path / "metrics" / "lock")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    endpoint = MetricsEndpoint(str(tmp_path), {}, lambda: None)
    assert not endpoint.try_to_serve()
    holder.kill()
    holder.communicate()
    assert endpoint.try_to_serve()
    assert endpoint.try_to_serve()
    assert "ray_a_counter_total 1" in read_metrics(str(tmp_path))
    assert stat.S_IMODE(os.stat(tmp_path / "metrics.s").st_mode) == 0o600


def test_a_process_that_is_not_reaped_has_ended(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        write_metrics(str(tmp_path), "w1", child.pid, [row("gauge", [[], 7])])
        assert "gauge" not in MetricsEndpoint(str(tmp_path), {}, lambda: None).text()[0]
