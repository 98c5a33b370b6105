"""Names of Ray that packages import at their top, and ways in which they import them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

NAMES = [
    "ray._private.worker.BaseContext",
    "ray._private.worker.RayContext",
    "ray._private.worker.RemoteFunction0",
    "ray._private.worker.RemoteFunction1",
    "ray._private.worker.RemoteFunction9",
    "ray._private.worker.RemoteFunctionNoArgs",
    "ray._private.ray_constants.MIN_RESOURCE_GRANULARITY",
    "ray._private.services.find_gcs_addresses",
    "ray._private.auto_init_hook.wrap_auto_init",
    "ray.experimental.internal_kv.internal_kv_get_gcs_client",
    "ray.util.collective.collective.get_address_and_port",
    "ray.util.dask.scheduler_utils.nested_get",
    "ray._raylet.async_task_id",
    "ray._raylet.GRPC_STATUS_CODE_UNAVAILABLE",
    "ray._common.utils.get_default_ray_temp_dir",
    "ray.client",
    "ray.client_builder.ClientContext",
    "ray.util.client_connect.connect",
    "ray.util.connect",
    "ray.util.disconnect",
    "ray.job_config.LoggingConfig",
    "ray.experimental.rdt.set_target_for_ref",
    "ray.experimental.rdt.register_tensor_transport",
    "ray._common.constants.HEAD_NODE_RESOURCE_NAME",
    "ray._common.constants.RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_packages_import_are_there(ray: Any, name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert getattr(importlib.import_module(module), attribute) is not None


def test_refs_are_made_of_as_many_bytes_as_the_constant_says(ray: Any) -> None:
    from ray._private.ray_constants import ID_SIZE

    assert ray.ObjectRef(b"0" * ID_SIZE).binary() == b"0" * ID_SIZE
    assert len(ray.put(1).binary()) == ID_SIZE
    assert ray._raylet.GRPC_STATUS_CODE_DEADLINE_EXCEEDED == 4


def test_the_address_file_of_a_ray_of_before_is_removed(ray: Any, tmp_path: Path) -> None:
    from ray._common.utils import reset_ray_address

    left = tmp_path / "ray_current_cluster"
    left.write_text("10.0.0.1:6379")
    reset_ray_address(str(tmp_path))
    assert not left.exists()
    assert reset_ray_address(str(tmp_path)) is None, "there is none"


def test_ray_client_connects_nowhere_and_its_builder_is_init(ray: Any) -> None:
    from ray.util import connect, disconnect

    assert disconnect() is None
    with pytest.raises(ConnectionError, match="hint"):
        connect("localhost:10001")
    with pytest.raises(RuntimeError, match="twice"):
        ray.client().namespace("n").env({}).connect()


def test_init_returns_what_is_called_a_context(ray: Any) -> None:
    from ray._private.worker import BaseContext

    assert isinstance(ray.init(ignore_reinit_error=True), BaseContext)


def test_remote_functions_are_annotated_with_the_types_of_their_arguments(ray: Any) -> None:
    from ray._private.worker import RemoteFunction0, RemoteFunction2

    assert RemoteFunction0[int, str] is not None and RemoteFunction2[int, str, float, bytes] is not None


def test_an_address_and_a_free_port(ray: Any) -> None:
    import socket

    from ray.util.collective.collective import get_address_and_port

    address, port = get_address_and_port()
    with socket.create_server((address, port)):
        pass


def test_keys_of_usage_tags_have_values(ray: Any) -> None:
    from ray._common.usage.usage_lib import TagKey, record_extra_usage_tag

    record_extra_usage_tag(TagKey.Value("LLM_BATCH_MODEL_ARCHITECTURE"), "x")
    assert TagKey.Name(TagKey.Value("SERVE_API_VERSION")) == "SERVE_API_VERSION"


@pytest.mark.parametrize("module", ["ray.util.queue", "ray.util", "ray", "ray._private.worker"])
def test_a_fromlist_with_a_name_that_is_not_there_imports_the_module(ray: Any, module: str) -> None:
    assert __import__(module, fromlist=["dummy"]) is sys.modules[module]
    assert __import__(module, fromlist=["*"]) is sys.modules[module]
    assert not hasattr(sys.modules[module], "dummy")
    with pytest.raises(AttributeError, match=r"dummy"):
        _ = sys.modules[module].dummy


def test_an_import_statement_says_why_a_name_is_missing(ray: Any) -> None:
    with pytest.raises(ImportError, match=r"hpcray does not have ray\.util\.queue\.dummy"):
        from ray.util.queue import dummy  # noqa: F401
    with pytest.raises(ImportError, match=r"hpcray does not have ray\.cpp_function"):
        from ray import cpp_function  # noqa: F401
