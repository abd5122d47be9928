"""Memory terms: hand-computed values, and what must hold for every model: sums, order, straight lines."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.core.errors import SetupError
from planner.core.units import MIB
from planner.hardware.gpus import find_gpu
from planner.memory.micro_batch import activation_parts, step_dtype_policy
from planner.memory.model import predict_memory
from planner.memory.rank_part import rank_parts
from planner.memory.step import computing, fixed_segments_gap_bytes, loss_parts
from planner.memory.trained import trained_parameters
from planner.memory.workspace import context_bytes, cublas_workspace_bytes, dequantized_bytes
from planner.setup import TrainSetup
from planner.setup.interchange import setup_from_dict, setup_to_dict
from tests.planner.helpers import loaded, loss_chain

A100 = find_gpu("a100-80gb")
TOKENS = 1000
WHOLE_BYTES = 1e-6
"""What is left of the activations at the last layer is a whole number of bytes."""
MODELS = (
    "meta-llama/llama-3.1-8b", "openai-community/gpt2-large", "google/gemma-2-2b", "microsoft/phi-2",
    "allenai/olmoe-1b-7b-0924", "qwen/qwen3.5-4b", "deepseek-ai/deepseek-v3", "coherelabs/c4ai-command-r-v01",
)  # fmt: skip


def stored_per_token(name: str, **fields: object) -> dict[str, float]:
    model = loaded(name)
    setup = TrainSetup(checkpointing=0, seq_len_tokens=TOKENS, **fields)  # type: ignore[arg-type]
    parts = activation_parts(model, A100, setup)
    return {part: size / TOKENS / model.num_layers for part, size in parts.stored.items()}


def test_llama_layer_keeps_what_its_modules_keep() -> None:
    """Llama-2-7B, bf16 adapters over bf16, per token and layer, by hand: h = 4096, i = 11008.

    norm: 2 x (4 h + 4); attention: q, k, v,
    output 4 x 2 h and 4 x 32 for the log-sum-exp; mlp: gate, activated gate, up, 3 x 2 i; adapters:
    the shared inputs 2 h (q, k, v), 2 h (gate, up), 2 i (down), 7 inner outputs of 2 x 16.
    """
    stored = stored_per_token("meta-llama/llama-2-7b-hf", method="lora", precision="bf16-pure", adapter_dtype="bf16")
    assert stored["norm"] == 2 * (4 * 4096 + 4)
    assert stored["attention"] == 4 * 2 * 4096 + 4 * 32
    assert stored["mlp"] == 3 * 2 * 11008
    assert stored["adapters"] == 2 * 4096 + 2 * 4096 + 2 * 11008 + 7 * 2 * 16
    assert stored["scores"] == stored["inputs"] == stored["pinned"] == 0


def test_llama_eager_keeps_scores_twice() -> None:
    """32 heads x 1000 keys, fp32 softmax and its bf16 copy."""
    stored = stored_per_token("meta-llama/llama-2-7b-hf", precision="bf16-pure", attention="eager")
    assert stored["scores"] == 32 * TOKENS * 6


def test_dropout_keeps_one_byte_and_the_dropped_copy() -> None:
    """lora_dropout over NF4 (bf16 adapters under autocast): 3 bytes per input element of each of the 7 matrices."""
    plain = stored_per_token("meta-llama/llama-2-7b-hf", method="qlora", quantization="nf4")
    dropped = stored_per_token("meta-llama/llama-2-7b-hf", method="qlora", quantization="nf4", lora_dropout=0.1)
    shared = 2 * (4096 + 4096 + 11008)
    assert dropped["adapters"] - plain["adapters"] == 3 * (6 * 4096 + 11008) - shared


def test_composed_gelu_keeps_fp32_under_autocast() -> None:
    """GPT-2 large (4h = 5120): 2 bytes for the product, 12 for fp32 input, tanh and sum."""
    stored = stored_per_token("openai-community/gpt2-large", precision="bf16-autocast")
    assert stored["mlp"] == (2 + 12) * 5120


def test_quantized_layer_norm_models_have_an_fp32_stream() -> None:
    setup = TrainSetup(method="qlora", quantization="nf4", precision="bf16-autocast")
    assert step_dtype_policy(loaded("openai-community/gpt2-large"), setup).residual == "fp32"
    assert step_dtype_policy(loaded("meta-llama/llama-3.1-8b"), setup).residual == "bf16"
    assert step_dtype_policy(loaded("allenai/olmo-7b-hf"), setup).residual == "bf16"  # its LayerNorm casts back


def test_traits_of_known_classes() -> None:
    gpt2, gemma, star = (
        loaded(name).traits for name in ("openai-community/gpt2", "google/gemma-2-2b", "bigcode/starcoder2-7b")
    )
    assert (gpt2.norm, gpt2.attention_dropout, gpt2.residual_dropout) == ("layer", True, True)
    assert (gemma.norm, gemma.attention_dropout, gemma.residual_dropout) == ("rms-fp32", False, False)
    assert (star.attention_dropout, star.residual_dropout) == (True, True)
    assert loaded("coherelabs/c4ai-command-r-v01").traits.norm == "layer-composed"


def test_full_loss_chain_is_ten_then_twelve_bytes_per_logit() -> None:
    chain = loss_chain(
        loss="full", tokens=10, vocab_size=1000, hidden_size=64, logits_dtype="bf16", hidden_dtype="bf16",
        head_trained=False, softcap=False,
    )  # fmt: skip
    assert (chain.loss_bytes, chain.backward_bytes) == (10 * 10_000, 12 * 10_000)


def test_fp32_head_under_autocast_adds_its_16_bit_copy() -> None:
    fields: dict[str, object] = {"loss": "full", "tokens": 10, "vocab_size": 1000, "hidden_size": 64}
    fields |= {"logits_dtype": "bf16", "hidden_dtype": "fp32", "head_trained": False, "softcap": False}
    plain, cast = loss_chain(**fields), loss_chain(**fields, head_cast=True)  # type: ignore[arg-type]
    assert cast.backward_bytes - plain.backward_bytes == 2 * 1000 * 64


def test_cublas_workspaces() -> None:
    assert cublas_workspace_bytes(A100) == 2 * 8320 * 1024
    assert cublas_workspace_bytes(find_gpu("h100-sxm")) == 64 * MIB


def test_expert_adapters_have_peft_ranks() -> None:
    """OLMoE, rank 8 on all linear: 16 layers of q, k, v, o (4 x 8 x 4096), router 8 x (2048 + 64), 64 experts with rank
    16 on gate_up (2048 + 2048) and rank 8 on down (1024 + 2048)."""
    setup = TrainSetup(method="lora", lora_rank=8, lora_targets="all-linear")
    layer = 4 * 8 * 4096 + 8 * (2048 + 64) + 64 * (16 * 4096 + 8 * 3072)
    assert trained_parameters(loaded("allenai/olmoe-1b-7b-0924"), setup).num == 16 * layer


def test_idle_towers_are_not_trained() -> None:
    model = loaded("google/gemma-3-4b-it")
    setup = TrainSetup(method="full", lora_rank=0, precision="bf16-pure")
    assert 0 < trained_parameters(model, setup).num < model.num_params


@pytest.mark.parametrize("name", MODELS)
def test_peak_is_the_largest_phase_of_its_terms(name: str) -> None:
    breakdown = predict_memory(loaded(name), A100, TrainSetup(method="qlora", quantization="nf4-double"))
    sums = {
        phase: sum(term.size_bytes for term in breakdown.terms if phase in term.phases)
        for phase in breakdown.phase_bytes
    }
    assert breakdown.phase_bytes == sums
    assert breakdown.peak_allocated_bytes == max(sums.values())
    assert breakdown.peak_reserved_bytes >= breakdown.peak_allocated_bytes
    assert all(term.size_bytes > 0 for term in breakdown.terms)


@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(MODELS),
    method=st.sampled_from(({"method": "lora"}, {"method": "qlora", "quantization": "nf4"})),
    attention=st.sampled_from(("sdpa", "eager")),
    checkpointing=st.sampled_from((0, 1, 2)),
    loss=st.sampled_from(("full", "chunked", "liger")),
    micro=st.integers(1, 8),
    seq=st.sampled_from((256, 512, 2048)),
    rank=st.sampled_from((8, 16, 64)),
)
def test_memory_never_falls(
    name: str, method: dict[str, str], attention: str, checkpointing: int, loss: str, micro: int, seq: int, rank: int
) -> None:
    model = loaded(name)
    base = TrainSetup(
        **method,  # type: ignore[arg-type]
        attention=attention, checkpointing=checkpointing, loss=loss, micro_batch_seqs=micro, seq_len_tokens=seq,
        lora_rank=rank,
    )  # fmt: skip
    peak = predict_memory(model, A100, base).peak_allocated_bytes
    for more in ({"micro_batch_seqs": micro + 1}, {"seq_len_tokens": 2 * seq}, {"lora_rank": 2 * rank}):
        assert predict_memory(model, A100, base.replace(**more)).peak_allocated_bytes >= peak, more


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpointing", [0, 1, 2])
def test_parts_are_affine_in_the_micro_batch(name: str, checkpointing: int) -> None:
    model, setup = loaded(name), TrainSetup(checkpointing=checkpointing, seq_len_tokens=512, attention="eager")
    single, two, five = (activation_parts(model, A100, setup.replace(micro_batch_seqs=n)) for n in (1, 2, 5))
    for first, second, fifth in zip(*(computing(model, parts) for parts in (single, two, five)), strict=True):
        line = first.size_bytes + 4 * (second.size_bytes - first.size_bytes)
        assert fifth.size_bytes == pytest.approx(line, rel=WHOLE_BYTES), first.name
    assert five.recomputed == pytest.approx(single.recomputed + 4 * (two.recomputed - single.recomputed))
    chain = [loss_parts(model, setup.replace(micro_batch_seqs=n)).backward_bytes for n in (1, 2, 5)]
    assert chain[2] == chain[0] + 4 * (chain[1] - chain[0])


def test_a_context_is_the_cards_by_hand() -> None:
    """132 multiprocessors of an H200 at 3.94 MiB, 234 MiB of libraries and 16 of cuDNN, which measured 764 to 768 MiB;
    128 of an RTX 4090 at 3.1 and 164 MiB; a T4's as measured; AMD's as assumed."""
    sizes_mib = {key: round(context_bytes(find_gpu(key)) / MIB) for key in ("h200", "rtx-4090", "t4", "mi300x")}
    assert sizes_mib == {"h200": 770, "rtx-4090": 561, "t4": 141, "mi300x": 512}
    assert context_bytes(replace(find_gpu("h200"), sm_count=None)) == 512 * MIB


def test_fixed_segments_leave_more_holes_by_hand() -> None:
    """16 % of the loss beside what is kept, 12 % of a layer's forward, 54 % of the smaller of kept and backward."""
    gap_bytes = fixed_segments_gap_bytes(saved=100 * MIB, forward=150 * MIB, loss=300 * MIB, backward=140 * MIB)
    assert gap_bytes == 24 * MIB + int((0.16 * 200 + 0.12 * 50 + 0.54 * 40) * MIB)


