"""An architecture that no family knows: its spec is read off the module tree, and the formula stands on that."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from torch import nn

from finetune_planner.app.levels import dry_runs_ahead
from planner.core.errors import ConfigError, UnknownModelError
from planner.core.install import install_command
from planner.frameworks.exporters import EXPORTERS
from planner.hardware.gpus import find_gpu
from planner.models import catalogue, module_tree
from planner.models.families import has_family, model_types, spec_from_config
from planner.models.spec import ModelSpec
from planner.models.targets import lora_linears
from planner.planning.evidence.bands import ENCODER_BAND
from planner.planning.predict import predict
from planner.setup import TrainSetup
from probes.module_tree import spec_of_tree
from probes.stack.build import bare_model
from probes.stack.configs import load_config
from probes.stack.tree import _IDLE, _layer
from tests.planner.helpers import loaded
from tests.planner.launch_sweep import request
from tests.probes.dryrun_small import dried
from tests.whole import paired, some

A100 = find_gpu("a100-80gb")
SIZES = {"vocab_size": 8000, "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8}
UNKNOWN: dict[str, dict[str, Any]] = {
    "exaone4": {**SIZES, "intermediate_size": 1536, "num_key_value_heads": 2, "sliding_window": 128},
    "gpt_bigcode": {"vocab_size": 8000, "n_embd": 512, "n_layer": 6, "n_head": 8, "n_positions": 1024},
    "arcee": {**SIZES, "intermediate_size": 1536, "num_key_value_heads": 4},
    "granitemoe": {**SIZES, "intermediate_size": 256, "num_local_experts": 8, "num_experts_per_tok": 2},
}  # fmt: skip
_TEXT = {**SIZES, "intermediate_size": 1536, "num_key_value_heads": 2}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}}
_EAR = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64}
_VIT = {"depth": 2, "embed_dim": 64, "hidden_size": 512, "num_heads": 4}
WITH_IMAGES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"text_config": {**_TEXT, **_ROPE}, "vision_config": _VIT},
    "qwen2_5_vl": {
        "text_config": {**_TEXT, **_ROPE},
        "vision_config": {"depth": 2, "hidden_size": 64, "out_hidden_size": 512, "num_heads": 4},
    },
    "qwen3_vl": {
        "text_config": {**_TEXT, "head_dim": 64, **_ROPE},
        "vision_config": {"depth": 2, "hidden_size": 64, "out_hidden_size": 512, "num_heads": 4,
                          "deepstack_visual_indexes": [0]},
    },
    "llava": {"text_config": {"model_type": "llama", **_TEXT}},
    "mistral3": {"text_config": {"model_type": "mistral", **_TEXT, "head_dim": 64}},
    "mllama": {"text_config": {**_TEXT, "cross_attention_layers": [], "pad_token_id": 0}},
    "ministral3": {**_TEXT, "head_dim": 64},
    "qwen2_audio": {"text_config": {"model_type": "qwen2", **_TEXT}, "audio_config": _EAR},
    "granite_speech": {
        "text_config": {"model_type": "granite", **_TEXT},
        "encoder_config": {"hidden_dim": 64, "num_layers": 2, "num_heads": 2, "dim_head": 32},
        "projector_config": {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2,
                             "num_hidden_layers": 1, "encoder_hidden_size": 64},
    },
    "modernbert": {**SIZES, "intermediate_size": 1536, "pad_token_id": 0},
    "bert": {**SIZES, "intermediate_size": 1536},
}  # fmt: skip
"""Models that see or hear, or that fill masks: their text side is planned, the encoder's weights lie idle."""
OTHERWISE = {"gemma3", "gemma4"}
"""Of them the tree does not say what an encoder is."""


def in_one_order(spec: ModelSpec) -> ModelSpec:
    """Matrices and norms by name: adapters list them as they are read, a tree as they were made."""
    layers = tuple(
        replace(
            layer,
            linears=tuple(
                replace(linear, refused=False) for linear in sorted(layer.linears, key=lambda matrix: matrix.name)
            ),
            norms=tuple(sorted(layer.norms, key=lambda norm: norm.name)),
        )
        for layer in spec.layer_kinds
    )
    return replace(spec, layer_kinds=layers, lacks=(), moved_targets=(), from_tree=False)


def adapted(spec: ModelSpec) -> set[str]:
    """Names of the matrices that LoRA on all linear layers adapts."""
    return {linear.name for _, _, linears in lora_linears(spec, "all-linear") for linear in linears}


