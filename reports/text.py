"""Words for figures and verdicts, shared by the terminal, Markdown and HTML reports.

Every figure a person sees goes through here, so that the three reports agree to the digit.
"""

from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING

from planner.core.notes import Place, place_of
from planner.core.redaction import without_secrets
from planner.core.units import count, gib, percent, seconds
from planner.memory.states import pinned_bytes
from planner.memory.workload import PRICE_GIVEN, Workload
from planner.planning.lora_rank import floor_of
from planner.planning.plan import Answer, NoPlan, Plan, PrunedBranch
from planner.planning.useful import cost_usd, job_s, useful_tokens_per_s
from planner.setup.outcome import (
    Candidate,
    Evidence,
    Fidelity,
    Fit,
    Prediction,
    ProbeFailure,
    sides_of,
    speed_level,
)
from reports.plain import clean, joined, plural
from reports.setup_text import layout_words, setup_words

if TYPE_CHECKING:
    from planner.samples.lengths import OverLengths

LEVEL_WORDS = {
    Fidelity.FORMULA: "formula",
    Fidelity.PROFILE: "profile",
    Fidelity.DRY_RUN: "dry run",
    Fidelity.TRACE: "trace",
    Fidelity.PROBE: "probe",
    Fidelity.CONFIRM: "confirmed",
    Fidelity.RUN: "run",
}
SHARE_SHOWN = 0.005
"""Difference between tokens/s and those that are no padding from which it is worth a word."""


def rate(tokens_per_s: float | None) -> str:
    """A speed as text, "unknown" where nobody knows."""
    if not tokens_per_s:
        return "unknown"
    return f"{tokens_per_s:,.0f} tokens/s" if tokens_per_s >= 10 else f"{tokens_per_s:.2g} tokens/s"


def dollars(amount: float) -> str:
    """US dollars as text: cents below 100 dollars, tenths of them below ten."""
    return f"${amount:,.{3 if amount < 0.1 else 2 if amount < 100 else 0}f}"


def cost_per_million(plan: Plan | NoPlan) -> float | None:
    """US dollars for a million tokens, None without a plan or a price."""
    if isinstance(plan, NoPlan) or plan.workload.price_per_hour is None or not plan.chosen.tokens_per_s:
        return None
    hours = 1e6 / plan.chosen.tokens_per_s / 3600
    return hours * plan.workload.price_per_hour * plan.workload.num_paid_gpus


def cost_words(plan: Plan | NoPlan) -> str:
    cost = cost_per_million(plan)
    return "-" if cost is None else f"${cost:,.3f}"


def band_words(band_fraction: float | None) -> str:
    """ "±8 %", or nothing where no band is known."""
    return "" if band_fraction is None else f"±{_two_digits(100 * band_fraction)} %"


def sides_words(below: float, above: float) -> str:
    """ "-6 to +9 %", or "±8 %" where both sides are the same."""
    lower, upper = _two_digits(100 * below), _two_digits(100 * above)
    return f"±{upper} %" if lower == upper else f"-{lower} to +{upper} %"


def _two_digits(number: float) -> str:
    """As text with two digits, whole from 100 on (".2g" alone would say 1.2e+02)."""
    return f"{number:.2g}" if number < 99.5 else f"{number:.0f}"


def memory_band_text(evidence: Evidence) -> str:
    """The error band of a memory figure: "±8 %", "-6 to +9 %", "measured", or nothing where none is known."""
    if isinstance(evidence, ProbeFailure):
        return ""
    if isinstance(evidence, Prediction):
        return sides_words(*evidence.memory_band)
    missed = abs(evidence.extrapolation_error_fraction or 0.0)
    return band_words(missed) if missed >= SHOWN_MISS else "measured"


SHOWN_MISS = 0.0005
"""An extension to full depth that missed by less says nothing of how a trainer's run may differ."""


def speed_band(evidence: Evidence) -> str:
    """The same of a speed figure; of a measurement how far its steps wandered, and how well its trainer is known."""
    if (sides := sides_of(evidence)) is None:
        return ""
    near = 0.0 <= sides.above - sides.below < PLUS_MINUS_WITHIN
    return band_words(sides.above) if near else sides_words(*sides)


