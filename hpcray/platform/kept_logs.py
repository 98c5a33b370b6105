"""Log files that outlive their job: the directory of a session's log files is a link to where they stay."""

from __future__ import annotations

import os

from hpcray.platform.private_files import make_private_directory


def node_logs(directory: str, node: int) -> str:
    """The directory where the log files of a node stay.

    Args:
        directory: of the whole job; %j stands for the number of Slurm's job.
        node: the number of the node.
    """
    return os.path.join(os.path.abspath(directory.replace("%j", os.environ.get("SLURM_JOB_ID", "0"))), f"node-{node}")


def keep_logs(session_logs: str, kept: str) -> str:
    """Have the log files of a node written to a directory that stays.

    Args:
        session_logs: the directory of log files in the session directory; made here, as a link.
        kept: where they stay.

    Returns:
        Why they are not, "" if they are.
    """
    try:
        make_private_directory(kept)
        os.symlink(kept, session_logs)
    except OSError as error:
        return f"the log files of workers do not stay in {kept}: {error}; hint: HPCRAY_LOG_DIR"
    return ""
