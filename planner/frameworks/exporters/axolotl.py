"""Axolotl YAML: `axolotl train FILE`. Field names of Axolotl 0.21 (transformers 5.20)."""

from planner.core.units import gib
from planner.frameworks.exporters import common, deepspeed, prepare, several_gpus
from planner.frameworks.exporters.text import Line, Section, section, setting_line, shown_path, yaml_text
from planner.frameworks.exporters.types import Difference, Draft, ExportRequest, LaunchFile
from planner.frameworks.tools.axolotl import AXOLOTL, LIGER_SWITCHES, lora_switches
from planner.memory.attention_kernels import has_expert_stacks
from planner.memory.trained import layer_numbers
from planner.models.spec import ModelSpec
from planner.models.stored import dequantizing_class
from planner.options.kernels import KERNELS, USUAL_TYPE
from planner.setup import TrainSetup
from planner.setup.allowed import XFORMERS

TARGET = "axolotl"
FILE = "axolotl/axolotl.yaml"
PYTHON = "3.12"
VALIDATED_WITH = {"axolotl": "0.21.0", "transformers": "5.20.1", "peft": "0.21.2", "accelerate": "1.15.0"}


def differences(setup: TrainSetup) -> tuple[Difference, ...]:
    by_deepspeed, dpo = deepspeed.differences(setup), setup.objective == "dpo"
    paused = setup.replace_trusted(stack=TARGET).pauses_checkpointing
    every_layer = setup.checkpointing > 1 and (paused or setup.parallel == "fsdp2")
    narrow = setup.precision if by_deepspeed else common.narrow(setup.precision)
    no_logits = "Axolotl 0.21 runs TRL 1.14, whose DPO makes the logits of policy and reference"
    runs: dict[str, tuple[object, str]] = {
        "precision": (narrow, "Axolotl loads the weights in the 16-bit type when bf16 or fp16 is on"),
        "kbit_fp32_cast": (False, "Axolotl casts norms and embeddings back to 16 bits after peft's k-bit preparation"),
        "checkpointing": (
            1 if every_layer else setup.checkpointing,
            "TRL switches checkpointing off for the reference's forward, and on again for every layer"
            if paused
            else "Axolotl's FSDP configuration checkpoints every layer",
        ),
        "loss": ("full" if dpo and setup.loss == "chunked" else setup.loss, no_logits),
        "lora_dropout": (
            0.0 if dpo else setup.lora_dropout,
            "TRL switches every dropout off for DPO (disable_dropout)",
        ),
        "adapter_dtype": (_adapter_dtype(setup), "peft keeps the adapters of a quantized base in fp32"),
    }
    return (*by_deepspeed, *common.differing(setup, runs))


def _adapter_dtype(setup: TrainSetup) -> str:
    """Data type the adapters have: fp32, or the base's where peft's cast is switched off."""
    if setup.method == "lora" and setup.adapter_dtype in ("bf16", "fp16") and setup.weight_dtype == setup.adapter_dtype:
        return setup.adapter_dtype
    return "fp32"


def refusal(setup: TrainSetup, model: ModelSpec | None = None) -> str:
    if reason := several_gpus.tensor_refusal(setup, "Axolotl"):
        return reason
    if setup.expert_degree > 1:
        return (
            "Axolotl's expert parallelism needs DeepEP built from source, and every GPU that shares experts holds all "
            "the rest: plan with --target trl"
        )
    if setup.kernels == "fused" and setup.replace_trusted(stack=TARGET).stages_nf4:
        return "Axolotl's LoRA functions hold what they unpack of a base staged on the host: plan with --kernels liger"
    if setup.activation_offload and setup.parallel == "fsdp2":
        return "Axolotl's own offloading of checkpoints was not read beside FSDP2: plan with --target trl"
    if reason := several_gpus.context_refusal(setup, "Axolotl"):
        return reason
    if setup.parallel == "dp":
        return "one process for all GPUs (nn.DataParallel) is not Axolotl's way; ddp holds less and is faster"
    if setup.tensor_degree > 1 and setup.loss != "full":
        return "a fused loss multiplies with the whole head, which tensor parallelism cuts"
    if setup.method == "full" and setup.precision == "fp16-mixed":
        return "Axolotl's fp16 loads fp16 weights, whose gradients the loss scaler cannot unscale in full fine-tuning"
    mixed = setup.method == "full" and setup.precision != "fp32" and setup.parallel != "fsdp2"
    if mixed and setup.attention != "flash-attention-2":
        # ModelLoader._configure_embedding_dtypes: back to 16 bits for adapters, FSDP and flash attention alone
        return (
            "without flash attention Axolotl trains embeddings and norms in fp32 beside 16-bit weights: plan with "
            "--attention flash-attention-2"
        )
    if setup.quantization == "int8" and setup.precision == "fp32":
        return "Axolotl loads an int8 base in fp16 when neither bf16 nor fp16 is on"
    if setup.wide_stacks and model is not None and has_expert_stacks(model):
        return (
            "Axolotl holds stacked experts in fp32 beside a 4- or 8-bit base (peft's k-bit preparation) unless they "
            "are quantized too: plan with --quantize-experts"
        )
    return (
        common.multimodal_refusal(model, "Axolotl")
        or common.model_refusal(setup, model, "axolotl")
        or common.liger_loss_refusal(setup, model, ("liger",))
        or several_gpus.sharding_refusal(setup, model)
    )


