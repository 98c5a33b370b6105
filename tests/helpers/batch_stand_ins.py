"""Programs that imitate the commands of PBS and Flux on this machine: a job is a process, its states are files.

Every call leaves its words, a line of JSON, in `calls` beside them.
"""

from __future__ import annotations

import sys
from pathlib import Path

_PROGRAM = """\
#!{python}
import json, os, signal, subprocess, sys
from pathlib import Path

here = Path({here!r})
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
with open(here / "calls", "a") as file:
    file.write(json.dumps([name, *words]) + "\\n")


def start(job, output, **variables):
    script = here / f"{{job}}.sh"
    script.write_text(sys.stdin.read())
    environ = {{**os.environ, **variables}}
    shell = f"/bin/sh {{script}}; echo $? > {{here}}/{{job}}.code"
    with open(output, "ab") as log:
        child = subprocess.Popen(["/bin/sh", "-c", shell], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                 env=environ, start_new_session=True, cwd="/")
    (here / f"{{job}}.pid").write_text(str(child.pid))


def end(jobs):
    for job in jobs:
        if not (here / f"{{job}}.pid").exists() or (here / f"{{job}}.code").exists():
            sys.exit(f"{{name}}: Unknown Job Id {{job}}")
        (here / f"{{job}}.code").write_text("271")
        os.killpg(int((here / f"{{job}}.pid").read_text()), signal.SIGTERM)


def option(flag):
    return words[words.index(flag) + 1]


def long_option(flag):
    return next(word.partition("=")[2] for word in words if word.startswith(flag + "="))


number = len(list(here.glob("*.pid"))) + 1
refusal = here / "refuse"
if name == "qsub":
    if refusal.exists():
        sys.exit("qsub: " + refusal.read_text())
    job = f"{{number}}.server"
    (here / "nodefile").write_text(os.uname().nodename + "\\n")
    start(job, option("-o"), PBS_JOBID=job, PBS_NODEFILE=str(here / "nodefile"), PBS_O_WORKDIR=os.getcwd(), NCPUS="2")
    print(job)
elif name == "qstat":
    for job in words[words.index("-f") + 1 :]:
        if not (here / f"{{job}}.pid").exists():
            print(f"qstat: Unknown Job Id {{job}}", file=sys.stderr)
            continue
        code = here / f"{{job}}.code"
        print(f"Job Id: {{job}}\\n    Job_Name = x\\n    job_state = {{'F' if code.exists() else 'R'}}")
        if code.exists():
            print(f"    Exit_status = {{code.read_text().strip()}}")
        print("    Resource_List.walltime = 01:00:00\\n    Variable_List = A=1,\\n\\tB=2\\n")
elif name == "qdel":
    end(words)
elif words[0] == "batch":
    if refusal.exists():
        sys.exit("flux-batch: ERROR: " + refusal.read_text())
    job = f"f{{number}}Ab"
    start(job, long_option("--output"), FLUX_URI=f"local://{{here}}/{{job}}")
    print(job)
elif words[0] == "jobs":
    for job in words[4:]:
        code = here / f"{{job}}.code"
        if (here / f"{{job}}.pid").exists():
            ends = {{"0": "COMPLETED", "271": "CANCELED"}}
            word = ends.get(code.read_text().strip(), "FAILED") if code.exists() else "RUN"
            print(f"\\u0192{{job[1:]}} {{word}}")
        else:
            print(f"flux-jobs: ERROR: unknown jobid {{job}}", file=sys.stderr)
elif words[0] == "cancel":
    end(words[1:])
elif words[0] == "getattr":
    print(1)
elif words[:2] == ["job", "timeleft"]:
    print(3600)
elif words[0] == "run":
    command = words[words.index("-n") + 2 :]
    rank = {{"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1", "FLUX_JOB_NNODES": "1", "FLUX_JOB_ID": "f9"}}
    os.execve(command[0], command, {{**os.environ, **rank}})
else:
    sys.exit(f"{{name}} {{words}}: the imitation cannot do that")
"""


def install(directory: Path, *names: str) -> Path:
    """Write the programs `qsub`, `qstat`, `qdel` or `flux` into `directory / "bin"`, which is returned."""
    programs = directory / "bin"
    programs.mkdir()
    for name in names:
        (programs / name).write_text(_PROGRAM.format(python=sys.executable, here=str(directory)))
        (programs / name).chmod(0o755)
    return programs
