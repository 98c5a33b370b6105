"""Settings: defaults, variables, given values; what is wrong with them is said."""

from __future__ import annotations

from typing import Any

import pytest

from hpcray.common.config import REMOVED_SETTINGS, Config


def test_a_given_value_precedes_a_variable_which_precedes_the_default() -> None:
    environ = {"HPCRAY_TICK": "2", "HPCRAY_PRESTART": "-1", "HPCRAY_LOG_TO_DRIVER": "0"}
    config = Config.from_env(environ, start_timeout=3, tick=None)
    assert (config.tick, config.start_timeout, config.stop_timeout) == (2.0, 3, Config().stop_timeout)
    assert (config.prestart, config.log_to_driver) == (-1, False)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("HPCRAY_START_TIMEOUT", "3s"),
        ("HPCRAY_START_TIMEOUT", "-3"),
        ("HPCRAY_START_TIMEOUT", "nan"),
        ("HPCRAY_OBJECT_STORE_MEMORY", "2x"),
        ("HPCRAY_LOG_TO_DRIVER", "maybe"),
    ],
)
def test_an_invalid_variable_is_named_in_the_error(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}=.* is not a valid .*hint:"):
        Config.from_env({name: text})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("start_timeout", "60"),
        ("tick", -1),
        ("tick", True),
        ("max_workers", 1.5),
        ("log_to_driver", 1),
        ("data_plane", 7),
    ],
)
def test_an_invalid_given_value_is_named_in_the_error(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}={value!r} is not a valid"):
        Config.from_env({}, **{name: value})


def test_a_mistyped_variable_is_reported_with_the_likely_name() -> None:
    environ = {
        "HPCRAY_START_TIMEOT": "3",
        "HPCRAY_TMPDIR": "/tmp",
        "HPCRAY_TICK": "1",
        "HPCRAY_MY_OWN": "x",
        "PATH": "",
    }
    assert Config.unknown_variables(environ) == [
        "HPCRAY_START_TIMEOT is no setting and has no effect; hint: HPCRAY_START_TIMEOUT?"
    ]


def test_a_variable_of_an_earlier_version_is_reported_with_what_to_do_instead() -> None:
    (said,) = Config.unknown_variables({"HPCRAY_LEARN_IMPORTS": "1"})
    assert "is no setting any more and has no effect" in said and said.endswith("hint: HPCRAY_PRELOAD")
    assert not set(Config.__struct_fields__) & set(REMOVED_SETTINGS)


def test_heartbeat_intervals_that_would_kill_every_node_are_refused() -> None:
    with pytest.raises(ValueError, match=r"heartbeat_interval=2 s .* node_timeout=4 s .*hint: HPCRAY_HEARTBEAT"):
        Config.from_env({"HPCRAY_HEARTBEAT_INTERVAL": "2"})
    with pytest.raises(ValueError, match="heartbeat_interval=0 s"):
        Config.from_env({"HPCRAY_HEARTBEAT_INTERVAL": "0"})
    assert Config.from_env({"HPCRAY_NODE_TIMEOUT": "60"}).node_timeout == 60.0


def test_a_system_config_of_rays_sets_what_hpcray_has_too() -> None:
    given: dict[str, Any] = {
        "local_gc_interval_s": 7,
        "memory_monitor_refresh_ms": 100,
        "gcs_rpc_server_reconnect_timeout_s": 1,
        "preload_python_modules": ["html.parser", "webbrowser"],
    }
    given["object_spilling_config"] = '{"type": "filesystem", "params": {"directory_path": ["/a", "/b"]}}'
    config = Config.from_env({"RAY_local_gc_interval_s": "9"}, **Config.from_system_config(given))
    assert (config.gc_interval, config.memory_monitor_period, config.spill_dir) == (7, 0.1, "/a")
    assert config.preload == "html.parser,webbrowser"
    off = Config.from_system_config({"automatic_object_spilling_enabled": False})
    assert Config.from_env({}, **off).spill_threshold == 0
    assert Config.from_env({"RAY_local_gc_interval_s": "9"}).gc_interval == 9
    assert Config.from_env({"RAY_preload_python_modules": "a.b,c"}).preload == "a.b,c"


@pytest.mark.parametrize(("text", "size"), [("2g", 2 << 30), ("512MiB", 512 << 20), ("0", 0), ("1000000", 10**6)])
def test_sizes_in_variables_may_have_units(text: str, size: int) -> None:
    assert Config.from_env({"HPCRAY_OBJECT_STORE_MEMORY": text}).object_store_memory == size
    assert Config.from_env({"HPCRAY_MEMORY_LIMIT": text}).memory_limit == size
