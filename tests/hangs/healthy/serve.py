"""A program that serves with Ray Serve.

kind: healthy
cause: Requests may come. Here an actor of its controller's name stands for Serve.
"""

import threading

import hpcray as ray


@ray.remote(num_cpus=0, max_concurrency=2)
class ServeController:
    def ready(self):
        return True

    def wait(self):
        threading.Event().wait()


ray.init()
controller = ServeController.remote()
ray.get(controller.ready.remote())
ref = controller.wait.remote()
print("MARK", flush=True)
ray.get(ref)
