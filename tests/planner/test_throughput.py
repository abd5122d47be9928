"""The speed model: golden values, what must never fall, and that whole spaces can be ranked."""

import math

import pytest

from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.models.families import spec_from_config
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from planner.speed import roofline
from planner.speed.roofline import (
    Conditions,
    conditions_of,
    speed_model,
    step_time,
    throughput_profile,
)
from planner.speed.roofline.types import matmul_s
from tests.planner.helpers import loaded
from tests.whole import some

SUM_TOLERANCE = 1e-9  # floating-point order of addition
GOLDEN_TOLERANCE = 0.10  # median error of the fit is 4 %, its 90th percentile 10 % (docs/speed-accuracy.md)
OLD_STACK = Conditions(reentrant_checkpointing=True)


MISTRAL = loaded("mistralai/Mistral-7B-v0.1")
SMALL = loaded("meta-llama/Llama-3.2-1B")
A100 = find_gpu("a100-80gb")

SETUPS = {
    "full": TrainSetup(method="full", lora_rank=0, precision="bf16-pure", micro_batch_seqs=2),
    "full-mixed": TrainSetup(method="full", lora_rank=0, precision="bf16-mixed", optimizer="adamw"),
    "lora": TrainSetup(precision="bf16-autocast", micro_batch_seqs=4, lora_dropout=0.1),
    "lora-attention": TrainSetup(lora_targets="attention", checkpointing=0, optimizer="adamw-8bit"),
    "qlora": TrainSetup(method="qlora", quantization="nf4-double", micro_batch_seqs=2),
    "qlora-cast": TrainSetup(method="qlora", quantization="nf4", kbit_fp32_cast=True, loss="liger"),
    "qlora-int8": TrainSetup(method="qlora", quantization="int8", loss="chunked", attention="eager"),
    "compiled": TrainSetup(compile=True, checkpointing=2, optimizer="adafactor"),
}


@pytest.mark.parametrize(
    ("setup", "conditions", "published_tokens_per_s"),
    [
        (
            TrainSetup(
                method="full", lora_rank=0, precision="bf16-pure", attention="flash-attention-2", optimizer="adamw",
                micro_batch_seqs=4, seq_len_tokens=4096,
            ),
            OLD_STACK,
            3054,
        ),
        (
            TrainSetup(
                lora_targets="attention", lora_dropout=0.1, precision="bf16-pure", adapter_dtype="fp32",
                attention="flash-attention-2", optimizer="adamw", micro_batch_seqs=4, seq_len_tokens=4096,
            ),
            OLD_STACK,
            3324,
        ),
        (
            TrainSetup(
                method="qlora", quantization="nf4-double", lora_targets="attention", lora_dropout=0.1,
                precision="bf16-autocast", adapter_dtype="fp32", attention="flash-attention-2", optimizer="adamw",
                micro_batch_seqs=4, seq_len_tokens=4096,
            ),
            OLD_STACK,
            3562,
        ),
    ],
    ids=["full", "lora", "qlora"],
)  # fmt: skip
def test_step_time_published_mistral_7b_on_a100(
    setup: TrainSetup, conditions: Conditions, published_tokens_per_s: float
) -> None:
    """Source: foundation-model-stack/fms-acceleration scripts/benchmarks/refs/a100_80gb.csv, medians over versions."""
    answer = step_time(MISTRAL, A100, setup, conditions=conditions)
    assert answer.tokens_per_s == pytest.approx(published_tokens_per_s, rel=GOLDEN_TOLERANCE)


def test_flops_full_is_six_per_weight_and_token() -> None:
    """Kaplan et al. 2020, section 2.1: 6 N per token, and half of 12 x layers x width x tokens for causal attention."""
    setup = SETUPS["full"].replace(seq_len_tokens=1024)
    weights = SMALL.num_active_params
    attention = 6 * SMALL.num_layers * 32 * 64 * 1024 * setup.tokens_per_step
    expected = 6 * weights * setup.tokens_per_step + attention
    assert step_time(SMALL, A100, setup).flops == pytest.approx(expected, rel=0.001)


