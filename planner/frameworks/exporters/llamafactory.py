"""LLaMA-Factory YAML: `llamafactory-cli train FILE`. Field names of LLaMA-Factory 0.9.5 (transformers 5.5)."""

import json

from planner.core.shipped import by_model_type, model_types
from planner.frameworks.exporters import chat, common, deepspeed, prepare
from planner.frameworks.exporters.several_gpus import PER_NODE, sharding_refusal, split_refusal
from planner.frameworks.exporters.text import Line, Section, section, setting_line, shown_path, yaml_text
from planner.frameworks.exporters.types import PLACEHOLDER_DATASET, Difference, Draft, ExportRequest, LaunchFile
from planner.frameworks.tools.llamafactory import ATTENTIONS, LLAMAFACTORY
from planner.memory.attention_kernels import SINK_KERNELS, flash_refusal, left_unnamed
from planner.models.spec import ModelSpec
from planner.models.targets import adapts_expert_stacks, attention_target_names, peft_target_modules, unadaptable
from planner.options.kernels import LIGER_LOSS
from planner.setup import TrainSetup
from planner.setup.allowed import TARGET_SETS

TARGET = "llamafactory"
FILE = "llamafactory/llamafactory.yaml"
COMMAND = f"llamafactory-cli train launch/{FILE}"
DATASET_KEY = "planned"
VALIDATED_WITH = {"llamafactory": "0.9.5", "transformers": "5.5.4", "peft": "0.18.1", "trl": "0.24.0"}
"""Of transformers not 5.6.0, the newest that it takes: that one's flash attention stops at every model without sinks
(`integrations/flash_attention.py`: s_aux.to of None; LLaMA-Factory issue 10610)."""
LIGER_TYPES = model_types("llamafactory_liger")
"""Source: LLaMA-Factory 0.9.5 `model/model_utils/liger_kernel.py`, which only warns for any other type."""


def differences(setup: TrainSetup) -> tuple[Difference, ...]:
    with_liger = (
        setup.objective_spec.supervised and setup.loss != "full" and setup.kernels == "eager" and setup.images is None
    )
    runs: dict[str, tuple[object, str]] = {
        "precision": _precision_run(setup),
        "kbit_fp32_cast": (False, "LLaMA-Factory does not call prepare_model_for_kbit_training"),
        "precomputed_reference": (False, "LLaMA-Factory asks the reference in every step"),
        "selective_checkpointing": (
            False,
            "LLaMA-Factory has no selective checkpointing: attention is recomputed, slower",
        ),
        "checkpointing": (
            min(setup.checkpointing, 1),
            "its transformers has no every_n_layers: every layer is checkpointed, slower",
        ),
        "loss": _loss_run(setup),
        "lora_dropout": (  # of pairs there is none of Liger's
            setup.lora_dropout if setup.objective_spec.supervised else 0.0,
            "its trainer switches every dropout off (disable_dropout)",
        ),
        "kernels": (
            "liger" if with_liger else setup.kernels,
            "its one Liger switch takes the layers' kernels with the loss",
        ),
        "adapter_dtype": ("fp32", "LLaMA-Factory trains adapters in fp32"),
    }
    return common.differing(setup, runs)


def _precision_run(setup: TrainSetup) -> tuple[str, str]:
    """(precision, why) of what is loaded and trained."""
    adapters = setup.method != "full"
    half = ("bf16-pure", "bf16-autocast", "fp32") if adapters else ("bf16-pure", "bf16-autocast")
    if setup.parallel in deepspeed.STAGES and setup.precision in half:
        runs_as = "bf16-autocast" if adapters else "bf16-mixed"
        return runs_as, "DeepSpeed trains bf16 weights with fp32 masters whatever type they were loaded in"
    if setup.trained_layers and setup.precision == "bf16-mixed":
        return "bf16-autocast", "LLaMA-Factory loads the layers that do not train in the 16-bit type"
    if adapters and setup.precision in ("bf16-mixed", "fp16-mixed", "fp32"):
        runs_as = "bf16-pure" if setup.precision == "fp32" else common.narrow(setup.precision)
        return runs_as, "LLaMA-Factory loads a frozen base in the 16-bit type"
    return setup.precision, ""


