"""An Unsloth script: `python FILE`. Unsloth 2026.10 with trl <= 1.15 and transformers <= 5.17 (old names)."""

from planner.frameworks.exporters import chat, common
from planner.frameworks.exporters.text import Code, Line, call, program, setting_line, shown_path
from planner.frameworks.exporters.types import Difference, Draft, ExportRequest, LaunchFile
from planner.frameworks.tools.transformers import DTYPES
from planner.frameworks.tools.unsloth import SCRIPT, own_kernels
from planner.models.spec import ModelSpec
from planner.models.stored import dequantizing_class, stored_method
from planner.models.targets import adapts_expert_stacks, peft_target_modules, same_targets, target_pattern
from planner.setup import TrainSetup

TARGET = "unsloth"
FILE = "unsloth/train_unsloth.py"
VALIDATED_WITH = {"unsloth": "2026.10.9", "trl": "1.15.0", "transformers": "5.17.0"}


def differences(setup: TrainSetup) -> tuple[Difference, ...]:
    kernels = own_kernels({name: getattr(setup, name) for name in setup.__dataclass_fields__}, None)
    runs: dict[str, tuple[object, str]] = {
        "loss": ("chunked", "Unsloth computes the loss in chunks by its own kernel"),
        "kernels": (kernels, "Unsloth has kernels for some models' adapters, without dropout on 16 or 4 bits"),
        "attention": ("sdpa", "Unsloth picks its attention itself: flash-attn where installed, else xformers or SDPA"),
        "kbit_fp32_cast": (False, "Unsloth prepares k-bit models itself and leaves embeddings in 16 bits"),
        "selective_checkpointing": (False, "Unsloth has no selective checkpointing: attention is recomputed, slower"),
        "checkpointing": (min(setup.checkpointing, 1), "Unsloth checkpoints all layers or none: slower"),
        "precision": (
            setup.precision if setup.method == "full" else common.narrow(setup.precision),
            "Unsloth loads a frozen base in the 16-bit type",
        ),
        "adapter_dtype": ("fp32", "Unsloth trains adapters in fp32"),
        "quantization": (
            "nf4-double" if setup.quantization == "nf4" else setup.quantization,
            "Unsloth always quantizes twice",
        ),
        "compile": (False, "Unsloth compiles its own parts and refuses torch_compile"),
    }
    return common.differing(setup, runs)


def refusal(setup: TrainSetup, model: ModelSpec | None = None) -> str:
    if not setup.single_gpu:
        return "the Unsloth script is written for one GPU"
    if setup.precision == "bf16-pure" and setup.method != "full":
        return "Unsloth trains adapters under autocast (bf16-autocast works)"
    if setup.method == "full" and setup.precision in ("bf16-autocast", "fp32"):
        return f"Unsloth has no {setup.precision} full fine-tuning (bf16-pure, bf16-mixed and fp16-mixed work)"
    if setup.precision == "fp32" and setup.method != "full":
        return "Unsloth loads a frozen base in 16 bits"
    eager = setup.replace(attention="eager")  # it picks its attention itself
    if reason := common.model_refusal(eager, model, TARGET) or common.multimodal_refusal(model, "Unsloth"):
        return reason
    if dequantizing_class(model):
        return f"Unsloth loads conversions of its own in place of weights published in {stored_method(model)}"
    if model is None or setup.method == "full":
        return ""
    # Source: `models/_utils.py` get_moe_target_parameters (any of gate_proj, up_proj, down_proj, gate_up_proj).
    stacked = any(linear.num > 1 for layer in model.layer_kinds for linear in layer.linears)
    if stacked and (setup.lora_targets == "all-linear" or adapts_expert_stacks(model, setup.lora_targets)):
        return "Unsloth adapts stacked experts by rules of its own: plan with --targets attention"
    return ""


