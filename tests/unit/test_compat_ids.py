"""Ids of `ray._raylet` that programs make themselves: Ray's sizes and layouts."""

from __future__ import annotations

from hpcray.compat.names.ids import ActorID, JobID, PlacementGroupID, TaskID


def test_ids_contain_those_of_what_they_belong_to():
    job = JobID.from_int(7)
    assert (job.hex(), job.int()) == ("07000000", 7)
    driver = TaskID.for_driver_task(job)
    assert driver.hex() == "f" * 40 + "07000000" and driver.job_id() == job
    actor = ActorID.of(job, driver, 1)
    assert len(actor) == ActorID.size() and actor.job_id == job and actor != ActorID.of(job, driver, 2)
    assert actor == ActorID.of(job, driver, 1)
    creation, call = TaskID.for_actor_creation_task(actor), TaskID.for_actor_task(job, driver, 3, actor)
    assert creation.actor_id() == call.actor_id() == actor and call.job_id() == job and creation != call
    for task in (TaskID.for_fake_task(job), TaskID.for_normal_task(job, driver, 1)):
        assert len(task) == TaskID.size() and task.job_id() == job and task.actor_id().hex()[:24] == "f" * 24
    assert PlacementGroupID.of(job).hex().endswith("07000000")
    assert TaskID.from_hex(call.hex()) == call and not call.is_nil() and TaskID.nil().is_nil()
