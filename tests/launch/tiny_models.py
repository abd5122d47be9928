"""A tiny copy of every model type of the catalogue: the same class, head sizes, sinks, windows and routing; few and
small layers, a tokenizer of bytes. Made on the spot in milliseconds."""

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from planner.frameworks.exporters import DatasetChoice, ExportRequest
from planner.frameworks.hyperparameters import choose
from planner.models import catalogue, module_tree
from planner.models.families import spec_from_config
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup


def kind_of(entry: catalogue.CatalogueEntry) -> str:
    """The model type, and what its siblings lack: an encoder, experts, projections beside the layers."""
    config = entry.config
    text = config.get("text_config", config)
    marks = {
        "audio": config.get("audio_config"),
        "experts": text.get("enable_moe_block"),
        "projections": text.get("word_embed_proj_dim", text.get("hidden_size")) != text.get("hidden_size"),
    }
    return "+".join([entry.model_type, *(name for name, there in marks.items() if there)])


def _takes_text(entry: catalogue.CatalogueEntry) -> bool:
    """Whether its files are of next tokens: encoders alone and readers of pictures have tests of their own."""
    spec = catalogue.load(entry.model_id)
    return not spec.reads_both_ways and "causal" not in spec.lacks


TYPES = {
    kind: entry
    for kind, entry in {kind_of(entry): entry for entry in reversed(catalogue.entries())}.items()
    if _takes_text(entry)
}
"""Every kind of model that predicts next tokens of text. All models of a kind get the same settings:
tests/planner/test_exporters_targets.py."""
VOCAB, PAD, EOS = 264, 0, 1
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HEADS = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim")
DEPTH = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
SMALL = {
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "intermediate_size": 64, "moe_intermediate_size": 32, "intermediate_size_mlp": 64, "ffn_dim": 64, "n_inner": 64,
    "d_ff": 64, "shared_expert_intermediate_size": 32, "num_local_experts": 4, "num_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "top_k_experts": 2, "experts_per_token": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "hidden_size_per_layer_input": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 0, "mtp_num_hidden_layers": 0,
}  # fmt: skip
PUBLISHED = {
    "llama4": "Llama4ForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}
"""Types whose hub checkpoints are of another class than `AutoModelForCausalLM` builds: with a vision tower."""
ENCODERS = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_position_embeddings": 16,
}

AUDIO = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 32}
LLAMA4_ENCODER = {
    **ENCODERS, "model_type": "llama4_vision_model", "num_attention_heads": 2, "vision_output_dim": 32,
    "projector_input_dim": 32, "projector_output_dim": 32, "image_size": 56,
}  # fmt: skip
"""transformers' own encoder, where a configuration names none, has 400 million parameters."""


