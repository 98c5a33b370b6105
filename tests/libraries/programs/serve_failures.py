"""Serve: replicas that die or fail their health check, a broken constructor, the controller killed, calls over gRPC."""

import json
import os
import time

import ray
from ray import serve
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE


@serve.deployment(num_replicas=2, health_check_period_s=0.5, health_check_timeout_s=5, graceful_shutdown_timeout_s=1)
class Fragile:
    def __init__(self) -> None:
        self.healthy = True

    def check_health(self) -> None:
        if not self.healthy:
            raise RuntimeError("unhealthy")

    def __call__(self) -> int:
        return os.getpid()

    def die(self) -> None:
        os._exit(3)

    def sicken(self) -> int:
        self.healthy = False
        return os.getpid()


@serve.deployment
class Broken:
    def __init__(self) -> None:
        raise ValueError("it never starts")


def pids(handle) -> set[int]:
    found = set()
    for _ in range(30):
        try:
            found.add(handle.remote().result(timeout_s=20))
        except ray.exceptions.RayActorError:
            time.sleep(0.1)
    return found


def replaced(handle, gone: int) -> bool:
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        now = pids(handle)
        if len(now) == 2 and gone not in now:
            return True
        time.sleep(0.2)
    return False


def main():
    ray.init(num_cpus=6)
    handle = serve.run(Fragile.bind(), name="fragile", route_prefix=None)
    before = pids(handle)
    found = {"replicas": len(before)}
    try:
        handle.die.remote().result(timeout_s=20)
    except Exception as error:
        found["death"] = isinstance(error, ray.exceptions.RayActorError)
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline and len(now := pids(handle)) < 2:
        time.sleep(0.2)
    found["after death"] = (len(now), len(now & before))
    sick = handle.sicken.remote().result(timeout_s=20)
    found["after sickness"] = replaced(handle, sick)

    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    pid = ray.get(controller.get_pid.remote())
    ray.kill(controller, no_restart=False)
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        try:
            if ray.get(controller.get_pid.remote(), timeout=5) != pid:
                break
        except ray.exceptions.RayError:
            time.sleep(0.1)
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline and found.get("controller") != "RUNNING":
        found["controller"] = serve.status().applications["fragile"].status.value
        time.sleep(0.1)
    found["still"] = len(pids(handle))

    found["by value"] = len({handle.options(_by_reference=False).remote().result(timeout_s=20) for _ in range(20)})

    try:
        serve.run(Broken.bind(), name="broken", route_prefix=None)
    except RuntimeError as error:
        found["broken"] = "broken" in str(error)
    found["status"] = serve.status().applications["broken"].status.value
    serve.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
