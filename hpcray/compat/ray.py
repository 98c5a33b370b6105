"""`import hpcray.compat.ray` makes `import ray` import hpcray. The imported module is `ray` itself."""

from __future__ import annotations

import sys

from hpcray.compat import install

sys.modules[__name__] = install()