OF_EACH_TYPE = {entry.model_type: entry for entry in reversed(catalogue.entries())}


@pytest.mark.parametrize("model_type", some(sorted(OF_EACH_TYPE), 9))
def test_a_tree_says_what_the_adapter_says(model_type: str) -> None:
    """Every catalogue type: where an adapter exists, reading the tree gives its spec, whole or at least its sizes; else
    what ships is what the installed transformers builds."""
    config = OF_EACH_TYPE[model_type].config
    made = spec_from_config(config, model_id="m", source="s")
    read = spec_of_tree(config, model_id="m", source="s")
    if not has_family(model_type):
        assert replace(read, from_tree=False) == made
        return
    assert read.num_params == made.num_params
    assert read.num_layers == made.num_layers
    if model_type not in OTHERWISE:
        assert in_one_order(read) == in_one_order(made)
        assert adapted(read) == adapted(made)


def test_layers_that_are_left_out_by_chance_are_refused() -> None:
    with pytest.raises(ValueError, match="layerdrop is not supported"):
        spec_of_tree({**OF_EACH_TYPE["whisper"].config, "encoder_layerdrop": 0.1}, model_id="m", source="s")


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_a_model_that_sees_images_is_counted_whole(name: str) -> None:
    """The encoder's matrices are there for adapters and quantization, its other parameters as a number."""
    config = {"model_type": name, **WITH_IMAGES[name]}
    spec = spec_of_tree(config, model_id="m", source="s")
    model = bare_model(load_config(config), torch.bfloat16, "eager")
    assert spec.num_params == sum(parameter.numel() for parameter in model.parameters())
    assert spec.num_layers == 6
    encoder = sum(num * len(layer.linears) for layer, num in spec.idle_layers)
    assert encoder == sum(
        isinstance(module, torch.nn.Linear) for path, module in model.named_modules() if _IDLE.search(path)
    )


@pytest.mark.parametrize(
    ("name", "kind"), [("DeltaAttention", "linear"), ("TextLinearAttention", "linear"), ("SelfAttention", "softmax")]
)
def test_a_delta_rule_that_is_called_attention_is_none(name: str, kind: str) -> None:
    """Kimi Linear's and Bailing's layers, 161 % above the formula of a softmax, whose band said 50."""
    matrices = {leaf: nn.Linear(64, 64) for leaf in ("q_proj", "k_proj", "v_proj", "o_proj")}
    mixer = type(name, (nn.Module,), {})()
    for leaf, matrix in matrices.items():
        mixer.add_module(leaf, matrix)
    layer = nn.ModuleDict({"self_attn": mixer})
    spec = _layer(layer, 0, SimpleNamespace(num_attention_heads=4), "model.layers", 64, True, set())
    assert spec.attention is not None
    assert spec.attention.kind == kind


def test_what_fills_masks_predicts_no_next_token() -> None:
    config = {"model_type": "nystromformer", **SIZES, "intermediate_size": 1536}
    spec = spec_of_tree(config, model_id="m", source="s")
    assert spec.reads_both_ways
    decoder = replace(spec, built_class="BertLMHeadModel", model_type="bert", config={"is_decoder": True})
    assert not decoder.reads_both_ways
    assert replace(decoder, config={}).reads_both_ways


def test_a_head_may_share_the_table_of_the_decoder_alone() -> None:
    """T5Gemma's halves have a table each."""
    half = {**_TEXT, "head_dim": 64}
    config = {"model_type": "t5gemma", "encoder": half, "decoder": {**half, "is_decoder": True}, "vocab_size": 8000}
    model = bare_model(load_config(config), torch.bfloat16, "eager")
    spec = spec_of_tree(config, model_id="m", source="s")
    assert spec.tied
    assert spec.num_params == sum(parameter.numel() for parameter in model.parameters())