PLUS_MINUS_WITHIN = 0.1
"""Sides that are less apart are one figure, the wider: a step x or / 1.28 as long is -22 to +28 % of its speed."""


def memory_mark(evidence: Evidence) -> str:
    """The level of a memory figure with its error band: "formula ±8 %", "dry run ±1.5 %", "probe, measured"."""
    return _mark(evidence.level, memory_band_text(evidence))


def speed_mark(evidence: Evidence) -> str:
    return _mark(speed_level(evidence), speed_band(evidence))


def _mark(level: Fidelity, band: str) -> str:
    return joined((LEVEL_WORDS[level], band), ", " if band == "measured" else " ")


def memory_marks(figures: Iterable[Evidence]) -> str:
    """The levels of several memory figures, each with the range of its bands: "formula ±4 to ±8 %"."""
    return _marks(
        (evidence.level, evidence.memory_band_fraction if isinstance(evidence, Prediction) else None)
        for evidence in figures
    )


def speed_marks(figures: Iterable[Evidence]) -> str:
    return _marks(
        (speed_level(evidence), sides.widest if (sides := sides_of(evidence)) else None) for evidence in figures
    )


def _marks(figures: Iterable[tuple[Fidelity, float | None]]) -> str:
    bands: dict[Fidelity, list[float]] = {}
    for level, band in figures:
        bands.setdefault(level, []).extend([] if band is None else [band])
    words = []
    for level, fractions in bands.items():
        ends = dict.fromkeys(f"±{_two_digits(100 * end)}" for end in fractions and (min(fractions), max(fractions)))
        words.append(joined((LEVEL_WORDS[level], f"{' to '.join(ends)} %" if ends else ""), " "))
    return ", ".join(words)


def failure_words(failure: ProbeFailure) -> str:
    """ "dry run: unsupported (no meta kernel for ...)"."""
    message = clean(failure.message)
    return f"{LEVEL_WORDS[failure.level]}: {failure.kind.value.replace('_', ' ')}" + (
        f" ({message})" if message else ""
    )


FIT_WORDS: Mapping[Fit, str] = {"fits": "yes", "tight": "tight", "over": "no"}
FIT_COLOURS: Mapping[Fit, str] = {"fits": "green", "tight": "yellow", "over": "red"}


def verdict_style(candidate: Candidate) -> str:
    """The colour of a verdict: what only may fit is no green."""
    return f"bold {FIT_COLOURS[candidate.verdict]}"


def sentence_style(sentence: str) -> str:
    """The colour of a sentence on the launch files: what may go wrong stands out."""
    return "bold red" if place_of(sentence) is Place.RISK else ""


def fit_word(candidate: Candidate) -> str:
    return FIT_WORDS[candidate.verdict]


def parameter_words(parameter: str) -> str:
    words = {"lora_rank": "LoRA rank", "seq_len_tokens": "sequence length", "micro_batch_seqs": "micro-batch"}
    return words.get(parameter, parameter)


def verdict_sentence(plan: Plan) -> str:
    words = setup_words(plan.chosen.setup)
    return f"Train with {words}." if plan.chosen.fits else f"Do not run this yet, it does not fit: {words}."


def short_verdict(plan: Plan) -> str:
    """Whether it fits, what is trained, memory and speed with one band each, and how long a step takes."""
    chosen = plan.chosen
    setup, memory, speed = chosen.setup, chosen.memory_evidence, chosen.speed_evidence
    fits = {"fits": "Fits", "tight": "Tight, it may run out of memory", "over": "Does not fit"}[chosen.verdict]
    base = {"int8": "an 8-bit base", "none": "the 16-bit model"}.get(setup.quantization, "a 4-bit base")
    if setup.quantize_experts and not setup.quantized:
        base = "a base with experts of 4 bits"
    trained = "Full fine-tuning" if setup.method == "full" else f"{setup.kind.title} on {base}"
    words = f"{fits}. {trained}: {gib(memory.peak_device_bytes)} of {gib(chosen.budget_bytes)} ({memory_mark(memory)})"
    if speed.tokens_per_s and speed.step_time_s:
        words += f", {rate(speed.tokens_per_s)} ({speed_mark(speed)}), {seconds(speed.step_time_s)} per step"
    return joined((f"{words}.", _disagreement(chosen)), " ")


