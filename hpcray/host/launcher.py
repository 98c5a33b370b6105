"""The launcher's variables, which must not reach user processes: with them a process takes itself for an MPI rank."""

from __future__ import annotations

from collections.abc import MutableMapping

_FOREIGN = ("PMIX_", "OMPI_", "PMI_", "PRTE_")


def strip_launcher(environ: MutableMapping[str, str]) -> None:
    """Remove the variables that make a process take itself for an MPI rank."""
    for name in [name for name in environ if name.startswith(_FOREIGN)]:
        del environ[name]