def export(request: ExportRequest, differences: tuple[Difference, ...]) -> Draft:
    """`axolotl.yaml`, with a DeepSpeed JSON beside it for ZeRO."""
    setup = request.setup
    command = f"axolotl train launch/{FILE}"
    if not several_gpus.launched(setup):
        command += " --launcher python"
    else:  # `accelerate launch` names no rank of a single process, which then is not wrapped by FSDP
        command += f" --launcher torchrun -- {several_gpus.torchrun_flags(request)}"
    notes = [f"Axolotl 0.21 needs Python {PYTHON} (without a version pip on 3.11 silently takes 0.19)."]
    if KERNELS[setup.kernels].parts or setup.loss == "liger":
        notes.append("Needs liger-kernel on a GPU with Triton; Axolotl brings it along.")
    env = common.environment(request.gpu)
    layers = [] if request.model is None else [request.model.layer_kinds[index] for index in request.model.layer_order]
    gates = [linear for layer in layers for linear in layer.linears if (linear.role, linear.leaf) == ("router", "gate")]
    routers = sum(router.num_weights + router.num_bias for router in gates)
    if setup.method == "full" and setup.precision != "fp32" and routers:
        # ModelLoader._convert_embedding_modules_dtype: *.gate to fp32, and back to 16 bits nothing but norms
        notes.append(
            f"Axolotl trains the routers ({routers / 1e6:.1f} M parameters) in fp32 beside 16-bit weights: up to "
            f"{gib(8 * routers)} more than planned."
        )
    notes += [several_gpus.PER_NODE] * (request.num_nodes > 1)
    files = deepspeed.config_files(request, TARGET)
    title = "Axolotl" if setup.objective_spec.supervised else f"Axolotl {setup.objective_spec.title}"
    main = LaunchFile(path=FILE, text=yaml_text(_sections(request)))
    command = common.after(env, command)
    return Draft(title=title, main=main, files=tuple(files), command=command, notes=tuple(notes), python=PYTHON)


