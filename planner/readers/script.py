"""Python training scripts as setups: the keyword arguments of the calls that everybody writes. Nothing is executed.

Reads `from_pretrained`, `BitsAndBytesConfig`, `LoraConfig`, `get_peft_model` (Unsloth), `TrainingArguments` and
`SFTConfig` with literal values or names assigned to literals; anything computed is noted as not followed.
"""

import ast
from typing import Any

from planner.errors import ConfigError
from planner.models.spec import ModelSpec
from planner.readers import common, hf
from planner.readers.sharding import Sharding, loaded, parallel_of
from planner.readers.trl import sharded
from planner.readers.types import ReadConfig
from planner.readers.values import Settings

FORMAT = "hf-script"
UNSLOTH = "unsloth-script"
ARGUMENTS = ("TrainingArguments", "SFTConfig", "Seq2SeqTrainingArguments", "UnslothTrainingArguments")
LENGTH_NAMES = ("MAX_LENGTH", "MAX_SEQ_LENGTH", "max_seq_length", "max_length", "SEQ_LEN", "seq_length", "cutoff_len")
BF16_QUESTIONS = ("is_bfloat16_supported", "is_bf16_supported")


class _Unknown:
    """A value that only running the script would give."""


UNKNOWN = _Unknown()


def read(text: str, name: str, model: ModelSpec | None = None, *, sharding: Sharding | None = None) -> ReadConfig:
    """The setup of a training script.

    Raises:
        ConfigError: not Python, or no call in it that names training arguments.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise ConfigError(
            f"{name} is not Python that can be read: {str(error).splitlines()[0][:120]}",
            hint="give a script that Python itself accepts",
        ) from error
    try:
        calls, constants = _collect(tree)
    except RecursionError as error:
        raise ConfigError(
            f"{name} is nested too deep", hint="give the script that trains, not a generated one"
        ) from error
    arguments = next((calls[kind] for kind in ARGUMENTS if kind in calls), None)
    if arguments is None:
        raise ConfigError(
            f"{name} has no call of TrainingArguments or SFTConfig with its settings",
            hint="scripts that take their settings from the command line have them elsewhere",
        )
    return _setup(calls, constants, arguments, name, model, sharding or Sharding())


def _collect(tree: ast.Module) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """function name -> its keyword arguments (the last call of that name), and module-level constants."""
    constants: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            value = _value(node.value, constants)
            if value is not UNKNOWN:
                constants[node.targets[0].id] = value
    calls: dict[str, dict[str, Any]] = {}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            function = _function(call.func)
            found = {one.arg: _value(one.value, constants) for one in call.keywords if one.arg}
            if function == "from_pretrained":
                owner = _function(call.func.value) if isinstance(call.func, ast.Attribute) else ""
                if "Model" not in owner:
                    continue
                function = "FastModel" if owner.startswith("Fast") else "AutoModel"
                if call.args:
                    found.setdefault("model_name", _value(call.args[0], constants))
            calls[function] = {**calls.get(function, {}), **found}
    return calls, constants


def _function(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def _value(node: ast.expr, constants: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return constants.get(node.id, UNKNOWN)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
        return node.attr
    if isinstance(node, ast.Call) and _function(node.func) in BF16_QUESTIONS:
        return True
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = _value(node.operand, constants)
        return UNKNOWN if inner is UNKNOWN else not inner
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return UNKNOWN


def _known(found: dict[str, Any], name: str) -> Settings:
    settings = Settings({key: value for key, value in found.items() if value is not UNKNOWN}, name)
    for key, value in found.items():
        if value is UNKNOWN and key in _MATTERS:
            settings.assume(f"{key} is computed in the script: the default is taken")
    return settings


_MATTERS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "max_length", "max_seq_length", "r", "load_in_4bit",
    "gradient_checkpointing", "activation_checkpointing", "optim", "packing", "bf16", "fp16", "target_modules",
)  # fmt: skip


def _setup(
    calls: dict[str, dict[str, Any]],
    constants: dict[str, Any],
    found: dict[str, Any],
    name: str,
    model: ModelSpec | None,
    sharding: Sharding,
) -> ReadConfig:
    unsloth = "FastModel" in calls
    trl = unsloth or "SFTConfig" in calls or "SFTTrainer" in calls
    arguments = _known({**_trainer_extras(calls), **found}, name)
    loader = _known(calls.get("FastModel" if unsloth else "AutoModel", {}), name)
    bnb = _known(calls.get("BitsAndBytesConfig", {}), name)
    adapter = calls.get("get_peft_model", {}) if unsloth else calls.get("LoraConfig", {})
    lora = _known(adapter, name)
    keys: dict[str, str] = {}
    fields: dict[str, Any] = hf.batch(arguments, keys)
    quantization = _quantization(bnb, loader, unsloth)
    adapted = ("get_peft_model" if unsloth else "LoraConfig") in calls
    fields["method"] = "full" if not adapted else "lora" if quantization == "none" else "qlora"
    fields["quantization"] = quantization if adapted else "none"
    fields["kbit_fp32_cast"] = fields["method"] == "qlora" and "prepare_model_for_kbit_training" in calls
    fields["precision"] = _precision(arguments, loader, fields["method"], model, trl=trl, unsloth=unsloth)
    if adapted:
        names = lora.names("target_modules")
        fields |= {
            "lora_rank": lora.integer("r", 16 if unsloth else 8, at_least=1),
            "lora_dropout": lora.real("lora_dropout", 0.0),
            "lora_targets": common.targets(names or (("all-linear",) if unsloth else ()), model, lora),
        }
        stated = constants.get("ADAPTER_DTYPE")
        if stated in common.DTYPES:
            fields["adapter_dtype"] = common.DTYPES[stated]
        elif unsloth or (fields["method"] == "qlora" and not trl):
            fields["adapter_dtype"] = "fp32"
    else:
        fields["lora_rank"] = 0
    fields["checkpointing"] = _checkpointing(arguments, loader, lora, keys, trl=trl, unsloth=unsloth)
    fields["seq_len_tokens"] = _length(arguments, loader, constants, calls)
    fields["packing"] = arguments.flag("packing", constants.get("PACKING") is True)
    fields["optimizer"] = common.optimizer(arguments, "optim", "adamw_torch_fused")
    fields["attention"] = "sdpa" if unsloth else common.attention(loader, "attn_implementation", model)
    fields["compile"] = arguments.flag("torch_compile", False)
    liger = arguments.flag("use_liger_kernel", False)
    fields["loss"] = "chunked" if trl else "liger" if liger else "full"
    if loader.raw("device_map") == "auto" and sharding.num_gpus > 1:
        fields |= {"num_gpus": sharding.num_gpus, "parallel": "device-map"}
    elif constants.get("PARALLEL") == "dp" and sharding.num_gpus > 1:
        fields |= {"num_gpus": sharding.num_gpus, "parallel": "dp"}
    else:
        if "DistributedConfig" in calls:
            loader.values = {**loader.values, "distributed_config": _known(calls["DistributedConfig"], name).values}
        spread = loaded(arguments, loader, sharding.num_gpus) or sharded(arguments, sharding)
        fields |= parallel_of(arguments, spread, sharding.num_gpus)
    parts = (arguments, loader, bnb, lora)
    named = loader.raw("model_name", loader.raw("pretrained_model_name_or_path"))
    return ReadConfig(
        format=UNSLOTH if unsloth else FORMAT,
        path=name,
        model_id=named if isinstance(named, str) else None,
        setup=common.build(arguments, fields),
        assumptions=tuple(dict.fromkeys(one for part in parts for one in part.assumptions)),
        approximations=tuple(dict.fromkeys(one for part in parts for one in part.approximations)),
        dataset=constants.get("DATASET") if isinstance(constants.get("DATASET"), str) else None,
        keys=keys,
        values=arguments.values,
    )


def _trainer_extras(calls: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Old TRL took some settings on the trainer itself."""
    trainer = calls.get("SFTTrainer", {})
    return {key: trainer[key] for key in ("max_seq_length", "packing") if key in trainer}


