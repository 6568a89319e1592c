"""Fine-tunes a Llama of transformers on the bytes of a text: its own class and forward, run by cuts in place.

Example:
    python benchmarks/finetune_llama.py
    python benchmarks/finetune_llama.py --schedule zb-h1 --chunks 8
    python benchmarks/finetune_llama.py --pretrained ./llama --devices cuda:0 cuda:1
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed works, too

import splitpipe
from benchmarks.models import text
from splitpipe import schedule


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(prog="finetune_llama.py", description="Fine-tunes a Llama by cuts.")
    parser.add_argument("--pretrained", help="a folder of save_pretrained (default: a small one, of random weights)")
    parser.add_argument("--devices", nargs="+", default=["cpu", "cpu"], help="one a stage")
    parser.add_argument("--schedule", default="1f1b", choices=schedule.names())
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--save", help="a folder for save_pretrained")
    return parser


def made(options: argparse.Namespace) -> Any:
    """The model, which has 256 words at least: the bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if options.pretrained:
        return LlamaForCausalLM.from_pretrained(options.pretrained)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=options.width, intermediate_size=4 * options.width, num_attention_heads=4,
        num_hidden_layers=options.layers, max_position_embeddings=options.context,
    ))


@torch.no_grad()
def evaluate(model: nn.Module, held_out: torch.Tensor, options: argparse.Namespace) -> float:
    """The mean loss over what is held out, in nats a byte."""
    model.eval()
    whole = held_out[: len(held_out) // options.context * options.context].long().view(-1, options.context)
    losses = [model(input_ids=ids, labels=ids).loss.item() * len(ids) for ids in whole.split(options.batch)]
    model.train()
    return sum(losses) / len(whole)


def main(argv: list[str] | None = None) -> int:
    """Run the script on ``argv``; the exit code."""
    parser = make_parser()
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    try:
        model = made(options)
    except ImportError as error:
        parser.error(f'needs transformers 5: python -m pip install -e ".[clients]" ({error})')
    devices, count = options.devices, len(model.model.layers)
    stages = len(devices) * (2 if splitpipe.schedule.build(options.schedule, 2, 4).stages > 2 else 1)
    if count < stages:
        parser.error(f"{count} layers make no {stages} stages; give more --layers, or fewer --devices")
    cuts = [f"model.layers.{count * stage // stages}" for stage in range(1, stages)]
    splitpipe.attach(model, cuts, devices=devices, chunks=options.chunks, schedule=options.schedule)
    data, held_out = text.load()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    first = evaluate(model, held_out, options)
    print(f"cuts {' '.join(cuts)}; held-out {first:.4f} nats a byte", flush=True)
    for step in range(options.steps):
        ids, _ = text.batch(data, options.batch, options.context)
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 25 == 0:
            print(f"step {step + 1} of {options.steps}: loss {loss.item():.4f}", flush=True)
    print(f"held-out {first:.4f} -> {evaluate(model, held_out, options):.4f} nats a byte")
    if options.save:
        model.save_pretrained(options.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
