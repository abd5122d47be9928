"""What several targets share: names of optimizers, data types, attention; target modules; environment variables."""

from collections.abc import Mapping

from planner.core.shipped import by_model_type
from planner.frameworks.exporters import prepare
from planner.frameworks.exporters.install import HUB_FLASH, from_hub
from planner.frameworks.exporters.text import Line, constant, setting_line, shown_path
from planner.frameworks.exporters.types import PLACEHOLDER_DATASET, Difference, ExportRequest
from planner.frameworks.hyperparameters import ADAM_BETA2, Hyperparameters
from planner.frameworks.tools import Tool
from planner.frameworks.tools.transformers import ATTENTIONS
from planner.hardware.gpu import GpuSpec
from planner.memory.attention_kernels import (
    attention_refusal,
    class_refusal,
    experts_refusal,
    hub_refusal,
    left_unnamed,
)
from planner.models.spec import ModelSpec
from planner.models.stored import packed_refusal, stored_refusal
from planner.models.targets import peft_target_modules
from planner.options.kernels import KERNELS, LIGER_LOSS, PLANNED_KERNELS, USUAL_TYPE
from planner.options.optimizers import OPTIMIZERS
from planner.options.precisions import PRECISIONS
from planner.options.stacks import TARGET_ROWS
from planner.samples.steps import steps_between_saves
from planner.setup import TrainSetup

SOUND_TRAINER = "Seq2SeqTrainer"
USUAL_ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
USUAL_LINEAR_MODULES = (*USUAL_ATTENTION_MODULES, "gate_proj", "up_proj", "down_proj")


def attention_line(request: ExportRequest) -> Line | None:
    """`attn_implementation`, None where transformers has to choose for each part of the model."""
    if request.model is not None and left_unnamed(request.model.config, request.setup.attention):
        return None
    amd = request.gpu is not None and request.gpu.vendor == "AMD"
    if from_hub(request.setup) and not amd:  # for AMD's cards transformers takes another of the hub's by itself
        return Line("attn_implementation", HUB_FLASH, "fetched from the hub, no compiler needed")
    return Line("attn_implementation", ATTENTIONS[request.setup.attention])


def multimodal_refusal(model: ModelSpec | None, tool: str) -> str:
    """Why a tool that loads the class of the published checkpoint cannot run this plan: that class has encoders which
    the planned one has not; "" where it is the planned one."""
    published = str((model.config.get("architectures") or [""])[0]) if model is not None else ""
    if model is None or published == model.built_class or not published.endswith("ForConditionalGeneration"):
        return ""
    return (
        f"{tool} loads the class that the model names, {published} with its encoders, not the {model.built_class} "
        "planned here; use the hf target"
    )


def target_modules(setup: TrainSetup, model: ModelSpec | None) -> str | list[str]:
    """PEFT's `target_modules`: "all-linear", a list of names, or a pattern (`planner.models.targets`)."""
    if model is not None:
        return peft_target_modules(model, setup.lora_targets)
    if setup.lora_targets == "attention":
        return list(USUAL_ATTENTION_MODULES)
    return setup.lora_targets if isinstance(setup.lora_targets, str) else list(setup.lora_targets)


def liger_loss_refusal(
    setup: TrainSetup, model: ModelSpec | None, losses: tuple[str, ...], model_types: frozenset[str] = LIGER_LOSS
) -> str:
    """Why a tool that runs these losses with Liger, for these model types, cannot run this setup's, "" when it can."""
    if model is None or setup.loss not in losses or model.model_type in model_types:
        return ""
    return f"Liger is not applied to {model.model_type}: the logits would be held in full; plan with --loss full"


def family_refusal(setup: TrainSetup, tool: str) -> str:
    """Why a tool's file cannot ask for the setup's kernel family, "" where it can."""
    row = KERNELS[setup.kernels]
    if not row.only or tool in row.only:
        return ""
    whose = " and ".join(f"{TARGET_ROWS[target].title}'s" for target in row.only)
    return f"{row.words} are {whose}; plan with --kernels {PLANNED_KERNELS[0]}, or with --target {row.only[0]}"