def nearest_sentence(no_plan: NoPlan) -> str:
    return f"The nearest setup is {setup_words(no_plan.nearest.setup)}."


def nothing_sentence(no_plan: NoPlan) -> str:
    """The verdict where nothing fits, with what is missing."""
    nearest = no_plan.nearest
    needed, mark = gib(nearest.memory_evidence.peak_device_bytes), memory_mark(nearest.memory_evidence)
    words = f"The nearest setup needs {needed} of a budget of {gib(nearest.budget_bytes)} ({mark})."
    return f"Nothing fits: {gib(no_plan.missing_bytes)} missing. {words}"


def memory_sentence(candidate: Candidate) -> str:
    """Whether it fits, with the bytes and their level."""
    evidence = candidate.memory_evidence
    peak, budget = gib(evidence.peak_device_bytes), gib(candidate.budget_bytes)
    words = {
        "fits": f"It fits: {peak} of the {budget} budget",
        "tight": f"Tight, it may run out of memory: {peak} of the {budget} budget, and the error band reaches past it",
        "over": f"It does not fit: {peak} against a budget of {budget}",
    }[candidate.verdict]
    if candidate.cannot_run:
        words = f"It cannot run (see Notes): a step would hold {peak} of the {budget} budget"
    return joined((f"{words} ({memory_mark(evidence)}).", _disagreement(candidate)), " ")


def _disagreement(candidate: Candidate) -> str:
    """What the trace of the launch file says against the level below it, where that is more than its band; else ""."""
    trace, below = candidate.trace, candidate.dry_run
    if not isinstance(below, Prediction):
        below = candidate.formula
    if not isinstance(trace, Prediction):
        return ""
    apart = trace.peak_device_bytes / below.peak_device_bytes - 1
    if abs(apart) <= max(trace.memory_band_fraction, below.memory_band_fraction):
        return ""
    return (
        f"The {LEVEL_WORDS[below.level]} says {gib(below.peak_device_bytes)}; the launch file, traced, needs "
        f"{percent(abs(apart))} {'more' if apart > 0 else 'less'}: more than the error bands explain."
    )


def speed_sentence(candidate: Candidate) -> str:
    """Speed and step time with their level, empty where no level knows them."""
    evidence = candidate.speed_evidence
    if not evidence.tokens_per_s or not evidence.step_time_s:
        return ""
    peak = "the GPU's peak" if candidate.setup.num_gpus == 1 else "the GPUs' peak"
    mfu = f", {percent(evidence.mfu_fraction)} of {peak}" if evidence.mfu_fraction else ""
    return f"{rate(evidence.tokens_per_s)}, {seconds(evidence.step_time_s)} per step{mfu} ({speed_mark(evidence)})."


def epoch_sentence(workload: Workload, candidate: Candidate) -> str:
    """Time and cost of the epochs that the launch files train; empty without a data set."""
    duration_s, tokens, epochs = job_s(workload, candidate), workload.data.epoch_tokens, workload.epochs
    if duration_s is None or tokens is None:
        return ""
    single = epochs == 1
    words = f"{'One epoch' if single else f'{epochs:g} epochs'} of {count(tokens)} tokens"
    words += f" {'takes' if single else 'take'} {seconds(duration_s)}"
    cost = cost_usd(workload, duration_s)
    if cost is not None and workload.price_per_hour is not None:
        source = f", {clean(workload.price_source)}" if workload.price_source else ""
        words += f" and {'costs' if single else 'cost'} {dollars(cost)}"
        words += f" (at {dollars(workload.price_per_hour)} per GPU hour{source})"
    useful = useful_tokens_per_s(workload, candidate)
    if abs(useful / candidate.tokens_per_s - 1) > SHARE_SHOWN:
        words += f": {rate(useful)} of the samples' own"
    return f"{words} ({speed_mark(candidate.speed_evidence)})."


