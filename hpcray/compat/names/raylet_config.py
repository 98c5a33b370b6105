"""`ray._config`: settings of Ray's C++ processes that its libraries read. They have no effect here."""

from __future__ import annotations


class _Config:
    """Ray's defaults, each as a method."""

    def grpc_client_keepalive_time_ms(self) -> int:
        """Return the milliseconds after which a silent gRPC connection is tested."""
        return 300_000

    def grpc_client_keepalive_timeout_ms(self) -> int:
        """Return the milliseconds after which such a test has failed."""
        return 120_000

    def max_grpc_message_size(self) -> int:
        """Return the largest message in bytes."""
        return 512 << 20


_config = _Config()
