"""PyTorch's CPU tensors between processes: whole, shared where they were shared, the reader's own to write to."""

from __future__ import annotations

from typing import Any

import pytest
from engine import hpcray_only, ray

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("session")
INIT = {"num_cpus": 2, "object_store_memory": 256 << 20}
LENGTH = 4 << 20


@ray.remote
class Learner:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
        self.model[1].weight = self.model[0].weight

    def weights(self) -> dict[str, Any]:
        return self.model.state_dict()

    def load(self, weights: dict[str, Any]) -> float:
        self.model.load_state_dict(weights)
        return float(self.model(torch.ones(512)).sum())


def test_weights_go_from_actor_to_actor() -> None:
    first, second = Learner.remote(), Learner.remote()
    weights = first.weights.remote()
    ours, theirs = ray.get([first.load.remote(weights), second.load.remote(weights)])
    assert ours == theirs
    read = ray.get(weights)
    assert read["0.weight"].data_ptr() == read["1.weight"].data_ptr(), "tied weights stay tied"


@ray.remote
def doubled(tensor: Any) -> Any:
    tensor *= 2  # its own
    return tensor


def test_a_tensor_as_an_argument_is_the_task_s_own() -> None:
    made = torch.arange(LENGTH, dtype=torch.float32)
    for argument in (made, ray.put(made)):
        assert torch.equal(ray.get(doubled.remote(argument)), made * 2)
    assert made[3] == 3 and ray.get(ray.put(made))[3] == 3


def test_what_is_read_belongs_to_its_reader() -> None:
    ref = ray.put({"batch": torch.zeros(LENGTH), "half": torch.zeros(LENGTH)[: LENGTH // 2]})
    first, second = ray.get([ref, ref])
    first["batch"].add_(1)
    first["batch"].resize_(2 * LENGTH)
    assert second["batch"].sum() == 0 and ray.get(ref)["batch"].sum() == 0


@hpcray_only
def test_a_view_of_a_large_tensor_takes_the_room_of_the_view() -> None:
    from hpcray.util.state import list_objects

    large = torch.zeros(64 << 20, dtype=torch.uint8)
    ref = ray.put(large[1000 : 1000 + (1 << 20)])
    (entry,) = [each for each in list_objects(limit=1000) if each.object_id == ref.hex()]
    assert 1 << 20 <= entry.object_size < 2 << 20
    assert ray.get(ref).sum() == 0
