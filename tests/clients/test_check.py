"""``splitpipe.check`` is quiet on models of timm and diffusers, drop-in and scheduled."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import splitpipe

pytestmark = [pytest.mark.thorough, pytest.mark.draws, pytest.mark.filterwarnings("default"),
              pytest.mark.parametrize("schedule", [None, "1f1b"])]

#: Small models of timm: the arguments that make them so, and where they are cut.
VISION: dict[str, tuple[dict[str, Any], str]] = {
    "resnet18": ({}, "layer2"), "mobilenetv3_small_050": ({}, "blocks.1"), "efficientnet_b0": ({}, "blocks.1"),
    "convnext_atto": ({}, "stages.1"), "regnetx_002": ({}, "s2"),
    "vit_tiny_patch16_224": ({"img_size": 32, "patch_size": 8}, "blocks.1"),
    "deit_tiny_patch16_224": ({"img_size": 32}, "blocks.1"), "mixer_s32_224": ({"img_size": 64}, "blocks.1"),
    "swin_tiny_patch4_window7_224": ({"img_size": 56}, "layers.1"), "resmlp_12_224": ({"img_size": 32}, "blocks.1"),
}
UNET = {"in_channels": 3, "out_channels": 3, "layers_per_block": 1, "block_out_channels": (8, 16), "sample_size": 8,
        "attention_head_dim": 4, "norm_num_groups": 4}
#: Models of diffusers: their arguments, and where they are cut.
DIFFUSION: dict[str, tuple[dict[str, Any], str]] = {
    "UNet2DModel": ({
        **UNET, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}, "mid_block"),
    "UNet2DConditionModel": ({
        **UNET, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "cross_attention_dim": 8,
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}, "mid_block"),
    "DiTTransformer2DModel": ({
        "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 3, "num_layers": 3, "sample_size": 8,
        "num_embeds_ada_norm": 1000}, "transformer_blocks.1"),
    "AutoencoderKL": ({
        "block_out_channels": (8, 16), "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2, "norm_num_groups": 4}, "decoder"),
}


def verify(model: torch.nn.Module, cut: str, schedule: str | None, loss_fn: Any, target: Any, call: Any) -> None:
    own = {} if schedule is None else {"schedule": schedule, "loss_fn": loss_fn}
    pipeline = splitpipe.attach(model, cuts=[cut], devices=["cpu"] * 2, chunks=3, **own)
    found = splitpipe.check(pipeline, **call, **({} if schedule is None else {"target": target}))
    assert found, str(found)


@pytest.mark.parametrize("name", VISION)
def test_models_of_timm(name: str, schedule: str | None) -> None:
    timm = pytest.importorskip("timm")
    arguments, cut = VISION[name]
    size = arguments.get("img_size", 32)
    model = timm.create_model(name, num_classes=5, drop_rate=0.1, **arguments)
    verify(model, cut, schedule, F.cross_entropy, torch.randint(5, (6,)), {"x": torch.randn(6, 3, size, size)})


@pytest.mark.parametrize("name", DIFFUSION)
def test_models_of_diffusers(name: str, schedule: str | None) -> None:
    diffusers = pytest.importorskip("diffusers")
    arguments, cut = DIFFUSION[name]
    x, steps = torch.randn(6, 3, 8, 8), torch.randint(1000, (6,))
    calls = {"UNet2DModel": {"sample": x, "timestep": steps},
             "UNet2DConditionModel": {"sample": x, "timestep": steps, "encoder_hidden_states": torch.randn(6, 5, 8)},
             "DiTTransformer2DModel": {"hidden_states": x, "timestep": steps, "class_labels": steps % 9},
             "AutoencoderKL": {"sample": x}}
    model = getattr(diffusers, name)(**arguments)
    verify(model, cut, schedule, lambda output, target: F.mse_loss(output.sample, target), x, calls[name])
