"""A plain script on transformers and peft, for `python` or `accelerate launch`. transformers 5.23, peft 0.21."""

from collections.abc import Iterator, Sequence

from planner.frameworks.exporters import accelerate, chat, common, deepspeed, several_gpus
from planner.frameworks.exporters.install import checkpointing_key
from planner.frameworks.exporters.text import Code, Line, call, constant, program, setting_line, shown_path
from planner.frameworks.exporters.types import Difference, Draft, ExportRequest, LaunchFile
from planner.frameworks.tools.transformers import DTYPES, SCRIPT, checkpointing_kwargs
from planner.memory.trained import scaled_inputs, tuned_norms
from planner.models.spec import ModelSpec
from planner.models.stored import dequantizing_class
from planner.models.targets import PRE_CLASSIFIED
from planner.setup import TrainSetup

TARGET = "hf"
FILE = "hf/train_hf.py"
VALIDATED_WITH = {
    "transformers": "5.23.0",
    "peft": "0.21.2",
    "bitsandbytes": "0.50.2",
    "accelerate": "1.15.0",
    "datasets": "5.2.0",
}


def differences(setup: TrainSetup) -> tuple[Difference, ...]:
    loss = "liger" if setup.loss == "chunked" else setup.loss
    runs: dict[str, tuple[object, str]] = {
        "loss": (loss, "transformers has no chunked loss; Liger's fused linear cross-entropy holds no logits either"),
        "selective_checkpointing": (
            False,
            "transformers' Trainer recomputes the attention of checkpointed layers, slower",
        ),
    }
    return (*deepspeed.differences(setup), *common.differing(setup, runs))


def refusal(setup: TrainSetup, model: ModelSpec | None = None) -> str:
    if reason := several_gpus.tensor_refusal(setup, "the Trainer") or several_gpus.context_refusal(
        setup, "the Trainer", ring=True, ulysses=True
    ):
        return reason
    if setup.context_degree > 1 and setup.loss != "full":
        return "labels of cut sequences come shifted already, which the fused losses here do not know"
    if setup.tensor_degree > 1 and setup.loss != "full":
        return "a fused loss multiplies with the whole head, which tensor parallelism cuts"
    return (
        common.family_refusal(setup, TARGET)
        or setup.scaler_refusal
        or common.model_refusal(setup, model, "hf")
        or common.liger_loss_refusal(setup, model, ("chunked", "liger"))
        or several_gpus.sharding_refusal(setup, model)
    )


def export(request: ExportRequest, differences: tuple[Difference, ...]) -> Draft:
    """`train_hf.py`, with an Accelerate config beside it for more than one GPU."""
    setup = request.setup
    command = f"python launch/{FILE}"
    files = []
    if setup.parallel == "dp":
        command = f"CUDA_VISIBLE_DEVICES={','.join(map(str, range(setup.num_gpus)))} {command}"
    notes = [several_gpus.PER_NODE] * (request.num_nodes > 1)
    if several_gpus.launched(setup):
        files += accelerate.config_files(request, TARGET)
        command = accelerate.command(request, f"launch/{FILE}", TARGET)
        if accelerate.distributed_type(setup) == "MULTI_GPU":  # nothing is sharded by Accelerate or DeepSpeed
            notes.append(f"Or without Accelerate's config: {several_gpus.torchrun(request, f'launch/{FILE}')}")
    if setup.parallel == "dp":
        notes.append("nn.DataParallel: one process, all logits on GPU 0; ddp holds less and is faster.")
    if setup.sharded_at_loading:
        notes.append("Sharded while loading: checkpoints hold the model only, so a run cannot be resumed.")
    notes += ["gradient_checkpointing is activation_checkpointing from transformers 5.23 on."]
    if setup.packing:
        notes.append("Packed samples see their neighbours in the same block; use the trl target to keep them apart.")
    if "liger" in (setup.loss, setup.kernels, *(difference.runs_as for difference in differences)):
        notes.append("Needs liger-kernel on a GPU with Triton.")
    title = "Plain transformers + peft" + ("" if setup.objective_spec.supervised else f": {setup.objective_spec.title}")
    main = LaunchFile(path=FILE, text=_script(request, differences))
    return Draft(title=title, main=main, files=tuple(files), command=command, notes=tuple(notes))


def opening(request: ExportRequest) -> list[str]:
    """What must be set before torch starts, and what every script imports."""
    parts = ["\nimport json\nimport os\n\n"]
    for name, value in common.environment(request.gpu).items():
        parts.append(f'os.environ.setdefault("{name}", "{value}")  # before torch starts\n')
    audio = "Audio, " * has_audio(request.model)
    return [*parts, f"\nimport torch\nfrom datasets import {audio}load_dataset\n"]


