"""hpcray: Ray's programming model as a native Slurm/MPI citizen. `import hpcray as ray`."""

from hpcray import actor, exceptions, util
from hpcray.api.actor import ActorClass, ActorHandle, ActorMethod, get_actor, kill, method
from hpcray.api.context import available_resources, cluster_resources, get_runtime_context, nodes
from hpcray.api.decorator import remote
from hpcray.api.objects import cancel, get, put, wait
from hpcray.api.session import init, is_initialized, shutdown
from hpcray.runtime.refs import ObjectRef

__version__ = "0.1.0"

ObjectID = ObjectRef

__all__ = [
    "ActorClass",
    "ActorHandle",
    "ActorMethod",
    "ObjectID",
    "ObjectRef",
    "actor",
    "available_resources",
    "cancel",
    "cluster_resources",
    "exceptions",
    "get",
    "get_actor",
    "get_runtime_context",
    "init",
    "is_initialized",
    "kill",
    "method",
    "nodes",
    "put",
    "remote",
    "shutdown",
    "util",
    "wait",
]
