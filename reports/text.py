"""Words for setups and figures, shared by the terminal, Markdown and HTML reports.

Every figure a person sees goes through here, so that the three reports agree to the digit.
"""

from collections.abc import Iterable, Mapping

from planner.choices.kernels import KERNELS
from planner.choices.objectives import DEFAULT as DEFAULT_OBJECTIVE
from planner.outcome import Candidate, Evidence, Measurement, Prediction, ProbeFailure, Rung, Verdict
from planner.plan import Answer, Cut, NoPlan, Plan
from planner.setup import TrainSetup
from planner.stacks import DEFAULT as DEFAULT_STACK
from planner.units import count, gib, percent, seconds
from planner.useful import useful_tokens_per_s
from planner.workload import Workload

METHOD_WORDS = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}
RUNG_WORDS = {
    Rung.FORMULA: "formula",
    Rung.DRY_RUN: "dry run",
    Rung.TRACE: "trace",
    Rung.PROBE: "probe",
    Rung.CONFIRM: "confirmed",
}
SHARE_SHOWN = 0.005
"""Difference between tokens/s and those that are no padding from which it is worth a word."""
TARGET_WORDS = {"all-linear": "all linear layers", "attention": "the attention layers"}

_TO_ASCII = str.maketrans(
    {"±": "+-", "·": "|", "×": "x", "→": "->", "█": "#", "░": ".", "│": "|", "✓": "yes", "✗": "no", "≤": "<=", "–": "-"}
)


