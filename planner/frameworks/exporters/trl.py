"""TRL's own program and its configuration: `python -m trl.scripts.sft --config FILE`, on several GPUs `trl sft`. Field
names of TRL 1.16 on transformers 5.23."""

import shlex

from planner.core.shipped import by_model_type
from planner.frameworks.exporters import accelerate, chat, common, deepspeed, prepare, several_gpus
from planner.frameworks.exporters.install import checkpointing_key
from planner.frameworks.exporters.text import Line, Section, section, setting_line, shipped, shown_path, yaml_text
from planner.frameworks.exporters.types import PLACEHOLDER_DATASET, Difference, Draft, ExportRequest, LaunchFile
from planner.frameworks.tools.transformers import DTYPES, TRL, checkpointing_kwargs
from planner.models.spec import ModelSpec
from planner.models.stored import dequantizing_class, stored_method
from planner.setup import TrainSetup

TARGET = "trl"
VALIDATED_WITH = {
    "trl": "1.16.0",
    "transformers": "5.23.0",
    "peft": "0.21.2",
    "bitsandbytes": "0.50.2",
    "accelerate": "1.15.0",
    "datasets": "5.2.0",
}
FILE_LOADERS = {"jsonl": "json", "json": "json", "parquet": "parquet"}
"""Ending of a local file -> the loader of `datasets` for it; `dataset_name` takes a directory or a hub id only."""

ORPO_SCRIPT = "trl/trl-orpo.py"
SERVER, SERVER_START_S = ("127.0.0.1", 8000), 1800
"""Where a vLLM server listens, and how long the run waits for it: TRL's own 240 seconds hold no download."""
REWARDS, REWARDED_BY = "trl/rewards.py", ("answer", "solution", "ground_truth", "target")
"""The stand-in for a reward, and the columns of which it asks for one."""
STAND_IN = (
    f"launch/{REWARDS} is a stand-in to replace by the reward of your task: 1 where the row's answer stands in the "
    "completion, else 0"
)


def differences(setup: TrainSetup) -> tuple[Difference, ...]:
    objective, adapters = setup.objective_spec, ("fp32", "peft holds adapters in fp32")
    if setup.method == "qlora":
        adapters = ("bf16", "TRL casts the adapters of a quantized base to bf16")
    elif setup.parallel == "zero3":
        adapters = (setup.weight_dtype, "TRL keeps adapters in the weights' type under ZeRO-3")
    loss = "chunked" if "chunked" in objective.losses else setup.loss
    runs: dict[str, tuple[object, str]] = {
        "loss": (loss, "TRL 1.16 always computes the loss in chunks and never holds full logits"),
        "kbit_fp32_cast": (False, "TRL does not call prepare_model_for_kbit_training"),
        "adapter_dtype": adapters,
    }
    if not objective.supervised:
        phase = "generation" if objective.rolls_out else "the reference's forward"
        paused = setup.replace_trusted(stack="trl").pauses_checkpointing
        selects = "of TRL's trainers only SFTTrainer keeps the attention of checkpointed layers"
        runs |= {
            "lora_dropout": (
                setup.lora_dropout if objective.rolls_out else 0.0,
                "TRL switches every dropout off for this objective (disable_dropout)",
            ),
            "selective_checkpointing": (False, selects),
            "checkpointing": (
                min(setup.checkpointing, 1) if paused else setup.checkpointing,
                f"TRL switches checkpointing off for {phase}, and on again for every layer",
            ),
            "activation_offload": (
                setup.activation_offload and not paused,
                f"TRL switches checkpointing off for {phase}, and on again without the host's memory",
            ),
        }
    return (*deepspeed.differences(setup), *common.differing(setup, runs))


def file_of(setup: TrainSetup) -> str:
    """The configuration's path below `launch/`."""
    return f"trl/trl-{setup.objective_spec.targets[TARGET]}.yaml"


