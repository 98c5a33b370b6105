"""The variables that name a job, set and restored."""

from __future__ import annotations

from hpcray.platform.launcher_environment import JobVariables, outside_of_job


def test_what_the_program_sets_itself_stays() -> None:
    environ = {"HPCRAY_ADDRESS": "/outer"}
    variables = JobVariables(environ, "/own")
    assert environ == {"HPCRAY_ADDRESS": "/outer", "HPCRAY_SESSION": "/own"}
    environ["HPCRAY_ADDRESS"] = "/chosen"
    variables.restore()
    assert environ == {"HPCRAY_ADDRESS": "/chosen"}


def test_the_programs_of_a_launcher_give_their_job_to_children() -> None:
    environ: dict[str, str] = {}
    variables = JobVariables(environ, "/own", for_children=True)
    assert environ == {"HPCRAY_ADDRESS": "/own", "HPCRAY_SESSION": "/own"}
    assert outside_of_job({**environ, "PATH": "/bin"}) == {"PATH": "/bin"}  # a batch job is none of theirs
    variables.restore()
    assert environ == {}