def _loss_run(setup: TrainSetup) -> tuple[str, str]:
    """(loss, why): its one Liger switch takes loss and kernels together, and only in supervised training."""
    if setup.loss == "chunked":
        if not setup.objective_spec.supervised:
            return "full", "its DPO makes the logits of policy and reference, and their log-softmax"
        if setup.images is not None:
            why = "no chunked loss, and its Liger switch is not planned with images: the logits are held in full"
            return "full", why
        return "liger", "no chunked loss; Liger's fused linear cross-entropy holds no logits either"
    if setup.loss == "full" and setup.kernels == "liger" and setup.objective_spec.supervised:
        return "liger", "its one Liger switch takes the loss with the layers' kernels"
    return setup.loss, ""


def refusal(setup: TrainSetup, model: ModelSpec | None = None) -> str:
    if setup.activation_offload and setup.parallel == "fsdp2":
        return "LLaMA-Factory's own offloading of checkpoints was not read beside FSDP2: plan with --target trl"
    if reason := split_refusal(setup, "LLaMA-Factory"):
        return reason
    if setup.parallel in ("fsdp2", "device-map"):
        return f"{setup.parallel} is not written for LLaMA-Factory (use ddp or ZeRO)"
    narrow = setup.precision == "bf16-autocast" and setup.parallel not in deepspeed.STAGES
    if setup.trains_everything and narrow:
        return "LLaMA-Factory trains fp32 weights under bf16 autocast: twice the memory (bf16-pure or bf16-mixed work)"
    if setup.trained_layers and setup.precision == "fp32":
        return "LLaMA-Factory trains fp32 layers between 16-bit ones without autocast, which stops"
    if setup.objective == "dpo" and setup.method == "full":
        return "LLaMA-Factory holds the reference of full fine-tuning in another type than the policy: not modelled"
    if not setup.objective_spec.supervised and setup.kernels != "eager":
        return "LLaMA-Factory's Liger switch was not read for preference training; plan with --kernels eager"
    if model is not None and model.model_type in SINK_KERNELS:
        why = flash_refusal(model, "kernels-community/vllm-flash-attn3")
        return f"LLaMA-Factory runs {model.model_type} with vllm-flash-attn3 whatever was asked: {why}"
    if reason := common.family_refusal(setup, TARGET) or common.multimodal_refusal(model, "LLaMA-Factory"):
        return reason
    if setup.images is not None and model is not None and model.model_type not in _TEMPLATES:
        return f"LLaMA-Factory has no template for the pictures of {model.model_type}"
    if model is not None and setup.method != "full":
        # Source: LLaMA-Factory 0.9.5 `model/adapter.py` (names alone), `model_utils/visual.py` patch_target_modules;
        # PEFT 0.18 has no names for stacked experts. tools/validators/every_type.py loads a model of every type.
        if isinstance(peft_target_modules(model, setup.lora_targets), str) and setup.lora_targets not in TARGET_SETS:
            return "LLaMA-Factory takes names of LoRA targets, no pattern"
        if adapts_expert_stacks(model, setup.lora_targets):
            return "the PEFT of LLaMA-Factory 0.9.5 adapts no stacked experts: plan with --targets attention"
        if setup.lora_targets == "all-linear" and any(layer.linears for layer, _ in model.idle_layers):
            return "LLaMA-Factory adapts no vision or audio encoder: plan with --targets attention"
    if setup.parallel == "zero3" and setup.quantized:
        return "LLaMA-Factory cannot shard a quantized base under ZeRO-3"
    if reason := common.model_refusal(setup, model, "llamafactory"):
        return reason
    with_liger = setup.objective_spec.supervised and setup.images is None
    if with_liger and (reason := common.liger_loss_refusal(setup, model, ("chunked", "liger"), LIGER_TYPES)):
        return reason
    if setup.kernels == "liger" and model is not None and model.model_type not in LIGER_TYPES & LIGER_LOSS:
        return f"LLaMA-Factory's Liger switch does not know {model.model_type}, or not its loss"
    return sharding_refusal(setup, model)