def _sections(request: ExportRequest) -> list[Section]:
    setup = request.setup
    runs = setup.replace(**{difference.field: difference.runs_as for difference in deepspeed.differences(setup)})
    asked_once = Line("precompute_ref_log_probs", True, "the reference is asked once, before the first step")
    beta, precomputed = Line("rl_beta", 0.1, "TRL's default"), asked_once if setup.precomputed_reference else None
    hyper = request.hyper
    dequantizing = dequantizing_class(request.model)
    dequantize = Line("model_quantization_config_kwargs", {"dequantize": True}, "16-bit weights, which train")
    by_xformers = Line("attn_implementation", "xformers", "for cards before Ampere")
    return [
        section(
            "model",
            common.model_line("base_model", request),
            Line("load_in_8bit", setup.quantization == "int8"),
            Line("load_in_4bit", setup.four_bit),
            Line("bnb_config_kwargs", {"bnb_4bit_use_double_quant": False}) if setup.quantization == "nf4" else None,
            Line("quantize_moe_experts", True, "stacked experts in 4 bits too") if setup.quantize_experts else None,
            Line("model_quantization_config", dequantizing) if dequantizing else None,
            dequantize if dequantizing else None,
            by_xformers if setup.attention == XFORMERS else common.attention_line(request),
            Line("device_map", "auto", "layers spread over the GPUs") if setup.parallel == "device-map" else None,
        ),
        section("method", *_method(request)),
        *([section("objective", Line("rl", "dpo"), beta, precomputed)] * (setup.objective == "dpo")),
        _datasets(request),
        section(
            "batch",
            setting_line(AXOLOTL, setup, "seq_len_tokens"),
            setting_line(AXOLOTL, setup, "packing"),
            Line("pad_to_sequence_len", setup.packing),
            setting_line(AXOLOTL, setup, "micro_batch_seqs"),
            setting_line(AXOLOTL, setup, "accumulation_steps"),
        ),
        section("memory and speed", *_precision(runs), *_memory(setup, request.model)),
        section("several GPUs", *_sharding(request)),
        section(
            "optimization",
            setting_line(AXOLOTL, setup, "optimizer"),
            common.tuned("learning_rate", hyper, "learning_rate"),
            common.tuned("lr_scheduler", hyper, "lr_schedule"),
            common.tuned("warmup_ratio", hyper, "warmup_fraction"),
            Line("weight_decay", hyper.weight_decay),
            *common.beta_lines(hyper),
            Line("max_grad_norm", hyper.max_grad_norm),
            Line("num_epochs", hyper.num_epochs),
            Line("max_steps", hyper.max_steps) if hyper.max_steps is not None else None,
            Line("seed", hyper.seed),
        ),
        section(
            "output",
            Line("output_dir", shown_path(request.output_dir)),
            Line("logging_steps", request.logging_steps),
            *common.evaluation_lines(request),
            *[Line("eval_sample_packing", False, "few samples fill no row")] * (request.evaluates and setup.packing),
            Line("save_steps", common.steps_between(request)) if request.save else Line("save_strategy", "no"),
            Line("save_total_limit", 1) if request.save else None,
            Line("val_set_size", 0.0),
        ),
    ]


def _method(request: ExportRequest) -> list[Line]:
    setup, hyper = request.setup, request.hyper
    if setup.method == "full" and (not setup.trained_layers or request.model is None):
        return []
    if setup.method == "full" and request.model is not None:
        numbers = layer_numbers(setup.trained_layers, request.model.num_layers)
        paths = dict.fromkeys(request.model.layer_kinds[request.model.layer_order[number]].path for number in numbers)
        any_of = "|".join(map(str, numbers))  # Axolotl takes every dot for one
        return [Line("unfrozen_parameters", [f"^{path}.({any_of})." for path in paths], "these layers alone train")]
    lines = [
        Line("adapter", "qlora" if setup.four_bit else "lora"),
        setting_line(AXOLOTL, setup, "lora_rank"),
        common.tuned("lora_alpha", hyper, "lora_alpha"),
        setting_line(AXOLOTL, setup, "lora_dropout"),
    ]
    targets = common.target_modules(setup, request.model)
    if setup.trained_layers and request.model is not None:
        numbers = layer_numbers(setup.trained_layers, request.model.num_layers)
        lines.append(Line("peft_layers_to_transform", [*numbers]))
        if isinstance(targets, str):  # which peft refuses beside the layers' numbers
            linears = [linear for layer in request.model.layer_kinds for linear in layer.linears]
            targets = sorted({linear.name.rpartition(".")[2] for linear in linears})
    # `lora_target_linear` would hand PEFT the leaf names instead: stacked experts are not among them
    comment = "all linear layers but the head" if targets == "all-linear" else ""
    lines.append(Line("lora_target_modules", targets, comment))
    lines += [Line(name, value) for name, value in (setup.kind.axolotl or {}).items()]
    if setup.method == "lora" and _adapter_dtype(setup) != "fp32":
        lines.append(Line("peft_autocast_adapter_dtype", False, "adapters in the base's type"))
    return lines


def _datasets(request: ExportRequest) -> Section:
    entry: dict[str, object] = {"path": prepare.folder(request, TARGET), "split": "train", "type": None}
    template = Line(
        "chat_template", "tokenizer_default_fallback_chatml", "of the saved tokenizer: a base model's may have none"
    )
    if not request.setup.objective_spec.supervised:
        by_trl = Line("skip_prepare_dataset", True, "TRL takes chats and texts as they are, Axolotl's own types do not")
        return section("dataset", Line("datasets", [entry], f"made by launch/{prepare.NAME}"), by_trl, template)
    words = f"tokens made by launch/{prepare.NAME}, the loss is on {prepare.loss_words(request)}"
    return section(
        "dataset",
        Line("datasets", [entry], words),
        Line("test_datasets", [{**entry, "split": "test"}]) if request.evaluates else None,
        Line("dataset_prepared_path", prepare.CACHE, f"emptied by {prepare.NAME}: its names do not tell old data"),
        template,
    )


