"""Your own training loop around a Llama of transformers: a schedule, gradient clipping, AdamW, and a checkpoint.

    python docs/examples/own_loop.py
    python docs/examples/own_loop.py --checkpoint counting.pt    # saves there, and resumes from there the next time

The model is tiny and learns to count: each row starts anywhere and goes up in steps of 1, 2, 3 or 4. It needs
``pip install transformers``. Without GPUs it runs on two CPU stages and warns.

On GPUs with a real model: in `make`, load the model with ``from_pretrained``, and return your own data from `batch`.
``splitpipe.attach`` uses all GPUs (the tiny model has blocks for four); ``devices=[0, 1]`` names them. docs/tuning.md
explains how to choose ``chunks`` and ``schedule``. For bfloat16, call the model under ``torch.autocast``.
"""
from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import splitpipe

WORDS, LENGTH, ROWS = 64, 16, 32


def make() -> LlamaForCausalLM:
    """A Llama of four blocks with random weights."""
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4))


def batch(step: int) -> dict[str, Tensor]:
    """The arguments for the model. They can stay on the CPU: splitpipe copies them to the stages that use them."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(WORDS, (ROWS, 1), generator=generator)
    stride = torch.randint(1, 5, (ROWS, 1), generator=generator)
    ids = (start + stride * torch.arange(LENGTH)) % WORDS
    return {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", type=Path, help="where to save, and to resume from if it exists")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = make()
    model.train()  # from_pretrained returns a model in eval mode.
    # With a sample, weights move to the devices of their stages now rather than in the first call. The optimizer
    # loads its state to where the weights are.
    splitpipe.attach(model, schedule="zb-h1", chunks=4, sample=batch(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    done = 0
    if options.checkpoint and options.checkpoint.exists():
        saved = torch.load(options.checkpoint, map_location="cpu", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]

    losses = []
    for step in range(done + 1, done + options.steps + 1):
        optimizer.zero_grad()
        loss = model(**batch(step)).loss  # Runs forward and backward of all microbatches, as the schedule orders them.
        loss.backward()  # Hands the gradients over.
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")

    state = model.state_dict()  # It has the names of the plain model, so either can load what the other saved.
    if options.checkpoint:
        torch.save({"model": state, "optimizer": optimizer.state_dict(), "step": step}, options.checkpoint)
    plain = make()
    plain.load_state_dict(state)
    with torch.no_grad():
        ours, theirs = (each.eval()(**batch(0)).loss.item() for each in (model, plain))
    print(f"loss of one more batch: {ours:.4f}; that of the plain model: {theirs:.4f}")


if __name__ == "__main__":
    main()