def _targets(setup: TrainSetup, model: ModelSpec | None) -> list[str]:
    """Names for `lora_target`. Its "all" is no Conv1D, and every head that is not called lm_head."""
    if model is None or isinstance(setup.lora_targets, tuple):
        names = common.target_modules(setup, model)
        return ["all"] if names == "all-linear" else list(names)
    if setup.lora_targets == "attention":
        return list(attention_target_names(model))
    of_layers = [linear for layer in model.layer_kinds for linear in layer.linears]
    linears = [linear for linear in (*of_layers, *model.outer_linears) if linear.module != "parameter"]
    return list(dict.fromkeys(linear.leaf for linear in linears if not unadaptable(linear)))


def export(request: ExportRequest, differences: tuple[Difference, ...]) -> Draft:
    """`llamafactory.yaml` with its `dataset_info.json`, and a DeepSpeed JSON for ZeRO."""
    setup = request.setup
    env = common.environment(request.gpu)
    if not setup.single_gpu:
        env |= {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(request.gpus_per_node)}
    meeting = {"NNODES": str(request.num_nodes)}
    meeting |= {name: f"${name}" for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")}
    command = common.after(env | (meeting if request.num_nodes > 1 else {}), COMMAND)
    runs = setup.replace(**{difference.field: difference.runs_as for difference in differences})
    notes = []
    if setup.packing and _stage(request) == "pt":
        notes.append("Packed texts see their neighbours in the same block: it keeps apart samples with answers alone.")
    if "liger" in (setup.loss, setup.kernels, *(difference.runs_as for difference in differences)):
        notes.append("Needs liger-kernel.")
    if request.evaluates and not _evaluates(request, runs):
        notes.append("Evaluates nothing between steps: its transformers would make whole logits for that.")
    notes += [PER_NODE] * (request.num_nodes > 1)
    files = [_dataset_info(request, runs), *deepspeed.config_files(request, TARGET)]
    main = LaunchFile(path=FILE, text=yaml_text(_sections(request, runs)))
    return Draft(title="LLaMA-Factory", main=main, files=tuple(files), command=command, notes=tuple(notes))


def _sections(request: ExportRequest, runs: TrainSetup) -> list[Section]:
    setup, hyper, model = request.setup, request.hyper, request.model
    loss = "sigmoid" if setup.objective == "dpo" else setup.objective
    named = request.dataset or prepare.needed(request)
    open_ = model is not None and left_unnamed(model.config, setup.attention)
    return [
        section(
            "model",
            common.model_line("model_name_or_path", request),
            Line("flash_attn", "auto" if open_ else ATTENTIONS[setup.attention]),
            *_quantization(setup),
            *_images(request),
        ),
        section("method", Line("stage", _stage(request)), Line("do_train", True), *_method(request)),
        *[section("objective", Line("pref_loss", loss), Line("pref_beta", 0.1, "its default"))]
        * (not setup.objective_spec.supervised),
        section(
            "dataset" + ": PUT YOURS HERE (in dataset_info.json)" * (not named),
            Line("dataset", DATASET_KEY),
            Line("eval_dataset", f"{DATASET_KEY}_test") if _evaluates(request, runs) else None,
            _loss(request),
            _template(request),
            Line("dataset_dir", f"launch/{TARGET}", "holds dataset_info.json"),
            setting_line(LLAMAFACTORY, setup, "seq_len_tokens", "tokens; longer samples are cut"),
            setting_line(LLAMAFACTORY, setup, "packing"),
            Line("neat_packing", True, "packed samples do not see each other")
            if setup.packing and _stage(request) == "sft"
            else None,
        ),
        section("batch", *common.batch_lines(LLAMAFACTORY, setup)),
        section(
            "memory and speed",
            *_precision(runs),
            Line("disable_gradient_checkpointing", setup.checkpointing == 0),
            Line("use_reentrant_gc", False) if setup.checkpointing else None,
            Line("use_unsloth_gc", True, "checkpoints in host memory") if setup.activation_offload else None,
            Line("enable_liger_kernel", True) if "liger" in (runs.loss, runs.kernels) else None,
            setting_line(LLAMAFACTORY, setup, "compile") if setup.compile else None,
            Line("ddp_find_unused_parameters", False) if setup.parallel == "ddp" else None,
            Line("deepspeed", f"launch/{TARGET}/{deepspeed.NAME}") if setup.parallel in deepspeed.STAGES else None,
        ),
        section(
            "optimization",
            setting_line(LLAMAFACTORY, setup, "optimizer"),
            *common.step_lines(hyper, common.tuned("warmup_ratio", hyper, "warmup_fraction")),
            Line("seed", hyper.seed),
        ),
        section(
            "output",
            Line("output_dir", shown_path(request.output_dir)),
            Line("logging_steps", request.logging_steps),
            Line("report_to", "none"),
            *(common.evaluation_lines(request) if _evaluates(request, runs) else []),
            Line("save_strategy", "steps" if request.save else "no"),
            Line("save_steps", common.steps_between(request)) if request.save else None,
            Line("save_total_limit", 1) if request.save else None,
        ),
    ]


_TEMPLATES = {"mistral3": "mistral_small", **by_model_type("llamafactory_templates")}
"""Its template of a vision-language model, which says what stands for a picture (0.9.5 `data/template.py`)."""


def _template(request: ExportRequest) -> Line:
    """Its template: one that leaves texts as they are, in which the model's own is written.

    What it takes the tokenizer's for (0.9.5 `data/template.py` parse_template) stops at those of Gemma 1 and 3, Phi 3,
    DeepSeek V3 and Qwen 3.5 (run), and begins every question of Llama 3.1's with the system's turn.
    """
    model = request.model
    if request.setup.images is not None and model is not None and model.model_type in _TEMPLATES:
        text = model.config.get("text_config", {}).get("model_type", "")
        return Line("template", _TEMPLATES.get(text) or _TEMPLATES[model.model_type])
    if chat.brought_along(request):
        return Line("template", "default", "the tokenizer has none of its own")
    return Line("template", "empty", f"launch/{prepare.NAME} has written the model's own into the texts")


def _stage(request: ExportRequest) -> str:
    """Its name of what is trained: texts without questions are no samples of its "sft"."""
    objective = request.setup.objective_spec
    return "pt" if objective.supervised and request.columns == "text" else objective.targets[TARGET]


def _loss(request: ExportRequest) -> Line | None:
    """Whether questions have a loss too; nothing of data without any.

    Source: LLaMA-Factory 0.9.5 `data/processor/supervised.py`: every answer of a chat has one (`mask_history` false).
    """
    if not prepare.command(request, TARGET) or _stage(request) != "sft":
        return None
    return Line("train_on_prompt", request.loss_on == "all", f"the loss is on {prepare.loss_words(request)}")


def _evaluates(request: ExportRequest, runs: TrainSetup) -> bool:
    """Whether samples are evaluated between steps: with Liger its transformers (5.5) would make their logits whole."""
    return request.evaluates and "liger" not in (runs.loss, runs.kernels)


def _images(request: ExportRequest) -> list[Line]:
    """What of a vision-language model is trained, and the largest picture; nothing of text alone.

    Source: LLaMA-Factory 0.9.5 `hparams/model_args.py` ProcessorArguments, `data/mm_plugin.py` _preprocess_image
    (scales down to `image_max_pixels`), `model/adapter.py` _setup_full_tuning, `model/model_utils/visual.py`.
    """
    images = request.setup.images
    if images is None:
        return []
    most = Line("image_max_pixels", images.width * images.height, "larger pictures are made smaller")
    frozen = request.setup.method != "full"
    return [most, Line("freeze_vision_tower", frozen), Line("freeze_multi_modal_projector", frozen)]


def _quantization(setup: TrainSetup) -> list[Line]:
    if setup.quantization == "none":
        return []
    lines = [Line("quantization_method", "bnb"), Line("quantization_bit", 4 if setup.four_bit else 8)]
    double = Line("double_quantization", setup.quantization == "nf4-double")
    return [*lines, Line("quantization_type", "nf4"), double] if setup.four_bit else lines


def _method(request: ExportRequest) -> list[Line]:
    setup, hyper = request.setup, request.hyper
    if setup.method == "full" and setup.trained_layers:
        layers = Line("freeze_trainable_layers", setup.trained_layers, "of the last; negative: of the first")
        return [Line("finetuning_type", "freeze"), layers]
    if setup.method == "full":
        return [Line("finetuning_type", "full")]
    if setup.adapter == "oft":
        return [
            Line("finetuning_type", "oft"),
            Line("oft_rank", 0, "the block size decides"),
            Line("oft_block_size", setup.lora_rank),
            Line("oft_target", ",".join(_targets(setup, request.model))),
        ]
    return [
        Line("finetuning_type", "lora"),
        setting_line(LLAMAFACTORY, setup, "lora_rank"),
        common.tuned("lora_alpha", hyper, "lora_alpha"),
        setting_line(LLAMAFACTORY, setup, "lora_dropout"),
        Line("lora_target", ",".join(_targets(setup, request.model))),
        *(Line(name, value) for name, value in (setup.kind.llamafactory or {}).items()),
    ]


def _precision(setup: TrainSetup) -> list[Line]:
    if setup.precision == "fp32":
        return [Line("bf16", False, "what trains is cast to fp32"), Line("fp16", False)]
    if setup.precision == "bf16-pure":
        return [Line("pure_bf16", True, "bf16 weights, no autocast"), Line("bf16", False), Line("fp16", False)]
    return [Line("bf16", setup.autocast_dtype == "bf16", "autocast"), Line("fp16", setup.autocast_dtype == "fp16")]


def _dataset_info(request: ExportRequest, runs: TrainSetup) -> LaunchFile:
    dataset, setup = request.dataset, request.setup
    entry: dict[str, object] = {}
    if made := prepare.command(request, TARGET):
        entry["file_name"] = f"../../{prepare.folder(request, TARGET)}/train.jsonl"
    elif dataset is not None and dataset.local:
        entry["file_name"] = "../../" + shown_path(dataset.path).removeprefix("./")
    else:
        entry["hf_hub_url"] = shown_path(dataset.path) if dataset is not None else PLACEHOLDER_DATASET
    if not setup.objective_spec.supervised:
        entry["ranking"] = True
        entry["columns"] = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    elif _stage(request) == "pt":
        entry["columns"] = {"prompt": "text"}
    else:
        entry |= {
            "formatting": "sharegpt",
            "columns": {"messages": "messages"} | ({"images": "images"} if setup.images is not None else {}),
            # its own word for a tool's turn is "observation"; samples with other words are skipped
            "tags": {f"{name}_tag": name for name in ("role", "content", "user", "assistant", "system")}
            | {"observation_tag": "tool"},
        }
    if dataset and dataset.split != "train" and not made:
        entry["split"] = dataset.split
    info = {DATASET_KEY: entry}
    if _evaluates(request, runs):
        info[f"{DATASET_KEY}_test"] = {**entry, "file_name": str(entry["file_name"]).replace("train.", "test.")}
    return LaunchFile(path="llamafactory/dataset_info.json", text=json.dumps(info, indent=2) + "\n")
