"""`ray.dashboard.modules.serve.sdk`: the commands `serve deploy`, `status`, `config` and `shutdown`; and the command
`ray` as a function, of `ray.scripts.scripts`.

Ray's send HTTP requests to the dashboard. Here the process joins the job of this user on this node and asks the
controller of Serve itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import hpcray
from hpcray.api.session import is_initialized
from hpcray.common.exceptions import RayActorError
from hpcray.platform.process_control import module_line

logger = logging.getLogger("ray.serve")

_NAMESPACE = "serve"


def parse_runtime_env_args(
    runtime_env: str | None = None, runtime_env_json: str | None = None, working_dir: str | None = None
) -> dict[str, Any]:
    """Return the runtime_env that options of a command line describe.

    Args:
        runtime_env: path of a YAML file.
        runtime_env_json: the same as JSON.
        working_dir: replaces the one of either.

    Raises:
        ValueError: there is both a file and JSON.
    """
    found: dict[str, Any] = {}
    if runtime_env is not None:
        if runtime_env_json is not None:
            raise ValueError("Only one of --runtime_env and --runtime-env-json can be provided.")
        import yaml

        with open(runtime_env, encoding="utf-8") as file:
            found = yaml.safe_load(file)
    elif runtime_env_json is not None:
        found = json.loads(runtime_env_json)
    if working_dir is not None:
        if "working_dir" in found:
            logger.warning("--working-dir replaces the working_dir of the runtime_env")
        found["working_dir"] = working_dir
    return found


class ServeSubmissionClient:
    """The Serve of this user's job on this node.

    Args:
        dashboard_head_address: the session directory of a job. A URL has no effect, as no server answers it: then
            RAY_ADDRESS says which job, or it is the one started last.

    Raises:
        ConnectionError: there is no job to join.
    """

    def __init__(self, dashboard_head_address: str = "", **_: Any) -> None:
        if not is_initialized():
            session = "" if "://" in dashboard_head_address else dashboard_head_address
            hpcray.init(address=session or os.environ.get("RAY_ADDRESS") or "auto", namespace=_NAMESPACE)

    def get_serve_details(self) -> dict[str, Any]:
        """Return the state of all applications, as `ray.serve.schema.ServeInstanceDetails` has it."""
        from ray.serve.schema import ServeInstanceDetails

        details: dict[str, Any] = ServeInstanceDetails.get_empty_schema_dict()
        client = self._client()
        if client is not None:
            with contextlib.suppress(RayActorError):  # Serve is being shut down
                details = hpcray.get(client._controller.get_serve_instance_details.remote(source=None))
        return details

    def deploy_applications(self, config: dict[str, Any]) -> None:
        """Make the applications of the job those of a config file; start Serve where it does not run.

        Raises:
            ValueError: the config is none.
        """
        from ray.serve._private.api import serve_start
        from ray.serve.schema import ServeDeploySchema

        wanted = ServeDeploySchema.model_validate(config)
        client = serve_start(
            http_options=wanted.http_options.model_dump(),
            grpc_options=wanted.grpc_options.model_dump(),
            proxy_location=wanted.proxy_location,
            global_logging_config=wanted.logging_config,
            controller_options=wanted.controller_options,
        )
        if wanted.logging_config:
            client.update_global_logging_config(wanted.logging_config)
        client.deploy_apps(wanted, _blocking=False)

    def delete_applications(self) -> None:
        """End Serve in the job, with all its applications."""
        client = self._client()
        if client is not None:
            client.shutdown()

    def _client(self) -> Any:
        """The client of the controller; None where Serve does not run."""
        from ray.serve.context import _get_global_client
        from ray.serve.exceptions import RayServeException

        try:
            return _get_global_client()
        except RayServeException:
            return None


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Become the command `ray`: this process ends with its exit code.

    Args:
        args: its words; None: those of this process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    line = module_line("hpcray.cli.ray", *(sys.argv[1:] if args is None else args))
    os.execv(line[0], line)


cli = main
