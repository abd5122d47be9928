"""Programs of one structure of layers for models of any size, and checkpoints of any spacing."""

from dataclasses import replace
from typing import Any

import pytest

from planner.hardware.gpus import find_gpu
from planner.memory.profiles import program_key
from planner.models.families import spec_from_config
from planner.models.spec import ModelSpec
from planner.models.structures import Resizer, structure_of
from planner.setup import TrainSetup
from planner.speed.operators import ISSUERS
from planner.speed.prices import needed_flops
from planner.speed.rates import card_rates
from planner.speed.sized import Sized, program_speed
from planner.speed.step_program import ModelPrograms, StepProgram, flat, programs_of, spaced
from tests.planner.helpers import loaded

H100 = find_gpu("h100-sxm")
SEQS, TOKENS, RANK = 2, 1024, 16
FULL = TrainSetup(
    method="full", lora_rank=0, precision="bf16-mixed", kernels="liger", loss="full", checkpointing=0,
    micro_batch_seqs=SEQS, seq_len_tokens=TOKENS,
)  # fmt: skip
SHARING = (
    "microsoft/phi-4", "google/gemma-7b", "bigcode/starcoder2-7b", "EleutherAI/pythia-2.8b", "openai-community/gpt2-xl",
    "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.2-3B", "meta-llama/Llama-2-13b-hf", "Qwen/Qwen2.5-3B",
    "Qwen/Qwen2.5-32B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-32B", "mistralai/Mistral-7B-v0.3",
    "microsoft/phi-2", "microsoft/Phi-4-mini-instruct", "EleutherAI/pythia-1b", "tiiuae/falcon-40b",
    "facebook/opt-350m",
)  # fmt: skip


def programs(model: ModelSpec) -> ModelPrograms:
    model_programs = programs_of(model)
    assert model_programs is not None, model.model_id
    return model_programs


