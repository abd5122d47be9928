"""A truncated run with its middle layers repeated must equal the full depth, byte for byte."""

import copy
import importlib
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from planner.models import catalogue
from planner.setup import TrainSetup
from probes.allocator.events import Alloc, Free, flat
from probes.allocator.replay import replay
from probes.dryrun import DryRunReport, engine, report_for_config
from probes.dryrun.analysis import curve_of, phase_peaks
from probes.dryrun.depths import fewest, layer_kinds, plan_depth, standing_for
from probes.dryrun.engine import full_trace
from probes.dryrun.fastmeta import SHORTCUTS, Remembered
from probes.dryrun.step_replay import Replay
from probes.dryrun.trace import Trace, trace_run
from probes.stack.configs import load_config, period_of, truncated_config
from tests.probes.dryrun_small import assert_same_figures, catalogue_config, small_config
from tests.whole import some, these

AMPERE = (8, 0)
DEEP = 5
"""Of which three run: the middle one stands for three."""
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama lora": ("llama", {"num_hidden_layers": DEEP}, {}),
    "llama every third layer": ("llama", {"num_hidden_layers": 13}, {"checkpointing": 3}),
    "qwen2 full": ("qwen2", {"num_hidden_layers": DEEP}, {"method": "full", "lora_rank": 0, "optimizer": "adamw"}),
    "qwen3 qlora": ("qwen3", {"num_hidden_layers": DEEP}, {"method": "qlora", "quantization": "nf4-double"}),
    "llama int8": ("llama", {"num_hidden_layers": DEEP}, {"method": "qlora", "quantization": "int8"}),
    "qwen2 int8, accumulation, sgd": (
        "qwen2",
        {"num_hidden_layers": DEEP},
        {"method": "qlora", "quantization": "int8", "accumulation_steps": 2, "optimizer": "sgd"},
    ),
    "gemma2 int8, dropout": (
        "gemma2",
        {"num_hidden_layers": 8},
        {"method": "qlora", "quantization": "int8", "lora_dropout": 0.1},
    ),
    "gemma2 alternating": ("gemma2", {"num_hidden_layers": 8}, {}),
    "gemma3 five to one": ("gemma3_text", {"num_hidden_layers": 14, "sliding_window": 32}, {"checkpointing": 0}),
    "gpt2": ("gpt2", {"n_layer": DEEP}, {"checkpointing": 0}),
    "deepseek dense first": (
        "deepseek_v3",
        {
            "num_hidden_layers": 9,
            "first_k_dense_replace": 3,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "num_key_value_heads": 4,
            "n_group": 1,
            "topk_group": 1,
        },
        {},
    ),
    "mixtral": ("mixtral", {"num_hidden_layers": DEEP}, {"accumulation_steps": 2}),
    "gpt-oss": ("gpt_oss", {"num_hidden_layers": 8, "layer_types": ["sliding_attention", "full_attention"] * 4}, {}),
    "smollm3 no rope every fourth": ("smollm3", {"num_hidden_layers": 14}, {}),
    "starcoder2 qlora, the first layer's input in 16 bits": (
        "starcoder2",
        {"num_hidden_layers": 7},
        {"method": "qlora", "quantization": "nf4-double", "accumulation_steps": 2},
    ),
    "bloom int8, biases replaced": ("bloom", {"n_layer": DEEP}, {"method": "qlora", "quantization": "int8"}),
    "gpt-neo local and global": ("gpt_neo", {"num_layers": 8, "attention_types": [[["global", "local"], 4]]}, {}),
}
SOME = (
    "gemma2 int8, dropout", "deepseek dense first",
    "starcoder2 qlora, the first layer's input in 16 bits",
)  # fmt: skip
"""Each pattern of layers, quantization and accumulation once."""