def export(request: ExportRequest, differences: tuple[Difference, ...]) -> Draft:
    notes = (
        "Written with the names of trl <= 1.15 and transformers <= 5.17, which Unsloth pins.",
        "Checked against the signatures and config classes in Unsloth's source; it was not run here (no GPU).",
    )
    setup, hyper = request.setup, request.hyper
    parts, env = ["\nimport os\n\n"], common.environment(request.gpu)
    parts += [f'os.environ.setdefault("{name}", "{value}")\n' for name, value in env.items()]
    parts.append("\nfrom unsloth import FastLanguageModel  # before trl and transformers: it patches them\n\n")
    parts.append("import torch\nfrom datasets import load_dataset\nfrom trl import SFTConfig, SFTTrainer\n\n")
    full = setup.method == "full"
    loading = [
        Line("model_name", Code("MODEL")),
        Line("max_seq_length", setup.seq_len_tokens),
        Line("dtype", Code(f"torch.{DTYPES[setup.compute_dtype]}")),
        Line("load_in_4bit", setup.four_bit),
        Line("load_in_8bit", setup.quantization == "int8"),
        Line("load_in_16bit", setup.method == "lora"),
        Line("full_finetuning", full),
        Line("float32_mixed_precision", setup.precision == "bf16-mixed", "fp32 weights") if full else None,
        checkpointing_line(setup),
    ]
    model = call("model, tokenizer", "FastLanguageModel.from_pretrained", loading)
    parts.append(common.data_constants(request, TARGET) + "\n" + model + chat.FALLBACK)
    if setup.method != "full":
        parts.append(_adapters(request))
    parts.append(program("UNSLOTH_DATA"))
    arguments = [
        Line("output_dir", shown_path(request.output_dir)),
        Line("max_length", setup.seq_len_tokens),
        Line("packing", setup.packing),
        *common.batch_lines(SCRIPT, setup),
        Line("gradient_checkpointing", setup.checkpointing > 0),
        Line("bf16", setup.autocast_dtype == "bf16"),
        Line("fp16", setup.autocast_dtype == "fp16"),
        setting_line(SCRIPT, setup, "optimizer"),
        *common.step_lines(hyper, Line("warmup_steps", hyper.warmup_fraction, "below 1: a share of the steps")),
        Line("seed", hyper.seed),
        Line("logging_steps", request.logging_steps),
        Line("report_to", "none"),
        *common.saving_lines(request),
    ]
    parts.append("\n" + call("arguments", "SFTConfig", arguments))
    parts.append(
        program("UNSLOTH_RUN").replace("ROWS", 'rows["train"]' + ', eval_dataset=rows["test"]' * request.evaluates)
    )
    main = LaunchFile(path=FILE, text="".join(parts))
    return Draft(title="Unsloth", main=main, command=f"python launch/{FILE}", notes=notes)


def checkpointing_line(setup: TrainSetup) -> Line:
    """Unsloth's own form keeps the checkpoints in host memory."""
    return Line("use_gradient_checkpointing", "unsloth" if setup.activation_offload else setup.checkpointing > 0)


def _adapters(request: ExportRequest) -> str:
    setup, hyper = request.setup, request.hyper
    # Names where they are all of the usual ones; else a pattern over whole module names, which Unsloth hands to PEFT
    # as it is. It drops names that lie under no "attn" or "mlp", and widens "all-linear" to what it finds by itself.
    #
    # Source: Unsloth 2026.10 `models/llama.py` and `models/vision.py` get_peft_model, unsloth_zoo `get_peft_regex`.
    model = request.model
    usual = list(common.USUAL_ATTENTION_MODULES if setup.lora_targets == "attention" else common.USUAL_LINEAR_MODULES)
    if not isinstance(setup.lora_targets, str):
        targets = list(setup.lora_targets) if model is None else peft_target_modules(model, setup.lora_targets)
    elif model is None or same_targets(model, tuple(usual)) == setup.lora_targets:
        targets = usual
    else:
        targets = target_pattern(model, setup.lora_targets)
    return "\n" + call(
        "model",
        "FastLanguageModel.get_peft_model",
        [
            Line("r", setup.lora_rank),
            Line("target_modules", targets),
            common.tuned("lora_alpha", hyper, "lora_alpha"),
            Line("lora_dropout", setup.lora_dropout),
            Line("bias", "none"),
            checkpointing_line(setup),
            Line("random_state", hyper.seed),
        ],
        first="model",
    )
