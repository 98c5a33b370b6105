"""verl's own PPO trainer, end to end on CPUs: a tiny model of random weights, made-up prompts, a reward function.

    python use_verl_trainer.py [grpo|gae] [v1|v0]

gae: PPO with a critic, which verl loads with FlashAttention only; v0: the trainer before TransferQueue.
Prints the losses of each step, in one line of JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

STEPS, RANKS = 3, 2
SHOWN = (
    "actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm", "critic/vf_loss",
    "critic/grad_norm", "critic/score/mean", "critic/advantages/mean", "response_length/mean",
)  # fmt: skip
LETTERS = "ĊĠwhatis+0123456789"  # Ċ and Ġ: how Qwen's tokenizer writes a new line and a space


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, object]) -> float:
    """The reward: how often the answer has the digit that the truth asks for, and a little for its length."""
    return solution_str.count(ground_truth) + len(solution_str) / 200


def make_model(path: Path) -> None:
    """A language model of two layers, and its tokenizer."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocabulary = {token: index for index, token in enumerate(["<pad>", "<|im_end|>", "<|im_start|>", *LETTERS])}
    made = Tokenizer(models.BPE(vocabulary, []))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(path)


def make_prompts(path: Path, count: int) -> None:
    import pandas

    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"what is {i % 10}+{i // 10}"}],
            "reward_model": {"style": "rule", "ground_truth": str((i % 10 + i // 10) % 10)},
            "extra_info": {"index": i},
        }
        for i in range(count)
    ]
    pandas.DataFrame(rows).to_parquet(path)


def settings(made: Path, estimator: str, trainer: str) -> list[str]:
    """What a user would write after `python -m verl.trainer.main_ppo`."""
    fsdp = {"mixed_precision": "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"}
    model = {"path": made / "model", "use_remove_padding": False, "enable_gradient_checkpointing": False}
    pairs = {
        "algorithm.adv_estimator": estimator,
        "data.train_files": made / "train.parquet",
        "data.val_files": made / "test.parquet",
        "data.train_batch_size": 8,
        "data.max_prompt_length": 24,
        "data.max_response_length": 12,
        "data.seed": 7,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.hybrid_engine": True,
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.actor.optim.lr": 0.003,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 8,
        "actor_rollout_ref.actor.use_kl_loss": estimator == "grpo",
        "actor_rollout_ref.actor.use_torch_compile": False,
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
        "actor_rollout_ref.ref.strategy": "fsdp2",
        "actor_rollout_ref.ref.use_torch_compile": False,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 8,
        "actor_rollout_ref.rollout.name": "transformers",
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.seed": 5,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": RANKS,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 8,
        "actor_rollout_ref.rollout.agent.num_workers": 1,
        "critic.strategy": "fsdp2",
        "critic.optim.lr": 0.003,
        "critic.ppo_micro_batch_size_per_gpu": 8,
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": Path(__file__).resolve(),
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": RANKS,
        "trainer.nnodes": 1,
        "trainer.logger": "[file]",
        "trainer.total_training_steps": STEPS,
        "trainer.total_epochs": 100,
        "trainer.test_freq": STEPS,
        "trainer.save_freq": STEPS,
        "trainer.default_local_dir": made / "checkpoints",
        "trainer.use_v1": trainer == "v1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "ray_kwargs.ray_init.num_cpus": 10,
        "+ray_kwargs.ray_init.num_gpus": RANKS,
        "hydra.run.dir": made / "hydra",
    }
    for part in ("actor_rollout_ref.model", "critic.model"):
        pairs |= {f"{part}.{key}": value for key, value in model.items()}
        pairs[f"+{part}.override_config.attn_implementation"] = "eager"
    for part in ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp"):
        pairs |= {f"+{part}.{key}": value for key, value in fsdp.items()}
    return [f"{key}={value}" for key, value in pairs.items()]


def main() -> None:
    estimator, trainer = (*sys.argv[1:], *("grpo", "v1")[len(sys.argv) - 1 :])
    here = str(Path(__file__).resolve().parent)
    made = Path(tempfile.mkdtemp(prefix="verl-"))
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")])),
        "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # its FSDP engine is registered for GPUs; nothing in it needs one
        "VERL_FILE_LOGGER_PATH": str(made / "metrics.jsonl"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    sys.path.insert(0, here)
    import ray

    make_model(made / "model")
    make_prompts(made / "train.parquet", 32)
    make_prompts(made / "test.parquet", 8)
    from verl.trainer.main_ppo import main as train

    sys.argv[1:] = settings(made, estimator, trainer)
    train()
    ray.shutdown()
    steps = [json.loads(line)["data"] for line in (made / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(made)
    steps = [{name: value for name, value in step.items() if name.startswith(SHOWN)} for step in steps]
    print(json.dumps({"ray": ray.__file__, "steps": [step for step in steps if step]}))


if __name__ == "__main__":
    main()
