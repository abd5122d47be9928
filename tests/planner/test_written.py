"""What a written file says, key by key, against facts stated here: whatever target writes a key, its value is the fact.

A reader of ours may share a fault with the writer of a line, and most lines are read back by nobody: each fact is
stated a second time, from the request alone. A key without a fact must decide what is read back.
"""

import ast
import copy
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any

import pytest
import yaml

from planner.core.errors import PlannerError, SetupError
from planner.frameworks.exporters import EXPORTERS, ExportRequest, Launch
from planner.frameworks.hyperparameters import Hyperparameters
from planner.frameworks.readers import FileContext, canonical, read_text
from planner.models import catalogue
from planner.options.images import Images
from planner.setup import TrainSetup
from tests.planner.launch_sweep import objective_layouts, request, setups
from tests.whole import WHOLE, some

HYPER = Hyperparameters(
    learning_rate=1.5e-5, lora_alpha=37, warmup_fraction=0.07, lr_schedule="linear", weight_decay=0.013,
    adam_beta2=0.97, max_grad_norm=0.71, num_epochs=2.5, seed=4321,
)  # fmt: skip
"""No two alike, none a default: a value under another's name is seen."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Case:
    """A request, and the setup that its file runs as."""

    asked: ExportRequest
    runs: TrainSetup


OPTIM = {
    "adamw-fused": "adamw_torch_fused", "adamw": "adamw_torch", "adamw-8bit": "adamw_bnb_8bit",
    "paged-adamw-32bit": "paged_adamw_32bit", "paged-adamw-8bit": "paged_adamw_8bit", "lion-8bit": "lion_8bit",
    "lion-32bit": "lion_32bit", "paged-lion-8bit": "paged_lion_8bit", "paged-lion-32bit": "paged_lion_32bit",
    "ademamix-32bit": "ademamix", "ademamix-8bit": "ademamix_8bit", "paged-ademamix-32bit": "paged_ademamix_32bit",
    "paged-ademamix-8bit": "paged_ademamix_8bit", "rmsprop": "rmsprop", "adagrad": "adagrad",
    "adafactor": "adafactor", "sgd": "sgd",
}  # fmt: skip
"""transformers' names."""
Fact = Callable[[Case], Any]

ATTRIBUTES = {
    "hyper.learning_rate": ("learning_rate", "lr"), "hyper.weight_decay": ("weight_decay",),
    "hyper.max_grad_norm": ("max_grad_norm", "max_norm", "gradient_clipping"),
    "hyper.num_epochs": ("num_train_epochs", "num_epochs"), "hyper.warmup_fraction": ("warmup_ratio",),
    "hyper.lr_schedule": ("lr_scheduler_type", "lr_scheduler"), "hyper.seed": ("seed", "random_state"),
    "hyper.lora_alpha": ("lora_alpha",), "hyper.adam_beta2": ("beta2", "adam_beta2"),
    "logging_steps": ("logging_steps",), "model_id": ("model_name_or_path", "base_model"),
    "output_dir": ("output_dir",), "num_nodes": ("num_machines",),
}  # fmt: skip
"""Attribute of the request -> the keys that say it."""
SETUP_FIELDS = {
    "micro_batch_seqs": ("per_device_train_batch_size", "micro_batch_size", "train_micro_batch_size_per_gpu"),
    "accumulation_steps": ("gradient_accumulation_steps",),
    "seq_len_tokens": ("max_length", "max_seq_length", "cutoff_len", "sequence_len"),
    "lora_rank": ("lora_r", "lora_rank", "r"),
    "lora_dropout": ("lora_dropout",),
    "packing": ("neat_packing",),
    "tensor_degree": ("tensor_parallel_size",),
    "shards": ("dp_shard_size",),
    "trained_layers": ("freeze_trainable_layers",),
}
"""Attribute of the setup that runs -> the keys that say it."""
CONSTANTS = {
    "bnb_4bit_quant_type": "nf4", "quantization_type": "nf4", "quantization_method": "bnb",
    "quant_method": "bitsandbytes", "stage3_gather_16bit_weights_on_model_save": True, "chosen": "chosen",
    "rejected": "rejected", "field_prompt": "prompt", "field_chosen": "chosen", "field_rejected": "rejected",
    "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
    "system_tag": "system", "observation_tag": "tool", "messages": "messages", "images": "images", "ranking": True,
    "bias": "none", "report_to": "none", "rl_beta": 0.1, "pref_beta": 0.1, "use_reentrant": False,
    "use_reentrant_gc": False,
    "save_total_limit": 1, "save_only_model": True, "lora_task_type": "SEQ_CLS", "fsdp_mixed_precision": True,
    "eval_strategy": "steps", "ddp_find_unused_parameters": False,
    "PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "stage3_prefetch_bucket_size": 50_000_000, "stage3_param_persistence_threshold": 100_000,
}  # fmt: skip
"""What a key says of every request."""