def refusal(setup: TrainSetup, model: ModelSpec | None = None) -> str:
    tool = "trl sft"
    if reason := several_gpus.tensor_refusal(setup, tool) or several_gpus.context_refusal(
        setup, tool, ring=True, ulysses=True
    ):
        return reason
    if setup.parallel == "dp":
        return "one process for all GPUs (nn.DataParallel) is not trl sft's way; ddp holds less and is faster"
    if reason := common.family_refusal(setup, TARGET) or common.multimodal_refusal(model, tool):
        return reason
    if setup.images is not None and model is not None and by_model_type("seen_both_ways").get(model.model_type) == 0:
        return (
            f"TRL hands {model.model_type} token types of zero, by which every token sees those after it: nothing is "
            "learned; plan with --target llamafactory"
        )
    if model is not None and model.model_type == "phimoe":
        return "TRL's forward asks for num_experts, which transformers' PhimoeConfig does not have; use the hf target"
    if dequantizing_class(model):
        return (
            f"trl sft can hand transformers no {dequantizing_class(model)}, without which the published "
            f"{stored_method(model)} weights do not train in 16 bits; use the hf target"
        )
    if setup.method == "qlora" and setup.autocast_dtype == "fp16":
        # whatever type was planned: the cast follows after every setting that TRL has
        return (
            "TRL casts the adapters of a quantized base to bf16, which the fp16 loss scaler cannot unscale; "
            "use the hf target, which keeps them in fp32"
        )
    refused = setup.scaler_refusal or common.model_refusal(setup, model, "trl")
    return refused or several_gpus.sharding_refusal(setup, model)


def export(request: ExportRequest, differences: tuple[Difference, ...]) -> Draft:
    """`trl-sft.yaml`, or of another command, with an Accelerate config beside it for more than one GPU."""
    setup = request.setup
    file, spoken = file_of(setup), setup.objective_spec.targets[TARGET]
    command = f"trl {spoken} --config launch/{file}"
    files = []
    if setup.objective == "orpo":  # no command of TRL 1.16 trains it
        files.append(LaunchFile(path=ORPO_SCRIPT, text=shipped("trl_orpo.py.txt")))
        command = f"python launch/{ORPO_SCRIPT} --config launch/{file}"
    if setup.objective_spec.rolls_out:
        files.append(LaunchFile(path=REWARDS, text=shipped("trl_rewards.py.txt")))
    server = _server(request) if request.serves else ""
    cards = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(request.gpus_per_node)))} if server else {}
    if several_gpus.launched(setup):
        files += accelerate.config_files(request, TARGET)
        if setup.objective == "orpo":  # a program is Accelerate's to launch; TRL's own takes its configuration
            command = accelerate.command(request, f"launch/{ORPO_SCRIPT} --config launch/{file}", TARGET)
        else:
            flags = several_gpus.accelerate_flags(request)
            command += f" --accelerate_config launch/{TARGET}/{accelerate.NAME}{flags}"
        command = common.after(cards, command)
    elif setup.objective != "orpo":
        # `trl sft` makes the training arguments in its launcher too, which then keeps a CUDA context of its own beside
        # the training process's: 0.5 GiB on an H200 (26 November 2026)
        env = {**cards, **common.environment(request.gpu)}
        command = common.after(env, f"python -m trl.scripts.{spoken} --config launch/{file}")
    runs = setup.replace(**{difference.field: difference.runs_as for difference in differences})
    if chat.chats(request) and request.lacks_template is not False:
        files.append(LaunchFile(path=f"{TARGET}/{chat.TEMPLATE_FILE}", text=chat.TEMPLATE))
    title = "TRL supervised fine-tuning" if setup.objective_spec.supervised else f"TRL {setup.objective_spec.title}"
    main = LaunchFile(path=file, text=yaml_text(_sections(request, runs)))
    notes = _notes(request)
    if server:
        notes.append(
            f"Completions come from a vLLM server on one more GPU of the machine, its number {request.gpus_per_node}, "
            f"most of which it takes; run.sh starts and ends it. By hand, beside the run: {server}"
        )
    return Draft(title=title, main=main, files=tuple(files), command=command, notes=tuple(notes), server=server)


def _server(request: ExportRequest) -> str:
    """What starts the server of completions: vLLM's own, with what TRL's trainer asks of it.

    Source: trl 1.16 scripts/vllm_serve.py (until 2.0; `vllm serve` with VLLM_SERVER_DEV_MODE=1 and its flags then).
    """
    setup = request.setup
    options = {"model": shown_path(request.model_id), "host": SERVER[0], "port": SERVER[1]}
    options |= {"max_model_len": setup.seq_len_tokens, "dtype": DTYPES[setup.compute_dtype]}
    words = (word for name, value in options.items() for word in (f"--{name}", str(value)))
    return f"CUDA_VISIBLE_DEVICES={request.gpus_per_node} trl vllm-serve {shlex.join(words)}"


