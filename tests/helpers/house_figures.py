"""The figures of tests/unit/test_house_laws.py: what breaks a law of the house today. They may only fall.

After a change `python tests/helpers/house_laws.py --lower` rewrites this file: figures that fell are lowered, and what
is gone is deleted. In a conflict take either side, then do the same. It raises and adds nothing: that is done by hand,
and the commit message says why. Each entry stands on a line of its own.
"""

from __future__ import annotations

STRINGS = {
    "hpcray.attach.starter -> hpcray.cli.attach": "lasting: code of another process, on a node of the job",
    "hpcray.api.runtime_context -> hpcray.compat.names.worker": "lasting: Ray's facade, found when it is asked for",
    "hpcray.cli.job -> hpcray.cli.ray": "lasting: the program of a step inside a Slurm job",
    "hpcray.common.exceptions -> hpcray.exceptions": "lasting: what errors name as their module",
    "hpcray.processes.bootstrap -> hpcray.processes.raylet_main": "lasting: code of another process",
}
"""Strings that name a module above their own, or close a circle of imports, with what for."""

INJECTED = {
    "ObjectTable.record_creation_sites: part.*": 1,
    "ObjectTable.record_parents: self.create": 1,
    "Recorder.wrap: target.*": 1,
    "_enable_tracing: ActorClass.remote": 1,
    "_enable_tracing: ActorMethod.remote": 1,
    "_enable_tracing: RemoteFunction.remote": 1,
    "_record_outlets: table.pins.use_neighbors": 1,
    "_record_outlets: table.when_freed": 1,
    "_record_task_state: table.lineage.why_not": 1,
    "_record_waiters: table._fire": 1,
    "record_table: table.bury": 1,
    "warn_of_blocking_get: reader.get": 1,
    "warn_of_blocking_get: reader.get_one": 1,
}
"""Functions that are put on another object, in place of a method, or by a setter: how often in each place."""

FOREIGN = {
    "EnvironmentReads.noted: environ.encodekey": "os.environ, whose reads it notes",
    "DashboardServer._serve: server.install_signal_handlers": "uvicorn's server",
    "WorkerDebugger.do_interact: console.raw_input": "the standard library's InteractiveConsole",
    "WorkerDebugger.do_interact: console.write": "the standard library's InteractiveConsole",
    "_start_over_unix: server.install_signal_handlers": "uvicorn's server",
}
"""The same, where the other object is another package's, and its interface asks for it."""

ATTRIBUTES = {
    "LeaseRequest": 41,
    "TaskState": 28,
}
"""Classes with more than 25 attributes."""

ATTRIBUTES_REASONS = {
    "LeaseRequest": "a row of the raylet's table of requests: counts and times, which three parts of the core write",
    "TaskState": "a row of the state API, with Ray's columns",
}
"""The reasons of those that stay: two at most."""

SHORT_WITH_REASON = {
    "actor.py": "Ray's `ray.actor`",
    "cluster.py": "a lazy table of public names",
    "common/keyed_hash.py": "one way round OpenSSL, which is imported by the cores and the wires",
    "exceptions.py": "Ray's `ray.exceptions`",
    "job_submission/__main__.py": "a program: `python -m` finds it by this name",
    "util/placement_group.py": "Ray's `ray.util.placement_group`",
    "util/scheduling_strategies.py": "Ray's `ray.util.scheduling_strategies`",
    "util/serialization.py": "Ray's `ray.util.serialization`",
    "util/tracing/setup_local_tmp_tracing.py": "Ray's module of this name",
}
"""Files of fewer than 40 lines that stay: ten at most."""

SHORT_FILES = {}
"""The others, each of which goes to its noun."""

# A figure is raised only by a commit whose message says why: so many lines more are for so much to be held in the head.
LINES_OF_CODE = {
    "api": 2976,
    "attach": 1417,
    "autoscaler": 1222,
    "cli": 4369,
    "common": 1539,
    "compat": 3439,
    "core": 12347,
    "dashboard": 2097,
    "diagnostics": 3446,
    "durable": 2951,
    "experimental": 569,
    "graphs": 2138,
    "hangs": 1533,
    "history": 2014,
    "job_submission": 725,
    "jobs": 1296,
    "kernel": 38116,
    "launch": 1145,
    "mpi": 559,
    "platform": 4882,
    "processes": 727,
    "protocol": 1496,
    "ray_api": 473,
    "ray_start": 2270,
    "runtime": 12935,
    "runtime_env": 1845,
    "state": 4125,
    "tensors": 3302,
    "top": 1196,
    "topology": 416,
    "transport": 1979,
    "util": 3615,
}
"""Lines of code of each room, of the kernel (common, protocol, core, transport, platform, runtime, api)."""

FILES = {
    "whole": 430,
}
"""Files of the package, those of compat/standin left out."""
