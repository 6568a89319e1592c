"""Fine-tuning with LoRA and transformers' Trainer: one line makes the model a pipeline, the rest is as without it.

    python docs/examples/lora_trainer.py
    python docs/examples/lora_trainer.py --out lora    # keeps the adapters in this folder

The model is tiny and has random weights. Its adapters learn to count: each row starts anywhere and goes up by one.
It needs ``pip install transformers peft accelerate``. Without GPUs it runs on two CPU stages and warns.

On GPUs with a real model: in `make`, load the model with ``from_pretrained``; its weights may be quantised
(docs/clients.md). Replace `Counting` by your data set. ``splitpipe.attach`` uses all GPUs, or those that the model was
loaded on with ``device_map="auto"``. Instead of accumulating gradients, make ``per_device_train_batch_size`` the whole
batch: splitpipe divides it into microbatches, ``attach(model, chunks=16)`` into 16.
"""
from __future__ import annotations

import argparse
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import splitpipe

WORDS, LENGTH = 64, 16


def make() -> LlamaForCausalLM:
    """A Llama of four blocks, with the same random weights in every call."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        initializer_range=0.1))


class Counting(Dataset[dict[str, Tensor]]):
    """Rows that count upwards. The labels are the same numbers, since the model shifts them."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        ids = (row + torch.arange(LENGTH)) % WORDS
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", help="a folder for the adapters (default: a temporary one)")
    options = parser.parse_args()

    model = get_peft_model(make(), LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.print_trainable_parameters()
    splitpipe.attach(model)  # This is the line.

    with tempfile.TemporaryDirectory() as temporary:
        out = options.out or temporary
        arguments = TrainingArguments(
            out, max_steps=options.steps, per_device_train_batch_size=32, learning_rate=1e-2, logging_steps=1,
            save_strategy="no", report_to=[], disable_tqdm=True)
        trainer = Trainer(model, arguments, train_dataset=Counting())
        trainer.train()
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")

        trainer.save_model(out)  # Only the adapters, in PEFT's format: they fit the plain model, too.
        plain = PeftModel.from_pretrained(make(), out).eval()
    ids = torch.stack([Counting()[row]["input_ids"] for row in range(WORDS)])
    with torch.no_grad():
        right = plain(input_ids=ids).logits[:, :-1].argmax(-1) == ids[:, 1:]
    print(f"the plain model with the saved adapters continues {right.float().mean():.0%} of the numbers correctly")


if __name__ == "__main__":
    main()
