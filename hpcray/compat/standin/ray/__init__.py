"""`import ray`, by hpcray: this module becomes a facade of `hpcray.compat` as soon as it is imported."""

import sys

from hpcray.compat import install

install(replacing=sys.modules[__name__])