def tiny_config(entry: catalogue.CatalogueEntry) -> dict[str, Any]:
    """The configuration, shrunk in everything but what decides which kernels and settings run it."""
    config = copy.deepcopy(dict(entry.config))
    config.pop("quantization_config", None)
    text = config.get("text_config", config)
    spec = catalogue.load(entry.model_id)
    softmax = [
        attention for layer in spec.layer_kinds if (attention := layer.attention) and attention.kind == "softmax"
    ]
    heads = 2 if entry.model_type != "falcon" else 4
    grouped = softmax[0].num_kv_heads < softmax[0].num_heads
    for names, value in ((HEADS, heads), (KV_HEADS, heads // 2 if grouped else heads)):
        text.update({name: value for name in names if text.get(name)})
    width = 64 if any(text.get(name) for name in ("head_dim", "d_kv", "qk_nope_head_dim")) else None
    text.update({name: width or heads * softmax[0].head_dim for name in HIDDEN if text.get(name)})
    if kind_of(entry) == "opt+projections":
        text["word_embed_proj_dim"] //= 2
    text.update({name: value for name, value in SMALL.items() if text.get(name)})
    _layers(text)
    if entry.model_type == "llama4":
        config["vision_config"] = LLAMA4_ENCODER
    for encoder in ("vision_config", "audio_config"):
        if config.get(encoder):
            small = {name: value for name, value in ENCODERS.items() if name in config[encoder]}
            config[encoder] = {**config[encoder], **small, "deepstack_visual_indexes": []}
            for name in (*HEADS, *KV_HEADS):
                if name in config[encoder]:
                    config[encoder][name] = 2
            for name in ("head_dim", "global_head_dim"):
                if name in config[encoder]:
                    config[encoder][name] = 16
            if config[encoder].get("model_type") == "gemma4_audio":  # published without sizes
                config[encoder] |= AUDIO
            if "out_hidden_size" in config[encoder]:
                config[encoder]["out_hidden_size"] = text["hidden_size"]
    for place in {id(text): text, id(config): config}.values():
        place |= {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None, "decoder_start_token_id": PAD}
        if entry.model_type not in ("t5", "whisper"):
            del place["decoder_start_token_id"]
    return config


def _layers(text: dict[str, Any]) -> None:
    """Two layers, or one of each type."""
    kinds = list(dict.fromkeys(text["layer_types"])) if text.get("layer_types") else []
    if "full_attention_interval" in text:
        kinds, text["full_attention_interval"] = ["linear_attention", "full_attention"], 2
    if text.get("model_type") == "gemma4_text":
        kinds = ["sliding_attention", "full_attention"]
    depth = max(2, len(kinds))
    text.update({name: depth for name in DEPTH if text.get(name)})
    if kinds:
        text["layer_types"] = (kinds * 2)[:depth]
    if "no_rope_layers" in text:
        text["no_rope_layers"] = text["no_rope_layers"][:depth]
    if "attention_types" in text:
        text["attention_types"] = [[["global", "local"], 1]]


@cache
def tiny_spec(model_type: str) -> ModelSpec:
    """The planner's inventory of the tiny model; a tree is read in this process, which has torch."""
    from probes.module_tree import answer

    module_tree.read_with(answer)
    return spec_from_config(tiny_config(TYPES[model_type]), model_id=f"./{model_type}", source="test")


def tiny_request(model_type: str, setup: TrainSetup) -> ExportRequest:
    """What an exporter is asked for the tiny model: two steps over rows of plain text."""
    spec = catalogue.load(TYPES[model_type].model_id)
    config = {**tiny_spec(model_type).config, **{k: v for k, v in spec.config.items() if k == "architectures"}}
    return ExportRequest(
        model_id=f"./{model_type}",
        setup=setup,
        hyper=replace(choose(setup, max_steps=2), learning_rate=0.01),
        model=replace(tiny_spec(model_type), model_type=TYPES[model_type].model_type, config=config),
        dataset=DatasetChoice(path="./rows", columns="text", local=True),
        logging_steps=1,
        held_out=0,
        save=False,
    )


def built_config(config: Mapping[str, Any]) -> Any:
    """transformers' configuration object."""
    from probes.stack.configs import load_config

    return load_config(config)


@cache
def tokenizer() -> Any:
    """Bytes and a chat template, ids below VOCAB; every tokenizer class of transformers reads it alike."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: index for index, word in enumerate(("<pad>", "<|end|>", "<unk>", *letters))}
    made = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", eos_token="<|end|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_tiny(model_type: str, folder: Path) -> Path:
    """A checkpoint folder as the hub has it: the class that transformers builds, random weights, the tokenizer."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    entry = TYPES[model_type]
    config = built_config(tiny_config(entry))
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    torch.manual_seed(0)
    if published := PUBLISHED.get(model_type):  # AutoModelForCausalLM takes its text part
        model = getattr(transformers, published)._from_config(config, dtype=torch.bfloat16)
    else:
        model = auto.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def write_rows(path: Path, num: int) -> Path:
    """Plain text."""
    rows = [{"text": f"row {number} of plain text"} for number in range(num)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