def kernels_lines(setup: TrainSetup, model: ModelSpec | None) -> list[Line]:
    """transformers' Liger switch, and what of it is on where that is not what the switch does by itself.

    Source: transformers 5.23 `TrainingArguments.liger_kernel_config`, handed to `apply_liger_kernel_to_*` of
    liger-kernel (rope, rms_norm, swiglu or geglu, cross_entropy, fused_linear_cross_entropy).
    """
    kind = model.model_type if model is not None else USUAL_TYPE
    parts, fused_loss = setup.fused_parts(kind, compiler=False), setup.loss == "liger"
    if not parts and not fused_loss:
        return []
    wanted = {"rope": "rotary" in parts, "rms_norm": "norm" in parts}
    usual = by_model_type("liger_options").get(kind, {})
    config = {name: on for name in usual if (on := wanted.get(name, "gated" in parts)) != usual[name]}
    if not fused_loss and kind in LIGER_LOSS:
        config["fused_linear_cross_entropy"] = False
    if kind not in LIGER_LOSS:
        config["cross_entropy"] = False
    lines: list[Line] = [Line("use_liger_kernel", True, KERNELS[setup.kernels].words if parts else "its loss alone")]
    return [*lines, Line("liger_kernel_config", config)] if config else lines


def batch_lines(tool: Tool, setup: TrainSetup) -> list[Line]:
    """Sequences of a micro-batch, in training and in evaluation, and micro-batches of a step, as transformers says
    them."""
    as_training = "as in training: transformers' own 8 may need more than the step"
    return [
        setting_line(tool, setup, "micro_batch_seqs"),
        Line("per_device_eval_batch_size", setup.micro_batch_seqs, as_training),
        Line("eval_accumulation_steps", 1, "compute_metrics' logits wait on the host, not on the GPU"),
        setting_line(tool, setup, "accumulation_steps"),
    ]


def step_lines(hyper: Hyperparameters, warmup: Line, decay_reason: str = "") -> list[Line]:
    """Learning rate, decay, clipping and length of a run, as transformers says them."""
    length = Line("num_train_epochs", hyper.num_epochs)
    return [
        tuned("learning_rate", hyper, "learning_rate"),
        tuned("lr_scheduler_type", hyper, "lr_schedule"),
        warmup,
        Line("weight_decay", hyper.weight_decay, decay_reason),
        *beta_lines(hyper),
        Line("max_grad_norm", hyper.max_grad_norm),
        length if hyper.max_steps is None else Line("max_steps", hyper.max_steps),
    ]


def beta_lines(hyper: Hyperparameters) -> list[Line]:
    """AdamW's second moment, where it is not the default."""
    return [tuned("adam_beta2", hyper, "adam_beta2")] if hyper.adam_beta2 != ADAM_BETA2 else []


STEPS = 1000
"""Optimizer steps in the file of a tool that counts no epochs, where no number was given."""


def counted_steps(request: ExportRequest) -> int:
    """Optimizer steps of a run, for a tool that counts no epochs."""
    return request.hyper.max_steps or request.num_steps or STEPS


def steps_between(request: ExportRequest) -> float:
    """Steps from one checkpoint, and one evaluation, to the next."""
    return steps_between_saves(request.hyper.max_steps or request.num_steps, request.step_s)


def evaluation_lines(request: ExportRequest) -> list[Line]:
    """When the samples held out are evaluated, as transformers says it."""
    if not request.evaluates:
        return []
    held_out = f"{request.held_out} samples are held out" if request.held_out else "a share of the samples is held out"
    return [Line("eval_strategy", "steps", held_out), Line("eval_steps", steps_between(request))]


RESUMED = "RESUME_FROM_CHECKPOINT"
"""The environment variable by which a script is told the folder of a checkpoint to go on from."""


def saving_lines(request: ExportRequest) -> list[Line]:
    """What is evaluated and saved on the way, as transformers says it."""
    evaluating = evaluation_lines(request)
    if not request.save:
        return [*evaluating, Line("save_strategy", "no", "the final model is saved all the same")]
    lines = [*evaluating, Line("save_steps", steps_between(request)), Line("save_total_limit", 1)]
    if request.setup.sharded_at_loading:
        lines.append(Line("save_only_model", True, "all that can be saved of a model sharded at loading"))
    return lines


def adapter_refusal(setup: TrainSetup, tool: str) -> str:
    """Why a tool's file cannot ask for the setup's kind of adapter, "" where it can."""
    row = setup.kind
    if setup.method == "full" or row.name == "lora" or getattr(row, tool, None) is not None:
        return ""
    if row.name == "adalora":
        return "AdaLoRA has to be told of every optimizer step (update_and_allocate), which no trainer here does"
    if tool == "hf":  # whose script takes peft's own classes, where the others take adapters by name
        return ""
    return f"{TARGET_ROWS[tool].title}'s file has no {row.title}; use the hf target"