def samples_speed_words(answers: Iterable[tuple[Workload, Candidate]]) -> str:
    """What time and cost of a table's rows count, where that is not their tokens/s; "" where it is."""
    with_data = [(workload, candidate) for workload, candidate in answers if workload.data.epoch_tokens]
    shares = [useful_tokens_per_s(workload, candidate) / candidate.tokens_per_s for workload, candidate in with_data]
    if not shares or max(abs(share - 1) for share in shares) <= SHARE_SHOWN:
        return ""
    least, most = percent(min(shares)), percent(max(shares))
    between = least if least == most else f"{least} to {most}"
    return (
        f"tokens/s: of full rows, padding too; time and cost: of the samples' own tokens, {between} as many a second."
    )


def job_words(workload: Workload) -> str:
    """ "chats.jsonl, 3 epochs of 1.2 M tokens"; empty where nobody said how much is trained on."""
    tokens, epochs = workload.data.epoch_tokens, workload.epochs
    if tokens is None:
        return ""
    name = clean(PurePath(without_secrets(workload.data.file)).name)
    passes = "1 epoch" if epochs == 1 else f"{epochs:g} epochs"
    return joined((name, f"{passes} of {count(tokens)} tokens"))


def price_date(workload: Workload) -> str:
    """When the price was asked, "" where none is known or the user gave it."""
    if workload.price_per_hour is None or workload.price_source == PRICE_GIVEN:
        return ""
    return workload.price_source.rpartition(", ")[2]


def price_dates(workloads: Iterable[Workload]) -> str:
    """ "of 2026-10-03 to 2026-10-10", "" where no price is dated."""
    dates = sorted({date for workload in workloads if (date := price_date(workload))[:1].isdigit()})
    return f"of {' to '.join(dict.fromkeys((dates[0], dates[-1])))}" if dates else ""


def data_sentence(workload: Workload) -> str:
    """What of the data is trained on; empty without a data set of supervised training."""
    data = workload.data
    if not data.file or not workload.objective_spec.supervised:
        return ""
    name = clean(PurePath(data.file).name if data.kind else without_secrets(data.file))
    share = "" if data.answers_fraction is None else f" ({percent(data.answers_fraction)} of the tokens)"
    words = {"answers": f"the answers alone{share}", "all": "all tokens"}[data.loss_on or "answers"]
    if not data.kind and data.loss_on != "all":
        words = "answers, where there are any"
    held_out = f"; {data.held_out} samples are held out and evaluated" if data.held_out else ""
    return f"{name}: the loss is on {words}{held_out}."


def host_bytes(workload: Workload, candidate: Candidate) -> int:
    """Bytes of every node's host memory that offloaded states or a mixture's streamed experts take."""
    from planner.memory.engines.host import host_bytes_per_node  # seldom needed

    num_nodes = workload.cluster.num_nodes if workload.cluster is not None else 1
    model, setup = workload.model, candidate.setup
    return host_bytes_per_node(model, setup, num_nodes) or pinned_bytes(model, setup)


def host_words(workload: Workload, candidate: Candidate) -> str:
    """ "149.58 GiB in every node's host"; empty where nothing lies there."""
    size = host_bytes(workload, candidate)
    return f"{gib(size)} in every node's host" if size else ""


def layout_sentence(candidate: Candidate, workload: Workload | None = None) -> str:
    """What several GPUs share and send, and what lies in the host's memory; empty where one GPU holds everything. With
    its `workload` also what joins several nodes, and how much every node's host has to hold."""
    cluster = workload.cluster if workload is not None else None
    setup, ran = candidate.setup, candidate.dry_run
    speed = ran if isinstance(ran, Prediction) and ran.time_parts_s else candidate.formula
    if setup.single_gpu:
        return ""
    nodes = ""
    if cluster is not None and cluster.between is not None:
        between = f"{cluster.between.key}, {cluster.between.bytes_per_s / 1e9:,.4g} GB/s per node"
        nodes = f" in {cluster.num_nodes} nodes ({between})"
    words = f"{setup.num_gpus} GPUs{nodes}: {layout_words(setup)}"
    words = words if setup.num_gpus > 1 else layout_words(setup)
    if setup.data_degree > 1:
        words += f", {setup.data_degree} data-parallel copies"
    if workload is not None and (in_host := host_words(workload, candidate)):
        words += f", {in_host}"
    parts = [
        f"{percent(speed.time_parts_s[name] / speed.step_time_s)} {label}"
        for name, label in (("communication", "communication"), ("bubble", "waiting"), ("offload", "the host"))
        if speed.step_time_s and speed.time_parts_s.get(name, 0.0) >= 0.005 * speed.step_time_s
    ]
    if speed.step_time_s:
        words += f"; of the step {joined(parts, ' and ')}" if parts else "; communication is hidden behind compute"
    return f"{words} ({speed_mark(speed)})."