def test_modules_to_save_by_hand() -> None:
    """Qwen2.5-0.5B's tied table of 151,936 x 896 as two trained bf16 copies: 2 + 2 bytes of weights and gradients, and
    2 + 2 of AdamW's two states; under TRL's cast of a quantized base, and beside fp32 adapters, the same."""
    model = loaded("Qwen/Qwen2.5-0.5B")
    table = 151_936 * 896
    plain = TrainSetup(seq_len_tokens=128)
    saved = plain.replace(modules_to_save=("embed_tokens", "lm_head"))
    trained = trained_parameters(model, saved)
    assert (trained.copies, trained.copies_dtype, trained.dtype) == (2 * table, "bf16", "fp32")
    assert trained.size_bytes - trained_parameters(model, plain).size_bytes == 2 * 2 * table
    steps = [predict_memory(model, find_gpu("a100-80gb"), setup).phase_bytes["step"] for setup in (plain, saved)]
    assert steps[1] - steps[0] == 2 * table * (2 + 2 + 2 + 2)
    quantized = {"method": "qlora", "quantization": "nf4"}
    folded = trained_parameters(model, saved.replace(**quantized))
    assert (folded.copies, folded.dtype) == (0, "bf16")
    assert folded.num - trained_parameters(model, plain.replace(**quantized)).num == 2 * table


def test_modules_to_save_are_embeddings_and_heads() -> None:
    for wrong in ({"modules_to_save": ("norm",)}, {"modules_to_save": ("lm_head",), "method": "full", "lora_rank": 0}):
        with pytest.raises(SetupError):
            TrainSetup(**wrong)  # type: ignore[arg-type]
    setup = setup_from_dict({"modules_to_save": ["lm_head"]})
    assert setup_to_dict(setup)["modules_to_save"] == ["lm_head"]
    assert "modules_to_save" not in setup_to_dict(TrainSetup())


def test_only_quantized_matrices_are_unpacked() -> None:
    model = loaded(MODELS[0])
    linear = model.layer_kinds[0].linears[0]
    assert dequantized_bytes(linear, TrainSetup(), "bf16") == 0
    quantized = TrainSetup(method="qlora", quantization="nf4")
    assert dequantized_bytes(linear, quantized, "bf16") == 2 * linear.in_features * linear.out_features


def test_one_gpu_holds_the_first_and_the_last_layer() -> None:
    (part,) = rank_parts(loaded(MODELS[0]), TrainSetup())
    assert (part.first, part.last, part.num_ranks, part.in_flight) == (True, True, 1, 1)
