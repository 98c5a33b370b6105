"""What the watch for hangs costs (`--end-hangs`): a thousand nodes, whose answers are real ones of this machine.

The watch is that of a job (`hpcray.hangs.watcher`); the nodes are made up, but each answer is made by the code of a
raylet from /proc, for so many workers, and every message is encoded and decoded as on the wire. Nothing goes on in the
job, which is when the watch costs most: all nodes are asked in each round.

    python benchmarks/hang_watch.py                       # 1,000 nodes with 8 workers each
    python benchmarks/hang_watch.py --nodes 100 --workers 64 --rounds 20

The figures are shares of one core: of a node, that of the program's node for all questions, both together by node, and
while the job works, when one node is asked.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec

from hpcray.diagnostics.process_activity import ActivityMeter
from hpcray.hangs.messages import ProcessLook
from hpcray.hangs.watcher import StillnessWatch
from hpcray.protocol import messages as m

SECONDS, CODE, LIMIT = 1800.0, 79, 0.001
_PROGRAM = b"program!"


class Nodes:
    """The nodes of a job in which nothing goes on: `gcs` of its program.

    Attributes:
        answering: CPU seconds of the answers so far. answers: how many there were.
    """

    def __init__(self, count: int, workers: int) -> None:
        self._rows = [{"Index": place, "Alive": True} for place in range(count)]
        self._workers = [
            subprocess.Popen([sys.executable, "-S", "-c", "import threading; threading.Event().wait()"])
            for _ in range(workers)
        ]
        self._meter = ActivityMeter()
        self.answering = 0.0
        self.answers = 0

    def nodes(self) -> list[dict[str, Any]]:
        return self._rows

    def ask_many(
        self, questions: Mapping[bytes, Callable[..., Any]], patience: float, gone: set[bytes]
    ) -> dict[bytes, Any]:
        replies = [
            (proc, self._answer(m.encode([make(number)]))) for number, (proc, make) in enumerate(questions.items())
        ]
        return {proc: msgspec.msgpack.decode(m.decode(reply)[0].value) for proc, reply in replies}

    def _answer(self, question: bytes) -> bytes:
        began = time.thread_time()
        asked = m.decode(question)[0]
        (asleep,) = msgspec.msgpack.decode(asked.args)
        found = msgspec.to_builtins(self._meter.look([one.pid for one in self._workers], (), asleep))
        value = msgspec.msgpack.encode({**found, "cpu": 0.0, "moved": 0, "gpu": 0.0, "transfers": 0})
        reply = m.encode([m.GcsReply(asked.req, True, value)])
        self.answering += time.thread_time() - began
        self.answers += 1
        return reply

    def end(self) -> None:
        for one in self._workers:
            one.kill()
            one.wait()


def measure(count: int, workers: int, rounds: int) -> dict[str, float]:
    """Watch for so many rounds, one after the other."""
    nodes = Nodes(count, workers)
    try:
        process: Any = SimpleNamespace(
            gcs=nodes, me=_PROGRAM, node=0, kind="driver", engine=SimpleNamespace(lock=nullcontext()),
            config=SimpleNamespace(max_nodes=0),
        )  # fmt: skip
        own = ProcessLook(_PROGRAM, 1, "driver", True, 0, [], [], [], 1)
        watch: Any = SimpleNamespace(look_at=lambda procs, **_: dict.fromkeys(procs, own))
        stillness = StillnessWatch(process, watch, SECONDS, CODE)
        for _ in range(2):
            stillness.round()  # the first look counts as progress
        nodes.answering, nodes.answers = 0.0, 0
        began = time.thread_time()
        for _ in range(rounds):
            stillness.round()
        asking = time.thread_time() - began - nodes.answering
        if nodes.answers != rounds * count:
            raise SystemExit(f"{nodes.answers} answers to {rounds} rounds of {count} nodes: something went on")
    finally:
        nodes.end()
    answer, period = nodes.answering / nodes.answers, stillness.period
    return {
        "period_s": period,
        "answer_ms": 1e3 * answer,
        "round_ms": 1e3 * asking / rounds,
        "node_share": answer / period,
        "program_share": asking / rounds / period,
        "share_by_node": (answer + asking / rounds / count) / period,
        "working_share": (answer + asking / rounds / count) / period / count,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=8, help="processes of each node")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    found = measure(options.nodes, options.workers, options.rounds)
    print(f"{options.nodes} nodes with {options.workers} workers each, a round every {found['period_s']:g} s")
    print(f"an answer of a node   {found['answer_ms']:8.3f} ms  {100 * found['node_share']:.4f} % of a core")
    print(f"a round of the watch  {found['round_ms']:8.3f} ms  {100 * found['program_share']:.4f} % of a core")
    print(f"both, by node                      {100 * found['share_by_node']:.4f} % of a core (wanted: below 0.1)")
    print(f"while the job works, by node       {100 * found['working_share']:.6f} % of a core")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)
    return 0 if found["share_by_node"] < LIMIT else 1


if __name__ == "__main__":
    threading.current_thread().name = "hpcray-hangs"
    sys.exit(main())