def test_flops_of_partial_training_are_those_that_the_backward_reaches() -> None:
    """The last 4 of 32 layers: forwards of all, gradients of 4 layers' inputs and weights, of the head's input; the
    first 4: of all inputs. Under checkpointing transformers' backward goes through all layers whatever trains."""
    plain = SETUPS["full"].replace(precision="bf16-autocast", checkpointing=0)
    head, tokens = MISTRAL.vocab_size * MISTRAL.hidden_size, plain.tokens_per_step
    layers = MISTRAL.num_active_params - head
    whole, last, first = (
        step_time(MISTRAL, A100, plain.replace(trained_layers=trained_layers)).flops for trained_layers in (0, 4, -4)
    )
    attention = whole - 6 * (layers + head) * tokens
    assert last == pytest.approx((2.5 * layers + 4 * head) * tokens + attention * (1 + 2 / 8) / 3, rel=0.001)
    assert first == pytest.approx((4.25 * layers + 4 * head) * tokens + attention, rel=0.001)
    checkpointed = step_time(MISTRAL, A100, plain.replace(checkpointing=1, trained_layers=4)).flops
    assert checkpointed == pytest.approx(first, rel=1e-9)


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize(("micro", "steps"), [(1, 1), (3, 5), (8, 2)])
def test_profile_at_equals_step_time(name: str, micro: int, steps: int) -> None:
    setup = SETUPS[name].replace(micro_batch_seqs=micro, accumulation_steps=steps)
    answer = step_time(MISTRAL, A100, setup)
    seconds, tokens_per_s = throughput_profile(MISTRAL, A100, setup).at(micro, steps)
    assert seconds == pytest.approx(answer.step_time_s, rel=SUM_TOLERANCE)
    assert tokens_per_s == pytest.approx(answer.tokens_per_s, rel=SUM_TOLERANCE)


def test_torchao_unpacks_4_bits_by_single_operations() -> None:
    """958 tokens/s measured (BenjaminBossan/peft-experiments), 1,975 as bitsandbytes' one kernel; compiled, one too."""
    model = loaded("meta-llama/Meta-Llama-3-8B")
    setup = TrainSetup(
        method="qlora", quantization="nf4-double", precision="bf16-pure", lora_rank=8, lora_dropout=0.05,
        adapter_dtype="bf16", checkpointing=0, micro_batch_seqs=2, seq_len_tokens=512, stack="torchtune-whole-loss",
    )  # fmt: skip
    eager, compiled = (
        step_time(model, find_gpu("rtx-4090"), variant, conditions=conditions_of(variant))
        for variant in (setup, setup.replace(compile=True))
    )
    assert eager.tokens_per_s == pytest.approx(958, rel=0.12)
    assert eager.parts_s["dequantization"] > 3 * compiled.parts_s["dequantization"]


def test_step_time_emulated_bf16_is_named_and_slow() -> None:
    """A T4 emulates bf16: 2.4 against 42 TFLOP/s measured."""
    card = find_gpu("t4")
    brain = step_time(SMALL, card, TrainSetup(precision="bf16-autocast"))
    half = step_time(SMALL, card, TrainSetup(precision="fp16-autocast"))
    assert brain.step_time_s > 5 * half.step_time_s
    assert any("fp16" in note for note in brain.notes)
    assert not any("emulated" in note for note in half.notes)


def test_step_time_unmeasured_card_says_so_with_a_wider_band() -> None:
    measured = step_time(MISTRAL, A100, SETUPS["lora"])
    unknown = step_time(MISTRAL, find_gpu("rtx-5080"), SETUPS["lora"])
    assert unknown.band_fraction > measured.band_fraction
    assert any("share of peak" in note for note in unknown.notes)
    assert not any("share of peak" in note for note in measured.notes)


def test_step_time_every_catalogue_model() -> None:
    for name in some(catalogue.names(), 4):
        spec = loaded(name)
        for key in ("full", "lora", "qlora"):
            answer = step_time(spec, A100, SETUPS[key])
            assert math.isfinite(answer.step_time_s), name
            assert answer.step_time_s > 0, name
            assert 0 < answer.mfu_fraction < 0.8, name


