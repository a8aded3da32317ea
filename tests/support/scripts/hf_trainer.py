"""The Trainer of transformers on a BERT from a configuration: accumulation, warm-up, clipping, evaluation, resume."""

import argparse
import logging

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Sentences(Dataset):
    def __init__(self, count, language):
        random = np.random.default_rng(count)
        self.ids = torch.from_numpy(random.integers(1, 64, (count, 12)))
        self.labels = self.ids if language else (self.ids.sum(1) % 3)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        ids = self.ids[i]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": self.labels[i]}


class Printer(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        print({key: value for key, value in logs.items() if "runtime" not in key and "second" not in key})


def metrics(prediction):
    logits, labels = prediction
    return {"accuracy": float((logits.argmax(-1) == labels).mean()), "sum": float(logits.astype("float64").sum())}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--language", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--epochs", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    set_seed(7)
    if given.language:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=3, n_head=2))
    else:
        model = BertForSequenceClassification(
            BertConfig(
                vocab_size=64,
                hidden_size=16,
                num_hidden_layers=3,
                num_attention_heads=2,
                intermediate_size=32,
                max_position_embeddings=16,
                num_labels=3,
            )
        )
    arguments = TrainingArguments(
        output_dir="out",
        num_train_epochs=given.epochs,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        warmup_steps=2,
        weight_decay=0.01,
        max_grad_norm=0.5,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=2,
        use_cpu=True,
        bf16=given.bf16,
        report_to=[],
        disable_tqdm=True,
        seed=7,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Sentences(24, given.language),
        eval_dataset=Sentences(11, given.language),
        compute_metrics=metrics,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Printer)
    trainer.train(resume_from_checkpoint=given.resume or None)
    trainer.evaluate()
    print(f"{sum(p.double().sum().item() for p in trainer.model.parameters()):.17g}")
    torch.save(trainer.model.state_dict(), "trainer.pt")