def _precision(setup: TrainSetup) -> list[Line]:
    if setup.precision == "bf16-pure":
        return [Line("bf16", False), Line("bfloat16", True, "bf16 weights, no autocast"), Line("fp16", False)]
    lines = [
        Line("bf16", setup.autocast_dtype == "bf16", "weights and autocast" if setup.autocast_dtype == "bf16" else ""),
        Line("fp16", setup.autocast_dtype == "fp16"),
    ]
    plain = Line("tf32", False, "fp32 products are counted without")
    return lines if setup.autocast_dtype else [*lines, plain]


def _memory(setup: TrainSetup, model: ModelSpec | None) -> list[Line]:
    lines = []
    sharded = setup.parallel == "fsdp2" and setup.checkpointing > 0
    if setup.checkpointing and not sharded:
        # the Trainer takes every_n_layers out when it starts (transformers 5.20; seen on a peft model)
        every = {"every_n_layers": setup.checkpointing} if setup.checkpointing > 1 else {}
        lines += [
            Line("gradient_checkpointing", True),
            Line("gradient_checkpointing_kwargs", {"use_reentrant": False, **every}),
        ]
    else:
        lines.append(Line("gradient_checkpointing", False, "fsdp_config does it" if sharded else ""))
    if setup.selective_checkpointing:
        lines.append(Line("selective_checkpointing", True, "attention is kept"))
    if setup.activation_offload:
        lines.append(Line("activation_offloading", "hidden_states", "checkpoints in host memory"))
    if setup.loss == "chunked" and setup.objective_spec.supervised:
        lines.append(Line("chunked_cross_entropy", True))
    # The Liger plugin's switches, and Axolotl's own LoRA kernels, which it switches on by itself unless told not to.
    # Source: Axolotl 0.21 `integrations/liger/args.py`; `utils/schemas/config.py` check_auto_enable_lora_kernels.
    parts = setup.fused_parts(model.model_type if model is not None else USUAL_TYPE, compiler=False)
    if parts or setup.loss == "liger":
        lines.append(Line("plugins", ["axolotl.integrations.liger.LigerPlugin"]))
    lines += [Line(switch, True) for part, switch in LIGER_SWITCHES.items() if part in parts]
    if setup.loss == "liger":
        lines.append(Line("liger_fused_linear_cross_entropy", True))
    if setup.method != "full":
        lines += [Line(switch, on) for switch, on in lora_switches(setup).items()]
    if setup.compile:
        lines.append(setting_line(AXOLOTL, setup, "compile"))
    return lines


def _sharding(request: ExportRequest) -> list[Line | None]:
    setup = request.setup
    if setup.parallel in deepspeed.STAGES:
        return [Line("deepspeed", f"launch/{TARGET}/{deepspeed.NAME}")]
    lines: list[Line | None] = [several_gpus.unused_line(request)]
    if setup.tensor_degree > 1:
        lines.append(Line("tensor_parallel_size", setup.tensor_degree, "GPUs that share every matrix"))
    if setup.parallel == "fsdp2":
        if setup.tensor_degree > 1 or setup.shards < setup.data_degree:
            lines.append(Line("dp_shard_size", setup.shards, "GPUs over which weights and states are cut"))
        if setup.shards < setup.data_degree:
            lines.append(Line("dp_replicate_size", setup.data_degree // setup.shards, "copies of such groups"))
        staged = {"cpu_ram_efficient_loading": True} if setup.replace_trusted(stack=TARGET).stages_nf4 else {}
        config = {
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": setup.reshard_after_forward,
            "offload_params": setup.offload == "parameters",
            "state_dict_type": "FULL_STATE_DICT",
            "activation_checkpointing": setup.checkpointing > 0,
            **staged,
        }
        lines += [Line("fsdp_version", 2), Line("fsdp_config", config), *several_gpus.sync_lines(setup)]
    return lines