def imported(request: ExportRequest, *names: str) -> str:
    """The import of these names from transformers, and of what the setup's weights and adapters need; "" of none."""
    setup, dequantizing = request.setup, dequantizing_class(request.model)
    needed = [*names, *["BitsAndBytesConfig"] * setup.quantized, *["set_seed"] * (setup.method != "full")]
    needed += [dequantizing] * bool(dequantizing)
    return f"from transformers import {', '.join(sorted(needed))}\n" if needed else ""


def _script(request: ExportRequest, differences: tuple[Difference, ...]) -> str:
    setup = request.setup
    runs = setup.replace(**{difference.field: difference.runs_as for difference in differences})
    parts = opening(request)
    if setup.method != "full":
        prepare = ", prepare_model_for_kbit_training" if setup.kbit_fp32_cast else ""
        loftq = ", replace_lora_weights_loftq" if setup.adapter == "loftq" else ""
        parts.append(f"from peft import {setup.kind.config}, get_peft_model{prepare}{loftq}\n")
    if has_audio(request.model):
        return "".join([*parts, *_on_sound(request, runs)])
    scored = setup.objective_spec.head == "score"
    auto = "AutoModelForSequenceClassification" if scored else "AutoModelForCausalLM"
    parts.append(imported(request, auto, "AutoTokenizer", "Trainer", "TrainingArguments"))
    parts.append("\n" + constants(request))
    parts.append("\ntokenizer = AutoTokenizer.from_pretrained(MODEL)\nif tokenizer.pad_token is None:\n")
    parts.append("    tokenizer.pad_token = tokenizer.eos_token\n" + chat.FALLBACK + "\n")
    before, lines = loading(request)
    parts += [f"{program('ROWS')}\n{program('LABELLED')}\n" * scored, *before]
    names = [Line("id2label", Code("dict(enumerate(map(str, LABELS)))"))] if scored else []
    names += [Line("label2id", Code("{str(label): number for number, label in enumerate(LABELS)}"))] if scored else []
    parts.append(call("model", f"{auto}.from_pretrained", [*names, *lines], first="MODEL"))
    parts.append("model.config.use_cache = False\n")
    if scored:
        parts.append("model.config.pad_token_id = tokenizer.pad_token_id  # the last token before it gets the score\n")
    if setup.method != "full":
        parts.append("\n" + _adapters(request))
    if setup.parallel == "dp":
        parts.append("\n" + constant("PARALLEL", "dp", "nn.DataParallel: one process drives all GPUs"))
    if not scored:
        # cut sequences have no attention mask: they attend causally, and padding comes last
        parts += ["\n", program("CUT" if setup.context_degree > 1 else "PADDED"), "\n"]
        parts += [program("PACKED")] * setup.packing
        parts.append("\n\nrows = load_dataset(DATASET)\n")
        if setup.packing:
            packed = 'pack, batched=True, batch_size=None, remove_columns=["attention_mask"]'
            parts.append(f'rows["train"] = rows["train"].map({packed})\n')
    parts.append("\n" + call("arguments", "TrainingArguments", argument_lines(request, runs)))
    rows = "rows" if scored else 'rows["train"]' + ', eval_dataset=rows["test"]' * request.evaluates
    parts.append(run("Trainer", "tokenizer", rows=rows))
    return "".join(parts)


def _on_sound(request: ExportRequest, runs: TrainSetup) -> Iterator[str]:
    """The script of a model that hears, behind what every script imports: constants, data, what Whisper's class wants.

    Two processes (judgement) make frames of sound beside the training."""
    setup, auto, kind = request.setup, "AutoModelForSpeechSeq2Seq", "Seq2SeqTrainingArguments"
    narrow = setup.autocast_dtype is None and not setup.kbit_fp32_cast
    features = Code(f"torch.{DTYPES[setup.weight_dtype if narrow else 'fp32']}")
    yield imported(request, auto, "AutoProcessor", common.SOUND_TRAINER, kind)
    yield "\n" + common.data_constants(request)
    yield constant("AUDIO_FIELD", "audio", "clips of at most 30 s: what is longer is cut, so split it before")
    yield constant("TEXT_FIELD", "text", "what is said in them")
    yield constant("LANGUAGE", None, 'of the texts, like "hindi"; None for English-only models')
    yield constant("TASK", None, '"transcribe" or "translate"; None for English-only models')
    yield constant("MAX_LENGTH", setup.seq_len_tokens, "tokens of text; clips with longer ones are left out")
    yield constant("FEATURES_DTYPE", features, "of the sound; autocast casts it itself")
    parts, lines = loading(request)
    yield "".join([program("PROCESSOR"), "\n", *parts]) + call("model", f"{auto}.from_pretrained", lines, first="MODEL")
    yield "model.config.use_cache = False\nif LANGUAGE or TASK:\n"
    yield "    model.generation_config.update(language=LANGUAGE, task=TASK, forced_decoder_ids=None)\n"
    if setup.frozen_encoder:
        yield "model.freeze_encoder()  # with its convolutions\n"
    if setup.method != "full":
        yield "\n" + _adapters(request)
    workers = Line("dataloader_num_workers", 2, "make frames of sound on the host")
    lines = argument_lines(request, runs, [Line("label_names", ["labels"]), workers])
    yield f"{program('ROWS')}\n{program('HEARD')}\n" + call("arguments", kind, lines)
    divides = "trainer.model_accepts_loss_kwargs = False  # Whisper's class does not divide by the step's tokens\n"
    yield run(common.SOUND_TRAINER, "processor", divides)