def _same(value: Any) -> Fact:
    return lambda _: value


FACTS: dict[str, Fact] = {
    **{key: attrgetter(f"asked.{path}") for path, keys in ATTRIBUTES.items() for key in keys},
    **{key: attrgetter(f"runs.{path}") for path, keys in SETUP_FIELDS.items() for key in keys},
    **{key: _same(value) for key, value in CONSTANTS.items()},
    "train_batch_size": lambda case: (
        case.runs.micro_batch_seqs * case.runs.accumulation_steps * case.runs.num_gpus // case.runs.split_degree
    ),
    "load_in_4bit": lambda case: case.runs.quantization.startswith("nf4"),
    "load_in_8bit": lambda case: case.runs.quantization == "int8",
    "quantization_bit": lambda case: 8 if case.runs.quantization == "int8" else 4,
    **dict.fromkeys(
        ("bnb_4bit_use_double_quant", "use_bnb_nested_quant", "double_quantization"),
        lambda case: case.runs.quantization == "nf4-double",
    ),
    "bnb_4bit_compute_dtype": lambda case: DTYPES[case.runs.compute_dtype],
    "bnb_4bit_quant_storage": lambda case: DTYPES[case.runs.weight_dtype],
    "num_processes": lambda case: 1 if case.runs.parallel == "device-map" else case.runs.num_gpus,
    "full_finetuning": lambda case: case.runs.method == "full",
    "freeze_vision_tower": lambda case: case.runs.method != "full",
    "freeze_multi_modal_projector": lambda case: case.runs.method != "full",
    "image_max_pixels": lambda case: case.runs.images.width * case.runs.images.height,
    "beta": lambda case: 0.04 * case.runs.rollout_settings.reference if case.runs.objective_spec.rolls_out else 0.1,
    "pref_loss": lambda case: {"dpo": "sigmoid"}.get(case.runs.objective, case.runs.objective),
    "pure_bf16": lambda case: case.runs.precision == "bf16-pure",
    "fused_linear_cross_entropy": lambda case: case.runs.loss == "liger",
    "optim": lambda case: OPTIM[case.runs.optimizer],
    "bf16": lambda case: case.runs.autocast_dtype == "bf16",
    "fp16": lambda case: case.runs.autocast_dtype == "fp16",
    "dp_replicate_size": lambda case: case.runs.data_degree // case.runs.shards,
    "train_on_prompt": lambda case: case.asked.loss_on == "all",
}
"""Last part of a key -> what it says, of the request alone."""
WARMUP: dict[str, Fact] = {"warmup_steps": attrgetter("asked.hyper.warmup_fraction")}
OF_ONE_FILE: dict[str, dict[str, Fact]] = {
    **dict.fromkeys(("trl", "hf", "unsloth"), WARMUP),
    "llamafactory": {"prompt": _same("prompt")},
    "loggetta": {
        "seq": attrgetter("runs.seq_len_tokens"),
        "micro-batch": attrgetter("runs.micro_batch_seqs"),
        "grad-accum": attrgetter("runs.accumulation_steps"),
        "learning-rate": attrgetter("asked.hyper.learning_rate"),
        "r": attrgetter("runs.lora_rank"),
    },
}
"""Facts of a key that says another thing elsewhere."""


