"""The driver of a submitted job, as the job knows it."""

from __future__ import annotations

import json
import os

from hpcray.common.submitted_jobs import DRIVER_PREFIX, JOB_ID_METADATA_KEY, KV_NAMESPACE, job_config, job_key
from hpcray.platform.sockets import node_ip_address
from hpcray.runtime.core_worker.core_worker import CoreWorker


def report_to_submission(process: CoreWorker, job_id: str) -> None:
    """Store who the driver is of the submitted job whose entrypoint this process is, or was started by."""
    submission = (job_config(os.environ).get("metadata") or {}).get(JOB_ID_METADATA_KEY)
    if submission:
        driver = {"id": job_id, "node_ip_address": node_ip_address(), "pid": str(os.getpid())}
        packed = json.dumps(driver).encode()
        process.gcs.call("kv_put", job_key(DRIVER_PREFIX, submission), packed, True, KV_NAMESPACE)
