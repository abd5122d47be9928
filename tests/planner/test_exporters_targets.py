"""Every target's files against what is at hand in the default run: parsers where installed, else committed snapshots.

The tools' own parsers run in their own venvs: tools/validators/*.sh, results in docs/launch.md.
"""

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.core.errors import ConfigError
from planner.core.units import GIB
from planner.frameworks.exporters import EXPORTERS, PLACEHOLDER_DATASET, TARGETS, DatasetChoice, Launch, prepare
from planner.frameworks.readers import read_text, versions
from planner.hardware.gpus import find_gpu
from planner.memory.attention_kernels import supported_attentions
from planner.models import catalogue
from planner.models.spec import ModelSpec
from planner.models.targets import lora_linears
from planner.planning.predict import predict
from planner.setup import TrainSetup
from planner.setup.allowed import TARGET_SETS
from tests.launch.tiny_models import TYPES, kind_of
from tests.planner.helpers import loaded
from tests.planner.launch_sweep import fewer_setups, request

SETUPS = fewer_setups()


def emitted(target: str) -> list[tuple[TrainSetup, Launch]]:
    launches = [(setup, EXPORTERS[target](request(setup))) for setup in SETUPS]
    return [(setup, launch) for setup, launch in launches if not launch.refused]


def keywords(text: str, function: str) -> dict[str, Any]:
    """Literal keyword arguments of the call of `function`; torch types by their name."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(function):
            return {keyword.arg: _literal(keyword.value) for keyword in node.keywords if keyword.arg}
    return {}


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_plain_script_imports_peft_where_adapters_train(method: str) -> None:
    setup = TrainSetup(method=method, lora_rank=16 * (method == "lora"), stack="hf")
    script = next(file.text for file in EXPORTERS["hf"](request(setup)).files if file.path.endswith(".py"))
    assert ("from peft import LoraConfig, get_peft_model" in script) is (method == "lora")


def test_accelerate_itself_accepts_every_config(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    path = tmp_path / "accelerate.yaml"
    accepted = 0
    for setup, launch in emitted("accelerate"):
        path.write_text(launch.files[0].text)
        config = load_config_from_file(str(path))
        assert config.num_processes == (1 if setup.parallel in ("none", "device-map") else setup.num_gpus)
        by_deepspeed = setup.parallel.startswith("zero")  # whose own file says it, and nobody else may
        assert config.mixed_precision == (None if by_deepspeed else setup.autocast_dtype or "no")
        accepted += 1
    assert accepted >= 100


@pytest.mark.slow
def test_transformers_peft_and_bitsandbytes_accept_every_scripts_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import warnings

    import torch
    import transformers
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig, TrainingArguments

    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.chdir(tmp_path)
    accepted = 0
    for setup, launch in emitted("hf"):
        text = launch.files[0].text
        compile(text, "train_hf.py", "exec")
        with warnings.catch_warnings():
            older = launch.validated_with["transformers"] != transformers.__version__
            warnings.simplefilter("ignore" if older else "error", FutureWarning)  # a deprecated name
            arguments = TrainingArguments(**keywords(text, "TrainingArguments"))
        assert arguments.per_device_train_batch_size == setup.micro_batch_seqs
        assert arguments.gradient_accumulation_steps == setup.accumulation_steps
        if setup.method != "full":
            assert LoraConfig(**keywords(text, "LoraConfig")).r == setup.lora_rank
        if setup.quantized:
            values = keywords(text, "BitsAndBytesConfig")
            for key, value in values.items():
                if isinstance(value, str) and value.startswith("torch."):
                    values[key] = getattr(torch, value.removeprefix("torch."))
            assert BitsAndBytesConfig(**values).load_in_4bit == setup.quantization.startswith("nf4")
        accepted += 1
    assert accepted >= 100


def test_unsloth_scripts_use_only_arguments_that_its_source_has() -> None:
    arguments = versions.known_settings("unsloth")
    trainer = versions.known_settings("trl")
    for _, launch in emitted("unsloth"):
        text = launch.files[0].text
        compile(text, "train_unsloth.py", "exec")
        for function in ("from_pretrained", "get_peft_model"):
            assert {f"{function}.{name}" for name in keywords(text, f"FastLanguageModel.{function}")} <= arguments
        assert set(keywords(text, "SFTConfig")) <= trainer
        assert "activation_checkpointing" not in text  # too new for the transformers that Unsloth pins


@pytest.mark.parametrize("target", ["axolotl", "llamafactory", "deepspeed"])
def test_every_setting_is_one_the_tool_knows(target: str) -> None:
    settings = versions.known_settings(target)
    launches = emitted(target)
    assert len(launches) >= {"deepspeed": 25}.get(target, 80)
    for _, launch in launches:
        text = launch.files[0].text
        values = json.loads(text)["zero_optimization"] if target == "deepspeed" else yaml.safe_load(text)
        assert set(values) <= settings


@pytest.mark.parametrize("target", ["trl", "hf", "axolotl", "llamafactory", "unsloth"])
def test_without_a_dataset_every_file_marks_where_it_belongs(target: str) -> None:
    export_request = request(TrainSetup(loss="chunked"), dataset=None)
    launch = EXPORTERS[target](export_request)
    assert launch.prepare
    text = prepare.file(export_request).text
    assert f'DATASET = "{PLACEHOLDER_DATASET}"  # PUT YOURS HERE' in text
    assert prepare.folder(export_request, target) in "".join(file.text for file in launch.files)


@pytest.mark.parametrize("columns", ["messages", "prompt-completion", "text"])
@pytest.mark.parametrize("target", ["trl", "hf", "axolotl", "llamafactory", "unsloth"])
def test_a_local_dataset_is_named_without_machine_paths(target: str, columns: str) -> None:
    dataset = DatasetChoice(path="/home/someone/data.jsonl", columns=columns, local=True)
    export_request = request(TrainSetup(loss="chunked"), dataset=dataset)
    text = "".join(file.text for file in (*EXPORTERS[target](export_request).files, prepare.file(export_request)))
    assert "data.jsonl" in text
    assert "/home" not in text


@pytest.mark.parametrize("target", sorted(EXPORTERS))
def test_header_names_versions_and_command(target: str) -> None:
    for setup, launch in emitted(target)[:20]:
        assert launch.command
        assert launch.validated_with
        text = launch.files[0].text
        if not launch.files[0].path.endswith(".json"):
            for name, version in launch.validated_with.items():
                assert f"{name}=={version}" in text
            assert f"{setup.global_batch_seqs} sequences" in text


def test_attention_targets_are_the_models_own_modules() -> None:
    for model_id, names in {
        "openai-community/gpt2": ["c_attn", "attn.c_proj"],
        "Qwen/Qwen2.5-1.5B": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "EleutherAI/pythia-1b": ["query_key_value", "attention.dense"],
    }.items():
        model = catalogue.load(model_id)
        if model is None:
            continue
        launch = EXPORTERS["trl"](request(TrainSetup(lora_targets="attention", loss="chunked"), model=model))
        assert yaml.safe_load(launch.files[0].text)["lora_target_modules"] in (names, [names[0], "dense"])


@pytest.mark.parametrize(("line", "damaged"), [("lora_r:", "lora_rnk:"), ("max_length: 2048", "max_length: [1]")])
def test_a_damaged_file_is_not_read_back(line: str, damaged: str) -> None:
    text = EXPORTERS["trl"](request(TrainSetup(loss="chunked"))).files[0].text
    with pytest.raises(ConfigError):
        read_text(text.replace(line, damaged), "trl.yaml")


@pytest.mark.parametrize("target", ["trl", "hf", "axolotl", "llamafactory"])
def test_an_attention_that_a_tower_refuses_by_name_is_not_named(target: str) -> None:
    """Gemma 4's audio encoder refuses SDPA when it is named, and runs eager beside an SDPA text when it is not."""
    setup = TrainSetup(attention="sdpa", lora_targets="attention")
    heard, plain = (
        EXPORTERS[target](request(setup, model=catalogue.load(name)))
        for name in ("google/gemma-4-E2B-it", "google/gemma-4-31B-it")
    )
    assert not heard.refused
    assert "sdpa" in plain.files[0].text
    assert "sdpa" not in heard.files[0].text
    assert read_text(heard.files[0].text, heard.files[0].path).setup.attention == "sdpa"