THERE: dict[tuple[str, str], Fact] = {
    ("deepspeed.json", "offload_optimizer"): lambda case: case.runs.offload != "none",
    ("deepspeed.json", "offload_param"): lambda case: case.runs.offload == "parameters",
    ("llamafactory.yaml", "enable_liger_kernel"): lambda case: "liger" in (case.runs.loss, case.runs.kernels),
    ("llamafactory.yaml", "neat_packing"): lambda case: case.runs.packing,
    ("llamafactory.yaml", "quantization_bit"): lambda case: case.runs.quantized,
    ("llamafactory.yaml", "deepspeed"): lambda case: case.runs.zero,
    ("axolotl.yaml", "liger_fused_linear_cross_entropy"): lambda case: case.runs.loss == "liger",
    ("axolotl.yaml", "chunked_cross_entropy"): lambda case: (
        case.runs.loss == "chunked" and case.runs.objective_spec.supervised
    ),
    ("axolotl.yaml", "bnb_config_kwargs"): lambda case: case.runs.quantization == "nf4",
    ("axolotl.yaml", "fsdp_config"): lambda case: case.runs.parallel == "fsdp2",
    ("axolotl.yaml", "deepspeed"): lambda case: case.runs.zero,
}
"""(file, key) that says something by being there -> whether it is."""


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(last name on the way, value) of every value in a document."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, str(name))
    elif isinstance(value, list) and any(isinstance(element, dict) for element in value):
        for inner in value:
            yield from leaves(inner, key)
    else:
        yield key, value


def said(path: str, text: str) -> Iterator[tuple[str, Any]]:
    """(key, value) of everything that a file says; of a program its calls' named arguments, constants followed."""
    if path.endswith((".yaml", ".yml")):
        yield from leaves(yaml.safe_load(text))
    elif path.endswith(".json"):
        yield from leaves(json.loads(text))
    elif path.endswith(".toml"):
        yield from leaves(tomllib.loads(text))
    elif path.endswith(".sh"):
        for key, value in re.findall(r"(?:--|--fix )([a-z-]+)[ =]([\d.e-]+)\b", text):
            yield key, float(value)
    elif path.endswith(".py"):
        tree = ast.parse(text)
        assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
        constants = {ast.unparse(node.targets[0]): node.value for node in assigned if not _made(node.value)}
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            for argument in call.keywords:
                node = constants.get(ast.unparse(argument.value), argument.value)
                try:
                    yield from leaves(ast.literal_eval(node), argument.arg or "")
                except ValueError:
                    yield argument.arg or "", re.sub(r"^torch\.", "", ast.unparse(node))


def _made(node: ast.expr) -> bool:
    """Whether something is called for a value."""
    return any(isinstance(child, ast.Call) for child in ast.walk(node))


def cases() -> list[ExportRequest]:
    """The sweep's setups and objectives with these hyperparameters, and vision-language models."""
    requests = [request(setup, hyper=HYPER) for setup in [*setups(), *objective_layouts()]]
    requests += [
        request(TrainSetup(objective="dpo", precision=precision, loss="full"), hyper=HYPER) for precision in PRECISIONS
    ]
    vision_encoders = catalogue.load("Qwen/Qwen2.5-VL-3B-Instruct")
    pictures = Images(width=336, height=448)
    for method in ({"method": "full", "lora_rank": 0, "precision": "bf16-mixed"}, {"lora_targets": "attention"}):
        setup = TrainSetup(images=pictures, attention="sdpa", loss="full", **method)
        name = vision_encoders.model_id if vision_encoders else ""
        requests.append(request(setup, hyper=HYPER, model=vision_encoders, model_id=name))
    return requests


PRECISIONS = ("bf16-autocast", "bf16-pure", "fp16-autocast")


OWN = {
    "torchtitan": "Qwen/Qwen3-8B",
    "loggetta": "Qwen/Qwen3-30B-A3B",
    "sentence-transformers": "Qwen/Qwen3-Embedding-0.6B",
}
"""Models of targets that train few."""


