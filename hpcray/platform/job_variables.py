"""Variables of the environment that name the job that this process has joined, for all that it starts."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from hpcray.common.exceptions import StartupError
from hpcray.platform.session_directory import ADDRESS, OWN_NAMESPACE, OWN_SESSION, SessionInfo, read_session


class JobVariables:
    """The variables that name a job, from `init()` to `shutdown()`.

    HPCRAY_SESSION always names the job that this process has joined: commands that it starts look there first,
    `init(address="auto")`, and `init()` where no address is named and no node is described: processes that a driver, a
    task or an actor starts, in whatever way, join its job, in the namespace that HPCRAY_NAMESPACE names. HPCRAY_ADDRESS
    is for `init()` what RAY_ADDRESS is in Ray: the job that it joins in any case. It is set only in the programs of a
    launcher. One that is inherited stays, as in Ray: after `init("local")` inside another job, a child's `init()` joins
    the outer job, while commands speak of the program's own. So the two need two variables.

    Args:
        environ: to change.
        session_dir: of the node that this process has joined.
        for_children: the `init()` of processes that this one starts joins the job whatever its arguments are.
    """

    def __init__(self, environ: MutableMapping[str, str], session_dir: str, for_children: bool = False) -> None:
        self._environ = environ
        self._before: dict[str, str | None] = {}
        self._set: dict[str, str] = {}
        for name in (OWN_SESSION, ADDRESS) if for_children else (OWN_SESSION,):
            self._name(name, session_dir)

    def name_namespace(self, namespace: str) -> None:
        """Have children join in this namespace."""
        self._name(OWN_NAMESPACE, namespace)

    def restore(self) -> None:
        """Give the variables the values from before; what the program has set itself since then stays."""
        for name, value in self._before.items():
            if self._environ.get(name) == self._set[name]:
                if value is None:
                    del self._environ[name]
                else:
                    self._environ[name] = value

    def _name(self, name: str, text: str) -> None:
        self._before.setdefault(name, self._environ.get(name))
        self._environ[name] = self._set[name] = text


def session_of_parent(environ: Mapping[str, str]) -> SessionInfo | None:
    """Return the node of the program or worker that has started this process, or one of its ancestors; None if there is
    none, its job has ended, or a batch job of its own lies between the two."""
    try:
        found = read_session(environ[OWN_SESSION])
    except (KeyError, StartupError):
        return None
    batch_job = environ.get("SLURM_JOB_ID", "")
    return None if found.slurm_job and batch_job and found.slurm_job != batch_job else found