def model_refusal(setup: TrainSetup, model: ModelSpec | None, tool: str) -> str:
    """Why no trainer on transformers runs this setup on this model, "" when one does or the model is not known."""
    if reason := adapter_refusal(setup, tool):
        return reason
    if not OPTIMIZERS[setup.optimizer].transformers:
        return f"transformers' optim has no name for {setup.optimizer}"
    if setup.modules_to_save:
        return "launch files train adapters alone: add modules_to_save to one yourself"
    last = tool == "llamafactory" and setup.method == "full" and isinstance(setup.trained_layers, int)
    if setup.trained_layers and not last and (tool != "axolotl" or model is None):
        return "layers that train alone are written for Axolotl, and without adapters for LLaMA-Factory"
    if setup.frozen_encoder and (model is None or model.front_end is None):
        return "only models that hear have an encoder to freeze"
    if setup.quantize_experts and tool not in ("axolotl", "loggetta"):
        return "experts in 4 bits (quantize_experts) are written for Axolotl and Loggetta alone: use --target axolotl"
    if model is None:
        return ""
    if setup.quantize_experts and (reason := experts_refusal(model, setup)):
        return reason
    if model.front_end is not None and tool != "hf":
        return f"{model.model_type} turns sound into text: transformers' {SOUND_TRAINER} trains it; use the hf target"
    if model.is_encoder_decoder and model.front_end is None:
        return f"launch files train causal language models; {model.model_type} is an encoder-decoder"
    heads = (
        model.reads_both_ways and setup.objective_spec.head != "vocabulary"
    )  # classes of their own, which encoders have
    if "causal" in model.lacks and setup.images is None and not heads:
        return f"launch files train causal language models on text; {model.model_type} is built as {model.built_class}"
    attention = attention_refusal(model, setup.attention) or hub_refusal(model, setup.attention)
    return attention or class_refusal(model, setup) or stored_refusal(setup, model) or packed_refusal(model)


def data_constants(request: ExportRequest, target: str = "hf") -> str:
    """What a person changes first in a script: model and data."""
    dataset, model = request.dataset, constant("MODEL", shown_path(request.model_id))
    if prepare.needed(request):
        made = constant("DATASET", prepare.folder(request, target), f"made by launch/{prepare.NAME} of your data set")
        return model + made + (constant("SPLIT", "train") if not request.setup.objective_spec.supervised else "")
    comment = "" if dataset else "PUT YOURS HERE: hub id, directory, .jsonl or .parquet file"
    path = constant("DATASET", shown_path(dataset.path) if dataset else PLACEHOLDER_DATASET, comment)
    return model + path + constant("SPLIT", dataset.split if dataset else "train")


def environment(gpu: GpuSpec | None) -> dict[str, str]:
    return {} if gpu is not None and gpu.vendor != "NVIDIA" else allocator_settings()


def after(env: Mapping[str, str], command: str) -> str:
    """A command with the environment that it starts in before it."""
    return " ".join([*(f"{name}={value}" for name, value in env.items()), command])


def tuned(key: str, hyper: Hyperparameters, name: str) -> Line:
    """The line of a hyperparameter, with what chose it."""
    return Line(key, getattr(hyper, name), hyper.reasons.get(name, ""))


def allocator_settings() -> dict[str, str]:
    """The allocator's settings that every launch file for NVIDIA sets, and every probe runs with.

    `expandable_segments` removes most of the gap between reserved and allocated memory (docs/dry-run.md). torch >= 2.9
    reads PYTORCH_ALLOC_CONF, older ones PYTORCH_CUDA_ALLOC_CONF; both are set to the same value.
    """
    value = "expandable_segments:True"
    return {"PYTORCH_CUDA_ALLOC_CONF": value, "PYTORCH_ALLOC_CONF": value}


def model_line(key: str, request: ExportRequest) -> Line:
    shown = shown_path(request.model_id)
    shortened = shown.startswith("./") and not request.model_id.startswith("./")
    return Line(key, shown, "a directory: launch from its parent, or put its path here" if shortened else "")


def narrow(precision: str) -> str:
    """The precision of weights that are loaded in the type of their autocast."""
    autocast = PRECISIONS[precision].autocast
    return precision if autocast is None else f"{autocast}-autocast"


def differing(setup: TrainSetup, runs: Mapping[str, tuple[object, str]]) -> tuple[Difference, ...]:
    """Of fields, each with what the target runs it as and why, those that the setup says otherwise.

    `adapter_dtype` is held against what "auto" comes to without the k-bit cast to fp32, which no tool here makes.
    """
    differences = []
    for field, (runs_as, why) in runs.items():
        planned = getattr(setup, field)
        if field == "adapter_dtype":
            if setup.method == "full":
                continue
            planned = setup.replace_trusted(kbit_fp32_cast=False).resolved_adapter_dtype
        if planned != runs_as:
            differences.append(Difference(field=field, planned=planned, runs_as=runs_as, reason=why))
    return tuple(differences)
