"""Train: the Trainer of Hugging Face transformers in two workers, with reports and checkpoints."""

import json
import tempfile

import ray
import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def loop(config):
    import torch
    from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    )

    class Words(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            words = torch.randint(0, 20, (8,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": words, "labels": int(words[0] > 10)}

    arguments = TrainingArguments(
        output_dir=config["output"], per_device_train_batch_size=8, num_train_epochs=2, save_strategy="epoch",
        logging_strategy="epoch", report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Words())
    trainer.add_callback(RayTrainReportCallback())
    prepare_trainer(trainer).train()


def main():
    ray.init(num_cpus=4)
    with tempfile.TemporaryDirectory() as storage, tempfile.TemporaryDirectory() as output:
        trainer = TorchTrainer(
            loop, train_loop_config={"output": output}, scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name="words", storage_path=storage),
        )  # fmt: skip
        result = trainer.fit()
        with result.checkpoint.as_directory() as directory:
            import os

            files = os.listdir(os.path.join(directory, "checkpoint"))
    print(
        json.dumps({"epoch": result.metrics["epoch"], "step": result.metrics["step"], "model": "config.json" in files})
    )


if __name__ == "__main__":
    main()
