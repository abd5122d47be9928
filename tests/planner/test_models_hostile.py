"""Hostile configurations: a spec or a `PlannerError` that says what was expected, never another exception."""

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.core.errors import ConfigError, PlannerError, UnknownModelError
from planner.models import catalogue
from planner.models.config_file import MAX_CONFIG_BYTES, parse_config, with_floats
from planner.models.families import has_family, model_types, spec_from_config
from planner.models.spec import ModelSpec
from planner.models.structures import changes as lengths_of_change
from tests.whole import some

ONE_PER_TYPE = {entry.model_type: dict(entry.config) for entry in catalogue.entries() if has_family(entry.model_type)}
"""Others are read by transformers itself, in another process."""

JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 3, 10**9, 10**30, 10**5000, -(10**18), 0.5, 4096.0, math.nan, math.inf, 1e308,
    "", "4096", "full_attention", "\x00", "x" * 5000, "\ud800", [], [1, 2], [[]], {}, {"a": 1}, [None] * 3,
    [["global"], 1], -math.inf,
    [[["global", "local"], 10**12]], ["full_attention"] * 4, ["sliding_attention"] * 100_000, {"hidden_size": -1},
]  # fmt: skip


def build(config: Any) -> ModelSpec:
    return spec_from_config(config, model_id="test", source="test")


def accept_or_refuse(config: Any) -> ModelSpec | None:
    """A spec whose numbers make sense, or a refusal with a message of bounded length and a hint."""
    refusal = None
    try:
        spec = build(config)
    except PlannerError as error:
        refusal = error
    if refusal is not None:
        assert 0 < len(refusal.message) < 500
        assert refusal.hint
        assert refusal.message.encode("utf-8")
        return None
    assert 0 < spec.num_params < 10**24
    assert spec.num_active_params > 0
    assert lengths_of_change(spec) == sorted(lengths_of_change(spec))
    assert 1 <= spec.num_layers <= 20_000
    return spec


def _places(config: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    paths = []
    for key, value in config.items():
        paths.append((*path, key))
        if isinstance(value, dict):
            paths += _places(value, (*path, key))
    return paths


def _with(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    changed = dict(config)
    inner = changed
    for key in path[:-1]:
        inner[key] = inner = dict(inner[key])
    inner[path[-1]] = value
    return changed


@pytest.mark.parametrize("model_type", sorted(ONE_PER_TYPE))
def test_any_single_field_turned_to_junk_is_refused_or_understood(model_type: str) -> None:
    config = ONE_PER_TYPE[model_type]
    for path in _places(config):
        for value in some(JUNK, 2):
            accept_or_refuse(_with(config, path, value))


@pytest.mark.parametrize("model_type", sorted(ONE_PER_TYPE))
def test_any_single_field_missing_is_refused_or_understood(model_type: str) -> None:
    config = ONE_PER_TYPE[model_type]
    for path in _places(config):
        changed = copy.deepcopy(config)
        inner = changed
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        accept_or_refuse(changed)


@pytest.mark.parametrize("model_type", [model_type for model_type in model_types() if has_family(model_type)])
def test_a_config_of_nothing_but_a_type_is_refused(model_type: str) -> None:
    with pytest.raises(ConfigError, match="missing"):
        build({"model_type": model_type})


@given(
    st.sampled_from(sorted(ONE_PER_TYPE)),
    st.dictionaries(
        st.sampled_from(sorted({path[-1] for config in ONE_PER_TYPE.values() for path in _places(config)})),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
            max_leaves=6,
        ),
        max_size=4,
    ),
)
@settings(max_examples=100, deadline=None)
def test_random_changes_never_raise_anything_else(model_type: str, changes: dict[str, Any]) -> None:
    accept_or_refuse({**ONE_PER_TYPE[model_type], **changes})


@pytest.mark.parametrize("root", [None, [], "llama", 3, math.nan, True, [{"model_type": "llama"}]])
def test_a_root_that_is_no_object_is_refused(root: Any) -> None:
    with pytest.raises(ConfigError, match="JSON object"):
        build(root)


def test_messages_say_what_was_expected_and_what_came() -> None:
    llama = ONE_PER_TYPE["llama"]
    for changes, expected in (
        ({"num_hidden_layers": "32"}, "num_hidden_layers must be a whole number, got '32'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be between 1 and 10000, got 0"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers must be between 1 and 10000, got 10001"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_key_value_heads": 7}, "must be a multiple of num_key_value_heads 7"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false, got 'yes'"),
        ({"hidden_size": [4096]}, "hidden_size must be a whole number, got [4096]"),
        ({"rope_scaling": "linear"}, "rope_scaling must be a JSON object or null, got 'linear'"),
        ({"hidden_act": "bogus"}, "hidden_act must be the name of an activation function of transformers, got 'bogus'"),
        ({"num_local_experts": 8, "num_experts_per_tok": 20}, "20 experts a token, of 8"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number of at least 0, got 'small'"),
    ):
        with pytest.raises(ConfigError) as error:
            build({**llama, **changes})
        assert expected in error.value.message, error.value.message


def test_an_unknown_type_names_close_ones_and_refuses_llama_shaped_configs() -> None:
    with pytest.raises(UnknownModelError) as error:
        build({**ONE_PER_TYPE["llama"], "model_type": "lama"})
    assert "llama" in error.value.hint
    with pytest.raises(UnknownModelError) as error:
        build({"model_type": "mamba9"})
    assert "newer" in error.value.hint or "close types" in error.value.hint or "torch" in error.value.hint


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b"[]", "JSON object"),
        (b"null", "JSON object"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"[" * 1_000_000, "nested too deeply"),
        (b'{"vocab_size": ' + b"9" * 10_000 + b"}", "not JSON"),
        (b" " * (MAX_CONFIG_BYTES + 1), "more than 5 MB"),
        (b"\x00" * 100, "not JSON"),
    ],
    ids=lambda value: value[:12] if isinstance(value, bytes) else None,
)
def test_files_that_are_no_configuration_are_refused(content: bytes, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse_config(content, "config.json")


def test_a_real_configuration_survives_the_round_trip_through_a_file() -> None:
    config = ONE_PER_TYPE["phi3"]
    assert build(parse_config(json.dumps(config).encode(), "config.json")) == build(config)


@pytest.mark.parametrize("written", ["Infinity", '{"__float__": "Infinity"}'], ids=["version 4", "version 5"])
def test_what_transformers_writes_for_infinity_is_read(written: str) -> None:
    """Mamba 2, Bamba, Granite 4, Nemotron-H; whatever is made of the configuration stays JSON."""
    content = f'{{"time_step_limit": [0.0, {written}], "quantization_config": {{"x": -Infinity, "y": NaN}}}}'
    config = parse_config(content.encode(), "config.json")
    assert json.loads(json.dumps(config, allow_nan=False)) == config
    floats = with_floats(config)
    assert floats["time_step_limit"] == [0.0, math.inf]
    assert floats["quantization_config"]["x"] == -math.inf
    assert math.isnan(floats["quantization_config"]["y"])


def test_code_that_a_model_brings_along_is_never_run_and_that_is_said() -> None:
    config = {"model_type": "brand_new", "auto_map": {"AutoModelForCausalLM": "modeling_new.NewForCausalLM"}}
    with pytest.raises(UnknownModelError, match="no trust_remote_code") as error:
        spec_from_config(config, model_id="new", source="test")
    assert "plan trace" in error.value.hint
