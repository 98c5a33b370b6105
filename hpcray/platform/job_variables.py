"""Variables of the environment that name the job that this process has joined, for all that it starts."""

from __future__ import annotations

from collections.abc import MutableMapping

from hpcray.platform.session_directory import ADDRESS, OWN_SESSION


class JobVariables:
    """The variables that name a job, from `init()` to `shutdown()`.

    HPCRAY_SESSION always names the job that this process has joined: commands that it starts look there first, and
    `init(address="auto")`. HPCRAY_ADDRESS is for `init()` what RAY_ADDRESS is in Ray: the job that it joins. It is set
    only in the programs of a launcher, whose children are meant to join; elsewhere a child's `init()` starts a job of
    its own. One that is inherited stays, as in Ray: after `init("local")` inside another job, a child's `init()` joins
    the outer job, while commands speak of the program's own. So the two need two variables.

    Args:
        environ: to change.
        session_dir: of the node that this process has joined.
        for_children: the `init()` of processes that this one starts joins the job too.
    """

    def __init__(self, environ: MutableMapping[str, str], session_dir: str, for_children: bool = False) -> None:
        self._environ = environ
        self._session_dir = session_dir
        names = (OWN_SESSION, ADDRESS) if for_children else (OWN_SESSION,)
        self._before = {name: environ.get(name) for name in names}
        environ.update(dict.fromkeys(names, session_dir))

    def restore(self) -> None:
        """Give the variables the values from before; what the program has set itself since then stays."""
        for name, value in self._before.items():
            if self._environ.get(name) == self._session_dir:
                if value is None:
                    del self._environ[name]
                else:
                    self._environ[name] = value
