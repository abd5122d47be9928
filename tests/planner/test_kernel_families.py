"""Kernel families: what they keep, where they run, what files say of them, what files are read as."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune_planner.cli.app import run
from planner.core.errors import SetupError, UsageError
from planner.frameworks.exporters import EXPORTERS, TARGETS
from planner.frameworks.exporters.install import install_calls
from planner.frameworks.readers import read_text
from planner.hardware.gpus import find_gpu
from planner.memory.micro_batch import activation_parts
from planner.memory.model import predict_memory
from planner.models import catalogue
from planner.models.spec import ModelSpec
from planner.options.kernels import (
    COMPILED,
    FUSED_LORA,
    KERNELS,
    LIGER,
    LIGER_LOSS,
    LIGER_PARTS,
    kernels_refusal,
)
from planner.planning.answer import plan_workload
from planner.planning.predict import cannot_run
from planner.planning.space import dimension_values
from planner.planning.walk import walk
from planner.setup import TrainSetup
from planner.setup.interchange import setup_from_dict, setup_to_dict
from planner.setup.packages import TESTED
from planner.speed import speed_profile
from tests.planner.helpers import loaded, plan_request, planned
from tests.planner.launch_sweep import request

GPU = find_gpu("rtx-4090")
LLAMA = "meta-llama/Llama-3.1-8B"


def unprofiled() -> ModelSpec:
    """Llama-3.1-8B as the closed forms see it: with a key of its own it has no profile and no program."""
    model = loaded(LLAMA)
    return replace(model, config={**model.config, "attention_dropout": 1e-9})


AXOLOTL = "base_model: {}\nadapter: qlora\nload_in_4bit: true\nmicro_batch_size: 1\nsequence_len: 2048\nlora_r: 8\n"
CUT = "plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]\n"
UNSLOTH_FILE = "model: {}\ntraining: {{max_seq_length: 512}}\nlora: {{lora_r: 8}}\n"
FACTORY = "model_name_or_path: {}\nstage: sft\ndo_train: true\nenable_liger_kernel: true\ncutoff_len: 512\n"
LITGPT = "checkpoint_dir: checkpoints/{}\nlora_r: 8\ntrain: {{max_seq_length: 512}}\n"


def test_a_gated_mlp_without_adapters_is_no_kernel_of_unsloth_or_fms_acceleration() -> None:
    """Theirs is part of the LoRA function: Llama-2-70B with adapters on attention alone took 62.7 GiB (fms_fused-0234)
    where 60.5 was said."""
    plain = TrainSetup(kernels="fused", method="qlora", quantization="nf4-double", lora_targets="attention")
    for targets, apart in (("attention", True), ("all-linear", False)):
        of_axolotl, *others = (
            activation_parts(loaded(LLAMA), GPU, plain.replace(stack=stack, lora_targets=targets)).recomputed
            for stack in ("axolotl", "unsloth", "fms-acceleration")
        )
        assert [recomputed > of_axolotl for recomputed in others] == [apart, apart]


def test_fms_acceleration_fuses_adapters_of_quantized_bases_alone() -> None:
    """Its benchmarks' Mistral-7B with plain LoRA was 5 to 12 % too fast (docs/accuracy/gathered.md, fms_fused)."""
    plain = TrainSetup(kernels="fused", stack="fms-acceleration", lora_rank=8)
    quantized = plain.replace(method="qlora", quantization="nf4")
    assert "lora" not in plain.fused_parts("mistral")
    assert "lora" in quantized.fused_parts("mistral")
    assert "lora" in plain.replace(stack="axolotl").fused_parts("mistral")
    assert plain.fused_parts("mistral") == quantized.fused_parts("mistral") - {"lora"}


