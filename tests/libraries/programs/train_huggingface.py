"""Train: Hugging Face's Trainer over the workers' parts of a dataset, and Accelerate; the same losses in each run."""

import json
import os
import sys
import tempfile

import numpy as np
import ray
import ray.data
import ray.train
from ray.train import DataConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def model():
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def trainer(config):
    import torch
    from ray.train.collective import barrier
    from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer
    from transformers import Trainer, TrainerCallback, TrainingArguments

    torch.manual_seed(0)
    train = ray.train.get_dataset_shard("train").iter_torch_batches(batch_size=8)
    check = ray.train.get_dataset_shard("check").iter_torch_batches(batch_size=8)
    arguments = TrainingArguments(
        output_dir=config["output"], max_steps=12, save_steps=6, logging_steps=3, eval_steps=6, eval_strategy="steps",
        save_strategy="steps", report_to="none", use_cpu=True, disable_tqdm=True, seed=1, learning_rate=0.01,
    )  # fmt: skip
    losses = []

    class Keep(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **more):
            losses.append({name: round(value, 5) for name, value in logs.items() if name in ("loss", "eval_loss")})

        def on_step_begin(self, args, state, control, **more):
            if state.global_step == 8 and not os.path.exists(config["marker"]):
                barrier()
                if ray.train.get_context().get_world_rank() == 0:
                    open(config["marker"], "w").close()
                    raise RuntimeError("once")

    class Saved(TrainerCallback):
        """Rank 0 writes what all ranks report."""

        def on_save(self, args, state, control, **more):
            barrier()

    hugging = prepare_trainer(
        Trainer(
            model=model(), args=arguments, train_dataset=train, eval_dataset=check,
            callbacks=[Saved(), RayTrainReportCallback(), Keep()],
        )
    )  # fmt: skip
    checkpoint, resumed = ray.train.get_checkpoint(), None
    if checkpoint:
        with checkpoint.as_directory() as directory:
            resumed = sorted(os.listdir(directory))
            hugging.train(resume_from_checkpoint=os.path.join(directory, RayTrainReportCallback.CHECKPOINT_NAME))
    else:
        hugging.train()
    return {"losses": losses, "resumed": resumed, "step": hugging.state.global_step}


def accelerated(config):
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    loader = DataLoader(
        TensorDataset(x, 3 * x + 1), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(4)
    )
    linear = torch.nn.Linear(1, 1)
    linear, optimizer, loader = accelerator.prepare(linear, torch.optim.SGD(linear.parameters(), lr=0.3), loader)
    losses = []
    for _ in range(3):
        for features, labels in loader:
            loss = torch.nn.functional.mse_loss(linear(features), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        losses.append(round(accelerator.gather(loss.detach().reshape(1)).mean().item(), 6))
        ray.train.report({"loss": losses[-1]})
    return {"processes": accelerator.num_processes, "kind": str(accelerator.distributed_type), "losses": losses}


def main(storage):
    ray.init(num_cpus=4)
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    random = np.random.default_rng(0)
    rows = [{"input_ids": words, "labels": int(words[0] > 10)} for words in random.integers(0, 20, (160, 8))]

    def fit(loop, **options):
        config = {"output": os.path.join(storage, "output"), "marker": os.path.join(storage, "marker")}
        run = RunConfig(name=loop.__name__, storage_path=storage, failure_config=FailureConfig(max_failures=1))
        workers = ScalingConfig(num_workers=2)
        return TorchTrainer(loop, train_loop_config=config, scaling_config=workers, run_config=run, **options).fit()

    data = {"train": ray.data.from_items(rows[:128]), "check": ray.data.from_items(rows[128:])}
    # Each worker sees all rows: how rows are split between workers depends on who asks first.
    result = fit(trainer, datasets=data, dataset_config=DataConfig(datasets_to_split=[]))
    found = {"trainer": result.return_value, "step": result.metrics["step"]}
    found["accelerated"] = fit(accelerated).return_value
    print(json.dumps(found))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else folder)