def constants(request: ExportRequest) -> str:
    """What a person changes first: model, data, length; of text also whether it is packed."""
    setup = request.setup
    return (
        common.data_constants(request)
        + constant("MAX_LENGTH", setup.seq_len_tokens, "tokens; longer samples are cut")
        + (setup.objective_spec.head != "none") * constant("PACKING", setup.packing)
        + (setup.context_degree > 1) * constant("PIECES", setup.sequence_chunks, "every sequence is cut into so many")
    )


def has_audio(model: ModelSpec | None) -> bool:
    """Whether samples are clips of sound; peft's own forward of any task asks for text then."""
    return model is not None and model.front_end is not None


def loading(request: ExportRequest) -> tuple[list[str], list[Line | None]]:
    """The statements before, and the arguments of, `from_pretrained` for the setup's weights."""
    setup, kind, bits = request.setup, dequantizing_class(request.model), quantization_lines(request.setup)
    quantization = call("quantization", kind, [Line("dequantize", True, "16-bit weights, which train")]) if kind else ""
    quantization += call("quantization", "BitsAndBytesConfig", bits) if bits else ""
    device_map: Line | None = None
    if setup.parallel == "device-map":
        device_map = Line("device_map", "auto", "layers spread over the GPUs")
    elif setup.quantized and setup.parallel not in ("fsdp2", "zero3"):
        own_gpu = '{"": int(os.environ.get("LOCAL_RANK", 0))} if torch.cuda.is_available() else None'
        device_map = Line("device_map", Code(own_gpu))
    return [quantization], [
        Line("dtype", Code(f"torch.{DTYPES[setup.weight_dtype]}"), "of the weights that are not quantized"),
        common.attention_line(request),
        Line("quantization_config", Code("quantization")) if quantization else None,
        Line("distributed_config", several_gpus.distributed_config(setup)) if setup.sharded_at_loading else None,
        device_map,
    ]


def quantization_lines(setup: TrainSetup) -> list[Line]:
    """What BitsAndBytesConfig is given; nothing where nothing is quantized."""
    if setup.quantization == "int8":
        return [Line("load_in_8bit", True)]
    if not setup.quantized:
        return []
    lines = [
        Line("load_in_4bit", True),
        Line("bnb_4bit_quant_type", "nf4"),
        Line("bnb_4bit_use_double_quant", setup.quantization == "nf4-double"),
        Line("bnb_4bit_compute_dtype", Code(f"torch.{DTYPES[setup.compute_dtype]}")),
    ]
    if setup.parallel in ("fsdp2", "zero3"):
        lines.append(Line("bnb_4bit_quant_storage", Code(f"torch.{DTYPES[setup.weight_dtype]}"), "shardable"))
    return lines


def _adapters(request: ExportRequest) -> str:
    setup, hyper = request.setup, request.hyper
    parts, name = [], "lora" if setup.kind.form == "low-rank" else "adapter"
    if setup.kbit_fp32_cast:
        line = Line("use_gradient_checkpointing", False, "the Trainer does it")
        parts.append(call("model", "prepare_model_for_kbit_training", [line], first="model"))
    parts.append(call(name, setup.kind.config, adapter_lines(request)))
    parts.append(f"set_seed({hyper.seed})  # adapters start alike in every run and process\n")
    parts.append(f"model = get_peft_model(model, {name})\n")
    if setup.adapter == "loftq":
        parts.append("replace_lora_weights_loftq(model)  # reads the 16-bit weights again, one matrix at a time\n")
    parts.append(constant("ADAPTER_DTYPE", Code(f"torch.{DTYPES[setup.resolved_adapter_dtype]}")))
    if setup.objective_spec.head == "score":  # whose input has the weights' type without autocast
        parts.append('for name, parameter in model.named_parameters():\n    if "lora_" in name:\n')
    else:
        parts.append("for parameter in model.parameters():\n    if parameter.requires_grad:\n")
    parts.append("        parameter.data = parameter.data.to(ADAPTER_DTYPE)\n")
    if setup.checkpointing:
        parts.append("model.enable_input_require_grads()  # checkpointed segments need an input with a gradient\n")
    return "".join(parts)