@pytest.mark.slow
@pytest.mark.parametrize("name", these(SOME, [*CASES]))
def test_dry_run_repeated_depth_equals_full_depth(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, changes, fields = CASES[name]
    messages: list[str] = []
    monkeypatch.setattr(engine.log, "debug", lambda text, *values: messages.append(text % values))
    config = small_config(model_type, **changes)
    setup = TrainSetup(**{"seq_len_tokens": 64, "micro_batch_seqs": 2, "lora_rank": 4, **fields})
    short = report_for_config(config, AMPERE, setup)
    full = report_for_config(config, AMPERE, setup, full_depth=True)
    assert isinstance(short, DryRunReport), short
    assert isinstance(full, DryRunReport), full
    assert_same_figures(short, full)
    assert f"{full.depth} of {full.depth} layers" not in " ".join(messages)


def test_every_event_is_that_of_the_full_depth() -> None:
    """In order: in the backward the deepest layer comes first, and what belongs to no layer goes with the layer that
    ends it."""
    config = small_config("qwen2", num_hidden_layers=8)
    setup = TrainSetup(
        seq_len_tokens=64, micro_batch_seqs=2, method="qlora", quantization="int8", optimizer="sgd", lora_rank=4
    )
    short, full = (
        full_trace(plan_depth(load_config(config), checkpointing=1, full_depth=whole), AMPERE, setup)
        for whole in (False, True)
    )
    assert _changes(short) == _changes(full)
    listed = short.flat()
    assert len(listed.events) > 5 * len(short.events)
    assert curve_of(short).totals == curve_of(listed).totals
    assert phase_peaks(short, curve_of(short)) == phase_peaks(listed, curve_of(listed))
    for expandable in (True, False):
        assert replay(short.events, expandable_segments=expandable) == replay(
            listed.events, expandable_segments=expandable
        )


def _changes(trace: Trace) -> list[int | tuple[int, int]]:
    """Sizes as they are made, and the place among them of what is released."""
    places: dict[int, int] = {}
    changes: list[int | tuple[int, int]] = []
    for event in flat(trace.events):
        if isinstance(event, Alloc):
            places[event.id] = len(places)
            changes.append((places[event.id], event.size_bytes))
        elif isinstance(event, Free):
            changes.append(places[event.id])
    return changes


def test_period_of_patterns() -> None:
    assert period_of((1,) * 12) == (0, 1)
    assert period_of((1, 2) * 6) == (0, 2)
    assert period_of((9, 9, 9) + (1,) * 20) == (3, 1)
    assert period_of((1, 1, 1, 1, 1, 2) * 4 + (1, 1)) == (0, 6)


def test_plan_depth_holds_every_neighbourhood_of_gemma3() -> None:
    """Local layers alone, before and behind a global one, and the two ends."""
    config = load_config(catalogue_config("gemma3_text"))
    plan = plan_depth(config, checkpointing=1, full_depth=False)
    assert plan.depth == 6
    kinds, short = layer_kinds(config), layer_kinds(plan.config)
    assert [short[run] for run in plan.layers.of] == [*kinds]
    assert (plan.layers.of[0], plan.layers.of[-1]) == (0, 5)


@pytest.mark.parametrize(
    ("kinds", "kept"),
    [("aaaaaaaa", "aaa"), ("aabbbbbb", "aabbb"), ("abababab", "abab"), ("abcdef", "abcdef"), ("a", "a")],
)
def test_fewest_layers_of_patterns(kinds: str, kept: str) -> None:
    chosen = fewest(kinds)
    assert "".join(kinds[layer] for layer in chosen) == kept
    assert [kinds[chosen[run]] for run in standing_for(kinds, chosen)] == [*kinds]


@pytest.mark.parametrize("kind", some(["gemma3_text", "gemma4"], 2))
def test_events_do_not_hang_on_the_order_in_which_a_process_walks_through_sets(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers makes masks and rotary tables for each of a set of words, whose order Python's hash seed decides."""
    from transformers import masking_utils

    config = truncated_config(load_config(small_config(kind, num_hidden_layers=6, sliding_window=32)), 6)
    configs = (config, config.get_text_config())
    modelings = {
        importlib.import_module(type(part).__module__.replace(".configuration_", ".modeling_")) for part in configs
    }
    setup = TrainSetup(seq_len_tokens=64, checkpointing=1)

    def events(backwards: bool) -> list[Any]:
        class Ordered(set[Any]):
            def __iter__(self) -> Any:
                return iter(sorted(super().__iter__(), key=str, reverse=backwards))

        for module in (masking_utils, *modelings):
            monkeypatch.setattr(module, "set", Ordered, raising=False)
        return [*flat(trace_run(copy.deepcopy(config), setup, capability=AMPERE).events)]

    assert events(False) == events(True)


def test_plan_depth_runs_all_layers_where_tables_outside_them_grow_with_their_number() -> None:
    small = catalogue.find("google/gemma-4-E4B-it")
    plan = plan_depth(load_config(dict(small.config)), checkpointing=1, full_depth=False)
    assert (plan.depth, plan.layers) == (42, None)


def test_plan_depth_runs_all_of_an_encoder_decoder() -> None:
    plan = plan_depth(load_config(catalogue_config("t5")), checkpointing=1, full_depth=False)
    assert plan.layers is None
    assert plan.depth == plan.full


QUICK: dict[str, tuple[str, dict[str, Any], dict[str, Any], bool]] = {
    "llama lora, accumulation": ("llama", {}, {"accumulation_steps": 4}, True),
    "gemma2 fp16, adafactor": ("gemma2", {}, {"precision": "fp16-autocast", "optimizer": "adafactor"}, True),
    "deepseek lora": (
        "deepseek_v3",
        {**CASES["deepseek dense first"][1], "num_hidden_layers": 3, "first_k_dense_replace": 1},
        {},
        True,
    ),
    "gpt2, a loop that keeps its outputs": ("gpt2", {}, {"stack": "plain-loop", "accumulation_steps": 2}, False),
    "llama full, tied, accumulation": (
        "llama",
        {"tie_word_embeddings": True},
        {"method": "full", "lora_rank": 0, "optimizer": "adamw", "accumulation_steps": 2},
        True,
    ),
}


@pytest.mark.parametrize("name", some([*QUICK], 4))
def test_what_is_not_run_again_is_as_if_it_had_been(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied micro-batches and steps and remembered meta kernels change no event; one that differs is run."""
    model_type, changes, fields, copied = QUICK[name]
    setup = TrainSetup(**{"seq_len_tokens": 64, "lora_rank": 4, **fields})
    config = small_config(model_type, **changes)
    step, replayed = Replay.step, []
    micro_batch, micro_found = Replay.micro_batch, []

    def told(*given: Any) -> bool:
        replayed.append(step(*given))
        return replayed[-1]

    def told_of_micro_batch(*given: Any) -> Any:
        loss = micro_batch(*given)
        if given[1] is not None:
            micro_found.append(loss is not None)
        return loss

    monkeypatch.setattr(Replay, "step", told)
    monkeypatch.setattr(Replay, "micro_batch", told_of_micro_batch)
    short = trace_run(load_config(config), setup, capability=AMPERE)
    assert replayed == [False, copied]
    assert all(was_copied is copied for was_copied in micro_found)
    assert len(micro_found) == (setup.accumulation_steps > 1) * (1 if copied else 2)
    monkeypatch.setattr(Replay, "step", lambda *_: False)
    monkeypatch.setattr(Replay, "micro_batch", lambda *_: None)
    monkeypatch.setattr(Remembered, "call", _called)
    long = trace_run(load_config(config), setup, capability=AMPERE)
    assert short.events == long.events
    assert short.origins == long.origins
    assert short.owners == long.owners
    assert short.log == long.log


def _called(_: Remembered, func: Any, args: Any, kwargs: Any) -> Any:
    """The operator itself, but what no meta kernel can do."""
    done = SHORTCUTS[func](args, kwargs) if func in SHORTCUTS else None
    return func(*args, **kwargs) if done is None else done if isinstance(done, list) else None
