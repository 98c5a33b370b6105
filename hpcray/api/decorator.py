"""`@remote`."""

from __future__ import annotations

import inspect
from typing import Any

from hpcray.api.actor import make_actor_class
from hpcray.api.options import ActorOptions, TaskOptions
from hpcray.api.remote_function import make_remote_function


def remote(*args: Any, **options: Any) -> Any:
    """Make a function a remote function, or a class an actor class.

    Use it bare (`@remote`) or with options (`@remote(num_cpus=2)`).

    Raises:
        TypeError: not a function or class. ValueError: an option is unknown or out of range, or an `async def`.
    """
    if len(args) == 1 and not options and callable(args[0]):
        return _make(args[0], {})
    if args or not options:
        raise TypeError(
            "The @ray.remote decorator must be applied either with no arguments and no parentheses, for example "
            "'@ray.remote', or it must be applied using some of the arguments of Ray's table of options, for example "
            "'@ray.remote(num_returns=2, resources={\"CustomResource\": 1})'."
        )
    return lambda target: _make(target, options)


def _make(target: Any, options: dict[str, Any]) -> Any:
    if inspect.isclass(target):
        return make_actor_class(target, ActorOptions(options))
    if inspect.iscoroutinefunction(target) or inspect.isasyncgenfunction(target):
        raise ValueError(
            "'async def' should not be used for remote tasks; hint: make it a method of an actor, or call "
            "`asyncio.run(...)` inside a plain function"
        )
    if callable(target):
        return make_remote_function(target, TaskOptions(options))
    raise TypeError("The @ray.remote decorator must be applied to either a function or a class.")
