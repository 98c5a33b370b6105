"""`import hpcray.compat.ray`: from now on `import ray` is hpcray. The module that it gives is `ray` itself."""

from __future__ import annotations

import sys

from hpcray.compat import install

sys.modules[__name__] = install()
