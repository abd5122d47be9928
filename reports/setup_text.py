"""A setup and what is asked, in words."""

from collections import Counter
from collections.abc import Iterable

from planner.core.units import count
from planner.memory.workload import Workload
from planner.options.kernels import KERNELS
from planner.options.objectives import DEFAULT as DEFAULT_OBJECTIVE
from planner.options.objectives import OBJECTIVES
from planner.options.stacks import DEFAULT as DEFAULT_STACK
from planner.setup import TrainSetup
from planner.setup.allowed import EXPERT_TARGETS
from reports.plain import clean, joined, plural

METHOD_WORDS = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}


TARGET_WORDS = {
    "all-linear": "all linear layers",
    "attention": "the attention layers",
    EXPERT_TARGETS: "attention and experts",
}


def method_words(setup: TrainSetup, *, short: bool = False) -> str:
    """ "QLoRA rank 64 on all linear layers", "DoRA rank 16", or "full fine-tuning"; short without the layers."""
    if setup.method == "full":
        return METHOD_WORDS["full"]
    if setup.adapter != "lora":
        row = setup.kind
        name = row.title + (f" {row.size} {setup.lora_rank}" if row.size else "")
        name += " beside a quantized base" if setup.quantized else ""
        return name if short or not row.adapts_matrices else f"{name} on {targets_words(setup)}"
    if short:
        return f"{METHOD_WORDS[setup.method]} rank {setup.lora_rank}"
    return f"{METHOD_WORDS[setup.method]} rank {setup.lora_rank} on {targets_words(setup)}"


def targets_words(setup: TrainSetup) -> str:
    if isinstance(setup.lora_targets, tuple):
        return clean(", ".join(setup.lora_targets))
    return TARGET_WORDS[setup.lora_targets]


def adapters_note(setups: Iterable[TrainSetup]) -> str:
    """Which adapters the rows of a table train, where they are not the same ones; "" where they are."""
    adapted = [setup for setup in setups if setup.method != "full"]
    counts = Counter(f"rank {setup.lora_rank} on {targets_words(setup)}" for setup in adapted)
    each = joined(f"{words} ({num})" for words, num in counts.most_common())
    return f"Not all rows train the same: {each}. --rank and --targets set it for all." if len(counts) > 1 else ""


def checkpointing_words(setup: TrainSetup) -> str:
    """ "checkpointing off", "on" or "every n-th layer"."""
    if setup.checkpointing == 0:
        return "no checkpointing"
    words = "checkpointing" if setup.checkpointing == 1 else f"checkpointing every {setup.checkpointing} layers"
    if setup.selective_checkpointing:
        words += " but attention"
    return f"{words}, offloaded" if setup.activation_offload else words


def quantization_words(setup: TrainSetup) -> str:
    """How the frozen base is stored, empty for an unquantized one."""
    experts = f"experts of 4 bits{' in the host memory' * setup.trainer.streams_experts}"
    if not setup.quantized:
        return experts if setup.quantize_experts else ""
    more = " with fp32 cast" if setup.kbit_fp32_cast else " and experts" if setup.quantize_experts else ""
    return f"{setup.quantization} base{more}{' in the host memory' * setup.trainer.streams_experts}"


def batch_words(setup: TrainSetup) -> str:
    """ "micro-batch 4 × accumulation 4 of 2,048 tokens"."""
    gpus = f" on {setup.num_gpus} GPUs" if setup.num_gpus > 1 else ""
    gpus += "" if setup.single_gpu else f" ({layout_words(setup)})"
    images = f" with {setup.images.words}" if setup.images is not None else ""
    rolled = f", {rollout_words(setup)}" if setup.objective_spec.rolls_out else ""
    return (
        f"micro-batch {setup.micro_batch_seqs} × accumulation {setup.accumulation_steps}{gpus} "
        f"of {setup.seq_len_tokens:,} tokens{images}{rolled}"
    )


def rollout_words(setup: TrainSetup) -> str:
    """How the completions of an objective that generates them come about, as the end of a sentence."""
    roll = setup.rollout_settings
    names = {"vllm": "vLLM beside it", "vllm-sleep": "a vLLM that sleeps meanwhile", "vllm-server": "a vLLM server"}
    share = f" on {roll.vllm_fraction:.0%} of the card" if roll.colocated else ""
    reference = ", with a reference" if roll.reference else ""
    return (
        f"completions of {roll.completion_tokens:,} tokens generated {setup.generation_seqs} at a time by "
        f"{names.get(roll.generator, roll.generator)}{share}{reference}"
    )


def layout_words(setup: TrainSetup) -> str:
    """How the job is spread over its GPUs: "FSDP2", "tensor 4 × pipeline 2 under DDP"; "one GPU"."""
    if setup.single_gpu:
        return "one GPU"
    from planner.planning.decision.layouts import layout_name  # one GPU never needs it

    return layout_name(setup)


def layers_words(setup: TrainSetup) -> str:
    """Which layers train, "" where all do."""
    trained = setup.trained_layers
    if isinstance(trained, tuple):
        return f"layers {', '.join(map(str, trained))} alone"
    return f"the {'last' if trained > 0 else 'first'} {abs(trained)} layers alone" if trained else ""


