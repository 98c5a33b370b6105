"""The exceptions of hpcray, for `from hpcray.exceptions import ...`. They are defined in `hpcray.common`."""

from hpcray.common.exceptions import *  # noqa: F403
from hpcray.common.task_errors import *  # noqa: F403

_names = [
    name
    for name, value in list(globals().items())
    if isinstance(value, type) and issubclass(value, Exception) and not issubclass(value, Warning)
]
# Type checkers cannot compute it, and would take an assignment for an empty list.
globals()["__all__"] = _names
for _name in [name for name in globals() if not name.startswith("__") and name not in _names]:
    del globals()[_name]  # what the star brought besides exceptions