def _notes(request: ExportRequest) -> list[str]:
    setup = request.setup
    notes = [
        "gradient_checkpointing is activation_checkpointing from transformers 5.23 on (every_n_layers needs >= 5.17); "
        "with trl < 1.16 check loss_type: only this version never materialises the logits."
    ]
    fields = () if request.dataset is None else request.dataset.fields
    if setup.objective_spec.rolls_out and not set(REWARDED_BY) & set(fields):
        lacking = f"{shown_path(request.dataset.path)} has {', '.join(fields)}" if request.dataset and fields else ""
        notes.append(
            f"The stand-in for a reward asks for a column {', '.join(REWARDED_BY)}{'; ' * bool(lacking)}{lacking}: "
            "write your own. run.sh stops before anything is loaded where a reward asks for what the data have not."
        )
    if setup.objective_spec.data[0] in ("preference", "unpaired", "prompt"):
        notes.append(
            "Prompts and answers that are plain texts are trained on as they are, without the model's chat template "
            'and with nothing between them; write them as turns ([{"role": ..., "content": ...}]) to have it.'
        )
    if chat.chats(request) and request.lacks_template is None:
        notes.append(
            f"If the tokenizer has no chat template (a base model's often has none), add {chat.OPTION} "
            f"launch/{TARGET}/{chat.TEMPLATE_FILE} to the command; run.sh looks and does."
        )
    if setup.images is not None:
        notes.append(
            f"Planned for {setup.images.words}: TRL resizes no pictures, the model's processor does; larger ones need "
            "more memory, and a sample longer than max_length loses tokens of its pictures and stops the run. "
            "The loss is on questions and answers."
        )
    if setup.kernels == "liger":
        notes.append("Needs liger-kernel on a GPU with Triton; TRL 1.16 warns that use_liger_kernel will go in 2.0.")
    notes += [several_gpus.PER_NODE] * (request.num_nodes > 1)
    if setup.sharded_at_loading:
        notes.append("Sharded while loading: checkpoints hold the model only, so a run cannot be resumed.")
    if setup.packing and setup.attention != "flash-attention-2":
        notes.append(
            "packing without flash attention: transformers keeps packed samples apart through position_ids where the "
            "attention mask allows it; flash_attention_2 is the form TRL recommends."
        )
    return notes


def _sections(request: ExportRequest, runs: TrainSetup) -> list[Section]:
    setup = request.setup
    template = Line("chat_template_path", f"launch/{TARGET}/{chat.TEMPLATE_FILE}", "the tokenizer has none of its own")
    env = common.environment(request.gpu)
    return [
        section("environment, set before the training process starts", Line("env", env) if env else None),
        section(
            "model",
            common.model_line("model_name_or_path", request),
            Line("dtype", DTYPES[setup.weight_dtype], "of the weights that are not quantized, and of 4-bit compute"),
            common.attention_line(request),
            template if chat.brought_along(request) else None,
            *_quantization(setup),
        ),
        section("method", *_method(request)),
        _dataset(request),
        *training_sections(request, runs),
    ]


def training_sections(request: ExportRequest, runs: TrainSetup) -> list[Section]:
    """What the trainer's own configuration (SFTConfig, DPOConfig, ...) is told."""
    setup, hyper = request.setup, request.hyper
    warmup = Line("warmup_steps", hyper.warmup_fraction, f"below 1: {hyper.reasons.get('warmup_fraction', 'a share')}")
    return [
        section("batch", *_lengths(setup), *common.batch_lines(TRL, setup)),
        section(
            "memory and speed",
            Line("bf16", runs.autocast_dtype == "bf16", "autocast" if runs.autocast_dtype else "no autocast"),
            Line("fp16", runs.autocast_dtype == "fp16"),  # both are written because TRL's default is bf16
            *_checkpointing(setup),
            *[Line("loss_type", "nll", "in chunks: never holds seqs x tokens x vocabulary")]
            * setup.objective_spec.supervised,
            *common.kernels_lines(setup.replace_trusted(loss="chunked"), request.model),
            setting_line(TRL, setup, "compile") if setup.compile else None,
            several_gpus.unused_line(request),
            *several_gpus.sync_lines(setup),
        ),
        *_objective(setup),
        section(
            "optimization",
            setting_line(TRL, setup, "optimizer"),
            *common.step_lines(hyper, warmup, hyper.reasons.get("weight_decay", "")),
            Line("seed", hyper.seed),
        ),
        section(
            "output",
            Line("output_dir", shown_path(request.output_dir)),
            Line("logging_steps", request.logging_steps),
            Line("report_to", "none", "or wandb, tensorboard, trackio"),
            *common.saving_lines(request),
        ),
    ]


