"""`ray.dashboard.utils`."""

from __future__ import annotations

from typing import NoReturn


def get_address_for_submission_client(address: str | None = None) -> NoReturn:
    """Where the job server is: nowhere.

    Raises:
        ConnectionError: always.
    """
    raise ConnectionError(
        f"there is no job server to send jobs to (address {address!r}): hpcray has no HTTP server; "
        "hint: hpcray.cluster.submit(...) or `hpcray submit`"
    )