@cache
def written(target: str) -> list[tuple[Case, Launch]]:
    """What a target writes of the cases."""
    launches = []
    for export_request in some(cases(), 2):
        if target in OWN:
            model = catalogue.load(OWN[target])
            export_request = replace(export_request, model=model, model_id=OWN[target])
            if target == "sentence-transformers" and export_request.setup.num_gpus == 1:
                pairs = {"objective": "embedding", "loss": "full", "packing": False, "micro_batch_seqs": 4}
                with suppress(SetupError):
                    export_request = replace(export_request, setup=export_request.setup.replace(**pairs), dataset=None)
            if target == "loggetta" and export_request.setup.single_gpu:
                packed = {"method": "qlora", "quantization": "nf4-double", "quantize_experts": True}
                packed |= {"lora_rank": 4, "lora_targets": "attention", "optimizer": "adamw-8bit"}
                with suppress(SetupError):
                    export_request = replace(export_request, setup=export_request.setup.replace(**packed), dataset=None)
        launch = EXPORTERS[target](export_request)
        if not launch.refused:
            launches.append((Case(asked=export_request, runs=launch.runs), launch))
    return launches


@pytest.mark.parametrize("target", sorted(EXPORTERS))
def test_what_a_file_says_is_the_fact(target: str) -> None:
    expected = FACTS | OF_ONE_FILE.get(target, {})
    seen = 0
    for case, launch in written(target):
        for file in launch.files:
            if file.path.endswith("prepare_data.py"):
                continue
            for key, value in said(file.path, file.text):
                if (key, value) == ("train_batch_size", "auto"):  # of copies that share sequences (Ulysses)
                    assert case.runs.context_degree > 1
                elif key in expected and isinstance(value, (str, int, float)) and not str(value).isupper():
                    where = (target, file.path, key, value, case.asked.setup)
                    assert value == pytest.approx(expected[key](case)), where
                    seen += 1
    assert seen


def names(value: Any) -> Iterator[str]:
    """Every key of a document, at any depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from names(inner)


@pytest.mark.parametrize("target", ["axolotl", "llamafactory", "hf"])
def test_what_says_something_by_being_there_is_there(target: str) -> None:
    seen: dict[tuple[str, str], set[bool]] = {}
    for case, launch in written(target):
        for file in launch.files:
            expected = {key: fact for (name, key), fact in THERE.items() if file.path.endswith(f"/{name}")}
            if not expected:
                continue
            document = yaml.safe_load(file.text)
            there = {*names(document)}
            for key, fact in expected.items():
                assert (key in there) == bool(fact(case)), (file.path, key, case.asked.setup)
                seen.setdefault((file.path, key), set()).add(key in there)
            if "test_datasets" in there:
                splits = [{dataset["split"] for dataset in document[name]} for name in ("datasets", "test_datasets")]
                assert splits == [{"train"}, {"test"}]
    assert {True, False} in seen.values()


def changed(target: str, before: ExportRequest, after: ExportRequest) -> set[str]:
    """Keys whose value changes."""
    settings = []
    for export_request in (before, after):
        launch = EXPORTERS[target](export_request)
        pairs = [(file.path, *pair) for file in launch.files for pair in said(file.path, file.text)]
        settings.append({(path, key, repr(value)) for path, key, value in pairs})
    return {key for _, key, _ in settings[0] ^ settings[1]}


OTHERS: dict[str, tuple[Any, set[str]]] = {
    "learning_rate": (3e-4, {"learning_rate", "lr", "arguments"}),
    "lora_alpha": (11, {"lora_alpha", "alpha", "scale"}),
    "warmup_fraction": (0.3, {"warmup_ratio", "warmup_steps", "warmup", "arguments"}),
    "lr_schedule": ("cosine", {"lr_scheduler_type", "lr_scheduler", "decay_type", "name", "arguments"}),
    "weight_decay": (0.2, {"weight_decay"}),
    "adam_beta2": (0.9, {"adam_beta2", "beta2", "betas"}),
    "max_grad_norm": (9.0, {"max_grad_norm", "max_norm", "gradient_clipping"}),
    "num_epochs": (7.0, {"num_train_epochs", "num_epochs"}),
    "max_steps": (50, {
        "max_steps", "steps", "num_train_epochs", "num_epochs", "save_steps", "eval_steps", "interval", "iters",
        "steps_per_eval", "save_every", "warmup", "arguments",
    }),
    "seed": (5, {"seed", "random_state"}),
}  # fmt: skip
"""Hyperparameter -> (another value, the keys that say it)."""


@pytest.mark.parametrize("target", sorted(EXPORTERS))
@pytest.mark.parametrize("name", OTHERS)
def test_a_hyperparameter_changes_what_says_it_and_nothing_else(target: str, name: str) -> None:
    assert {*OTHERS} == {*Hyperparameters.__dataclass_fields__} - {"reasons", "notes"}
    value, keys = OTHERS[name]
    for setup in (TrainSetup(), TrainSetup(num_gpus=4, parallel="zero2"), TrainSetup(objective="dpo", loss="full")):
        before = request(setup, hyper=HYPER, model=catalogue.load("Qwen/Qwen2.5-1.5B"))
        assert changed(target, before, replace(before, hyper=replace(HYPER, **{name: value}))) <= keys, setup


NEITHER = {
    "trl": {
        "dataset_name", "dataset_train_split", "per_device_eval_batch_size", "eval_accumulation_steps", "eval_steps",
        "save_steps", "packing_strategy", "sync_each_batch", "dtype", "attn_implementation", "loss_type",
        "pad_to_multiple_of",
    },
    "axolotl": {
        "datasets", "test_datasets", "dataset_prepared_path", "chat_template", "pad_to_sequence_len", "tf32",
        "eval_steps", "save_steps", "val_set_size", "auto_wrap_policy", "state_dict_type", "eval_sample_packing",
        "sync_each_batch", "attn_implementation", "optimizer", "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel",
        "liger_rope", "liger_rms_norm", "liger_glu_activation", "every_n_layers",
    },
    "llamafactory": {
        "dataset", "eval_dataset", "dataset_dir", "per_device_eval_batch_size", "eval_accumulation_steps",
        "eval_steps", "save_strategy", "save_steps", "stage", "flash_attn", "lora_target",
    },
}  # fmt: skip
"""Keys of data, of what happens between steps, and of words whose default a change or a loss of the line also says."""


def places(value: Any, way: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(names on the way, value) of every setting that holds no others."""
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from places(inner, (*way, name))
        else:
            yield (*way, name), inner