def flops(model: ModelSpec, setup: TrainSetup) -> float:
    """Of a micro-batch's products, by its program."""
    model_programs = programs(model)
    program = model_programs.get(program_key(model, H100, setup)) or model_programs.get(
        program_key(model, H100, setup.replace(kernels="eager"))
    )
    sized = Sized(model_programs, card_rates(H100), SEQS, TOKENS, RANK, {})
    calls = (
        call
        for place in flat((*program.forward, *program.backward))
        for run in model_programs.segments[place].runs
        for call in run.calls
        if call % len(ISSUERS)
    )
    return sum(needed_flops(sized.operator(call // len(ISSUERS))) for call in calls)


@pytest.mark.parametrize("name", SHARING)
def test_a_structures_products_are_those_of_the_models_own_sizes(name: str) -> None:
    """Six for every weight but the embedding's (the head's may be narrower, between two matrices) and every token, and
    attention's 14 of four products (2 forward, 5 backward) over half of the pairs."""
    model = loaded(name)
    attention = model.layer_kinds[0].attention
    layer = sum(linear.in_features * linear.out_features for linear in model.layer_kinds[0].linears)
    hidden, embedded = model.hidden_size, model.config.get("word_embed_proj_dim", model.hidden_size)
    weights = model.num_layers * layer + model.vocab_size * embedded + (hidden != embedded) * 2 * hidden * embedded
    attended = 14 * model.num_layers * SEQS * attention.num_heads * attention.head_dim * TOKENS**2 / 2
    assert flops(model, FULL) == pytest.approx(6 * weights * SEQS * TOKENS + attended, rel=0.005)


OWN = {
    "hidden": 3080, "intermediate": 7424, "head": 104, "kv heads": 7, "groups": 5, "vocabulary": 106240, "layers": 37,
    "rest": 7936, "weights": 123456789, "adapters: all": 1876640, "adapters: attention": 740000,
    "adapters: queries and values": 370000,
}  # fmt: skip
OTHER = {
    "hidden": 5120, "intermediate": 13824, "head": 128, "kv heads": 8, "groups": 5, "vocabulary": 128256, "layers": 48,
    "rest": 29952, "weights": 1000, "adapters: all": 300, "adapters: attention": 20, "adapters: queries and values": 10,
}  # fmt: skip
DIMENSIONS = {
    3080: 5120, 7424: 13824, 104: 128, 52: 64, 7: 8, 35: 40, 5: 5, 728: 1024, 3640: 5120, 106240: 128256, 7936: 29952,
    123456789: 1000, 1876640: 300, 740000: 20, 2 * 370000: 20, 3080 * 7424 / 64: 5120 * 13824 / 64,
    3080 * 3640 / 2: 5120 * 5120 / 2, 4096: 4096, 32768: 32768, 132: 132, 1: 1, 256: 256, 1308: 1308,
}  # fmt: skip
"""Of the model that was run -> of the other: products, sums, blocks of 64 and 256 weights, and what is of no size."""


@pytest.mark.parametrize("number", DIMENSIONS)
def test_a_number_says_which_sizes_it_is_of(number: float) -> None:
    assert Resizer(OWN, OTHER).size(number) == pytest.approx(DIMENSIONS[number])


@pytest.mark.parametrize(
    ("number", "other"),
    [
        (2 * 106240 * 3080, 2 * 128256 * 5120),
        (2 * 5096 * 3080, 2 * 7168 * 5120),
        (3640 * 3080 / 2, 5120 * 5120 / 2),
        (60 * 3080 * 7424, 60 * 5120 * 13824),
        (1000.0, 1000.0),
        (98304.0, 98304.0),
        (6188.875, 6188.875 * 5120 / 3080),
    ],
)
def test_a_product_says_which_matrix_it_is(number: float, other: float) -> None:
    """Embeddings, queries, keys and values in one, queries alone of half the bytes, sixty experts; no matrix, and none
    that is nearly the features' bytes; two bytes a feature and a little more."""
    sizes = {"queries, keys and values": 5096}, {"queries, keys and values": 7168}
    assert Resizer(OWN | sizes[0], OTHER | sizes[1]).product(number) == pytest.approx(other)


def test_counts_are_of_layers_and_what_is_beside_them() -> None:
    to = Resizer(OWN, OTHER)
    assert [to.count(num) for num in (1, 35, 36, 37, 38, 14 * 37, 9 * 37 + 3)] == [1, 46, 47, 48, 49, 672, 435]
    assert [to.count(num) for num in (2 * 37 - 2, 60 * 37 + 20)] == [94, 2900]  # five lists of what four others have


def test_a_program_of_windowed_layers_is_of_samples_that_a_window_holds() -> None:
    model = loaded("mistralai/Mistral-7B-v0.1")
    assert program_speed(model, H100, FULL.replace(seq_len_tokens=4095)) is not None
    assert program_speed(model, H100, FULL.replace(seq_len_tokens=4097)) is None


def test_other_layers_are_another_structure() -> None:
    model = loaded("Qwen/Qwen2.5-7B")
    assert structure_of(model) == structure_of(loaded("Qwen/Qwen2.5-32B")) is not None
    layer = model.layer_kinds[0]
    assert layer.attention is not None
    unbiased = replace(layer, linears=tuple(replace(linear, bias=False) for linear in layer.linears))
    others = [
        replace(model, layer_kinds=(unbiased,) * model.num_layers),
        replace(model, vocab_size=32_000),
        replace(model, config={**model.config, "tie_word_embeddings": True}),
    ]
    assert structure_of(model) not in {structure_of(variant) for variant in others}
    windowed = replace(layer, attention=replace(layer.attention, window_tokens=4096))
    assert structure_of(replace(model, layer_kinds=(windowed,))) not in {structure_of(model), None}
    assert structure_of(loaded("google/gemma-2-2b")) is None
    packed = {**model.config, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert structure_of(replace(model, config=packed)) is None
    loaded_so = {**model.config, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    assert structure_of(replace(model, config=loaded_so)) == structure_of(model)


def test_checkpoints_of_any_spacing_stand_between_none_and_every() -> None:
    """Layers 0 to 4 are 1, the last one 2; checkpointed 11 and 12; in the backward 3, of the first one 4; 13 and 14."""
    none = StepProgram(
        (((0,), 1), ((1,), 4), ((2,), 1), ((9,), 1)), (((8,), 1), ((3,), 4), ((4,), 1)), (), {}, 5, False
    )
    every = none._replace(
        forward=(((0,), 1), ((11,), 4), ((12,), 1), ((9,), 1)), backward=(((8,), 1), ((13,), 4), ((14,), 1)),
        checkpointed=True,
    )  # fmt: skip
    second = spaced(none, every, 2, 5)
    assert (flat(second.forward), flat(second.backward)) == ([0, 11, 1, 11, 1, 12, 9], [8, 13, 3, 13, 3, 14])
    third = spaced(none, every, 3, 5)
    assert (flat(third.forward), flat(third.backward)) == ([0, 11, 1, 1, 11, 2, 9], [8, 3, 13, 3, 3, 14])
    assert spaced(none, every, 2, 6) is None


def test_fewer_checkpoints_are_faster() -> None:
    model = loaded("meta-llama/Llama-3.1-8B")
    times = []
    for apart in (0, 16, 8, 5, 4, 3, 2, 1):
        setup = FULL.replace(method="lora", lora_rank=RANK, precision="bf16-autocast", checkpointing=apart)
        speed = program_speed(model, H100, setup)
        times.append(speed.step_time(setup).step_time_s)
    assert times == sorted(times)
    assert times[-1] > 1.2 * times[0]


@pytest.mark.parametrize("packed", ["int4", ["a"], {"quant_method": "awq"}])
def test_weights_that_are_packed_in_another_way_have_no_structure(packed: Any) -> None:
    model = loaded("meta-llama/Llama-3.2-1B")
    assert structure_of(model) is not None
    other = spec_from_config({**model.config, "quantization_config": packed}, model_id="a copy", source="test")
    assert structure_of(other) is None