def _quantization(bnb: Settings, loader: Settings, unsloth: bool) -> str:
    source = bnb if bnb.values else loader
    if source.flag("load_in_8bit", False):
        return "int8"
    if source.flag("load_in_4bit", unsloth):
        full = loader.flag("full_finetuning", False) or loader.flag("load_in_16bit", False)
        if full and not bnb.values:
            return "none"
        double = True if unsloth else source.flag("bnb_4bit_use_double_quant", False)
        return "nf4-double" if double else "nf4"
    return "none"


def _precision(
    arguments: Settings, loader: Settings, method: str, model: ModelSpec | None, *, trl: bool, unsloth: bool
) -> str:
    autocast = hf.autocast(arguments, bf16_default=trl)
    key = loader.first("dtype", "torch_dtype")
    if unsloth:
        if method == "full":
            if loader.flag("float32_mixed_precision", False):
                return "bf16-mixed"
            return "fp32" if loader.raw(key) == "float32" else "bf16-pure"
        return f"{autocast or 'bf16'}-autocast"
    if not loader.has(key):
        loader.assume("no dtype on from_pretrained: the checkpoint's own, taken to be bf16")
    weights = hf.weight_dtype(loader, key, "auto", model)
    return common.precision(arguments, weights, autocast, method)


def _checkpointing(
    arguments: Settings, loader: Settings, lora: Settings, keys: dict[str, str], *, trl: bool, unsloth: bool
) -> int:
    if unsloth:
        value = lora.raw("use_gradient_checkpointing", loader.raw("use_gradient_checkpointing", "unsloth"))
        if value == "unsloth":
            arguments.assume("checkpoints kept in host memory (unsloth) are counted as if they stayed on the GPU")
        return int(bool(value) and value not in ("none", "false"))
    return hf.checkpointing(arguments, trl, keys)


def _length(arguments: Settings, loader: Settings, constants: dict[str, Any], calls: dict[str, dict[str, Any]]) -> int:
    for settings in (arguments, loader, _known(calls.get("tokenizer", {}), arguments.name)):
        key = settings.first("max_length", "max_seq_length")
        if settings.has(key):
            return settings.integer(key, 1024, at_least=1)
    for key in LENGTH_NAMES:
        if isinstance(constants.get(key), int) and not isinstance(constants.get(key), bool):
            return int(constants[key])
    arguments.assume("no sequence length named: 1024 tokens taken")
    return 1024