@pytest.mark.parametrize(
    ("name", "targets", "written"),
    [
        ("openai-community/gpt2", "all-linear", "c_attn,c_proj,c_fc"),
        ("EleutherAI/pythia-70m", "all-linear", "query_key_value,dense,dense_h_to_4h,dense_4h_to_h"),
        ("facebook/opt-350m", "all-linear", "k_proj,v_proj,q_proj,out_proj,fc1,fc2,project_out,project_in"),
        ("google/gemma-3-4b-it", "attention", "q_proj,k_proj,v_proj,o_proj"),
        ("google/gemma-3-4b-it", "all-linear", "vision or audio encoder"),
        ("mistralai/Mixtral-8x7B-v0.1", "all-linear", "stacked experts"),
        ("mistralai/Mixtral-8x7B-v0.1", "attention", "q_proj,k_proj,v_proj,o_proj"),
        ("Qwen/Qwen3.5-4B", "attention", "Qwen3_5ForConditionalGeneration"),
    ],
)
def test_llamafactory_adapts_the_planned_matrices_or_nothing_is_written(name: str, targets: str, written: str) -> None:
    """As LLaMA-Factory itself took them for every model type: tools/validators/every_type.py."""
    launch = EXPORTERS["llamafactory"](request(TrainSetup(lora_targets=targets), model=catalogue.load(name)))
    if launch.refused:
        assert written in launch.refused
    else:
        assert yaml.safe_load(launch.files[0].text)["lora_target"] == written