@pytest.mark.parametrize(
    ("text", "model", "fields"),
    [
        (AXOLOTL + CUT, "zai-org/GLM-4.5-Air", {"loss": "chunked"}),
        (AXOLOTL + CUT, "Qwen/Qwen3-8B", {"loss": "liger"}),
        (AXOLOTL + "liger_fused_linear_cross_entropy: true\n", "CohereLabs/aya-23-8B", {"loss": "chunked"}),
        (
            AXOLOTL + "attn_implementation: flash_attention_2\ngemma4_hybrid_attn_impl: true\n",
            "google/gemma-4-31B-it",
            {"attention": "sdpa"},
        ),
        (UNSLOTH_FILE, "google/gemma-4-31B-it", {"kernels": "eager"}),
        (FACTORY, "CohereLabs/aya-23-8B", {"loss": "full"}),
        (LITGPT, "google/gemma-2-9b", {"attention": "sdpa"}),
    ],
)
def test_a_file_is_not_held_to_what_its_own_code_does_otherwise(text: str, model: str, fields: dict[str, Any]) -> None:
    spec = loaded(model)
    reading = read_text(text.format(model), "a.yaml", model=spec)
    assert {name: getattr(reading.setup, name) for name in fields} == fields
    assert cannot_run(spec, find_gpu("h100-sxm"), reading.setup) == ()


@pytest.mark.parametrize("precision", ["bf16-autocast", "bf16-pure"])
@pytest.mark.parametrize("checkpointing", [0, 1, 4])
def test_fewer_and_larger_kernels_need_no_more_memory_and_time(precision: str, checkpointing: int) -> None:
    for name in (LLAMA, "qwen/qwen3-8b", "google/gemma-2-9b"):
        model = loaded(name)
        peaks, speeds = [], []
        for kernels in KERNELS:
            setup = TrainSetup(kernels=kernels, precision=precision, checkpointing=checkpointing, loss="chunked")
            peaks.append(predict_memory(model, GPU, setup).peak_device_bytes)
            speeds.append(speed_profile(model, GPU, setup).at(1, 1)[1])
        assert peaks == sorted(peaks, reverse=True), name
        assert speeds == sorted(speeds), name


