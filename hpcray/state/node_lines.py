"""The lines in which a node answers the doctor: short ones, since the tasks of a step share srun's stdout.

slurmstepd sends whole lines to srun only while they are shorter than its messages of 1024 bytes (`MAX_MSG_LEN`,
`_task_build_message` in slurmd/slurmstepd/io.c). A longer one goes in pieces, and what another node says at that moment
lands between them. So an answer is cut here, and put together again by node.
"""

from __future__ import annotations

import json
import re
from typing import Any

MARK = "HPCRAY-DOCTOR "
"""What a line of ours begins with; a site's profile may print too, and srun may put a label before."""
LINE = 512
"""Most bytes of a line, with its end: half of what Slurm keeps together."""
SENDING = "sending its report"

_PART = re.compile(r"(\S+) (\d+)/(\d+) (.*)", re.DOTALL)
_NUMBERS = 16


def cut(node: str, answer: dict[str, Any]) -> str:
    """The lines of an answer, ASCII.

    Args:
        node: who answers; no blanks.
        answer: what JSON can hold.
    """
    text = json.dumps(answer)
    room = LINE - len(MARK) - len(node.encode()) - _NUMBERS
    parts = [text[start : start + room] for start in range(0, len(text), room)]
    return "".join(f"{MARK}{node} {i}/{len(parts)} {part}\n" for i, part in enumerate(parts, 1))


class Answers:
    """Puts the nodes' lines together again, in whatever order those of different nodes come."""

    def __init__(self) -> None:
        self._parts: dict[str, list[str]] = {}

    def feed(self, line: str) -> dict[str, Any]:
        """What a line, without its end, brings.

        Returns:
            The answer that it completes, with "node"; for a part before the last, that the node is `SENDING`; {} for
            what is none of ours, or belongs to an answer of which a part was lost.
        """
        found = _PART.fullmatch(line.partition(MARK)[2])
        if found is None:
            return {}
        node, number, count, text = found[1], int(found[2]), int(found[3]), found[4]
        parts = self._parts.setdefault(node, [])
        if number == 1:
            parts.clear()
        if len(parts) != number - 1:
            return {}
        parts.append(text)
        if number < count:
            return {"node": node, "at": SENDING}
        try:
            answer = json.loads("".join(self._parts.pop(node)))
        except ValueError:
            return {}
        return {**answer, "node": node} if isinstance(answer, dict) else {}
