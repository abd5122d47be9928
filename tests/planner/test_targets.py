"""Which matrices get an adapter: golden counts, the rules for names, and what is refused."""

import pytest

from planner.core.errors import SetupError
from planner.models import catalogue, matching
from planner.models.targets import (
    adapts_expert_stacks,
    attention_target_names,
    available_names,
    lora_linears,
    lora_params,
    lora_rank,
    num_lora_params,
    peft_target_modules,
    unmatched_targets,
)
from tests.planner.helpers import loaded

ALL_SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("name", "targets", "rank", "expected"),
    [
        # By hand: 32 layers x 16 x (8192 + 2 x 5120 + 8192 attention, + 3 x 18432 MLP).
        ("meta-llama/Llama-3.1-8B", "all-linear", 16, 41_943_040),
        ("meta-llama/Llama-3.1-8B", "attention", 16, 13_631_488),
        # peft's own README and many notebooks print this for q_proj and v_proj at rank 8.
        ("meta-llama/Llama-2-7b-hf", ("q_proj", "v_proj"), 8, 4_194_304),
        ("openai-community/gpt2", ("c_attn",), 8, 294_912),
    ],
)
def test_num_lora_params_golden(name: str, targets: str | tuple[str, ...], rank: int, expected: int) -> None:
    assert num_lora_params(loaded(name), targets, rank) == expected


def test_counts_grow_with_rank_and_with_targets() -> None:
    for name in catalogue.names():
        model = loaded(name)
        attention, everything = (num_lora_params(model, targets, 8) for targets in ("attention", "all-linear"))
        assert 0 < attention <= everything, name
        assert num_lora_params(model, "all-linear", 16) == 2 * everything, name


def test_explicit_attention_names_adapt_what_attention_adapts() -> None:
    """But for idle encoders, whose modules may carry the same names."""
    for name in catalogue.names():
        model = loaded(name)
        if not model.idle_layers:
            names = attention_target_names(model)
            assert num_lora_params(model, names, 4) == num_lora_params(model, "attention", 4), name


def test_the_seven_usual_names_are_all_linear_for_llama() -> None:
    model = loaded("meta-llama/Llama-3.1-8B")
    assert num_lora_params(model, ALL_SEVEN, 16) == num_lora_params(model, "all-linear", 16)


def test_attention_names_stay_unambiguous() -> None:
    assert attention_target_names(loaded("gpt2")) == ("c_attn", "attn.c_proj")
    assert attention_target_names(loaded("microsoft/Phi-3-mini-4k-instruct")) == ("o_proj", "qkv_proj")
    assert attention_target_names(loaded("tiiuae/falcon-7b")) == ("query_key_value", "dense")


def test_names_match_by_suffix_at_a_dot() -> None:
    model = loaded("gpt2")
    both = num_lora_params(model, ("c_proj",), 8)
    assert num_lora_params(model, ("attn.c_proj",), 8) + num_lora_params(model, ("mlp.c_proj",), 8) == both
    with pytest.raises(SetupError):
        lora_linears(model, ("proj",))
    with pytest.raises(SetupError):
        lora_linears(model, ("ttn.c_proj",))


def test_the_head_can_be_named_and_is_never_in_all_linear() -> None:
    model = loaded("Qwen/Qwen2.5-7B")
    head = num_lora_params(model, ("lm_head",), 8)
    assert head == 8 * (3584 + 152064)
    assert num_lora_params(model, (*ALL_SEVEN, "lm_head"), 8) == num_lora_params(model, "all-linear", 8) + head


def test_outer_projections_belong_to_all_linear() -> None:
    kinds = [layer.kind for layer, _, _ in lora_linears(loaded("facebook/opt-350m"), "all-linear")]
    assert kinds == ["full", "outer"]


def test_idle_towers_are_in_all_linear_and_not_in_attention() -> None:
    model = loaded("google/gemma-3-4b-it")
    idle = [layer for layer, _ in model.idle_layers]
    assert any(layer in idle for layer, _, _ in lora_linears(model, "all-linear"))
    assert not any(layer in idle for layer, _, _ in lora_linears(model, "attention"))
    regex = peft_target_modules(model, "attention")
    assert isinstance(regex, str)
    assert "language_model" in regex


