"""MLX-LM's YAML (`mlx_lm.lora --config FILE`): LoRA, DoRA, a 4-bit base, full fine-tuning on Apple's GPUs.

Field names of mlx-lm 0.32. A base in 4 bits is made by `mlx_lm.convert`, once, before the run.
"""

import shlex

from planner.core.shipped import model_types
from planner.frameworks.exporters import chat, common, prepare
from planner.frameworks.exporters.text import Line, Section, section, setting_line, shown_path, yaml_text
from planner.frameworks.exporters.types import Difference, Draft, ExportRequest, LaunchFile
from planner.frameworks.tools.others import MLX
from planner.models.spec import ModelSpec
from planner.models.targets import adapts_expert_stacks, lora_linears
from planner.samples.steps import steps_between_saves
from planner.setup import TrainSetup

TARGET = "mlx"
FILE = "mlx/mlx.yaml"
VALIDATED_WITH = {"mlx-lm": "0.32.2", "datasets": "5.2.0"}
BASE = "launch/mlx/base"
"""Where a base is written that is not used as the hub has it, by its bits."""
TYPES = model_types("mlx")
"""Model types whose layers MLX-LM's own classes have under transformers' names (`mlx_lm/models`)."""


def differences(setup: TrainSetup) -> tuple[Difference, ...]:
    runs: dict[str, tuple[object, str]] = {
        "loss": ("full", "MLX-LM computes the logits in full"),
        "kernels": ("eager", "MLX has kernels of its own"),
        "attention": ("sdpa", "MLX-LM calls mx.fast.scaled_dot_product_attention"),
        "precision": ("bf16-pure", "MLX-LM computes in the type of the weights, without autocast"),
        "adapter_dtype": ("fp32", "MLX-LM makes its adapters in fp32"),
        "kbit_fp32_cast": (False, "MLX-LM casts nothing to fp32"),
        "checkpointing": (min(setup.checkpointing, 1), "MLX-LM checkpoints all layers or none"),
        "selective_checkpointing": (False, "MLX-LM's checkpoints recompute whole layers"),
        "activation_offload": (False, "memory is one: there is nowhere to move checkpoints to"),
        "packing": (False, "MLX-LM pads the samples of a micro-batch to the longest, in steps of 32 tokens"),
        "compile": (False, "mx.compile is MLX-LM's own and always on"),
        "optimizer": (
            "adamw-fused" if setup.optimizer == "adamw" else setup.optimizer,
            "MLX-LM's optimizer step is compiled with the rest",
        ),
        "quantization": (
            "nf4" if setup.quantization == "nf4-double" else setup.quantization,
            "MLX's 4 bits have a scale and a bias of 16 bits for every 64 weights: nf4's bytes without double "
            "quantization",
        ),
    }
    if setup.method == "full":
        runs["precision"] = (setup.precision, "")
    return common.differing(setup, runs)


def refusal(setup: TrainSetup, model: ModelSpec | None = None) -> str:
    if not setup.single_gpu:
        return "the MLX-LM config is written for one GPU"
    if setup.quantization == "int8":
        return "LLM.int8 is bitsandbytes': MLX's own 8 bits are not planned (nf4 is written as MLX's 4 bits)"
    if setup.method == "full" and setup.precision != "bf16-pure":
        return "MLX-LM trains weights in the type that they are stored in: bf16-pure"
    if setup.compute_dtype != "bf16":
        return "MLX-LM computes in the type of the weights: bf16"
    if setup.optimizer not in ("adamw", "adamw-fused", "adafactor", "sgd"):
        return f"MLX has no {setup.optimizer}"
    if setup.method != "full" and setup.adapter not in ("lora", "dora"):
        return f"MLX-LM has LoRA and DoRA, no {setup.kind.title}"
    if setup.quantize_experts:
        return "quantize_experts is bitsandbytes': MLX-LM's 4 bits are of all that can be quantized"
    if setup.modules_to_save:
        return "MLX-LM trains adapters alone beside no module"
    if setup.trained_layers and not (isinstance(setup.trained_layers, int) and setup.trained_layers > 0):
        return "MLX-LM trains the last layers alone or all"
    if model is None:
        return ""
    if model.model_type not in TYPES:
        return f"{model.model_type} was not read in MLX-LM: plan with --target trl"
    if setup.method != "full" and adapts_expert_stacks(model, setup.lora_targets):
        return "MLX-LM's adapters of stacked experts were not read"
    return common.model_refusal(setup.replace(attention="sdpa", trained_layers=0, adapter="lora"), model, TARGET)