def _lengths(setup: TrainSetup) -> list[Line | None]:
    pieces = Line("pad_to_multiple_of", setup.sequence_chunks, "every sequence is cut into so many pieces")
    if setup.objective_spec.supervised:
        return [
            setting_line(TRL, setup, "seq_len_tokens", "tokens; longer samples are cut"),
            setting_line(TRL, setup, "packing"),
            Line("packing_strategy", "bfd") if setup.packing else None,
            pieces if setup.context_degree > 1 else None,
        ]
    if setup.objective_spec.rolls_out:
        why = f"planned for prompts of {setup.prompt_tokens} tokens, not cut"
        return [Line("max_completion_length", setup.rollout_settings.completion_tokens, why)]
    several = setup.objective_spec.seqs_per_sample > 1
    each = f"tokens of each half of a {setup.objective_spec.sample}" if several else "tokens"
    return [setting_line(TRL, setup, "seq_len_tokens", f"{each}, prompt included")]


def _objective(setup: TrainSetup) -> list[Section]:
    if setup.objective_spec.rolls_out:
        return _rollout(setup)
    beta = Line("beta", 0.1, "TRL's default: how far the policy may leave the reference")
    if setup.objective == "orpo":
        return [section("objective", Line("beta", 0.1, "TRL's default: weight of the odds ratio"))]
    if not setup.objective_spec.reference:
        return []
    loss = Line("loss_type", "sigmoid" if setup.objective == "dpo" else setup.objective, "TRL's default")
    reference = "a second copy of the weights" if setup.method == "full" else "the base with its adapters switched off"
    comment = "asked once, before the first step" if setup.precomputed_reference else f"the reference is {reference}"
    return [section("objective", loss, beta, Line("precompute_ref_log_probs", setup.precomputed_reference, comment))]


def _rollout(setup: TrainSetup) -> list[Section]:
    """The rollout as the settings of GRPOConfig or RLOOConfig, with the beta of RLOOConfig's own, or of Shao et al.
    2024, DeepSeekMath, section 4.2."""
    roll = setup.rollout_settings
    reference = "a second copy of the weights" if setup.method == "full" else "the base with its adapters switched off"
    beta = 0.05 if setup.objective == "rloo" else 0.04
    engine = [
        Line("use_vllm", roll.generator != "transformers"),
        Line("vllm_mode", "server" if roll.generator == "vllm-server" else "colocate"),
    ]
    if roll.generator == "vllm-server":
        engine += [
            Line("vllm_server_host", SERVER[0]),
            Line("vllm_server_port", SERVER[1]),
            Line("vllm_server_timeout", SERVER_START_S, "seconds: the server downloads and compiles first"),
        ]
    if roll.colocated:
        engine += [
            Line("vllm_gpu_memory_utilization", roll.vllm_fraction, "of the whole card"),
            Line("vllm_enable_sleep_mode", roll.generator == "vllm-sleep"),
            Line("vllm_max_model_length", setup.seq_len_tokens),
        ]
    return [
        section(
            "objective",
            Line("reward_funcs", ["launch.trl.rewards.contains_answer"], "a stand-in: replace it"),
            Line("loss_type", "dapo", "TRL's default") if setup.objective == "grpo" else None,
            Line("normalize_advantages", False, "TRL's default") if setup.objective == "rloo" else None,
            Line(
                "beta", beta if roll.reference else 0.0, f"the reference is {reference}" if roll.reference else "none"
            ),
        ),
        section(
            "completions",
            Line("num_generations", roll.num_generations, "of each prompt"),
            Line("generation_batch_size", setup.generation_seqs, "made at once"),
            *(engine if roll.generator != "transformers" else engine[:1]),
        ),
    ]


