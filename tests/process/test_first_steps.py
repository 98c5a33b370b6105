"""What a newcomer stumbles over is said in words: where it happens, by name, with what to do."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from engine import ray
from helpers.jobs import Job, embedded
from helpers.scripts import write

INIT = {"num_cpus": 1}
pytestmark = pytest.mark.usefixtures("session")


@ray.remote
def echo(*args, **kwargs):
    return args, kwargs


@ray.remote
def stream():
    yield 1


@ray.remote(num_returns=2)
def two():
    yield 1
    yield 2


@ray.remote
class Maker:
    def stream(self):
        yield 1

    @ray.method(num_returns="streaming")
    def declared(self):
        yield 1

    @ray.method(num_returns=2)
    def two(self):
        yield 1
        yield 2

    def leave(self):
        ray.actor.exit_actor()


def test_generators_stream_unless_their_returns_are_counted():
    maker = Maker.remote()
    for call in (stream.remote, maker.stream.remote, maker.declared.remote):
        assert [ray.get(ref) for ref in call()] == [1]
    with pytest.raises(ValueError, match="can only be used with generator functions"):
        ray.method(num_returns="streaming")(lambda self: 1)
    assert ray.get(two.remote()) == ray.get(maker.two.remote()) == [1, 2]


def test_options_of_a_method_are_checked():
    maker = Maker.remote()
    with pytest.raises(ValueError, match=r"\['num_return'\].*num_returns"):
        maker.two.options(num_return=2)
    with pytest.raises(ValueError, match="num_returns"):
        maker.two.options(num_returns=-1)
    with pytest.raises(ValueError, match="num_returns"):
        ray.method(num_returns=-1)(len)


def test_the_argument_that_does_not_pickle_is_named():
    with pytest.raises(TypeError, match=r"^Could not serialize the argument .*lock"):
        echo.remote([1], threading.Lock())
    with pytest.raises(TypeError, match=r"^Could not serialize the argument .*lock"):
        echo.remote([1], key=threading.Lock())


def test_submodules_are_there_without_an_import():
    maker = Maker.remote()
    with pytest.raises(ray.exceptions.ActorDiedError, match="exit_actor"):
        ray.get(maker.leave.remote())
    assert ray.util.list_named_actors() == []


def test_a_taken_name_says_what_to_do():
    keep = Maker.options(name="taken").remote()
    with pytest.raises(ValueError, match=r"The name taken \(namespace=.*already taken.*get_actor\('taken'"):
        Maker.options(name="taken").remote()
    del keep


ASK = """\
import hpcray as ray
ray.init(num_cpus=1)
print(len(ray.nodes()))
"""


def test_a_mistyped_variable_is_told(tmp_path: Path):
    with Job(embedded(write(tmp_path, ASK)), {"HPCRAY_START_TIMEOT": "3"}) as job:
        ended = job.wait()
    assert (ended.code, ended.out) == (0, "1\n")
    assert "HPCRAY_START_TIMEOT is no setting and has no effect; hint: HPCRAY_START_TIMEOUT?" in ended.err


def test_a_port_for_metrics_is_not_opened_and_that_is_told(tmp_path: Path):
    program = ASK.replace("num_cpus=1", "num_cpus=1, _metrics_export_port=8080")
    with Job(embedded(write(tmp_path, program))) as job:
        ended = job.wait()
    assert (
        ended.code == 0 and "_metrics_export_port has no effect: no port is opened; hint: hpcray metrics" in ended.err
    )


def test_one_node_of_an_allocation_of_several_is_told(tmp_path: Path):
    with Job(embedded(write(tmp_path, ASK)), {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4"}) as job:
        ended = job.wait()
    assert ended.code == 0 and "one node of the 4 that Slurm job 7 has; hint: hpcray-launch --srun" in ended.err


def test_what_init_cannot_give_when_it_joins_is_told(tmp_path: Path):
    with Job([sys.executable, "-m", "hpcray", str(write(tmp_path, ASK))]) as job:
        ended = job.wait()
    assert ended.code == 0 and "num_cpus has no effect" in ended.err


def test_resources_of_the_command_line_are_checked(tmp_path: Path):
    for text in ("[1]", "{1"):
        with Job([sys.executable, "-m", "hpcray", "--resources", text, str(write(tmp_path, ASK))]) as job:
            ended = job.wait()
        assert ended.code == 2 and "is not a JSON object; hint:" in ended.err
