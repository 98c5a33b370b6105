"""The warning that a name or a value of an option will be removed."""

from __future__ import annotations

import sys
import warnings


class RayDeprecationWarning(DeprecationWarning):
    """Warning that a name will be removed."""


if not sys.warnoptions:
    # Python hides deprecations outside of __main__; one of these is shown once for each module that uses the name.
    warnings.filterwarnings("module", category=RayDeprecationWarning)
