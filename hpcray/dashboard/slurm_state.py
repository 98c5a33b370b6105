"""The job by Slurm: its limits, its nodes, whether it is requeued."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

_TIMEOUT = 10.0  # seconds
_FIELD = re.compile(r"(?:^|\s)([A-Za-z][\w:/]*)=(\S*)")
_FIELDS = (
    "JobState", "Reason", "Partition", "QOS", "Account", "NumNodes", "NumCPUs", "TRES", "TimeLimit", "RunTime",
    "StartTime", "EndTime", "PreemptTime", "Requeue", "Restarts", "NodeList", "Features", "Dependency", "WorkDir",
)  # fmt: skip


def job_facts(job_id: str) -> dict[str, Any]:
    """Ask Slurm's controller about a job. Returns "fields" (name, value), "nodes", "problem" ("" where it answers)."""
    if not job_id:
        return {"fields": [], "nodes": [], "problem": "this is no Slurm job"}
    if shutil.which("scontrol") is None:
        return {"fields": [], "nodes": [], "problem": "there is no scontrol on this machine"}
    try:
        known = dict(_FIELD.findall(_run("scontrol", "show", "job", "-o", job_id)))
        nodes = [parse_node(line) for line in _run("scontrol", "show", "node", "-o", known["NodeList"]).splitlines()]
    except (OSError, subprocess.SubprocessError, KeyError) as error:
        said = str(getattr(error, "stderr", "") or error).strip()
        return {"fields": [], "nodes": [], "problem": f"Slurm does not answer: {said}"}
    return {
        "fields": [(name, known[name]) for name in _FIELDS if name in known],
        "nodes": [node for node in nodes if node["name"]],
        "problem": "",
    }


def parse_node(line: str) -> dict[str, str]:
    """Return "name", "state" and "reason" in a line of `scontrol show node -o`. The reason may have blanks."""
    known = dict(_FIELD.findall(line))
    reason = re.search(r"\sReason=(.*?)(?:\s\w+=|$)", line)
    return {
        "name": known.get("NodeName", ""),
        "state": known.get("State", ""),
        "reason": reason[1].strip() if reason else "",
    }


def _run(*command: str) -> str:
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT, check=True
    ).stdout