def lengths_sentence(over: "OverLengths") -> str:
    """Memory over varying lengths beside that of constant ones, and what the card's limit makes of it."""
    rounded = ", lengths rounded up to a few" if over.rounded else ""
    words = (
        f"Over {over.num_micro_batches} shuffled micro-batches of {over.shortest_tokens:,} to "
        f"{over.longest_tokens:,} tokens ({clean(over.source)}; seed {over.seed}{rounded}): "
        f"{gib(over.peak_reserved_bytes)} reserved, {gib(over.peak_allocated_bytes)} allocated; "
        f"all of them at {over.longest_tokens:,}: {gib(over.constant_reserved_bytes)} reserved."
    )
    if over.num_retries is None:
        return f"{words} The card cannot hold that: it runs out of memory."
    if over.num_retries:
        return f"{words} Above the card's limit, so PyTorch gives cached memory back {over.num_retries} times."
    return words


def rank_peaks_rows(candidate: Candidate) -> list[tuple[str, str, str, str]]:
    """(GPUs, how many, device peak, of the fullest) of every distinct rank, empty where all are alike."""
    peaks = candidate.memory_evidence.rank_peaks
    if len(peaks) < 2:
        return []
    worst = max(size for _, _, size in peaks)
    return [(clean(name), str(number), gib(size), percent(size / worst)) for name, number, size in peaks]


def rank_floor_sentence(plan: Plan) -> str:
    """The rule below which the LoRA rank did not go, empty for full fine-tuning."""
    if plan.chosen.setup.method == "full":
        return ""
    floor, reason = floor_of(plan.workload, plan.chosen.setup.lora_targets)
    return f"LoRA rank floor {floor}: {clean(reason).rstrip('.')}." if reason else ""


def space_sentence(answer: Plan | NoPlan) -> str:
    """How much of the space was looked at."""
    space = answer.space
    fitting = space.walked - space.infeasible
    return (
        f"Looked at {space.walked:,} setups: {fitting:,} fit, {space.infeasible:,} do not; "
        f"{space.impossible:,} combinations cannot exist, lose to other kernels or are planned only when asked for."
    )


def plan_sentences(plan: Plan) -> list[str]:
    """What is said of a plan below its verdict."""
    chosen = plan.chosen
    sentences = (
        memory_sentence(chosen),
        speed_sentence(chosen),
        layout_sentence(chosen, plan.workload),
        epoch_sentence(plan.workload, chosen),
        data_sentence(plan.workload),
        rank_floor_sentence(plan),
    )
    return [sentence for sentence in sentences if sentence]


SUGGESTION_HEADER = ("change", "saves", "enough?")


def suggestion_rows(no_plan: NoPlan) -> list[tuple[str, str, str]]:
    """What would make it fit, under SUGGESTION_HEADER."""
    return [
        (clean(suggestion.action), gib(suggestion.saves_bytes), "yes" if suggestion.fits else "not alone")
        for suggestion in no_plan.suggestions
    ]


def cut_words(cut: PrunedBranch, answer: Answer) -> str:
    """A branch given up, without repeating what its question already says."""
    return f"{clean(cut.branch)}{behind_the_branch(cut, answer)}"


def behind_the_branch(cut: PrunedBranch, answer: Answer) -> str:
    """What `cut_words` says behind the branch's name."""
    words = f", {cut.num_setups:,} {plural(cut.num_setups, 'setup')}"
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