def test_every_type_of_the_table_is_one_of_the_catalogue_or_its_text_class() -> None:
    types = {entry.model_type for entry in catalogue.entries()}
    assert {model_type.removesuffix("_text") for model_type in LIGER_PARTS} <= types
    assert set(LIGER_PARTS) >= FUSED_LORA
    assert "granite" not in LIGER_LOSS  # Liger patches its layers and raises for the loss
    liger, fused = TrainSetup(kernels="liger"), TrainSetup(kernels="fused")
    assert liger.fused_parts("olmo2") == {"norm", "rotary", "gated"}
    assert fused.fused_parts("llama") == KERNELS["fused"].parts
    assert liger.fused_parts("gpt2") == frozenset()
    compiled = liger.replace(compile=True, attention="sdpa")
    assert compiled.fused_parts("gpt2") == COMPILED
    assert compiled.fused_parts("gpt2", compiler=False) == frozenset()
    assert kernels_refusal("liger", "gpt2")
    assert kernels_refusal("fused", "phi3")
    assert not kernels_refusal("eager", "gpt2")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kernels": "fused", "method": "full", "lora_rank": 0}, "kernels 'fused'"),
        ({"kernels": "fused", "lora_dropout": 0.1}, "kernels 'fused'"),
        ({"kernels": "fused", "method": "qlora", "quantization": "int8"}, "kernels 'fused'"),
        ({"kernels": "fused", "num_gpus": 2, "tensor_degree": 2}, "kernels 'fused'"),
        ({"kernels": "fused", "lora_targets": ("q_proj", "v_proj")}, "kernels 'fused'"),
        ({"activation_offload": True, "checkpointing": 0}, "checkpointing off"),
        ({"activation_offload": True, "num_gpus": 2, "parallel": "zero3"}, "DeepSpeed checkpoints by itself"),
        ({"selective_checkpointing": True, "checkpointing": 0}, "keeps the attention"),
        ({"selective_checkpointing": True, "activation_offload": True}, "keeps the attention"),
        ({"selective_checkpointing": True, "reentrant_checkpointing": True}, "keeps the attention"),
    ],
)
def test_what_no_tool_runs_cannot_be_built(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(SetupError, match=reason):
        TrainSetup(**fields)


def test_the_interchange_key_is_there_only_where_it_says_something() -> None:
    assert "kernels" not in setup_to_dict(TrainSetup())
    values = setup_to_dict(TrainSetup(kernels="liger"))
    assert values["kernels"] == "liger"
    assert setup_from_dict(values) == TrainSetup(kernels="liger")
    with pytest.raises(SetupError, match="kernels must be one of eager, liger, fused"):
        setup_from_dict({"kernels": "unsloth"})


@pytest.mark.parametrize(
    ("target", "model", "fields", "lines"),
    [
        ("trl", LLAMA, {"kernels": "liger", "loss": "chunked"}, ["use_liger_kernel: true"]),
        ("hf", LLAMA, {"kernels": "liger", "loss": "liger"}, ["use_liger_kernel=True"]),
        ("hf", LLAMA, {"kernels": "liger"}, ['liger_kernel_config={"fused_linear_cross_entropy": False}']),
        ("hf", LLAMA, {"loss": "liger"}, ['liger_kernel_config={"rope": False, "rms_norm": False, "swiglu": False}']),
        ("hf", "google/gemma-2b", {"loss": "liger"}, ['"geglu": False']),
        ("hf", "mistralai/mixtral-8x7b-v0.1", {"kernels": "liger", "loss": "liger"}, ['{"swiglu": False}']),
        ("hf", "ibm-granite/granite-3.1-2b-base", {"kernels": "liger"}, ['{"cross_entropy": False}']),
        ("llamafactory", LLAMA, {"kernels": "liger", "loss": "liger"}, ["enable_liger_kernel: true"]),
        (
            "axolotl", LLAMA, {"kernels": "liger", "loss": "liger"},
            ["liger_rope: true", "liger_rms_norm: true", "liger_glu_activation: true", "lora_mlp_kernel: false"],
        ),
        (
            "axolotl", LLAMA, {"kernels": "fused", "loss": "liger"},
            ["liger_rms_norm: true", "lora_mlp_kernel: true", "lora_qkv_kernel: true", "lora_o_kernel: true"],
        ),
    ],
)  # fmt: skip
def test_launch_files_switch_on_what_was_planned(
    target: str, model: str, fields: dict[str, Any], lines: list[str]
) -> None:
    text = EXPORTERS[target](request(TrainSetup(**fields), model=loaded(model))).files[0].text
    assert all(line in text for line in lines), text


@pytest.mark.parametrize(("model", "kernels"), [(LLAMA, "fused"), ("zai-org/GLM-4-9B-0414", "eager")])
def test_unsloth_runs_its_kernels_where_it_has_them(model: str, kernels: str) -> None:
    """A plan for it took 8 bits of models without them, the one base that their absence was known of."""
    setup = TrainSetup(kernels="liger", loss="chunked", adapter_dtype="fp32", stack="unsloth")
    runs = EXPORTERS["unsloth"](request(setup, model=loaded(model))).runs
    assert runs == setup.replace(kernels=kernels)
    assert TARGETS["unsloth"].expresses(runs, loaded(model))


def test_a_tool_without_fused_lora_says_so_and_the_package_is_in_the_install_line() -> None:
    for target in ("hf", "trl", "llamafactory"):
        launch = EXPORTERS[target](request(TrainSetup(kernels="fused"), model=loaded(LLAMA)))
        assert "--target axolotl" in launch.refused
    planned = request(TrainSetup(kernels="liger", loss="chunked"), model=loaded(LLAMA))
    assert f"liger-kernel=={TESTED[LIGER]}" in install_calls(EXPORTERS["trl"](planned), planned)[0]
    pinned_by_axolotl = install_calls(EXPORTERS["axolotl"](planned), planned)[0]
    assert not any("liger" in package for package in pinned_by_axolotl)


@pytest.mark.parametrize(
    ("text", "name", "kernels", "loss"),
    [
        ("use_liger_kernel: true\nuse_peft: true\n", "trl-sft.yaml", "liger", "chunked"),
        (
            "use_liger_kernel: true\nuse_peft: true\nliger_kernel_config:\n  rms_norm: false\n  rope: false\n"
            "  swiglu: false\n", "trl-sft.yaml", "eager", "chunked",
        ),
        ("enable_liger_kernel: true\nstage: sft\ndo_train: true\n", "llamafactory.yaml", "liger", "liger"),
        ("base_model: m\nadapter: lora\nlora_dropout: 0.05\nplugins: [axolotl.integrations.liger.LigerPlugin]\n"
         "liger_rope: true\nliger_rms_norm: true\nliger_glu_activation: true\n", "axolotl.yaml", "liger", "full"),
        ("base_model: m\nadapter: lora\nlora_target_linear: true\nplugins: [axolotl.integrations.liger.LigerPlugin]\n"
         "liger_rope: true\nliger_rms_norm: true\nliger_glu_activation: true\n", "axolotl.yaml", "fused", "full"),
        ("base_model: m\nadapter: lora\nlora_target_linear: true\nplugins: [axolotl.integrations.liger.LigerPlugin]\n"
         "liger_rope: true\nliger_rms_norm: true\nliger_glu_activation: true\nrl: dpo\n", "axolotl.yaml", "liger",
         "full"),
        ("base_model: m\nadapter: lora\nlora_mlp_kernel: true\n", "axolotl.yaml", "eager", "full"),
    ],
)  # fmt: skip
def test_files_are_read_as_what_they_switch_on(text: str, name: str, kernels: str, loss: str) -> None:
    setup = read_text(text, name, model=loaded(LLAMA)).setup
    assert (setup.kernels, setup.loss) == (kernels, loss)


def test_axolotls_kernels_on_named_matrices_are_said_to_be_counted_as_eager() -> None:
    text = "base_model: m\nadapter: lora\nlora_target_modules: [q_proj, down_proj]\nlora_qkv_kernel: true\n"
    assert any("LoRA kernels" in note for note in read_text(text, "axolotl.yaml").approximations)
    assert not read_text(text.replace("true", "false"), "axolotl.yaml").approximations


def test_a_switch_that_liger_does_not_know_for_the_model_leaves_eager_layers_and_a_note() -> None:
    read = read_text("use_liger_kernel: true\nuse_peft: true\n", "trl-sft.yaml", model=loaded("openai-community/gpt2"))
    assert read.setup.kernels == "eager"
    assert any("no layer kernels for gpt2" in assumption for assumption in read.assumptions)


def test_a_plan_takes_liger_where_it_runs_and_gains_and_says_what_it_buys() -> None:
    plan = planned(plan_request(LLAMA, targets=("trl",)))
    assert plan.chosen.setup.kernels == "liger"
    assert any(note.startswith("Liger kernels: -") and "% faster, needs liger-kernel and Triton" in note
               for note in plan.notes)  # fmt: skip
    assert any("pairs of runs measured on an A100, none on this card" in note for note in plan.chosen.notes)
    for model, gpu in (("openai-community/gpt2", "rtx-4090"), (LLAMA, "apple-m3-max"), (LLAMA, "p100")):
        other = planned(plan_request(model, gpu))
        assert other.chosen.setup.kernels == "eager"


def test_a_compiled_speed_says_how_little_is_known_of_it() -> None:
    plain, compiled = (
        speed_profile(unprofiled(), GPU, setup).step_time(setup) for setup in (TrainSetup(), TrainSetup(compile=True))
    )
    sure, gain = compiled.uncertainty, plain.step_time_s / compiled.step_time_s
    assert sure.slower[1] == pytest.approx(gain)  # it may gain nothing
    assert gain > 1
    assert sure.slower_fraction > plain.uncertainty.slower_fraction
    assert any("6 pairs of runs (B200, A100, H100)" in note for note in compiled.notes)


def test_flash_attention_in_checkpointed_layers_leaves_nothing_to_compile() -> None:
    """benchmarks/compiled_layers.py at e34acc15: 12 such layers, 0 graphs. Without checkpointing, in torchtitan's own
    model, or with SDPA the layers are compiled."""
    alone = TrainSetup(compile=True, attention="flash-attention-2")
    assert not alone.compiled
    for change in ({"checkpointing": 0}, {"stack": "torchtitan"}, {"attention": "sdpa"}):
        assert alone.replace(**change).compiled
    eager = alone.replace(compile=False)
    assert (
        predict_memory(loaded(LLAMA), GPU, alone).peak_device_bytes
        == predict_memory(loaded(LLAMA), GPU, eager).peak_device_bytes
    )
    both = [speed_profile(unprofiled(), GPU, setup).step_time(setup) for setup in (alone, eager)]
    assert both[0].step_time_s == both[1].step_time_s
    assert any("compile gains nothing" in note for note in both[0].notes)
    plan = planned(plan_request(LLAMA, fixed={"compile": (True,)}))
    assert plan.chosen.setup.compiled
    fixed = {"compile": (True,), "attention": ("flash-attention-2",), "checkpointing": (1,)}
    with pytest.raises(UsageError, match="leaves torch"):
        plan_workload(plan_request(LLAMA, fixed=fixed))


def test_torch_compile_is_taken_where_it_gains_more_than_its_band_and_the_tree_says_what_it_would_buy() -> None:
    plan = planned(plan_request(LLAMA, targets=("trl",)))
    answer = next(answer for answer in plan.tree if answer.question == "torch.compile?")
    assert (plan.chosen.setup.compile, answer.choice) == (False, "no")
    assert "is predicted" in answer.reason
    assert "in a step of one sequence, such gains are off by 28 %" in answer.reason
    mixture = planned(plan_request("openai/gpt-oss-20b", gpu="h100-sxm"))  # eager attention: 2.1 times the speed
    assert mixture.chosen.setup.compile
    stacked = planned(plan_request("Qwen/Qwen3-30B-A3B", gpu="h100-sxm", fixed={"attention": ("sdpa",)}))
    answer = next(answer for answer in stacked.tree if answer.question == "torch.compile?")
    assert (stacked.chosen.setup.compile, "stacked experts end dynamo's graphs" in answer.reason) == (False, True)


def test_liger_does_not_displace_eager_kernels_for_less_than_a_preference_is_worth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Liger gains some 15 % here, fused adapters more: were that given for fewer packages, eager kernels would stay."""
    narrow = {"method": ("lora",), "optimizer": ("adamw-fused",), "loss": ("chunked",), "micro_batch_seqs": (4,)}
    workload = plan_request(LLAMA, "h200", fixed=narrow)
    assert {point.shared.kernels for point in walk(workload)} == {"liger"}
    for room in ("planner.planning.walk", "planner.planning.decision.results"):
        monkeypatch.setattr(f"{room}.PREFERENCE_FRACTION", 0.5)
    plan = planned(workload)
    assert plan.chosen.setup.kernels == "eager"
    assert any("too little for another package" in answer.reason for answer in plan.tree)


def test_on_a_machine_without_liger_eager_is_planned_and_what_it_would_buy_stands_beside() -> None:
    here = replace(plan_request(LLAMA), absent_packages=("liger-kernel", "flash-attn", "axolotl"))
    plan = planned(here)
    assert (plan.chosen.setup.kernels, plan.chosen.setup.loss) == ("eager", "chunked")
    alternative = plan.alternatives[0]
    assert (alternative.label, alternative.candidate.setup.kernels) == ("with axolotl", "fused")
    assert any("not installed here: axolotl" in note and "--target axolotl --out" in note for note in plan.notes)
    trl = planned(replace(here, targets=("trl",)))
    alternative = trl.alternatives[0]
    assert (alternative.label, alternative.candidate.setup.kernels) == ("with liger-kernel", "liger")
    assert any(f"pip install liger-kernel=={TESTED[LIGER]}" in note for note in trl.notes)
    liger_plan = planned(replace(here, fixed={"kernels": ("liger",)}))
    assert liger_plan.chosen.setup.kernels == "liger"


def test_the_walk_holds_the_families_asked_for() -> None:
    workload = plan_request(LLAMA, fixed={"kernels": ("liger", "eager"), "method": ("lora",)})
    families = {point.shared.kernels for point in walk(workload)}
    assert families == {"liger", "eager"}
    unknown = plan_request("openai-community/gpt2", fixed={"kernels": ("liger", "eager")})
    assert dimension_values(unknown)["kernels"] == ("eager",)


def test_the_flags_reach_the_setup(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["estimate", LLAMA, "--gpu", "rtx-4090", "--no-dry-run", "--json=full"]
    assert run([*arguments, "--kernels", "liger"]) == 0
    assert json.loads(capsys.readouterr().out)["setup"]["kernels"] == "liger"
    plan = [LLAMA, "--gpu", "rtx-4090", "--method", "lora", "--no-dry-run", "--json=full"]
    assert run([*plan, "--no-extra-packages"]) == 0
    chosen = json.loads(capsys.readouterr().out)["chosen"]["setup"]
    assert chosen.get("kernels", "eager") == "eager"
    assert chosen["loss"] != "liger"
    assert chosen["attention"] != "flash-attention-2"
    assert run([*plan, "--no-extra-packages", "--kernels", "liger"]) == 2
    assert "--no-extra-packages contradicts --kernels" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "field", "value", "line"),
    [
        ("trl", "activation_offload", True, "offload: true"),
        ("hf", "activation_offload", True, '"offload": True'),
        ("axolotl", "activation_offload", True, "activation_offloading: hidden_states"),
        ("llamafactory", "activation_offload", True, "use_unsloth_gc: true"),
        ("unsloth", "activation_offload", True, 'use_gradient_checkpointing="unsloth"'),
        ("trl", "selective_checkpointing", True, "selective: true"),
        ("axolotl", "selective_checkpointing", True, "selective_checkpointing: true"),
        ("axolotl", "checkpointing", 4, "every_n_layers: 4"),
    ],
)
def test_every_tool_says_checkpointing_in_its_words_and_is_read_back(
    target: str, field: str, value: object, line: str
) -> None:
    (file, *_) = EXPORTERS[target](request(TrainSetup(**{field: value}), model=loaded(LLAMA))).files
    assert line in file.text
    assert getattr(read_text(file.text, Path(file.path).name, model=loaded(LLAMA)).setup, field) == value


@pytest.mark.parametrize(("field", "tokens"), [("activation_offload", 65_536), ("selective_checkpointing", 16_384)])
def test_what_spares_memory_of_checkpoints_is_walked_for_long_sequences(field: str, tokens: int) -> None:
    assert dimension_values(plan_request(LLAMA))[field] == (False,)
    long = plan_request(LLAMA, seq_len=tokens)
    assert dimension_values(long)[field] == (False, True)
    assert {point.shared.checkpointing for point in walk(long) if getattr(point.shared, field)} == {1}


@pytest.mark.parametrize(
    ("name", "card", "published"),
    [
        ("meta-llama/Llama-3.1-8B", "rtx-4090", 78_475),
        ("meta-llama/Llama-3.1-8B", "a100-80gb", 342_733),
        ("meta-llama/Llama-3.3-70B-Instruct", "a100-80gb", 89_389),
    ],
)
def test_the_longest_context_of_unsloths_engine_is_as_published(name: str, card: str, published: int) -> None:
    """Source: unsloth.ai/docs/basics/unsloth-benchmarks, QLoRA of rank 32, the whole card (docs/kernels.md)."""
    model, gpu = loaded(name), find_gpu(card)
    setup = TrainSetup(
        method="qlora", quantization="nf4-double", lora_rank=32, optimizer="adamw-8bit", adapter_dtype="fp32",
        loss="chunked", kernels="fused", activation_offload=True,
    )  # fmt: skip
    peaks = (
        predict_memory(model, gpu, setup.replace(seq_len_tokens=round(published * share))).peak_device_bytes
        for share in (0.85, 1.15)
    )
    fits, beyond = (peak <= gpu.memory_bytes for peak in peaks)
    assert fits
    assert not beyond


def test_compile_is_planned_where_asked_and_refused_where_triton_is_not() -> None:
    assert "compile" not in dimension_values(plan_request(LLAMA))
    plan = planned(plan_request(LLAMA, fixed={"compile": (True,)}))
    assert plan.chosen.setup.compile
    assert any("torch.compile" in note for note in plan.chosen.formula.notes)
    with pytest.raises(UsageError, match=r"torch\.compile's kernels are Triton's"):
        dimension_values(plan_request(LLAMA, gpu="p100", fixed={"compile": (True,)}))
