"""A circle of calls in an actor that has set itself an alarm.

kind: healthy
cause: The handler of SIGALRM ends the wait.
"""

import signal

import hpcray as ray


class Late(Exception):
    pass


def late(number, frame):
    raise Late


@ray.remote
class A:
    def f(self, me):
        signal.signal(signal.SIGALRM, late)
        signal.alarm(3600)
        try:
            return ray.get(me.g.remote())
        except Late:
            return None

    def g(self):
        return 1


ray.init()
a = A.remote()
ray.get(a.g.remote())
ref = a.f.remote(a)
print("MARK", flush=True)
ray.get(ref)
