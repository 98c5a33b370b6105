"""What verl lacks to train on CPUs, through its own plug-ins: a platform, and rollouts by transformers.

verl loads this module in each of its processes where VERL_USE_EXTERNAL_MODULES names it, with VERL_PLATFORM=cpu. Its
trainer, worker groups, FSDP engine, agent loops and reward loops are its own; vLLM and SGLang, which generate text
there, need GPUs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import types
import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any

import ray
import torch
import torch.distributed
import transformers
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class _Device(types.ModuleType):
    """torch.cpu, with those functions of torch.cuda that verl calls."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def empty_cache(self) -> None: ...

    def ipc_collect(self) -> None: ...

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return 0, 0

    def _no_bytes(self, *_: Any) -> int:
        return 0

    memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = _no_bytes

    def get_device_name(self, *_: Any) -> str:
        return "cpu"

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    """Processes compute on CPUs; their places in a resource pool are called GPUs, and declared by init(num_gpus=…)."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _Device("torch.cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


_init_process_group = torch.distributed.init_process_group


@functools.wraps(_init_process_group)
def _with_one_backend(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """verl asks for a backend for CPUs, and one for the platform's device, which is the CPU too."""
    _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)


torch.distributed.init_process_group = _with_one_backend
torch.Tensor.pin_memory = lambda self, *_: self  # of the reference model; there is no device that could read it

from verl.workers.rollout import base, replica  # noqa: E402 — they ask for the platform


class Server:
    """Generates text with the weights that the trainer sent last.

    A prompt's n-th answer depends on these, on the seed and on n alone.
    """

    def __init__(self, path: str, rollout: Any) -> None:
        torch.set_num_threads(1)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
        self._eos, self._rollout = self._model.config.eos_token_id, rollout
        self._asked = Counter[tuple[int, ...]]()
        self._steps: int | None = None

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **_: Any
    ) -> replica.TokenOutput:
        prompt = tuple(int(token) for token in prompt_ids)
        seed = zlib.crc32(repr((prompt, self._asked[prompt], self._steps, self._rollout.seed)).encode())
        self._asked[prompt] += 1
        source = torch.Generator().manual_seed(seed)
        temperature = sampling_params["temperature"]
        tokens, log_probs = list(prompt), list[float]()
        limit = len(prompt) + sampling_params.get("max_tokens", self._rollout.response_length)
        with torch.no_grad():
            while len(tokens) < limit and (len(tokens) == len(prompt) or tokens[-1] != self._eos):
                scores = self._model(torch.tensor([tokens])).logits[0, -1].float()
                likely = torch.log_softmax(scores / (temperature or 1.0), -1)
                chosen = torch.multinomial(likely.exp(), 1, generator=source) if temperature else likely.argmax()
                tokens.append(int(chosen))
                log_probs.append(float(likely[tokens[-1]]))
        return replica.TokenOutput(
            token_ids=tokens[len(prompt) :],
            log_probs=log_probs,
            stop_reason="completed",
            extra_fields={"global_steps": self._steps},
        )

    async def update_weights(self, weights: dict[str, torch.Tensor], steps: int | None) -> None:
        self._model.load_state_dict(weights)
        self._steps = steps
        self._asked.clear()

    async def ignore(self, *_: Any, **__: Any) -> None: ...

    wake_up = sleep = clear_kv_cache = abort_all_requests = resume_generation = ignore


class Adapter(base.BaseRollout):
    """In a process of the trainer: sends the server of its replica the weights."""

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        whole = {name: tensor.detach().clone() for name, tensor in weights}  # on all ranks: shards are gathered
        rank, ranks = int(os.environ["RANK"]), self.config.tensor_model_parallel_size
        if rank % ranks == 0:
            await ray.get_actor(f"transformers_server_{rank // ranks}").update_weights.remote(whole, global_steps)


class Replica(replica.RolloutReplica):
    """One server, on the node of the first trainer process of its replica."""

    async def launch_servers(self) -> None:
        node = await self.workers[0].__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id())
        name = f"transformers_server_{self.replica_rank}"
        server = ray.remote(Server).options(
            name=name,
            max_concurrency=self.max_concurrency,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        self._server_handle = server.remote(self.model_config.path, self.config)
        assert await self._server_handle.node.remote() == node
        self.servers, self._server_address = [self._server_handle], name


replica.RolloutReplicaRegistry.register("transformers", lambda: Replica)
base._ROLLOUT_REGISTRY["transformers", "async"] = "verl_on_cpu.Adapter"