@pytest.mark.parametrize("targets", ["all-linear", "attention"])
def test_unsloths_names_adapt_the_planned_matrices_of_every_type(targets: str) -> None:
    """Seven names for all adapted 0 to 38 % of what was planned for Phi-3, GPT-2, Pythia and 20 more types."""
    setup = TrainSetup(lora_targets=targets, loss="chunked")
    written = 0
    for kind, entry in TYPES.items():
        spec = loaded(entry.model_id)
        launch = EXPORTERS["unsloth"](request(setup, model=spec))
        if launch.refused:
            continue
        target_modules = keywords(launch.files[0].text, "get_peft_model")["target_modules"]
        names = (target_modules,) if isinstance(target_modules, str) else tuple(target_modules)
        assert lora_linears(spec, names) == lora_linears(spec, targets), kind
        written += 1
    assert written >= (25 if targets == "all-linear" else 35)


@pytest.mark.parametrize("target", ["trl", "axolotl", "llamafactory", "unsloth"])
def test_a_tool_that_would_load_the_towers_is_refused(target: str) -> None:
    """Qwen 3.5 and Llama 4 are published as classes with a vision encoder; the plan is of the text model alone."""
    for name in ("Qwen/Qwen3.5-0.8B", "Qwen/Qwen3.5-35B-A3B", "meta-llama/Llama-4-Scout-17B-16E"):
        setup = TrainSetup(loss="chunked" if target in ("trl", "unsloth") else "full", lora_targets="attention")
        assert "with its encoders" in EXPORTERS[target](request(setup, model=loaded(name))).refused
        assert not EXPORTERS["hf"](request(setup.replace(loss="full"), model=loaded(name))).refused


def test_every_model_gets_the_settings_of_its_kind() -> None:
    """What a tool's loading code sees of one model of a kind it sees of all: one is loaded by each tool
    (tests/launch/test_every_model.py, tools/validators/every_type.py)."""
    names = ("attn_impl", "target_modules", "quantization", "load_in", "Config(")
    gpu = find_gpu("h100-sxm")

    def settings(spec: ModelSpec) -> list[object]:
        attentions = supported_attentions(spec, gpu)
        choices: list[object] = [attentions]
        for targets in TARGET_SETS:
            setup = TrainSetup(lora_targets=targets, attention=attentions[0], loss="chunked")
            choices.append([bool(tool.refusal(setup, spec)) for tool in TARGETS.values()])
            for target, loss in (("hf", "full"), ("unsloth", "chunked")):  # the others write what hf does
                text = EXPORTERS[target](request(setup.replace(loss=loss), model=spec)).files
                lines = text[0].text.splitlines() if text else []
                choices.append([line for line in lines if any(name in line for name in names)])
        return choices

    of_kind = {kind: settings(loaded(entry.model_id)) for kind, entry in TYPES.items()}
    for entry in catalogue.entries():
        if kind_of(entry) in of_kind:  # encoders and readers of pictures have no file of next tokens
            assert settings(loaded(entry.model_id)) == of_kind[kind_of(entry)], entry.model_id