def _quantization(setup: TrainSetup) -> list[Line]:
    """Quantization, and what only `from_pretrained` takes.

    `trl sft` takes the 4-bit compute type from `dtype`; weights in another type need the configuration handed through.
    """
    lines: list[Line] = []
    kwargs: dict[str, object] = {}
    double = setup.quantization == "nf4-double"
    if setup.quantization == "int8":
        lines.append(Line("load_in_8bit", True))
    elif setup.quantized and setup.weight_dtype == setup.compute_dtype:
        lines = [
            Line("load_in_4bit", True),
            Line("bnb_4bit_quant_type", "nf4"),
            Line("use_bnb_nested_quant", double, "double quantization"),
        ]
        if setup.parallel in ("fsdp2", "zero3"):
            lines.append(Line("bnb_4bit_quant_storage", DTYPES[setup.weight_dtype], "shardable like the rest"))
    elif setup.quantized:
        kwargs["quantization_config"] = {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": double,
            "bnb_4bit_compute_dtype": DTYPES[setup.compute_dtype],
        }
    if setup.sharded_at_loading:
        kwargs["distributed_config"] = several_gpus.distributed_config(setup)
        return [*lines, Line("model_init_kwargs", kwargs, "sharded while loading")]
    if setup.parallel == "device-map":
        return [*lines, Line("model_init_kwargs", {"device_map": "auto", **kwargs}, "layers spread over the GPUs")]
    if kwargs:
        lines.append(Line("model_init_kwargs", kwargs, "computes in another type than the weights'"))
    return lines


def _method(request: ExportRequest) -> list[Line]:
    setup, hyper, objective = request.setup, request.hyper, request.setup.objective_spec
    if setup.method == "full":
        return [Line("use_peft", False, "full fine-tuning")]
    targets = common.target_modules(setup, request.model)
    return [
        Line("use_peft", True),
        setting_line(TRL, setup, "lora_rank"),
        common.tuned("lora_alpha", hyper, "lora_alpha"),
        setting_line(TRL, setup, "lora_dropout"),
        Line("lora_target_modules", [targets] if isinstance(targets, str) else targets),
        *(Line(name, value) for name, value in (setup.kind.trl or {}).items()),
        *[Line("lora_task_type", "SEQ_CLS", "trains the score beside the adapters")] * (objective.head == "score"),
    ]


def _dataset(request: ExportRequest) -> Section:
    """`dataset_name` and its split, or the placeholder; TRL looks for pictures in a column `images` beside messages.

    Source: trl 1.16 `SFTTrainer.__init__` (`_is_vision_dataset`), DataCollatorForVisionLanguageModeling.
    """
    dataset, images, objective = request.dataset, request.setup.images, request.setup.objective_spec
    if prepare.needed(request):
        labels = f", the loss is on {prepare.loss_words(request)}" if objective.supervised and images is None else ""
        made = Line("dataset_name", prepare.folder(request, TARGET), f"made by launch/{prepare.NAME}{labels}")
        return section("dataset", made, Line("dataset_train_split", "train"))
    shown = f"columns: images (a list of {images.num}), messages" if images is not None else ""
    if dataset is None:
        columns = "messages or text" if objective.name == "sft" else objective.columns
        comment = shown or f"hub id, or a directory with train.jsonl ({columns})"
        return section("dataset: PUT YOURS HERE", Line("dataset_name", PLACEHOLDER_DATASET, comment))
    comment = shown or f"{'chat' if dataset.columns == 'messages' else dataset.columns} columns"
    loader = FILE_LOADERS.get(dataset.path.rpartition(".")[2].lower()) if dataset.local else None
    if loader is not None:
        entry = {"path": loader, "data_files": shown_path(dataset.path), "split": "train"}
        return section("dataset", Line("datasets", [entry], comment))
    name = Line("dataset_name", shown_path(dataset.path), comment)
    return section("dataset", name, Line("dataset_train_split", dataset.split))


def _checkpointing(setup: TrainSetup) -> list[Line]:
    """Checkpointing by the names of transformers' version; under FSDP it moves into the Accelerate config."""
    key = checkpointing_key(setup)
    if accelerate.checkpoints(setup):
        return [Line(key, False, "fsdp_activation_checkpointing does it")]
    if setup.checkpointing == 0:
        return [Line(key, False)]
    comment = f"every {setup.checkpointing} layers" if setup.checkpointing > 1 else "every layer"
    comment += ", attention kept" * setup.selective_checkpointing + ", inputs in host memory" * setup.activation_offload
    return [Line(key, True, comment), Line(f"{key}_kwargs", checkpointing_kwargs(setup))]