def test_a_speed_model_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan estimate --setups` asks one for another kind of step at every line."""
    monkeypatch.setattr(roofline, "_MAX_WORKS", 2)
    gpt2 = loaded("openai-community/gpt2")
    for seq_len in (256, 512, 768, 1024):
        step_time(gpt2, A100, TrainSetup(seq_len_tokens=seq_len))
        assert len(speed_model(gpt2, A100).works) < 2


@pytest.mark.parametrize(("columns", "microseconds"), [(1600, 310), (6400, 1211)])
def test_fp32_loses_little_to_small_matrices(columns: int, microseconds: int) -> None:
    """1,024 x 1,600 by 1,600 x columns inside a training step on an A100-40GB, as nsys timed them (yyin-dev/cs336-a2
    @bc6cc1b:writeup.md); a fifth: the clock's fall that is measured on tensor cores is taken for these too."""
    speed = speed_model(MISTRAL, find_gpu("a100-40gb"))
    seconds = matmul_s(1024, columns, 1600, speed.rates.matmul["fp32"], 4, speed.rates, speed.constants)
    assert seconds == pytest.approx(microseconds * 1e-6, rel=0.2)


def small_of_cs336() -> ModelSpec:
    """The course's "small": 12 layers of 768, untied."""
    sizes = {"vocab_size": 10_000, "hidden_size": 768, "intermediate_size": 3072, "max_position_embeddings": 1024}
    heads = {"num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 12}
    config = {"model_type": "llama", "tie_word_embeddings": False, **sizes, **heads}
    return spec_from_config(config, model_id="cs336-small", source="the course's assignment 2")


CS336 = TrainSetup(
    method="full", lora_rank=0, checkpointing=0, precision="fp32", attention="eager", loss="full", optimizer="adamw",
    stack="cs336", micro_batch_seqs=4, seq_len_tokens=512,
)  # fmt: skip


@pytest.mark.parametrize(
    ("card", "precision", "tokens", "milliseconds"),
    [
        ("h20", "fp32", 1024, 196.31),  # MarkMrLi/assignment2-systems@a024148:results/benchmark.md
        ("h20", "bf16-mixed", 512, 57.63),
        ("h100-sxm", "fp32", 512, 62.00),  # brandon-snider/cs336-a2@49cf3d4:writeup.typ
        ("h100-sxm", "bf16-mixed", 512, 49.58),
    ],
)
def test_single_operations_take_as_long_as_published(
    card: str, precision: str, tokens: int, milliseconds: float
) -> None:
    """Forward and backward of the half that benchmarks/gathered.py does not keep out; none is fitted on."""
    setup = CS336.replace(precision=precision, seq_len_tokens=tokens)
    timing = step_time(small_of_cs336(), find_gpu(card), setup, conditions=conditions_of(setup))
    assert (timing.step_time_s - timing.parts_s["optimizer"]) * 1e3 == pytest.approx(milliseconds, rel=0.13)


@pytest.mark.parametrize(
    ("gpu", "size", "published"), [("rtx-5090", "8B", 3500), ("h100-sxm", "8B", 9100), ("b200", "32B", 4200)]
)
def test_unsloths_speed_is_as_published(gpu: str, size: str, published: int) -> None:
    """Rows of 2,048 packed, LoRA on all matrices (surogate_unsloth of benchmarks/gathered.py): 12 to 34 % too slow
    while packed samples were taken to see each other and adapters to be peft's."""
    setup = TrainSetup(
        precision="bf16-autocast", optimizer="adamw-8bit", loss="chunked", kernels="fused", activation_offload=True,
        micro_batch_seqs=2, accumulation_steps=4, seq_len_tokens=2048, packing=True, stack="unsloth",
        adapter_dtype="fp32",
    )  # fmt: skip
    model, card = loaded(f"Qwen/Qwen3-{size}"), find_gpu(gpu)
    profile = throughput_profile(model, card, setup, conditions=conditions_of(setup))
    assert profile.step_time(setup).tokens_per_s == pytest.approx(published, rel=0.11)


def test_an_older_delta_rule_walks_over_every_row_of_its_chunks() -> None:
    """Qwen3.5-4B on a T4 under transformers before 5.17, samples of 93 tokens: 42 to 45 tokens/s, 129 said before."""
    setup = TrainSetup(
        precision="fp16-autocast", optimizer="adamw-fused", loss="chunked", linear_attention="torch",
        micro_batch_seqs=1, accumulation_steps=16, seq_len_tokens=93,
    )  # fmt: skip
    model, card = loaded("Qwen/Qwen3.5-4B"), find_gpu("t4")
    today, older = (step_time(model, card, setup.replace(transformers_version=v)) for v in ("", "5.16"))
    assert older.step_time_s - today.step_time_s == pytest.approx(16 * 24 * 31.3e-3, rel=0.2)


def test_a_loss_scaler_reads_and_writes_every_gradient() -> None:
    """5.6 ms of a Colab T4's step of 162 M weights (the trace that `planner.speed.rates.COPY_SHARE` names)."""
    mixed = TrainSetup(method="full", lora_rank=0, precision="fp16-mixed", optimizer="adamw")
    card = find_gpu("t4")
    halves, brains = (
        step_time(SMALL, card, mixed.replace(precision=precision)).parts_s["optimizer"]
        for precision in ("fp16-mixed", "bf16-mixed")
    )
    assert (halves - brains) / SMALL.num_params == pytest.approx(5.64e-3 / 162e6, rel=0.06)