def without(document: dict[str, Any], way: tuple[str, ...], *, other: Any = None) -> dict[str, Any]:
    """The document without a setting, or with another value of it."""
    edited = copy.deepcopy(document)
    node = edited
    for name in way[:-1]:
        node = node[name]
    del node[way[-1]]
    if other is not None:
        node[way[-1]] = other
    return edited


def read(document: dict[str, Any], path: str, num_gpus: int) -> Any:
    """What is read of a document: a setup, or the kind of error."""
    try:
        return canonical(read_text(yaml.safe_dump(document), path, around=FileContext(num_gpus=num_gpus)).setup)
    except PlannerError as error:
        return type(error)


@pytest.mark.skipif(not WHOLE, reason="10 CPU seconds; TESTS_WHOLE=1")
@pytest.mark.parametrize("target", sorted(NEITHER))
def test_a_key_is_a_fact_or_decides_what_is_read(target: str) -> None:
    """A new line of a file needs a fact above, a reader, or its name in NEITHER."""
    explained = {*FACTS, *OF_ONE_FILE.get(target, {}), *NEITHER[target]}
    tries: dict[str, int] = {}
    for case, launch in written(target)[::3]:
        file = launch.files[0]
        if not file.path.endswith(".yaml"):
            continue
        document = yaml.safe_load(file.text)
        whole = read(document, file.path, case.runs.num_gpus)
        for way, value in places(document):
            key = way[-1]
            if key in explained or tries.get(key, 0) > 20:
                continue
            tries[key] = tries.get(key, 0) + 1
            other = not value if isinstance(value, bool) else 2 * value + 1 if isinstance(value, (int, float)) else None
            for changed in (without(document, way), without(document, way, other=other)):
                if read(changed, file.path, case.runs.num_gpus) != whole:
                    explained.add(key)
    assert sorted({*tries} - explained) == []
