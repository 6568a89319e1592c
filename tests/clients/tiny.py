"""Models of transformers, tiny and with random weights: each with its cuts and a batch of seven rows."""
from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"

ROWS, WORDS, LENGTH, IGNORED = 7, 64, 8, -100
#: The arguments that these configs share.
SMALL = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
DECODER = {**SMALL, "num_key_value_heads": 2}
ENCODER = {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VISION = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16,
    "patch_size": 4,
}
GPT2 = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0}
T5 = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0,
      "decoder_start_token_id": 0}
BART = {"vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0,
        "decoder_start_token_id": 2, "pad_token_id": 0}


Batch = dict[str, Tensor]


def words() -> Tensor:
    return torch.randint(4, WORDS - 4, (ROWS, LENGTH))


def some(labels: Tensor, even: bool) -> Tensor:
    """Labels of which each row ignores two; else rows ignore different numbers, and the second microbatch all."""
    if even:
        labels[:, 3:5] = IGNORED
    else:
        labels[0, 2:] = IGNORED
        labels[2, 5:] = IGNORED
        labels[3:6] = IGNORED
        labels[6, 1:4] = IGNORED
    return labels


def classes(even: bool, number: int = 3) -> Tensor:
    labels = torch.randint(number, (ROWS,))
    if not even:
        labels[[1, 3, 4, 5]] = IGNORED
    return labels


