"""Modules of a lent library that are changed after their import, where Ray's behaviour must not be had here."""

from __future__ import annotations

import importlib
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

AMENDMENTS = {
    "ray._common.tls_utils": "hpcray.compat.serve_ports:tls_utils",
    "ray.serve._private.client": "hpcray.compat.serve_ports:client",
    "ray.serve._private.default_impl": "hpcray.compat.serve_ports:default_impl",
    "ray.serve._private.grpc_util": "hpcray.compat.serve_ports:grpc_util",
    "ray.serve._private.http_util": "hpcray.compat.serve_ports:http_util",
    "ray.serve.config": "hpcray.compat.serve_ports:config",
    "ray.serve.scripts": "hpcray.compat.serve_ports:scripts",
    "ray.serve.schema": "hpcray.compat.serve_ports:schema",
    "ray.train.torch.config": "hpcray.compat.train_network:torch_config",
    "ray.tune.experiment.trial": "hpcray.compat.tune_amendments:trial",
    "ray.tune.experimental.output": "hpcray.compat.tune_amendments:output",
    "ray.tune.tune": "hpcray.compat.tune_amendments:tune",
}
"""By module of Ray: a function that gets the module, once it has been executed."""


class AmendingLoader(SourceFileLoader):
    """Executes a module of a lent library, then amends it."""

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module and call its function of `AMENDMENTS`."""
        super().exec_module(module)
        source, _, function = AMENDMENTS[module.__name__].partition(":")
        getattr(importlib.import_module(source), function)(module)


def amended_spec(fullname: str, path: object) -> ModuleSpec | None:
    """Return the spec of a lent module that is in `AMENDMENTS`; None for any other, which Python finds itself."""
    if fullname not in AMENDMENTS:
        return None
    spec = PathFinder.find_spec(fullname, path)  # type: ignore[arg-type]
    if spec is not None and spec.origin:
        spec.loader = AmendingLoader(fullname, spec.origin)
    return spec
