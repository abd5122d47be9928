"""Raw configurations of published VLMs, for `benchmarks.frozen` and the tests: what their classes' defaults
do not say; and setups that train them on pictures."""

from typing import Any

from planner.models import catalogue
from planner.models.encoders import image_tokens, with_vision
from planner.models.families import spec_from_config
from planner.models.spec import ModelSpec
from planner.options.images import Images, with_text
from planner.setup import TrainSetup


def _config(model_type: str, built_class: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [built_class], "dtype": "bfloat16", **fields}


CONFIGS = {  # each class's defaults are the published model's, but for what stands here
    "llava-1.5-7b-hf": _config(  # llava-hf/llava-1.5-7b-hf: the class's vision encoder, and Vicuna 7B
        "llava", "LlavaForConditionalGeneration", dtype="float16",
        text_config={"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096},
    ),
    "Qwen2.5-VL-3B-Instruct": _config(
        "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", tie_word_embeddings=True,
        text_config={"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
                     "intermediate_size": 11008, "vocab_size": 151936, "tie_word_embeddings": True,
                     "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}},
        vision_config={"intermediate_size": 3420, "hidden_size": 1280, "out_hidden_size": 2048},
    ),
    "Qwen3-VL-4B-Instruct": _config(
        "qwen3_vl", "Qwen3VLForConditionalGeneration", tie_word_embeddings=True,
        text_config={"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
                     "intermediate_size": 9728, "vocab_size": 151936, "tie_word_embeddings": True,
                     "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}},
        vision_config={"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2560,
                       "deepstack_visual_indexes": [5, 11, 17]},
    ),
}  # fmt: skip
_SO400M = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
    "num_attention_heads": 16,
}  # fmt: skip
_GEMMA_3N = {
    "model_type": "gemma3n",
    "architectures": ["Gemma3nForConditionalGeneration"],
    "dtype": "bfloat16",
    "vision_config": {"model_type": "gemma3n_vision", "architecture": "mobilenetv5_300m_enc"},
    "audio_config": {"model_type": "gemma3n_audio"},
}
"""With timm alone does transformers build them: the dry run needs it."""

OTHERS: dict[str, dict[str, Any]] = {
    "Mistral-Small-3.1-24B-Instruct-2503": _config(  # the class's defaults
        "mistral3", "Mistral3ForConditionalGeneration", tie_word_embeddings=False, vision_feature_layer=-1,
        text_config={"model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
                     "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
                     "sliding_window": None, "max_position_embeddings": 131072, "tie_word_embeddings": False},
        vision_config={"model_type": "pixtral", "image_size": 1540, "patch_size": 14},
    ),
    "SmolVLM-Instruct": _config(
        "idefics3", "Idefics3ForConditionalGeneration", image_token_id=49153, scale_factor=3,
        text_config={"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
                     "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 49155,
                     "max_position_embeddings": 16384, "pad_token_id": 2},
        vision_config={"model_type": "idefics3_vision", "hidden_size": 1152, "intermediate_size": 4304,
                       "num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 384, "patch_size": 14},
    ),
    "SmolVLM2-500M-Video-Instruct": _config(
        "smolvlm", "SmolVLMForConditionalGeneration", image_token_id=49190, scale_factor=4,
        text_config={"model_type": "llama", "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32,
                     "num_attention_heads": 15, "num_key_value_heads": 5, "vocab_size": 49280,
                     "max_position_embeddings": 8192, "pad_token_id": 2},
        vision_config={"model_type": "smolvlm_vision", "hidden_size": 768, "intermediate_size": 3072,
                       "num_hidden_layers": 12, "num_attention_heads": 12, "image_size": 512, "patch_size": 16},
    ),
    "InternVL3-2B-hf": _config(
        "internvl", "InternVLForConditionalGeneration", image_token_id=151667, tie_word_embeddings=False,
        text_config={"model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                     "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151674,
                     "max_position_embeddings": 32768, "tie_word_embeddings": False},
        vision_config={"model_type": "internvl_vision", "attention_bias": True},
    ),
    "Qwen2-VL-7B-Instruct": _config(
        "qwen2_vl", "Qwen2VLForConditionalGeneration", image_token_id=151655, tie_word_embeddings=False,
        text_config={"model_type": "qwen2_vl_text", "hidden_size": 3584, "intermediate_size": 18944,
                     "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
                     "vocab_size": 152064, "max_position_embeddings": 32768, "tie_word_embeddings": False},
        vision_config={"model_type": "qwen2_vl", "depth": 32, "embed_dim": 1280, "hidden_size": 3584},
    ),
    "Ministral-3-3B-Instruct-2512": _config(
        "mistral3", "Mistral3ForConditionalGeneration", tie_word_embeddings=True, vision_feature_layer=-1,
        text_config={"model_type": "ministral3", "hidden_size": 3072, "intermediate_size": 9216,
                     "num_hidden_layers": 26, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                     "vocab_size": 131072, "max_position_embeddings": 262144, "tie_word_embeddings": True},
        vision_config={"model_type": "pixtral", "image_size": 1540, "patch_size": 14},
    ),
    "Llama-3.2-11B-Vision-Instruct": _config(  # the class's defaults
        "mllama", "MllamaForConditionalGeneration", image_token_index=128256,
        text_config={"model_type": "mllama_text_model", "hidden_size": 4096, "intermediate_size": 14336,
                     "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
                     "vocab_size": 128256, "max_position_embeddings": 131072,
                     "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38]},
        vision_config={"model_type": "mllama_vision_model", "image_size": 560},
    ),
    "gemma-3n-E2B-it": {
        **_GEMMA_3N,
        "text_config": {
            "model_type": "gemma3n_text", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 30,
            "num_kv_shared_layers": 10, "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
        },
    },
    "gemma-3n-E4B-it": {  # the class's defaults
        **_GEMMA_3N,
        "text_config": {
            "model_type": "gemma3n_text", "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35,
        },
    },
    "paligemma-3b-pt-448": {
        "model_type": "paligemma",
        "architectures": ["PaliGemmaForConditionalGeneration"],
        "dtype": "bfloat16",
        "image_token_id": 257152,
        "text_config": {
            "model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18,
            "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 257216,
        },
        "vision_config": _SO400M | {"image_size": 448, "patch_size": 14, "projection_dim": 2048},
    },
}  # fmt: skip


LISTED = ("Qwen3.5-2B", "Qwen3.5-9B", "gemma-4-E4B-it", "gemma-4-31B-it")
"""Further models of the catalogue."""


def configs() -> dict[str, dict[str, Any]]:
    """The raw configurations by name: the catalogue's Gemma 3, and what the catalogue has not."""
    seven = _grown(
        CONFIGS["Qwen2.5-VL-3B-Instruct"],
        {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
         "intermediate_size": 18944, "vocab_size": 152064},
        {"out_hidden_size": 3584},
    )  # fmt: skip
    eight = _grown(
        CONFIGS["Qwen3-VL-4B-Instruct"],
        {"hidden_size": 4096, "intermediate_size": 12288},
        {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 4096,
         "deepstack_visual_indexes": [8, 16, 24]},
    )  # fmt: skip
    listed = {entry.model_id.partition("/")[2]: dict(entry.config) for entry in catalogue.entries()}
    return {
        **CONFIGS,
        **OTHERS,
        "Qwen2.5-VL-7B-Instruct": seven,
        "Qwen3-VL-8B-Instruct": eight,
        **{name: listed[name] for name in ("gemma-3-4b-it", *LISTED)},
    }


def _grown(config: dict[str, Any], text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    """A larger sibling, whose head is its own."""
    untied = {"tie_word_embeddings": False}
    return {
        **config,
        **untied,
        "text_config": {**config["text_config"], **text, **untied},
        "vision_config": {**config["vision_config"], **vision},
    }


METHODS: dict[str, dict[str, Any]] = {
    "lora": {},
    "lora attention": {"lora_targets": "attention"},
    "lora, no checkpointing": {"checkpointing": 0},
    "qlora": {"method": "qlora", "quantization": "nf4-double"},
    "full": {"method": "full", "lora_rank": 0, "precision": "bf16-pure"},
}


def spec_of(name: str, config: dict[str, Any]) -> ModelSpec:
    """The model with its vision encoder, the catalogue's where it has this configuration."""
    for owner in ("google", "Qwen"):
        listed = catalogue.load(f"{owner}/{name}")
        if listed is not None and listed.config == config:
            return with_vision(listed)
    return with_vision(spec_from_config(config, model_id=name, source="benchmarks"))


def setup_of(model: ModelSpec, fields: dict[str, Any], case: tuple[int, int, int, int]) -> TrainSetup:
    """A setup with room for text beside its pictures. Case: pictures of a sample, their side in pixels, micro-batch,
    accumulation."""
    num, side, micro, steps = case
    images = Images(num=num, width=side, height=side)
    length = max(1024, with_text(image_tokens(model, images)))
    sizes = {"micro_batch_seqs": micro, "accumulation_steps": steps, "seq_len_tokens": length}
    return TrainSetup(**fields, loss="chunked", images=images, **sizes)