def text(even: bool = True) -> Batch:
    """Words, one row shorter than others."""
    ids = words()
    mask = torch.ones_like(ids)
    mask[2, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": some(ids.clone(), even)}


def tagged(even: bool = True) -> Batch:
    return {"input_ids": words(), "labels": some(torch.randint(3, (ROWS, LENGTH)), even)}


def classified(even: bool = True) -> Batch:
    return {"input_ids": words(), "labels": classes(even)}


def numbers(even: bool = True) -> Batch:
    return {"input_ids": words(), "labels": torch.randn(ROWS).double()}


def several(even: bool = True) -> Batch:
    return {"input_ids": words(), "labels": torch.randint(2, (ROWS, 3)).double()}


def answers(even: bool = True) -> Batch:
    """Where answers begin and end; a place behind the last word is ignored."""
    start, end = torch.randint(LENGTH, (2, ROWS))
    if not even:
        start[[0, 3, 4, 5]] = LENGTH + 1
        end[[1, 2]] = LENGTH + 1
    return {"input_ids": words(), "start_positions": start, "end_positions": end}


def sentences(even: bool = True) -> Batch:
    return {**text(even), "next_sentence_label": torch.randint(2, (ROWS,))}


def pixels(size: int = 16) -> Tensor:
    return torch.randn(ROWS, 3, size, size).double()


def images(even: bool = True, size: int = 16) -> Batch:
    """Pictures of two classes."""
    return {"pixel_values": pixels(size), "labels": classes(even, 2)}


def segmented(even: bool = True) -> Batch:
    """Pictures with a class for each point."""
    return {"pixel_values": pixels(32), "labels": torch.randint(2, (ROWS, 32, 32))}


def patches(even: bool = True) -> Batch:
    return {"pixel_values": pixels(), "noise": torch.rand(ROWS, 16).double()}


def spectra(even: bool = True) -> Batch:
    """Sounds, and words."""
    return {"input_features": torch.randn(ROWS, 8, 32).double(), "labels": torch.randint(4, WORDS - 4, (ROWS, 5))}


def waves(even: bool = True) -> Batch:
    """Sounds of two classes."""
    return {"input_values": torch.randn(ROWS, 400).double(), "labels": torch.randint(2, (ROWS,))}


def sounds(even: bool = True) -> Batch:
    """Sounds, and letters."""
    labels = torch.randint(1, 31, (ROWS, 5))
    labels[::2, 2:] = IGNORED
    labels[4 if even else slice(3, 6)] = IGNORED
    return {"input_values": torch.randn(ROWS, 400).double(), "labels": labels}


class Tiny(NamedTuple):
    """A class of transformers, the arguments of its config, where it is cut, and what it is called with.

    The batch is one in which all microbatches ignore as many labels as each other, in proportion to their rows, or not.
    """

    name: str
    config: str
    arguments: dict[str, Any]
    cuts: list[str]
    batch: Callable[..., Batch] = text
    terms: int = 1  # Of its loss, each a mean over labels of its own number.

    def made(self, seed: int = 0, **more: Any) -> nn.Module:
        """The model, in float64, to be trained."""
        transformers: Any = pytest.importorskip("transformers", minversion="5")
        torch.manual_seed(seed)
        config = getattr(transformers, self.config)(**{**self.arguments, **more})
        config._experts_implementation = "eager"  # The other ones know no float64.
        model: nn.Module = getattr(transformers, self.name)(config)
        model.double().train()
        for part in model.modules():
            if isinstance(part, nn.BatchNorm2d):  # In training it normalises each microbatch by itself.
                part.eval()
        return model


def at(path: str, *numbers: int) -> list[str]:
    """The names of some of a list's modules."""
    return [f"{path}.{number}" for number in numbers or (1, 3)]


#: Those that run in all ways.
FOUR = {
    "llama": Tiny("LlamaForCausalLM", "LlamaConfig", DECODER, at("model.layers")),
    "gpt2": Tiny("GPT2LMHeadModel", "GPT2Config", GPT2, at("transformer.h")),
    "bert": Tiny("BertForMaskedLM", "BertConfig", ENCODER, at("bert.encoder.layer")),
    "t5": Tiny("T5ForConditionalGeneration", "T5Config", T5, ["encoder.block.1", "decoder.block.0", "decoder.block.1"]),
}

#: What each of these does that others don't.
MORE = {
    # Sliding windows in every second block: two masks, and two rotary embeddings, made once.
    "gemma3": Tiny(
        "Gemma3ForCausalLM", "Gemma3TextConfig", {**DECODER, "head_dim": 8, "sliding_window": 4}, at("model.layers")
    ),
    # Experts: rows go to modules by number.
    "mixtral": Tiny(
        "MixtralForCausalLM", "MixtralConfig", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
        at("model.layers"),
    ),
    # Later blocks use keys and values of earlier ones, handed on in a dict of its own class.
    "gemma3n": Tiny("Gemma3nForCausalLM", "Gemma3nTextConfig", {
        **DECODER, "head_dim": 8, "sliding_window": 4, "vocab_size_per_layer_input": WORDS,
        "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "laurel_rank": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.0] * 4,
    }, at("model.layers")),
    # One block is called several times, in later stages, too.
    "albert": Tiny("AlbertForMaskedLM", "AlbertConfig", {**ENCODER, "embedding_size": 16, "num_hidden_groups": 2},
                   at("albert.encoder.albert_layer_groups", 1)),
    # Positions between words are an embedding that all blocks use.
    "deberta": Tiny("DebertaV2ForMaskedLM", "DebertaV2Config", {
        **ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 16,
        "type_vocab_size": 0, "position_biased_input": False,
    }, at("deberta.encoder.layer")),
    # What is tied is tied three times.
    "bart": Tiny("BartForConditionalGeneration", "BartConfig", {**BART, "max_position_embeddings": 64},
                 ["model.encoder.layers.1", "model.decoder.layers.0", "model.decoder.layers.1"]),
    # Convolutions, then an encoder and a decoder.
    "whisper": Tiny("WhisperForConditionalGeneration", "WhisperConfig", {
        **BART, "max_source_positions": 16, "max_target_positions": 16, "num_mel_bins": 8, "bos_token_id": 1,
        "eos_token_id": 2, "suppress_tokens": None, "begin_suppress_tokens": None,
    }, ["model.encoder.layers.1", "model.decoder.layers.0"], spectra),
    # Two streams of attention, and a list of memories.
    "xlnet": Tiny("XLNetLMHeadModel", "XLNetConfig", {
        "vocab_size": WORDS, "d_model": 32, "n_layer": 4, "n_head": 4, "d_inner": 48, "dropout": 0.0,
    }, at("transformer.layer")),
    # A scan without attention.
    "mamba": Tiny("MambaForCausalLM", "MambaConfig", {
        "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 4,
    }, at("backbone.layers")),
    "vit": Tiny("ViTForImageClassification", "ViTConfig", VISION, at("vit.layers"), images),
    # Windows that are rolled; a cut inside of a stage of its own.
    "swin": Tiny("SwinForImageClassification", "SwinConfig", {
        "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
        "drop_path_rate": 0.0,
    }, ["swin.encoder.layers.0.blocks.1", "swin.encoder.layers.1"], partial(images, size=32)),
    # A list of all stages' outputs goes to the head.
    "segformer": Tiny("SegformerForSemanticSegmentation", "SegformerConfig", {
        "depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 1, 2, 2],
        "decoder_hidden_size": 16, "hidden_dropout_prob": 0.0, "drop_path_rate": 0.0, "classifier_dropout_prob": 0.0,
    }, ["segformer.stages.1.blocks.0", "segformer.stages.2.blocks.0"], segmented),
    # Sounds, by convolutions of another norm.
    "wav2vec2": Tiny("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", {
        **VISION, "vocab_size": 32, "conv_dim": [8, 8], "conv_stride": [5, 4], "conv_kernel": [5, 4],
        "num_feat_extract_layers": 2, "hidden_dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0,
        "feat_proj_dropout": 0.0, "layerdrop": 0.0, "apply_spec_augment": False, "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16,
    }, at("wav2vec2.encoder.layers"), waves),
}


def bert(name: str, batch: Callable[..., Batch], terms: int = 1, **more: Any) -> Tiny:
    return Tiny(f"BertFor{name}", "BertConfig", {**ENCODER, **more}, at("bert.encoder.layer"), batch, terms)


def ctc(reduction: str) -> Tiny:
    arguments = {**MORE["wav2vec2"].arguments, "ctc_loss_reduction": reduction, "pad_token_id": 0, "final_dropout": 0.0}
    return Tiny("Wav2Vec2ForCTC", "Wav2Vec2Config", arguments, at("wav2vec2.encoder.layers"), sounds)


#: Other heads, each with a loss of its own.
HEADS = {
    "llama classes": Tiny("LlamaForSequenceClassification", "LlamaConfig", {
        **DECODER, "num_labels": 3, "pad_token_id": 0}, at("model.layers"), classified),
    "bert classes": bert("SequenceClassification", classified, num_labels=3),
    "bert regression": bert("SequenceClassification", numbers, num_labels=1),
    "bert several labels": bert(
        "SequenceClassification", several, num_labels=3, problem_type="multi_label_classification"),
    "bert tokens": bert("TokenClassification", tagged, num_labels=3),
    "bert answers": bert("QuestionAnswering", answers, terms=2),
    "bert pretraining": bert("PreTraining", sentences, terms=2),
    "distilbert classes": Tiny("DistilBertForSequenceClassification", "DistilBertConfig", {
        "vocab_size": WORDS, "dim": 32, "hidden_dim": 48, "n_layers": 4, "n_heads": 4, "num_labels": 3, "dropout": 0.0,
        "attention_dropout": 0.0, "seq_classif_dropout": 0.0, "max_position_embeddings": 64,
    }, at("distilbert.transformer.layer"), classified),
    "vit mae": Tiny("ViTMAEForPreTraining", "ViTMAEConfig", {
        **VISION, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "decoder_hidden_size": 16,
        "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 2, "decoder_intermediate_size": 16,
    }, ["vit.layers.2", "decoder.decoder_layers.1"], patches),
    "ctc sum": ctc("sum"),
    "ctc mean": ctc("mean"),
}