def clean(text: str) -> str:
    """`text` without control characters, so that a hostile name can neither move the cursor nor break a line."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def to_ascii(text: str) -> str:
    """`text` for an output that only takes ASCII."""
    return text.translate(_TO_ASCII).encode("ascii", "replace").decode("ascii")


def joined(parts: Iterable[str], separator: str = ", ") -> str:
    """The parts that are not empty, joined."""
    return separator.join(part for part in parts if part)


def method_words(setup: TrainSetup, *, short: bool = False) -> str:
    """ "QLoRA rank 64 on all linear layers", or "full fine-tuning"; short without the layers."""
    if setup.method == "full":
        return METHOD_WORDS["full"]
    if setup.adapter != "lora":
        return adapter_words(setup, short=short)
    if short:
        return f"{METHOD_WORDS[setup.method]} rank {setup.lora_rank}"
    return f"{METHOD_WORDS[setup.method]} rank {setup.lora_rank} on {targets_words(setup)}"


def adapter_words(setup: TrainSetup, *, short: bool = False) -> str:
    """Another adapter than LoRA: "DoRA rank 16 on all linear layers"."""
    row = setup.kind
    name = row.title.partition(" (")[0] + (f" {row.size} {setup.lora_rank}" if row.size else "")
    name += " beside a quantized base" if setup.quantized else ""
    return name if short or not row.adapts_matrices else f"{name} on {targets_words(setup)}"


def targets_words(setup: TrainSetup) -> str:
    """The layers that carry adapters."""
    if isinstance(setup.lora_targets, tuple):
        return clean(", ".join(setup.lora_targets))
    return TARGET_WORDS[setup.lora_targets]


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
    if not setup.quantized:
        return ""
    more = " with fp32 cast" if setup.kbit_fp32_cast else " and experts" if setup.quantize_experts else ""
    return f"{setup.quantization} base{more}"


def batch_words(setup: TrainSetup) -> str:
    """ "micro-batch 4 × accumulation 4 of 2,048 tokens"."""
    gpus = f" on {setup.num_gpus} GPUs ({spread_words(setup)})" if setup.num_gpus > 1 else ""
    return (
        f"micro-batch {setup.micro_batch_seqs} × accumulation {setup.accumulation_steps}{gpus} "
        f"of {setup.seq_len_tokens:,} tokens{image_words(setup)}{rollout_words(setup)}"
    )


def image_words(setup: TrainSetup) -> str:
    """The pictures of a sample, as the end of a sentence; "" of text alone."""
    return f" with {setup.images.words}" if setup.images is not None else ""


def rollout_words(setup: TrainSetup) -> str:
    """How completions come about, as the end of a sentence; "" of an objective that generates none."""
    if not setup.aim.rolls_out:
        return ""
    roll = setup.rolls
    names = {"vllm": "vLLM beside it", "vllm-sleep": "a vLLM that sleeps meanwhile", "vllm-server": "a vLLM server"}
    share = f" on {roll.vllm_fraction:.0%} of the card" if roll.colocated else ""
    held = ", with a reference" if roll.reference else ""
    return (
        f", completions of {roll.completion_tokens:,} tokens generated {setup.generation_seqs} at a time by "
        f"{names.get(roll.generator, roll.generator)}{share}{held}"
    )


def spread_words(setup: TrainSetup) -> str:
    """How the job is spread over its GPUs: "FSDP2", "tensor 4 × pipeline 2 under DDP"; "one GPU"."""
    if setup.num_gpus == 1:
        return "one GPU"
    from planner.decision.spreads import spread_name  # one GPU never needs it

    return spread_name(setup)


def setup_words(setup: TrainSetup) -> str:
    """The whole setup in one line, in the order a person asks for it. Defaults that change nothing are left out."""
    return joined(
        (
            setup.aim.title if setup.objective != DEFAULT_OBJECTIVE else "",
            method_words(setup),
            quantization_words(setup),
            setup.precision,
            f"{setup.attention} attention",
            checkpointing_words(setup),
            batch_words(setup),
            setup.optimizer,
            f"{setup.loss} loss",
            KERNELS[setup.kernels].words if setup.kernels != "eager" else "",
            "packed" if setup.packing else "",
            "torch.compile" if setup.compile else "",
            f"LoRA dropout {setup.lora_dropout:g}" if setup.lora_dropout else "",
            f"{setup.adapter_dtype} adapters" if setup.adapter_dtype != "auto" and setup.method != "full" else "",
            "reentrant checkpointing" if setup.reentrant_checkpointing and setup.checkpointing else "",
            f"by {setup.by.title}" if setup.stack != DEFAULT_STACK else "",
        )
    )


def short_setup_words(setup: TrainSetup) -> str:
    """What matters most, for a table: "QLoRA rank 64, micro-batch 4 × 4, checkpointing"."""
    batch = f"micro-batch {setup.micro_batch_seqs} × {setup.accumulation_steps}"
    gpus = f"{spread_words(setup)}" if setup.num_gpus > 1 else ""
    return joined((method_words(setup, short=True), gpus, batch, checkpointing_words(setup)))


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
        parts.append(f"{other.num_gpus} GPUs ({spread_words(other)})" if other.num_gpus > 1 else "one GPU")
    elif (other.parallel, other.spread) != (setup.parallel, setup.spread):
        parts.append(spread_words(other))
    return ", ".join([*parts, *_names_difference(setup, other)])


def _names_difference(setup: TrainSetup, other: TrainSetup) -> list[str]:
    """What it calls by another name, or switches."""
    parts = [
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
    return parts


def gpus_words(workload: Workload) -> str:
    """ "RTX 4090", "8 × RTX 4090"."""
    name = clean(workload.gpu.name)
    return name if workload.num_gpus == 1 else f"{workload.num_gpus} × {name}"


def workload_words(workload: Workload) -> str:
    """ "Qwen/Qwen2.5-7B on RTX 4090 · 2,048 tokens · 16 sequences per step"."""
    model = clean(workload.model.model_id)
    return (
        f"{model} ({count(workload.model.num_params)} parameters) on {gpus_words(workload)} · "
        f"{workload.seq_len_tokens:,} tokens{_of_images(workload)} · "
        f"{workload.global_batch_seqs:,} {plural(workload.global_batch_seqs, workload.aim.sample)} per step"
    )


def _of_images(workload: Workload) -> str:
    """What of a sequence are pictures, "" of text alone."""
    images = workload.images
    if images is None:
        return ""
    from planner.models.towers import image_tokens  # late: text alone needs none of it

    return f", {image_tokens(workload.model, images):,} of them of {images.words}"


def plural(number: float, word: str) -> str:
    """`word`, with an s unless there is one of it."""
    return word if number == 1 else f"{word}s"


def rate(tokens_per_s: float | None) -> str:
    """A speed as text, "unknown" where nobody knows."""
    if not tokens_per_s:
        return "unknown"
    return f"{tokens_per_s:,.0f} tokens/s" if tokens_per_s >= 10 else f"{tokens_per_s:.2g} tokens/s"


def dollars(amount: float) -> str:
    """US dollars as text: cents below 100 dollars."""
    return f"${amount:,.2f}" if amount < 100 else f"${amount:,.0f}"


def band_words(band_fraction: float | None) -> str:
    """ "±8 %", or nothing where no band is known."""
    return "" if band_fraction is None else f"±{100 * band_fraction:.2g} %"


def sides_words(below: float, above: float) -> str:
    """ "-6 to +9 %": a band that is wider on one side."""
    return f"-{100 * below:.2g} to +{100 * above:.2g} %"


def memory_mark(evidence: Evidence) -> str:
    """The rung of a memory figure with its error band: "formula ±8 %", "dry run ±1.5 %", "probe, measured"."""
    if isinstance(evidence, ProbeFailure):
        return RUNG_WORDS[evidence.rung]
    if isinstance(evidence, Prediction):
        return joined((RUNG_WORDS[evidence.rung], band_words(evidence.memory_band_fraction)), " ")
    return _measured_mark(evidence)


def speed_mark(evidence: Evidence) -> str:
    """The rung of a speed figure with its error band."""
    if isinstance(evidence, ProbeFailure):
        return RUNG_WORDS[evidence.rung]
    if isinstance(evidence, Prediction):
        return joined((RUNG_WORDS[evidence.rung], band_words(evidence.time_band_fraction)), " ")
    return _measured_mark(evidence)


def _measured_mark(evidence: Measurement) -> str:
    error = band_words(evidence.extrapolation_error_fraction)
    return f"{RUNG_WORDS[evidence.rung]} {error}" if error else f"{RUNG_WORDS[evidence.rung]}, measured"


def failure_words(failure: ProbeFailure) -> str:
    """ "dry run: unsupported (no meta kernel for ...)"."""
    message = clean(failure.message)
    return f"{RUNG_WORDS[failure.rung]}: {failure.kind.value.replace('_', ' ')}" + (f" ({message})" if message else "")


FIT_WORDS: Mapping[Verdict, str] = {"fits": "yes", "tight": "tight", "over": "no"}
FIT_COLOURS: Mapping[Verdict, str] = {"fits": "green", "tight": "yellow", "over": "red"}


def verdict_style(candidate: Candidate) -> str:
    """The colour of a verdict: what only may fit is no green."""
    return f"bold {FIT_COLOURS[candidate.verdict]}"


def fit_word(candidate: Candidate) -> str:
    """ "yes", "tight" or "no"."""
    return FIT_WORDS[candidate.verdict]


def parameter_words(parameter: str) -> str:
    """A field of TrainSetup in words."""
    known = {"lora_rank": "LoRA rank", "seq_len_tokens": "sequence length", "micro_batch_seqs": "micro-batch"}
    return known.get(parameter, parameter)


def verdict_sentence(plan: Plan) -> str:
    """What to do, in one sentence. A plan whose choice a higher rung refuted says so instead of recommending it."""
    words = setup_words(plan.chosen.setup)
    return f"Train with {words}." if plan.chosen.fits else f"Do not run this yet, it does not fit: {words}."


def nearest_sentence(no_plan: NoPlan) -> str:
    """The setup that came nearest to fitting."""
    return f"The nearest setup is {setup_words(no_plan.nearest.setup)}."


def nothing_sentence(no_plan: NoPlan) -> str:
    """The verdict where nothing fits, with what is missing."""
    nearest = no_plan.nearest
    needed, mark = gib(nearest.memory_evidence.peak_device_bytes), memory_mark(nearest.memory_evidence)
    words = f"The nearest setup needs {needed} of a budget of {gib(nearest.budget_bytes)} ({mark})."
    return f"Nothing fits: {gib(no_plan.missing_bytes)} missing. {words}"


def memory_sentence(candidate: Candidate) -> str:
    """Whether it fits, with the bytes and their rung."""
    evidence = candidate.memory_evidence
    peak, budget = gib(evidence.peak_device_bytes), gib(candidate.budget_bytes)
    words = {
        "fits": f"It fits: {peak} of the {budget} budget",
        "tight": f"Tight, it may run out of memory: {peak} of the {budget} budget, and the error band reaches past it",
        "over": f"It does not fit: {peak} against a budget of {budget}",
    }[candidate.verdict]
    return joined((f"{words} ({memory_mark(evidence)}).", _disagreement(candidate)), " ")


def _disagreement(candidate: Candidate) -> str:
    """What the trace of the launch file says against the rung below it, where that is more than its band; else ""."""
    trace, below = candidate.trace, candidate.dry_run
    if not isinstance(below, Prediction):
        below = candidate.formula
    if not isinstance(trace, Prediction):
        return ""
    apart = trace.peak_device_bytes / below.peak_device_bytes - 1
    if abs(apart) <= max(trace.memory_band_fraction, below.memory_band_fraction):
        return ""
    return (
        f"The {RUNG_WORDS[below.rung]} says {gib(below.peak_device_bytes)}; the launch file, traced, needs "
        f"{percent(abs(apart))} {'more' if apart > 0 else 'less'}: more than the error bands explain."
    )


def speed_sentence(candidate: Candidate) -> str:
    """Speed and step time with their rung, empty where no rung knows them."""
    evidence = candidate.speed_evidence
    if not evidence.tokens_per_s or not evidence.step_time_s:
        return ""
    peak = "the GPU's peak" if candidate.setup.num_gpus == 1 else "the GPUs' peak"
    mfu = f", {percent(evidence.mfu_fraction)} of {peak}" if evidence.mfu_fraction else ""
    return f"{rate(evidence.tokens_per_s)}, {seconds(evidence.step_time_s)} per step{mfu} ({speed_mark(evidence)})."


def epoch_sentence(workload: Workload, candidate: Candidate) -> str:
    """Time and cost of the epochs that the launch files train; empty without a data set."""
    if not workload.data.epoch_tokens or not candidate.tokens_per_s:
        return ""
    epochs = workload.epochs
    duration_s = epochs * epoch_s(workload, candidate)
    one = epochs == 1
    words = f"{'One epoch' if one else f'{epochs:g} epochs'} of {count(workload.data.epoch_tokens)} tokens"
    words += f" {'takes' if one else 'take'} {seconds(duration_s)}"
    if workload.price_per_hour is not None:
        cost = duration_s / 3600 * workload.price_per_hour * workload.num_gpus
        source = f", {clean(workload.price_source)}" if workload.price_source else ""
        words += f" and {'costs' if one else 'cost'} {dollars(cost)}"
        words += f" (at {dollars(workload.price_per_hour)} per GPU hour{source})"
    useful = useful_tokens_per_s(workload, candidate)
    if abs(useful / candidate.tokens_per_s - 1) > SHARE_SHOWN:
        words += f": {rate(useful)} of the samples' own"
    return f"{words} ({speed_mark(candidate.speed_evidence)})."


def epoch_s(workload: Workload, candidate: Candidate) -> float:
    """Seconds of one pass over the data, padding included."""
    return (workload.data.epoch_tokens or 0) / useful_tokens_per_s(workload, candidate)


def spread_sentence(candidate: Candidate) -> str:
    """What several GPUs share and send, empty on one GPU."""
    setup, formula = candidate.setup, candidate.formula
    if setup.num_gpus == 1:
        return ""
    words = f"{setup.num_gpus} GPUs: {spread_words(setup)}"
    if setup.data_degree > 1:
        words += f", {setup.data_degree} data-parallel copies"
    parts = [
        f"{percent(formula.time_parts_s[name] / formula.step_time_s)} {label}"
        for name, label in (("communication", "communication"), ("bubble", "waiting"), ("offload", "the host"))
        if formula.step_time_s and formula.time_parts_s.get(name, 0.0) >= 0.005 * formula.step_time_s
    ]
    if formula.step_time_s:
        words += f"; of the step {joined(parts, ' and ')}" if parts else "; communication is hidden behind compute"
    return f"{words} ({speed_mark(formula)})."


def rank_peaks_rows(candidate: Candidate) -> list[tuple[str, str, str, str]]:
    """(GPUs, how many, device peak, of the fullest) of every distinct rank, empty where all are alike."""
    peaks = candidate.memory_evidence.rank_peaks
    if len(peaks) < 2:
        return []
    worst = max(size for _, _, size in peaks)
    return [(clean(name), str(number), gib(size), percent(size / worst)) for name, number, size in peaks]


def rank_floor_sentence(plan: Plan) -> str:
    """The rule below which the LoRA rank did not go, empty for full fine-tuning."""
    reason = clean(plan.workload.min_rank_reason).rstrip(".")
    if not reason or plan.chosen.setup.method == "full":
        return ""
    return f"LoRA rank floor {plan.workload.min_rank}: {reason}."


def space_sentence(answer: Plan | NoPlan) -> str:
    """How much of the space was looked at."""
    space = answer.space
    fitting = space.walked - space.infeasible
    return (
        f"Looked at {space.walked:,} setups: {fitting:,} fit, {space.infeasible:,} do not; "
        f"{space.impossible:,} combinations cannot exist or are planned only when asked for."
    )


def cut_words(cut: Cut, answer: Answer) -> str:
    """A branch given up, without repeating what its question already says."""
    words = f"{clean(cut.branch)}, {cut.num_setups:,} {plural(cut.num_setups, 'setup')}"
    if cut.reason != answer.reason:
        words += f": {clean(cut.reason)}"
    needs = needs_words(cut.needed_bytes, cut.budget_bytes)
    repeated = (cut.needed_bytes, cut.budget_bytes) == (answer.needed_bytes, answer.budget_bytes)
    return f"{words} ({needs})" if needs and not repeated else words


def hanging(label: str, width: int) -> str:
    """`label` indented by two, its further lines by four, for a column of `width`."""
    from textwrap import wrap

    lines = wrap(label, max(8, width - 4)) if len(label) > width - 2 else [label]
    return "\n".join([f"  {lines[0]}", *(f"    {line}" for line in lines[1:])]) if lines else ""


def needs_words(needed_bytes: int | None, budget_bytes: int | None) -> str:
    """ "needs 81.20 GiB, budget 22.51 GiB: over by 58.69 GiB", empty where bytes did not decide."""
    if needed_bytes is None:
        return ""
    if budget_bytes is None:
        return f"needs {gib(needed_bytes)}"
    gap = needed_bytes - budget_bytes
    verdict = f"over by {gib(gap)}" if gap > 0 else f"{gib(-gap)} to spare"
    return f"needs {gib(needed_bytes)}, budget {gib(budget_bytes)}: {verdict}"
