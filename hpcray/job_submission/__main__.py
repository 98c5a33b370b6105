"""`hpcray-launch -m hpcray.job_submission`: a cluster without a program of its own, for submitted jobs.

It lasts until SIGTERM, SIGINT (Ctrl-C) or `scancel`, which end the jobs too.
"""

from __future__ import annotations

import signal
import sys
import threading

from hpcray.api.session import init, require_session, shutdown


def main() -> int:
    """Keep the nodes up until a signal comes. Returns the exit code."""
    ended = threading.Event()
    init()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: ended.set())
    print(f"ready for jobs: ray job submit --address {require_session().place.session_dir} -- COMMAND", flush=True)
    ended.wait()
    shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