USUAL_NORMS = ["input_layernorm", "post_attention_layernorm", "norm"]
"""What Llama and most others call their norms."""
TASKS = {"vocabulary": "CAUSAL_LM", "score": "SEQ_CLS", "none": "FEATURE_EXTRACTION"}
"""peft's kind of task, by the head."""


def adapter_lines(request: ExportRequest) -> list[Line | None]:
    """What peft's configuration of the setup's adapter is given."""
    setup, hyper = request.setup, request.hyper
    row, task = setup.kind, None if has_audio(request.model) else Line("task_type", TASKS[setup.objective_spec.head])
    settings = [Line(name, value) for name, value in row.arguments.items()]
    targets = Line("target_modules", common.target_modules(setup, request.model)) if row.adapts_matrices else None
    scored = setup.objective_spec.head == "score" and row.adapts_matrices
    apart = request.model is not None and request.model.model_type in PRE_CLASSIFIED and scored
    whole = "trained whole: its name ends in that of the head, by which peft looks for that"
    excluded = Line("exclude_modules", ["pre_classifier"], whole) if apart else None
    if row.form == "low-rank":
        return [
            task,
            setting_line(SCRIPT, setup, "lora_rank"),
            common.tuned("lora_alpha", hyper, "lora_alpha"),
            Line("lora_dropout", setup.lora_dropout),
            targets,
            excluded,
            Line("bias", "none"),
            *settings,
        ]
    if row.form == "norms":
        norms = [norm.name.rpartition(".")[2] for norm in tuned_norms(request.model)] if request.model else USUAL_NORMS
        return [task, Line("target_modules", list(dict.fromkeys(norms)))]
    if row.form == "rows":
        return [task, Line("token_indices", list(range(setup.lora_rank)), "PUT YOURS HERE: ids of the trained tokens")]
    if row.form == "scales":
        names = common.target_modules(setup, request.model)
        inputs = scaled_inputs(request.model, names) if request.model is not None else ["down_proj"]
        return [task, targets, excluded, Line("feedforward_modules", inputs, "scaled at their input")]
    size = {"shared": "r", "rotations": "oft_block_size"}.get(row.form, "num_virtual_tokens")
    return [task, *settings, Line(size, setup.lora_rank), targets, excluded]


def argument_lines(request: ExportRequest, setup: TrainSetup, more: Sequence[Line | None] = ()) -> list[Line | None]:
    """What the Trainer's arguments are given for the setup that runs, with `more`."""
    hyper = request.hyper
    sharded = accelerate.checkpoints(setup)
    kwargs = checkpointing_kwargs(setup)
    return [
        Line("output_dir", shown_path(request.output_dir)),
        *common.batch_lines(SCRIPT, setup),
        Line("bf16", setup.autocast_dtype == "bf16", "autocast" if setup.autocast_dtype else "no autocast"),
        Line("fp16", setup.autocast_dtype == "fp16"),
        Line(
            checkpointing_key(setup),
            setup.checkpointing > 0 and not sharded,
            "fsdp_activation_checkpointing does it" if sharded else "",
        ),
        Line(f"{checkpointing_key(setup)}_kwargs", kwargs) if setup.checkpointing and not sharded else None,
        setting_line(SCRIPT, setup, "optimizer"),
        *common.step_lines(hyper, Line("warmup_steps", hyper.warmup_fraction, "below 1: a share of the steps")),
        *common.kernels_lines(setup, request.model),
        several_gpus.unused_line(request),
        *several_gpus.sync_lines(setup),
        setting_line(SCRIPT, setup, "compile") if setup.compile else None,
        Line("seed", hyper.seed),
        Line("logging_steps", request.logging_steps),
        Line("report_to", "none"),
        Line("remove_unused_columns", False),
        *more,
        *common.saving_lines(request),
    ]


def run(trainer: str, processing: str, then: str = "", rows: str = "rows") -> str:
    """The end of a script: the trainer of this class, made with what it saves beside the model, and `then`."""
    made = f"trainer = {trainer}(\n    model=model, args=arguments, train_dataset={rows}, data_collator=collate, "
    return f"\n{made}processing_class={processing}\n)\n{then}{program('RUN')}"
