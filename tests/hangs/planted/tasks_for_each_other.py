"""Two tasks that wait for each other's results.

kind: certain
cause: Each task gets the ref of the other one through an actor, and waits for it.
remedy: A task may wait only for what was submitted before it.
names: one
"""

import hpcray as ray


@ray.remote(num_cpus=0)
class Board:
    def __init__(self):
        self.refs = {}

    def put(self, name, refs):
        self.refs[name] = refs

    def take(self, name):
        return self.refs.get(name)


@ray.remote(num_cpus=0)
def one(board, other):
    while (refs := ray.get(board.take.remote(other))) is None:
        pass
    return ray.get(refs[0])


ray.init()
board = Board.remote()
first, second = one.remote(board, "second"), one.remote(board, "first")
ray.get([board.put.remote("first", [first]), board.put.remote("second", [second])])
print("MARK", flush=True)
ray.get([first, second])