def test_layers_that_look_at_pictures_lie_idle_in_text_alone() -> None:
    """Llama 3.2 Vision's forward leaves them out, so they get no gradient and no optimizer states."""
    config = {"model_type": "mllama", **WITH_IMAGES["mllama"]}
    config["text_config"] = {**config["text_config"], "cross_attention_layers": [1, 4]}
    spec = spec_of_tree(config, model_id="m", source="s")
    model = bare_model(load_config(config), torch.bfloat16, "eager")
    assert spec.num_params == sum(parameter.numel() for parameter in model.parameters())
    assert (spec.num_layers, [num for layer, num in spec.idle_layers if layer.path == "model.layers"]) == (4, [2])
    setup = TrainSetup(method="full", lora_rank=0, precision="bf16-pure", seq_len_tokens=256)
    formula, run = predict(spec, A100, setup), dried(spec, A100, setup)
    assert formula.phase_peaks_bytes["step"] == pytest.approx(run.phase_peaks_bytes["step"], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", some(["qwen2_5_vl", "mistral3"], 2))
def test_the_text_side_of_a_model_that_sees_images_is_planned(name: str) -> None:
    spec = spec_of_tree({"model_type": name, **WITH_IMAGES[name]}, model_id="m", source="s")
    setup = TrainSetup(seq_len_tokens=512, micro_batch_seqs=2)
    formula, run = predict(spec, A100, setup), dried(spec, A100, setup)
    assert abs(formula.peak_allocated_bytes / run.peak_allocated_bytes - 1) <= formula.memory_band_fraction
    assert "built as" in EXPORTERS["hf"](request(setup, model=spec)).refused


@pytest.mark.slow
def test_a_checkpoint_with_16_bit_parts_is_run_as_it_is() -> None:
    """Dynamic 4-bit checkpoints: the dry run quantizes what the checkpoint's own list leaves."""
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
              "bnb_4bit_use_double_quant": True}  # fmt: skip
    setup = TrainSetup(method="qlora", quantization="nf4-double", seq_len_tokens=256)
    peaks = []
    for names in (["lm_head"], ["lm_head", "model.layers.1.mlp", "model.layers.7.self_attn"]):
        config = {"model_type": "llama", **SIZES, "num_hidden_layers": 12, "intermediate_size": 4096}
        config["quantization_config"] = {**stored, "llm_int8_skip_modules": names}
        spec = spec_from_config(config, model_id="m", source="s")
        formula, run = predict(spec, A100, setup), dried(spec, A100, setup)
        assert abs(formula.peak_allocated_bytes / run.peak_allocated_bytes - 1) <= formula.memory_band_fraction
        peaks.append(run.peak_allocated_bytes)
    num_unquantized = 3 * 512 * 4096 + 4 * 512 * 512
    assert peaks[1] - peaks[0] == pytest.approx(num_unquantized * (2 - 4.127 / 8), rel=0.02)


@pytest.fixture(scope="module")
def specs(warm_programs: Path) -> Mapping[str, ModelSpec]:
    """The first by a child process, as a plan has it (docs/questions.md starts one cold); the others by what the child
    calls."""
    first, *others = UNKNOWN
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(warm_programs / "python"))
        made = {first: spec_from_config({"model_type": first, **UNKNOWN[first]}, model_id=first, source="a test")}
    for name in others:
        made[name] = spec_of_tree({"model_type": name, **UNKNOWN[name]}, model_id=name, source="a test")
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fields"), paired(UNKNOWN, [{}, {"method": "full", "lora_rank": 0, "checkpointing": 0}], 1)
)
def test_an_unknown_architecture_is_planned(specs: Mapping[str, ModelSpec], name: str, fields: dict[str, Any]) -> None:
    """Formula and dry run stand side by side, and the formula's band holds."""
    assert name not in model_types()
    setup = TrainSetup(seq_len_tokens=512, micro_batch_seqs=2, **fields)
    formula = predict(specs[name], A100, setup)
    run = dried(specs[name], A100, setup)
    error = formula.peak_allocated_bytes / run.peak_allocated_bytes - 1
    assert abs(error) <= formula.memory_band_fraction
    assert any("module tree" in note for note in formula.notes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fields"),
    paired(
        ["bert", "modernbert"],
        [
            {"method": "full", "precision": "fp32", "checkpointing": 0},
            {"method": "full", "precision": "bf16-mixed", "checkpointing": 0, "attention": "eager"},
            {"method": "lora", "precision": "bf16-autocast", "checkpointing": 0, "lora_targets": "attention"},
            {"method": "lora", "precision": "bf16-autocast", "checkpointing": 1},
            {"method": "lora", "precision": "fp32", "checkpointing": 0, "adapter": "prompt"},
            {"method": "lora", "precision": "fp32", "checkpointing": 0, "adapter": "ia3", "lora_rank": 0},
        ],
        1,
    ),
)
def test_an_encoders_layers_are_counted(name: str, fields: dict[str, Any]) -> None:
    """Norms behind the sums, dropouts, a gate in one matrix, values that stay a view of one projection; adapters, and
    checkpoints in fp32, as autocast's LayerNorm behind the embeddings makes them."""
    spec = spec_of_tree({"model_type": name, **WITH_IMAGES[name]}, model_id=name, source="a test")
    assert not any(layer.parallel_residual for layer in spec.layer_kinds)
    fields = {"lora_rank": 0 if fields["method"] == "full" else 8, **fields}
    setup = TrainSetup(objective="classification", seq_len_tokens=256, micro_batch_seqs=16, **fields)
    formula, run = predict(spec, A100, setup), dried(spec, A100, setup)
    assert formula.memory_band_fraction >= ENCODER_BAND
    band = ENCODER_BAND / 2 if setup.method == "full" else ENCODER_BAND
    assert formula.peak_allocated_bytes == pytest.approx(run.peak_allocated_bytes, rel=band)