def setup_words(setup: TrainSetup) -> str:
    """The whole setup in one line, in the order a person asks for it. Defaults that change nothing are left out."""
    return joined(
        (
            setup.objective_spec.title if setup.objective != DEFAULT_OBJECTIVE else "",
            method_words(setup),
            quantization_words(setup),
            setup.precision,
            f"{setup.attention} attention",
            checkpointing_words(setup),
            batch_words(setup),
            setup.optimizer,
            f"{setup.loss} loss",
            "reference asked beforehand" if setup.precomputed_reference else "",
            f"{setup.hard_negatives} hard negatives" if setup.hard_negatives else "",
            "a frozen encoder" if setup.frozen_encoder else "",
            layers_words(setup),
            f"gradient cache, {setup.cached_seqs} at once" if setup.cached_seqs else "",
            KERNELS[setup.kernels].words if setup.kernels != "eager" else "",
            "packed" if setup.packing else "",
            "torch.compile" if setup.compile else "",
            f"LoRA dropout {setup.lora_dropout:g}" if setup.lora_dropout else "",
            f"{setup.adapter_dtype} adapters" if setup.adapter_dtype != "auto" and setup.method != "full" else "",
            "reentrant checkpointing" if setup.reentrant_checkpointing and setup.checkpointing else "",
            f"by {setup.trainer.title}" if setup.stack != DEFAULT_STACK else "",
        )
    )


def short_setup_words(setup: TrainSetup) -> str:
    """What matters most, for a table: "QLoRA rank 64, micro-batch 4 × 4, checkpointing"."""
    batch = f"micro-batch {setup.micro_batch_seqs} × {setup.accumulation_steps}"
    gpus = "" if setup.single_gpu else layout_words(setup)
    return joined((method_words(setup, short=True), gpus, batch, checkpointing_words(setup)))


def trial_words(setup: TrainSetup) -> str:
    """One line of a progress log: what a search varies."""
    batch = f"micro-batch {setup.micro_batch_seqs} × {setup.accumulation_steps} of {setup.seq_len_tokens:,}"
    return joined(
        (
            "" if setup.single_gpu else layout_words(setup),
            method_words(setup, short=True),
            setup.quantization if setup.quantized else "",
            setup.precision,
            setup.optimizer,
            setup.attention,
            checkpointing_words(setup),
            f"{setup.loss} loss",
            batch,
        )
    )


def setup_difference(setup: TrainSetup, other: TrainSetup) -> str:
    """What `other` does differently from `setup`, short: "rank 128, micro-batch 2 × 8"."""
    parts = []
    if other.method != setup.method:
        parts.append(METHOD_WORDS[other.method])
    if other.lora_rank != setup.lora_rank and other.lora_rank:
        parts.append(f"rank {other.lora_rank}")
    if other.lora_targets != setup.lora_targets and other.method != "full":
        parts.append(f"on {targets_words(other)}")
    if other.quantized and quantization_words(other) != quantization_words(setup):
        parts.append(quantization_words(other))
    if checkpointing_words(other) != checkpointing_words(setup):
        parts.append(checkpointing_words(other))
    if (other.micro_batch_seqs, other.accumulation_steps) != (setup.micro_batch_seqs, setup.accumulation_steps):
        parts.append(f"micro-batch {other.micro_batch_seqs} × {other.accumulation_steps}")
    if other.seq_len_tokens != setup.seq_len_tokens:
        parts.append(f"{other.seq_len_tokens:,} tokens")
    if other.num_gpus != setup.num_gpus:
        parts.append(f"{other.num_gpus} GPUs ({layout_words(other)})" if other.num_gpus > 1 else "one GPU")
    elif (other.parallel, other.layout) != (setup.parallel, setup.layout):
        parts.append(layout_words(other))
    parts += [
        f"{getattr(other, name)}{suffix}"
        for name, suffix in (
            ("precision", ""),
            ("attention", " attention"),
            ("optimizer", ""),
            ("loss", " loss"),
            ("lora_dropout", " dropout"),
            ("adapter_dtype", " adapters"),
        )
        if getattr(other, name) != getattr(setup, name)
    ]
    if other.kernels != setup.kernels:
        parts.append(KERNELS[other.kernels].words)
    parts += [
        f"{'' if getattr(other, name) else 'no '}{words}"
        for name, words in (("packing", "packing"), ("compile", "torch.compile"))
        if getattr(other, name) != getattr(setup, name)
    ]
    return ", ".join(parts)


def gpus_words(workload: Workload) -> str:
    name = clean(workload.gpu.name)
    return name if workload.num_gpus == 1 else f"{workload.num_gpus} × {name}"


def objective_words(workload: Workload) -> str:
    """ "direct preference optimization"; empty for what is trained for where nothing is said."""
    objective = workload.objective_spec
    return objective.title if objective is not OBJECTIVES[DEFAULT_OBJECTIVE] else ""


def step_words(workload: Workload) -> str:
    """ "16 sequences per step"."""
    num = workload.global_batch_seqs
    return f"{num:,} {plural(num, workload.objective_spec.sample)} per step"


def workload_words(workload: Workload) -> str:
    """ "Qwen/Qwen2.5-7B on RTX 4090 · 2,048 tokens · 16 sequences per step"."""
    model, front = clean(workload.model.model_id), workload.model.front_end
    images, pictures = workload.images, ""
    if images is not None:
        from planner.models.encoders import image_tokens  # late: text alone needs none of it

        pictures = f", {image_tokens(workload.model, images):,} of them of {images.words}"
    clips = "" if front is None else f"clips of {front.seconds:g} s with "
    return (
        f"{model} ({count(workload.model.num_params)} parameters) on {gpus_words(workload)} · "
        f"{clips}{workload.seq_len_tokens:,} tokens{pictures} · {step_words(workload)}"
    )
