"""Log files that outlive their job: the directory of a session's log files is a link to where they stay."""

from __future__ import annotations

import os

from hpcray.platform.private_files import make_private_directory


def keep_logs(session_logs: str, directory: str, node: int) -> str:
    """Have the log files of a node written to a directory that stays.

    Args:
        session_logs: the directory of log files in the session directory; made here, as a link.
        directory: where they stay, in `node-<number>`; %j stands for the number of Slurm's job.
        node: the number.

    Returns:
        Why they are not, "" if they are.
    """
    kept = os.path.join(os.path.abspath(directory.replace("%j", os.environ.get("SLURM_JOB_ID", "0"))), f"node-{node}")
    try:
        make_private_directory(kept)
        os.symlink(kept, session_logs)
    except OSError as error:
        return f"the log files of workers do not stay in {kept}: {error}; hint: HPCRAY_LOG_DIR"
    return ""