def test_the_second_time_no_process_is_started(specs: Mapping[str, ModelSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "run", refuse)
    spec = spec_from_config({"model_type": "exaone4", **UNKNOWN["exaone4"]}, model_id="other", source="elsewhere")
    assert spec == replace(specs["exaone4"], model_id="other")
    assert (spec.config_source, spec.config["hidden_size"]) == ("elsewhere", 512)


def test_without_torch_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_tree, "find_spec", lambda name: None)
    with pytest.raises(UnknownModelError, match="torch, transformers, peft not installed") as error:
        spec_from_config({"model_type": "exaone4"}, model_id="m", source="s")
    assert install_command("torch") in error.value.hint


def test_what_transformers_does_not_know_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_tree, "_ask", lambda config: pytest.fail("a process was started"))
    for name in ("llama9", "../x", '"), ("llama'):
        with pytest.raises(UnknownModelError, match="does not know it"):
            spec_from_config({"model_type": name}, model_id="m", source="s")
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        spec_from_config({"model_type": "exaone4", "num_hidden_layers": 10**9}, model_id="m", source="s")


def test_the_process_that_loads_the_libraries_reads_the_tree_after_the_first_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One import of the libraries instead of two; where it has no answer a child of its own gives one."""
    events: list[str] = []

    def answer(config: Mapping[str, Any], limit_s: float) -> Mapping[str, Any] | None:
        events.append(f"read within {limit_s:g}")
        return {"failure": "ValueError: no heads"} if config["hidden_size"] == 1 else None

    monkeypatch.setattr("probes.dryrun.helper.load_ahead", lambda **_: None)
    monkeypatch.setattr("probes.dryrun.helper.tree_answer", answer)
    monkeypatch.setattr(module_tree, "LIMIT_S", 7)
    monkeypatch.setattr(module_tree, "_readers", [])
    monkeypatch.setattr(module_tree, "_cached", lambda config: tmp_path / "spec.json")
    monkeypatch.setattr(module_tree, "_child_answer", lambda config: {"failure": "ValueError: a child's"})
    dry_runs_ahead(1, first=lambda config: events.append(str(config["model_type"])))
    for width, words in ((1, "no heads"), (2, "a child's")):
        with pytest.raises(UnknownModelError, match=words):
            spec_from_config({"model_type": "exaone4", "hidden_size": width}, model_id="m", source="s")
        assert events == ["exaone4", "read within 7"]
        events.clear()


@pytest.mark.parametrize(
    ("stdout", "stderr", "words"),
    [
        ('{"failure": "ValueError: no heads"}', "", "no heads"),
        ("", "Traceback\nMemoryError", "MemoryError"),
        ("[]", "", "could not be read"),
    ],
)
def test_a_child_that_brings_no_tree_is_an_error_with_its_reason(
    stdout: str, stderr: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = subprocess.CompletedProcess(args=[], returncode=1, stdout=stdout, stderr=stderr)
    monkeypatch.setattr(module_tree, "_readers", [])
    monkeypatch.setattr(module_tree.subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(module_tree, "_cached", lambda config: tmp_path / "spec.json")
    with pytest.raises(UnknownModelError, match=words):
        spec_from_config({"model_type": "exaone4"}, model_id="m", source="s")
    assert not list(tmp_path.iterdir())


def test_a_damaged_cache_is_read_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = loaded("gpt2")
    from planner.setup.interchange import to_jsonable

    path = tmp_path / "spec.json"
    path.write_text('{"model_id": 3')
    monkeypatch.setattr(module_tree, "_cached", lambda config: path)
    monkeypatch.setattr(module_tree, "_ask", lambda config: json.loads(json.dumps(to_jsonable(spec))))
    recovered = module_tree.spec_from_tree({"model_type": "exaone4"}, "exaone4")
    assert recovered == replace(spec, from_tree=True)
    assert json.loads(path.read_text())["vocab_size"] == spec.vocab_size