@pytest.mark.parametrize("target", ["trl", "hf", "axolotl", "llamafactory", "unsloth"])
def test_a_model_of_which_nothing_is_quantized_has_no_qlora_file(target: str) -> None:
    """Axolotl's loader left every matrix of a tiny Falcon in 16 bits: transformers replaces nn.Linear alone."""
    spec = loaded("tiiuae/falcon-7b")
    loss = "chunked" if target in ("trl", "unsloth") else "full"
    four_bits = TrainSetup(method="qlora", quantization="nf4-double", loss=loss, kernels="eager")
    assert "quantizes no matrix" in EXPORTERS[target](request(four_bits, model=spec)).refused
    assert not EXPORTERS[target](request(TrainSetup(loss=loss), model=spec)).refused
    gpu = find_gpu("a100-80gb")
    weights = [
        sum(term.size_bytes for term in predict(spec, gpu, setup).terms if term.name == "weights: layers")
        for setup in (four_bits, TrainSetup(loss=loss))
    ]
    assert weights[0] == pytest.approx(weights[1], rel=1e-6)  # runs round their blocks
    assert weights[1] > 12 * GIB


@pytest.mark.parametrize(("attention", "parallel"), [("sdpa", "none"), ("eager", "none"), ("sdpa", "zero2")])
def test_axolotl_trains_a_whole_model_in_16_bits_with_flash_attention_or_fsdp_alone(
    attention: str, parallel: str
) -> None:
    """Its loader leaves embeddings and norms in fp32 otherwise: 37 of the catalogue's types, loaded by it."""

    def refused(attention: str, parallel: str) -> str:
        num_gpus = 1 if parallel == "none" else 4
        layout: dict[str, Any] = {"attention": attention, "parallel": parallel, "num_gpus": num_gpus}
        setup = TrainSetup(method="full", lora_rank=0, precision="bf16-pure", loss="full", **layout)
        return EXPORTERS["axolotl"](request(setup)).refused

    assert "embeddings and norms in fp32" in refused(attention, parallel)
    assert not refused("flash-attention-2", parallel)
    assert not refused(attention, "fsdp2")


def test_axolotl_says_that_it_trains_routers_in_fp32() -> None:
    """By its own loader (tools/validators/every_type.py): eight types with a router named `gate`. Qwen3-30B-A3B has 48
    layers of 2048 x 128; of gpt-oss, whose router has another name, nothing is said."""
    for name, figure in (("Qwen/Qwen3-30B-A3B", "12.6 M parameters"), ("openai/gpt-oss-20b", "")):
        setup = TrainSetup(
            method="full", lora_rank=0, precision="bf16-pure", loss="full", attention="flash-attention-2"
        )
        launch = EXPORTERS["axolotl"](request(setup, model=loaded(name)))
        notes = [note for note in launch.notes if "trains the routers" in note]
        assert bool(notes) == bool(figure)
        assert all(figure in note and note in launch.files[0].text.replace("\n#   ", " ") for note in notes)


@pytest.mark.parametrize(
    ("model_type", "attention", "built"),
    [
        ("llama", "sdpa", {"trl", "hf", "axolotl", "llamafactory", "unsloth"}),
        ("lfm3", "sdpa", {"trl", "hf"}),
        ("lfm3", "flash-attention-2", set()),  # whose kernels come with transformers 5.22
        ("kolibri1", "sdpa", {"trl", "hf", "axolotl"}),
        ("minicpm3", "sdpa", {"trl", "hf", "axolotl", "unsloth"}),
    ],
)
def test_no_file_is_written_for_a_transformers_without_the_type(
    model_type: str, attention: str, built: set[str]
) -> None:
    model = replace(loaded("meta-llama/Llama-3.1-8B"), model_type=model_type)
    setup = TrainSetup(attention=attention, loss="full")
    refused = {
        name: TARGETS[name].refusal(setup, model) for name in ("trl", "hf", "axolotl", "llamafactory", "unsloth")
    }
    assert {name for name, why in refused.items() if "does not know" not in why} == built
