"""The programs of examples/gallery, each by its own job script, in a small size. Each checks its own result."""

from __future__ import annotations

import json
import re

import pytest
from helpers.jobs import ROOT
from helpers.slurm import Slurm

pytest.importorskip("gymnasium")
pytest.importorskip("nbclient")
pytest.importorskip("sklearn")
pytest.importorskip("submitit")
pytestmark = [pytest.mark.slurm, pytest.mark.slow]

GALLERY = sorted(path.parent.name for path in (ROOT / "examples" / "gallery").glob("*/job.sbatch"))
ENVIRON = {"OMP_NUM_THREADS": "1"}  # the nodes of the cluster share the processors of this machine


def submit(slurm: Slurm, name: str, *arguments: object, **environ: str) -> str:
    (slurm.place / "examples").symlink_to(slurm.source / "examples")
    environ = {**ENVIRON, "HOME": str(slurm.place), "TMPDIR": "/tmp", **environ}
    return slurm.sbatch(f"examples/gallery/{name}/job.sbatch", *arguments, environ=environ)


def check(slurm: Slurm, job: str) -> None:
    shown = slurm.complete(job, timeout=300)
    assert re.search(r"^checked$", shown, re.MULTILINE), shown


@pytest.mark.parametrize("name", [name for name in GALLERY if name not in ("nbody", "notebook")])
def test_a_program_runs_as_its_job_script_starts_it(name: str, slurm: Slurm) -> None:
    check(slurm, submit(slurm, name, "--quick"))
    left = (path.name for path in slurm.place.iterdir() if path.suffix != ".out")
    assert not [one for one in left if one.startswith(("sort-", "frames-"))]


def test_an_ensemble_that_is_interrupted_ends_as_if_it_were_not(slurm: Slurm) -> None:
    job = submit(slurm, "nbody", "--quick")
    slurm.wait_output(job, "run 0 begins at steps [0, 0, 0, 0]")
    slurm.said("scancel", "-s", "USR1", job)
    slurm.wait(lambda: slurm.job(job)["Restarts"] == "1", f"the next run of job {job}")
    check(slurm, job)
    begun = re.search(r"run 1 begins at steps \[(.+)\]", slurm.output())
    assert begun is not None and all(int(steps) > 0 for steps in begun[1].split(", ")), slurm.output()


def test_a_notebook_submits_a_job_waits_for_it_and_draws_its_result(slurm: Slurm) -> None:
    job = submit(slurm, "notebook", RESAMPLES="2000", PICTURE=str(slurm.place / "coefficients.png"))
    slurm.complete(job, timeout=300)
    cells = json.loads((slurm.place / "bootstrap-executed.ipynb").read_text())["cells"]
    shown = "".join("".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", []))
    assert {"2 nodes", "2000 fits", "checked"} <= set(re.findall(r"^.*?(\d+ \w+|checked)$", shown, re.MULTILINE)), shown
    assert (slurm.place / "coefficients.png").stat().st_size > 5_000
    assert not (slurm.source / "examples" / "gallery" / "notebook" / ".hpcray-jobs").exists()


def test_there_are_eight_programs_each_with_a_picture_and_a_page() -> None:
    assert len(GALLERY) == 8
    table = (ROOT / "examples" / "gallery" / "README.md").read_text()
    for name in GALLERY:
        directory = ROOT / "examples" / "gallery" / name
        (picture,) = directory.glob("*.png")
        assert picture.stat().st_size <= 80_000, picture
        page = (directory / "README.md").read_text()
        assert picture.name in page and "job.sbatch" in page
        times = re.findall(r"^\| (.+?) \|.* ([\d.]+) s \|$", page, re.MULTILINE)
        beside = "`mpirun` by itself" if name == "ising" else "Ray 2.60"
        assert [engine for engine, _ in times] == ["hpcray", beside], name
        row_of = rf"^\| \[{name}\].* \| ([\d.]+) s \| {beside}: ([\d.]+) s \| ([\d.]+) \|$"
        (row,) = re.findall(row_of, table, re.MULTILINE)
        assert list(row[:2]) == [seconds for _, seconds in times], f"{name}: its page says otherwise"
        assert float(row[2]) == pytest.approx(float(row[1]) / float(row[0]), abs=0.1), name
