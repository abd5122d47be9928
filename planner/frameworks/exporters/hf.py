"""A plain script on transformers and peft, for `python` or `accelerate launch`. transformers 5.23, peft 0.21."""

from collections.abc import Iterator, Sequence

from planner.frameworks.exporters import accelerate, chat, common, deepspeed, several_gpus
from planner.frameworks.exporters.install import checkpointing_key
from planner.frameworks.exporters.text import Code, Line, call, constant, setting_line, shown_path
from planner.frameworks.exporters.types import Difference, Draft, ExportRequest, LaunchFile
from planner.frameworks.tools.transformers import DTYPES, SCRIPT, checkpointing_kwargs
from planner.memory.trained import scaled_inputs, tuned_norms
from planner.models.spec import ModelSpec
from planner.models.stored import dequantizing_class
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
    parts += [(ROWS + "\n" + LABELLED + "\n") * scored, *before]
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
        parts.append(
            "\n"
            + (CUT if setup.context_degree > 1 else PADDED).replace("FILLED", FILLED)
            + "\n"
            + PACKED * setup.packing
        )
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
    yield "".join([PROCESSOR, "\n", *parts]) + call("model", f"{auto}.from_pretrained", lines, first="MODEL")
    yield "model.config.use_cache = False\nif LANGUAGE or TASK:\n"
    yield "    model.generation_config.update(language=LANGUAGE, task=TASK, forced_decoder_ids=None)\n"
    if setup.frozen_encoder:
        yield "model.freeze_encoder()  # with its convolutions\n"
    if setup.method != "full":
        yield "\n" + _adapters(request)
    workers = Line("dataloader_num_workers", 2, "make frames of sound on the host")
    lines = argument_lines(request, runs, [Line("label_names", ["labels"]), workers])
    yield ROWS + "\n" + HEARD + "\n" + call("arguments", kind, lines)
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
    apart = request.model is not None and request.model.model_type == "distilbert" and scored
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
    return f"\n{made}processing_class={processing}\n)\n{then}{COUNTS}{_RUN}"


_RUN = (
    """\
if trainer.is_world_process_zero():
    print("RUN " + json.dumps(counts))
"""
    + common.TRAIN
    + """\
trainer.save_model()
# A rank that ends inside the process group can abort at exit (pytorch issue 190489).
trainer.accelerator.end_training()
"""
)


ROWS = '''
def load_rows():
    """The training split: a hub id, a directory, or one .jsonl, .json or .parquet file."""
    kind = {"jsonl": "json", "json": "json", "parquet": "parquet"}.get(DATASET.rpartition(".")[2])
    if kind and os.path.isfile(DATASET):
        return load_dataset(kind, data_files=DATASET, split="train")
    return load_dataset(DATASET, split=SPLIT)
'''

PROCESSOR = """
processor = AutoProcessor.from_pretrained(MODEL)
if LANGUAGE or TASK:
    processor.tokenizer.set_prefix_tokens(language=LANGUAGE, task=TASK)
"""

HEARD = '''
def tokenize(row):
    return {"labels": processor.tokenizer(row[TEXT_FIELD]).input_ids}


def collate(samples):
    """Frames of sound, always of 30 s, and texts padded to the longest; the model puts the start token before them."""
    extractor, start = processor.feature_extractor, START
    sounds = [sample[AUDIO_FIELD] for sample in samples]
    rate = sounds[0]["sampling_rate"]
    features = extractor([one["array"] for one in sounds], sampling_rate=rate, return_tensors="pt").input_features
    texts = [sample["labels"][1:] if sample["labels"][0] == start else sample["labels"] for sample in samples]
    longest = max(map(len, texts))
    labels = [text + [-100] * (longest - len(text)) for text in texts]
    return {"input_features": features.to(FEATURES_DTYPE), "labels": torch.tensor(labels)}


rows = load_rows()
if isinstance(rows.features[AUDIO_FIELD], Audio):  # decoded by torchcodec; else {"array": [...], "sampling_rate": ...}
    rows = rows.cast_column(AUDIO_FIELD, Audio(sampling_rate=processor.feature_extractor.sampling_rate))
rows = rows.select_columns([AUDIO_FIELD, TEXT_FIELD])
rows = rows.map(tokenize, remove_columns=[TEXT_FIELD])
rows = rows.filter(lambda labels: len(labels) <= MAX_LENGTH + 1, input_columns="labels")
START = model.config.decoder_start_token_id
'''

FILLED = """\
    ids, labels = (
        [sample[name][:longest] + [fill] * (longest - len(sample[name])) for sample in samples]
        for name, fill in (("input_ids", tokenizer.pad_token_id), ("labels", -100))
    )
"""
PADDED = '''
def collate(samples):
    """Pads to the longest sample of the batch; the loss skips padding, and questions where it is on answers alone."""
    longest = min(MAX_LENGTH, max(len(sample["input_ids"]) for sample in samples))
FILLED    mask = [[int(place < len(sample["input_ids"])) for place in range(longest)] for sample in samples]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "labels": torch.tensor(labels)}
'''

CUT = '''
def collate(samples):
    """Pads to the longest sample of the batch, up to a length that can be cut over the GPUs; the loss skips padding."""
    longest = -(-min(MAX_LENGTH, max(len(sample["input_ids"]) for sample in samples)) // PIECES) * PIECES
FILLED    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels),
            "position_ids": torch.arange(longest).repeat(len(samples), 1)}
'''
"""No attention mask: what is cut attends causally, and padding comes last."""

PACKED = '''
def pack(rows):
    """Samples one after another in blocks of MAX_LENGTH tokens, the last one shorter; blocks without loss go."""
    ids, labels = ([token for sample in rows[name] for token in sample] for name in ("input_ids", "labels"))
    blocks = [slice(start, start + MAX_LENGTH) for start in range(0, len(ids), MAX_LENGTH)]
    blocks = [block for block in blocks if any(label != -100 for label in labels[block][1:])]
    return {"input_ids": [ids[block] for block in blocks], "labels": [labels[block] for block in blocks]}
'''

COUNTS = """\
counts = {
    "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
    "micro_batch_seqs": arguments.per_device_train_batch_size,
    "accumulation_steps": arguments.gradient_accumulation_steps,
    "global_batch_seqs": trainer.get_total_train_batch_size(arguments),
}
"""

LABELLED = '''
def tokenize(row):
    return {"input_ids": tokenizer(row["text"], truncation=True, max_length=MAX_LENGTH)["input_ids"]}


def collate(samples):
    """Pads to the longest sample of the batch; the last token that is no padding gets the score."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    pad = tokenizer.pad_token_id
    ids = [sample["input_ids"] + [pad] * (longest - len(sample["input_ids"])) for sample in samples]
    mask = [[1] * len(sample["input_ids"]) + [0] * (longest - len(sample["input_ids"])) for sample in samples]
    labels = [LABELS.index(sample["label"]) for sample in samples]
    return {name: torch.tensor(rows) for name, rows in
            (("input_ids", ids), ("attention_mask", mask), ("labels", labels))}


rows = load_rows()
LABELS = sorted(set(rows["label"]))
rows = rows.map(tokenize, remove_columns=[name for name in rows.column_names if name != "label"])
'''
