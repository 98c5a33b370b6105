"""slurm/apptainer.sbatch: with a stand-in for Apptainer everywhere, with itself where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess

import programs
import pytest
from helpers.slurm import Slurm

pytestmark = pytest.mark.slurm
# Runs the command on the host, and says what it would have run it in.
STAND_IN = """\
#!/bin/bash
[ "$1" = exec ] || exit 99
[ -d "${APPTAINER_BIND##*,}" ] || exit 98
[ "$PMIX_RANK" = 0 ] && echo "image $2 binds ${APPTAINER_BIND%%,*}"
shift 2
exec "$@"
"""


def test_every_rank_enters_the_container(slurm: Slurm) -> None:
    script = slurm.write(programs.HOSTS)
    slurm.write(STAND_IN, "apptainer")
    environ = {"PATH": f"{slurm.place}:{slurm.environ()['PATH']}", "APPTAINER_BIND": "/data"}
    batch = slurm.source / "slurm" / "apptainer.sbatch"
    job = slurm.sbatch("-N2", batch, "some image.sif", script, "an argument", environ=environ)
    assert slurm.finish(job)["JobState"] == "COMPLETED", slurm.output()
    shown = slurm.output()
    assert "image some image.sif binds /data\n" in shown
    assert "hosts n1 n2\n" in shown
    assert " an argument\n" in shown


def test_a_missing_apptainer_is_reported_with_a_hint(slurm: Slurm) -> None:
    if shutil.which("apptainer"):
        pytest.skip("apptainer is here")
    job = slurm.sbatch("-N1", slurm.source / "slurm" / "apptainer.sbatch", "image.sif", "program.py")
    assert slurm.finish(job)["ExitCode"] == "127:0"
    assert "hint: module load apptainer" in slurm.output()


@pytest.mark.skipif(shutil.which("apptainer") is None, reason="no apptainer")
def test_a_program_runs_in_a_container_on_every_node(slurm: Slurm) -> None:
    """The image is a directory with nothing in it: the machine's own programs are bound into it."""
    image = slurm.place / "image"
    for name in ("bin", "lib", "lib64", "usr", "etc", "run", "tmp", "dev", "proc", "sys", "root"):
        (image / name).mkdir(parents=True)
    if subprocess.run(["apptainer", "exec", "-B", "/usr,/bin,/lib,/lib64", image, "true"]).returncode:
        pytest.skip("apptainer does not run here")
    script = slurm.write(programs.HOSTS)
    binds = [name for name in ("/usr", "/bin", "/lib", "/lib64", "/run") if os.path.exists(name)]
    environ = {"APPTAINER_BIND": ",".join(binds)}
    job = slurm.sbatch("-N2", slurm.source / "slurm" / "apptainer.sbatch", image, script, environ=environ)
    assert slurm.finish(job)["JobState"] == "COMPLETED", slurm.output()
    assert "hosts n1 n2\n" in slurm.output()
