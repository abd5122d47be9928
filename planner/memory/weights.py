"""Weights: what the frozen or trained base model holds, after loading."""

from planner.memory.dtypes import SIZE_BYTES
from planner.memory.trained import layers_alone
from planner.models.spec import LayerSpec, LinearSpec, ModelSpec
from planner.setup import TrainSetup

NF4_BLOCK = 64
DOUBLE_QUANT_BLOCK = 256
_SMALL = 512  # the caching allocator's smallest block: each little tensor costs this much


def nf4_bytes(num_weights: int, *, double: bool) -> int:
    """Bytes of one NF4 matrix: packed 4-bit codes and the scales of its 64-element blocks.

    Plain: one fp32 scale per block (4.5 bits per weight). Double quantization: one uint8 scale per block and one fp32
    per 256 blocks (4.127 bits per weight), with a 256-entry fp32 code table and one fp32 offset. Both hold a 16-entry
    fp32 code table.

    Source: Dettmers et al. 2023, QLoRA, section 3, https://arxiv.org/abs/2305.14314; bitsandbytes 0.50 `quantize_4bit`.
    Not counted: rounding to 512 bytes of the large tensors (below 0.01 %).
    """
    blocks = -(-num_weights // NF4_BLOCK)
    packed = -(-num_weights // 2)
    if not double:
        return packed + 4 * blocks + _SMALL
    return packed + blocks + 4 * -(-blocks // DOUBLE_QUANT_BLOCK) + _SMALL + 1024 + _SMALL


def int8_bytes(num_weights: int, out_features: int) -> int:
    """Bytes of one LLM.int8() matrix: one byte per weight and one fp32 scale per output row.

    Source: Dettmers et al. 2022, LLM.int8(), section 3, https://arxiv.org/abs/2208.07339; bitsandbytes `Int8Params`.
    """
    return num_weights + 4 * out_features


def linear_bytes(linear: LinearSpec, setup: TrainSetup) -> int:
    """Bytes of one LinearSpec (all its copies, biases included) under the setup's quantization.

    bitsandbytes replaces nn.Linear and Conv1D; bare parameters (stacked experts) stay 16-bit unless the setup says
    otherwise (a stack is one tensor), and so does what a checkpoint published quantized keeps so.
    """
    plain = SIZE_BYTES["fp32" if setup.kbit_fp32_cast else setup.weight_dtype]
    if setup.quantize_experts and linear.is_stack:
        rows = linear.num * linear.out_features
        eight, double = setup.quantization == "int8", setup.quantization == "nf4-double"
        stack = int8_bytes(linear.num_weights, rows) if eight else nf4_bytes(linear.num_weights, double=double)
        return stack + linear.num_bias * plain
    if not setup.quantized or not linear.quantizes:
        return (linear.num_weights + linear.num_bias) * plain
    one = linear.in_features * linear.out_features
    if setup.quantization == "int8":
        quantized = int8_bytes(one, linear.out_features)
    else:
        quantized = nf4_bytes(one, double=setup.quantization == "nf4-double")
    return linear.num * quantized + linear.num_bias * plain


def layer_weight_bytes(layer: LayerSpec, setup: TrainSetup) -> int:
    """Bytes of one layer's weights: matrices, norms and the rest."""
    plain = SIZE_BYTES["fp32" if setup.kbit_fp32_cast else setup.weight_dtype]
    rest = sum(norm.num_params for norm in layer.norms) + layer.num_other_params
    return sum(linear_bytes(linear, setup) for linear in layer.linears) + rest * plain


def weight_bytes(model: ModelSpec, setup: TrainSetup) -> dict[str, int]:
    """Bytes of the base model by part: "layers", "embeddings", "head", "outer", "idle".

    The output head is never quantized (transformers keeps it in 16 bit); with `kbit_fp32_cast` everything that is not
    quantized is fp32, which makes embeddings and an untied head twice as large as in 16 bit.

    Source: transformers 5.23 `get_keys_to_not_convert`; peft 0.21 `prepare_model_for_kbit_training`.
    """
    what = (setup.quantization, setup.weight_dtype, setup.kbit_fp32_cast, setup.quantize_experts)
    widened = setup.trained_layers if setup.widens_trained else 0
    return model.once(("weight bytes", *what, widened), lambda one: _weight_bytes(one, setup))


def _weight_bytes(model: ModelSpec, setup: TrainSetup) -> dict[str, int]:
    """`weight_bytes`, worked out."""
    plain = SIZE_BYTES["fp32" if setup.kbit_fp32_cast else setup.weight_dtype]
    outer = sum(linear_bytes(linear, setup) for linear in model.outer_linears)
    outer += (sum(norm.num_params for norm in model.outer_norms) + model.num_outer_other_params) * plain
    if model.tied and model.head is not None:
        outer += model.head.num_bias * plain
    idle = sum(layer_weight_bytes(layer, setup) * num for layer, num in model.idle_layers)
    return {
        "layers": sum(layer_weight_bytes(layer, setup) * num for layer, num in model.layer_counts)
        + ((4 - plain) * layers_alone(model, setup.trained_layers).num_params if setup.widens_trained else 0),
        "embeddings": model.num_embedding_params * plain,
        "head": model.num_head_params * plain,
        "outer": outer,
        "idle": idle + model.num_idle_other_params * plain,
    }
