"""Each command that looks at a job, from the login host, through `srun --overlap`."""

from __future__ import annotations

import json
import shlex
import time

import pytest
from helpers.slurm import LOGIN, SRUN, Slurm
from helpers.terminal import Terminal
from helpers.watched_job import LOOKS, PROGRAM, debug_by_hand, look_around, missing, tokens

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def terminal(slurm: Slurm, *words: str) -> Terminal:
    """A command of hpcray that somebody types in a terminal of 80 columns on the login host."""
    line = slurm.cluster.command(LOGIN, [slurm.python, "-m", "hpcray.cli", *words], "root", str(slurm.place))
    return Terminal(line, slurm.environ())


@pytest.mark.timeout(600)
def test_every_command_works_from_the_login_host(slurm: Slurm) -> None:
    wrong: list[str] = []
    with slurm.start(*SRUN, "-N4", "-J", "watched", "python", "-m", "hpcray", slurm.write(PROGRAM)) as started:
        line = started.line()
        while not line.startswith("watch "):
            assert line, started.wait()
            line = started.line()
        ref, job = line.split()[1], slurm.said("squeue", "-h", "-n", "watched", "-o", "%A")

        def command(text: str) -> tuple[int, str, str]:
            words = shlex.split(text)
            named = [] if words[0] == "jobs" else ["--job", job]
            ended = slurm.run("python", "-m", "hpcray.cli", *words, *named)
            return ended.code, ended.out, ended.err

        for look in LOOKS:
            began = time.monotonic()
            code, out, err = command(look.words.replace("REF", ref))
            took = time.monotonic() - began - look.extra
            lacks = missing(look, out + err)
            if code != look.code or lacks:
                wrong.append(f"hpcray {look.words}: {code}, lacks {lacks}:\n{out}{err}")
            print(f"{took:6.2f} s  hpcray {look.words}")
            if not look.local:
                assert "through srun --overlap" in err
        for name in ("timeline.json", "p.svg"):
            assert (slurm.place / name).stat().st_size > 100, "files are written where the command was typed"
        sizes = [
            line.split()[-1]
            for line in command("metrics")[1].splitlines()
            if 'State="Pulled"' in line and "bytes" in line
        ]
        assert sizes and float(sizes[0]) > 3e6, "the head has read the blocks of the three other hosts"
        assert not wrong, "\n\n".join(wrong)
        with terminal(slurm, "top", "--interval", "0.5", "--job", job) as top:
            look_around(top)
            assert "through srun --overlap" in top.printed
        rows = json.loads(command("debug --json")[1])
        assert len(rows) == 2
        with terminal(slurm, "debug", "--job", job) as debug:
            debug_by_hand(debug, 8 if rows[0]["node"] == 0 else 7)
        (token,) = tokens(command("debug --json")[1])
        line = f"printf 'p number * 100\\nc\\n' | python -m hpcray.cli debug {token} --job {job}"
        with terminal(slurm, "top", "--interval", "0.5", "--job", job) as top:
            top.shows("stopping", "functions by total time")
            text = slurm.said("bash", "-c", line)
            assert "-> return number" in text and ("700" in text or "800" in text), text
            assert started.line() == "released [7, 8]"
            assert started.wait().code == 0
            top.ends()  # Slurm ends its step with the job
            assert top.left_alternate_screen, "the terminal is as it was"
    slurm.check()