def export(request: ExportRequest, differences: tuple[Difference, ...]) -> Draft:
    """`mlx.yaml`, and the template of a tokenizer that has none."""
    files, setup = [], request.setup
    notes = [
        "It counts micro-batches (iters), not epochs: "
        f"{common.counted_steps(request):,} optimizer steps of {setup.accumulation_steps} of them.",
        "No run of MLX's was compared: memory and speed are those of PyTorch's step on this GPU, and MLX caches freed "
        "buffers beside them.",
    ]
    if setup.method == "full" and not setup.trained_layers:
        notes.append("MLX-LM's full fine-tuning leaves embeddings and head as they are: the peak is an upper bound.")
    notes.append(f"Gradients are not clipped: MLX-LM has no max_grad_norm ({request.hyper.max_grad_norm:g} planned).")
    steps = []
    if made := _base(request):
        bits = "-q --q-bits 4 --q-group-size 64 " if setup.quantized else "--dtype bfloat16 "
        where = shlex.quote(shown_path(request.model_id))
        convert = f"mlx_lm.convert --hf-path {where} {bits}--mlx-path {made}"
        if chat.brought_along(request):
            template = f"{TARGET}/{chat.TEMPLATE_FILE}"
            files.append(LaunchFile(path=template, text=chat.TEMPLATE))
            convert += f" && cp launch/{template} {made}/"
        steps.append(f"{{ [ -f {made}/config.json ] || {{ {convert}; }}; }}")
        notes.append(f"The base is written to {made} once, by mlx_lm.convert.")
    command = " && ".join([*steps, f"mlx_lm.lora --config launch/{FILE}"])
    main = LaunchFile(path=FILE, text=yaml_text(_sections(request)))
    return Draft(title="MLX-LM", main=main, files=tuple(files), command=command, notes=tuple(notes))


def _base(request: ExportRequest) -> str:
    """Where a base stands that has to be made first, "" where the model is taken as it is."""
    if request.setup.quantized:
        return f"{BASE}-4bit"
    return f"{BASE}-bf16" if chat.brought_along(request) else ""


def _sections(request: ExportRequest) -> list[Section]:
    setup, hyper = request.setup, request.hyper
    made, model = _base(request), common.model_line("model", request)
    iters = common.counted_steps(request) * setup.accumulation_steps
    often = round(steps_between_saves(common.counted_steps(request), request.step_s)) * setup.accumulation_steps
    answers = request.columns != "text" and request.loss_on != "all"
    return [
        section("model", Line("model", made, f"made of {shown_path(request.model_id)}") if made else model),
        section("method", Line("train", True), *_method(request)),
        section(
            "dataset",
            Line("data", prepare.folder(request, TARGET), f"made by launch/{prepare.NAME}"),
            Line("mask_prompt", answers, prepare.loss_words(request)),
            setting_line(MLX, setup, "seq_len_tokens", "tokens; longer samples are cut"),
        ),
        section(
            "batch",
            setting_line(MLX, setup, "micro_batch_seqs"),
            setting_line(MLX, setup, "accumulation_steps"),
            Line("iters", iters, "micro-batches"),
        ),
        section("memory and speed", Line("grad_checkpoint", setup.checkpointing > 0)),
        section("optimization", *_optimization(request)),
        section(
            "output",
            Line("adapter_path", shown_path(request.output_dir)),
            Line("steps_per_report", request.logging_steps * setup.accumulation_steps),
            Line("steps_per_eval", often if request.evaluates else iters + 1),
            Line("val_batches", -1 if request.evaluates else 0),
            Line("save_every", often if request.save else iters + 1),
            Line("seed", hyper.seed),
        ),
    ]


def _method(request: ExportRequest) -> list[Line]:
    setup, model = request.setup, request.model
    kind = "full" if setup.method == "full" else setup.adapter
    assert isinstance(setup.trained_layers, int)
    layers = Line("num_layers", setup.trained_layers or -1, "of the last" if setup.trained_layers else "all")
    lines = [Line("fine_tune_type", kind), layers]
    if kind == "full":
        return lines
    block: dict[str, object] = {
        "rank": setup.lora_rank,
        "dropout": float(setup.lora_dropout),
        "scale": request.hyper.lora_alpha / setup.lora_rank,
    }
    if setup.lora_targets != "all-linear":
        if model is not None:
            linears = [linear for _, _, linears in lora_linears(model, setup.lora_targets) for linear in linears]
            block["keys"] = list(dict.fromkeys(linear.name for linear in linears))
        elif setup.lora_targets == "attention":
            block["keys"] = [f"self_attn.{name}" for name in common.USUAL_ATTENTION_MODULES]
        else:
            block["keys"] = list(setup.lora_targets)
    return [*lines, Line("lora_parameters", block, "scale: alpha over rank")]


def _optimization(request: ExportRequest) -> list[Line]:
    setup, hyper = request.setup, request.hyper
    runs = "adamw" if setup.optimizer == "adamw-fused" else setup.optimizer
    steps = common.counted_steps(request)
    warmup = round(hyper.warmup_fraction * steps)
    configs: dict[str, dict[str, object]] = {
        "adamw": {"betas": [0.9, hyper.adam_beta2], "weight_decay": hyper.weight_decay, "bias_correction": True},
        "sgd": {"weight_decay": hyper.weight_decay},
        "adafactor": {"relative_step": False, "scale_parameter": False},
    }
    lines = [Line("optimizer", runs), common.tuned("learning_rate", hyper, "learning_rate")]
    lines.append(Line("optimizer_config", {runs: configs[runs]}))
    if hyper.lr_schedule == "constant":
        return lines
    name, ends = ("cosine_decay", []) if hyper.lr_schedule == "cosine" else ("linear_schedule", [0.0])
    schedule = {"name": name, "warmup": warmup, "arguments": [hyper.learning_rate, *ends, max(1, steps - warmup)]}
    return [*lines, Line("lr_schedule", schedule, "in optimizer steps, from the end of the warm-up on")]
