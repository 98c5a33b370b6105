"""Serve: updates under load, graceful shutdown, health, user_config, deployments that fail, metrics and logs."""

import asyncio
import contextlib
import json
import logging
import os
import threading
import time

import ray
from ray import serve
from ray.serve import metrics
from ray.serve.config import AutoscalingConfig
from ray.serve.exceptions import RayServeException
from ray.serve.schema import LoggingConfig


@ray.remote(num_cpus=0)
class Notes:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        self.lines.append(line)

    def all(self) -> list[str]:
        return self.lines


@serve.deployment(
    num_replicas=2, max_ongoing_requests=10, graceful_shutdown_timeout_s=20, graceful_shutdown_wait_loop_s=0.2
)
class Versioned:
    def __init__(self, version: int) -> None:
        self.version, self.factor = version, 1

    def reconfigure(self, config: dict) -> None:
        self.factor = config["factor"]

    async def __call__(self, seconds: float = 0.02) -> int:
        await asyncio.sleep(seconds)
        return self.version * self.factor

    async def __del__(self) -> None:
        notes = ray.get_actor("notes", namespace="notes")
        await notes.add.remote(f"version {self.version} ends")


class Load:
    """Calls one after the other from several threads, while something else happens."""

    def __init__(self, handle, threads: int = 4) -> None:
        self.handle, self.answers, self.errors, self.ended = handle, [], [], False
        self.threads = [threading.Thread(target=self.run) for _ in range(threads)]
        for thread in self.threads:
            thread.start()

    def run(self) -> None:
        while not self.ended:
            try:
                self.answers.append(self.handle.remote().result(timeout_s=60))
            except Exception as error:
                self.errors.append(repr(error)[:300])

    def end(self) -> list:
        self.ended = True
        for thread in self.threads:
            thread.join()
        return [sorted(set(self.answers)), self.errors]


@serve.deployment(num_replicas=1)
class Broken:
    def __init__(self, how: str) -> None:
        if how == "raise":
            raise ValueError("there is no model file")
        if how == "exit":
            os._exit(1)


@serve.deployment(logging_config=LoggingConfig(encoding="JSON", log_level="DEBUG", enable_access_log=False))
class Logging:
    def __init__(self) -> None:
        self.counter = metrics.Counter("calls_of_logging", description="calls", tag_keys=("model",))
        self.counter.set_default_tags({"model": "a"})
        self.gauge = metrics.Gauge("level_of_logging")
        self.histogram = metrics.Histogram("size_of_logging", boundaries=[1, 10])

    def __call__(self, text: str) -> list[str]:
        logger = logging.getLogger("ray.serve")
        logger.debug("debugged %s", text, extra={"part": "body"})
        self.counter.inc()
        self.gauge.set(2)
        self.histogram.observe(3)
        for handler in logger.handlers:
            handler.flush()
        return [handler.target.baseFilename for handler in logger.handlers if hasattr(handler, "target")] + [
            handler.baseFilename for handler in logger.handlers if hasattr(handler, "baseFilename")
        ]


@serve.deployment(
    autoscaling_config=AutoscalingConfig(
        min_replicas=0, max_replicas=2, target_ongoing_requests=1, upscale_delay_s=0.1, downscale_delay_s=0.5,
        metrics_interval_s=0.1, look_back_period_s=0.3,
    )
)  # fmt: skip
class FromZero:
    async def __call__(self) -> str:
        return "woken"


def running(app: str, deployment: str) -> int:
    states = serve.status().applications[app].deployments[deployment].replica_states
    return sum(count for state, count in states.items() if getattr(state, "value", state) == "RUNNING")


def until(condition, seconds: float = 120) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


def main():
    ray.init(num_cpus=8)
    notes = Notes.options(name="notes", namespace="notes").remote()
    found = {}
    handle = serve.run(Versioned.bind(1), name="app", route_prefix=None)
    load = Load(handle)
    time.sleep(1)
    serve.run(Versioned.bind(2), name="app", route_prefix=None)
    time.sleep(1)
    found["update"] = load.end()
    found["ended"] = until(lambda: ray.get(notes.all.remote()).count("version 1 ends") == 2)

    load = Load(handle)
    serve.run(Versioned.options(user_config={"factor": 10}).bind(2), name="app", route_prefix=None)
    until(lambda: 20 in load.answers)
    found["reconfigured"] = load.end()
    load = Load(handle)
    changed = Versioned.options(user_config={"factor": 10}, num_replicas=3)
    serve.run(changed.bind(2), name="app", route_prefix=None)
    found["three"] = until(lambda: running("app", "Versioned") == 3), load.end()
    load = Load(handle)
    changed = Versioned.options(user_config={"factor": 10}, num_replicas=1)
    serve.run(changed.bind(2), name="app", route_prefix=None)
    found["one"] = until(lambda: running("app", "Versioned") == 1), load.end()

    slow = [handle.remote(3) for _ in range(3)]
    time.sleep(0.5)
    start = time.monotonic()
    serve.delete("app")
    found["in flight"] = [response.result(timeout_s=20) for response in slow], time.monotonic() - start > 1.5

    for how in ("raise", "exit"):
        try:
            serve.run(Broken.bind(how), name="broken", route_prefix=None)
        except RuntimeError as error:
            found[how] = "Deploying application broken failed" in str(error) or str(error)
        status = serve.status().applications["broken"]
        found[f"{how} status"] = status.status.value, "there is no model file" in str(status)
        with contextlib.suppress(RayServeException):
            serve.delete("broken")

    logged = serve.run(Logging.bind(), name="logs", route_prefix=None)
    [path] = logged.remote("this").result()
    with open(path) as file:
        lines = [json.loads(line) for line in file if "debugged" in line]
    keys = ("deployment", "application", "levelname", "part", "message")
    found["logged"] = (
        [lines[-1].get(key) for key in keys],
        "request_id" in lines[-1],
        os.path.basename(os.path.dirname(path)),
    )

    zero = serve.run(FromZero.bind(), name="zero", route_prefix=None)
    found["zero"] = running("zero", "FromZero")
    found["woken"] = zero.remote().result(timeout_s=60)
    found["asleep"] = until(lambda: running("zero", "FromZero") == 0)
    serve.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