def test_peft_target_modules_are_short_names_where_nothing_is_idle() -> None:
    model = loaded("meta-llama/Llama-3.1-8B")
    assert peft_target_modules(model, "attention") == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert peft_target_modules(model, "all-linear") == "all-linear"
    assert peft_target_modules(model, ("q_proj",)) == ["q_proj"]


def test_all_linear_adapts_expert_stacks_of_converted_types_at_double_rank() -> None:
    """Golden: shapes printed by peft 0.21.2 for Qwen3-30B-A3B at rank 8 (2048 = 128 experts x 16)."""
    model = loaded("Qwen/Qwen3-30B-A3B")
    ((_, num, linears),) = lora_linears(model, "all-linear")
    assert num == 48
    stacks = {linear.role: linear for linear in linears if linear.module == "parameter"}
    assert lora_rank(stacks["gate_up"], 8) * stacks["gate_up"].num == 2048
    assert lora_params(stacks["gate_up"], 8) == 2048 * (2048 + 1536)
    assert lora_params(stacks["down"], 8) == 1024 * (768 + 2048)
    assert lora_params(stacks["router"], 8) == 8 * (2048 + 128)
    assert adapts_expert_stacks(model, "all-linear")
    assert not adapts_expert_stacks(model, "attention")


def test_experts_of_other_types_stay_untouched() -> None:
    for name in ("openai/gpt-oss-20b", "microsoft/Phi-3.5-MoE-instruct", "Qwen/Qwen1.5-MoE-A2.7B"):
        assert not adapts_expert_stacks(loaded(name), "all-linear"), name


def test_half_of_a_fused_expert_stack_is_refused() -> None:
    with pytest.raises(SetupError, match="one half"):
        lora_linears(loaded("Qwen/Qwen3-30B-A3B"), ("q_proj", "gate_proj"))
    with pytest.raises(SetupError, match="one half"):
        lora_linears(loaded("mistralai/Mixtral-8x7B-v0.1"), ("w1",))


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("meta-llama/Llama-3.1-8B", ("c_attn",)), ("meta-llama/Llama-3.1-8B", ("",)),
        ("meta-llama/Llama-3.1-8B", ("embed_tokens",)), ("meta-llama/Llama-3.1-8B", ("layers.0.self_attn.q_proj",)),
        ("mistralai/Mixtral-8x7B-v0.1", ("gate_proj",)), ("google/gemma-4-E2B-it", ("q_proj",)),
        ("openai/gpt-oss-20b", ("router",)), ("meta-llama/Llama-3.1-8B", "everything"),
    ],
)  # fmt: skip
def test_what_matches_nothing_or_cannot_be_adapted_is_refused(name: str, targets: str | tuple[str, ...]) -> None:
    with pytest.raises(SetupError) as error:
        lora_linears(loaded(name), targets)
    assert error.value.hint


def test_the_refusal_lists_what_there_is() -> None:
    with pytest.raises(SetupError) as error:
        lora_linears(loaded("gpt2"), ("q_proj",))
    assert "c_attn, c_proj, c_fc" in error.value.hint
    assert "lm_head" in available_names(loaded("gpt2"))
    assert "w1" in available_names(loaded("mistralai/Mixtral-8x7B-v0.1"))


def test_unmatched_targets_are_named() -> None:
    phi3 = loaded("microsoft/Phi-3-mini-4k-instruct")
    assert unmatched_targets(phi3, ALL_SEVEN) == ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    assert unmatched_targets(phi3, "all-linear") == ()
    assert unmatched_targets(loaded("Qwen/Qwen3-30B-A3B"), ALL_SEVEN) == ()


def test_a_pattern_that_would_match_for_ever_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "CPU_LIMIT_S", 1)
    names = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj")
    assert matching.full_matches(r".*\.[qk]_proj", names) == {names[0]}
    with pytest.raises(SetupError, match="to match"):
        matching.full_matches(r"(\w+\.?)+!", ("a" * 60,))
    with pytest.raises(SetupError, match="no valid pattern"):
        matching.full_matches("(", names)
