"""`plan check`: does an existing config fit, by how much, and which single changes would make it fit or faster.

Pure: the prediction is a function handed in (formula or dry run), the file a `ReadConfig`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cache

from planner.core.errors import NotPlanned
from planner.core.notes import measured, risk
from planner.core.records import dataclass
from planner.core.units import gib, percent
from planner.frameworks.readers.evaluating import setting_of
from planner.frameworks.readers.types import EXPANDABLE, Bound, LowerBound, ReadConfig, UpperBound
from planner.frameworks.tools import changed_fields
from planner.hardware.cluster import most_per_node
from planner.hardware.gpu import GpuSpec
from planner.memory import around
from planner.memory.attention_kernels import halves_refusal
from planner.memory.dtypes import SIZE_BYTES
from planner.memory.engines.host import loading_host_bytes
from planner.memory.states import state_bytes, weight_bytes
from planner.models.spec import ModelSpec
from planner.planning.predict import cannot_run
from planner.planning.single_changes import Predict, single_changes, speedup
from planner.setup import TrainSetup
from planner.setup.outcome import CANNOT_RUN, Band, Prediction

APPROXIMATION_BAND_FRACTION = 0.10
"""Added to the band for each feature of a config that the memory model does not follow. A judgement, not a fit."""

EVALUATION_BAND_FRACTION = 0.08
"""What an evaluation's peak may be below its bound (docs/check.md: 0 to 7 %)."""

MIN_SPEEDUP = 1.01
"""A change must promise at least this to be called faster."""


class Verdict(StrEnum):
    """What the device peak, with its error band, says against the budget."""

    FITS = "fits"
    DOES_NOT_FIT = "does_not_fit"
    UNCERTAIN = "uncertain"
    CANNOT_RUN = "cannot_run"  # whatever its memory


EXIT_CODES = {Verdict.FITS: 0, Verdict.DOES_NOT_FIT: 1, Verdict.UNCERTAIN: 3, Verdict.CANNOT_RUN: 1}


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change to a setup and what it does.

    Attributes:
        saves_bytes: of the device peak; negative when it costs memory.
        speedup: tokens/s after over before, the least of it where samples may differ in length (`speedup`).
        changes_training: whether the trained model may differ (shorter sequences, quantization), not only the run.
        in_place: whether `--fix` can write it into the file's format.
    """

    label: str
    fields: tuple[str, ...]
    setup: TrainSetup
    prediction: Prediction
    verdict: Verdict
    saves_bytes: int
    speedup: float
    changes_training: bool
    in_place: bool


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The answer for one config on one GPU; `evaluation_bytes`: at most the device peak of its evaluation, where
    that is above the step's; `notes`: what a person should know of it; `longest_tokens`: of its samples, None where it
    is not known."""

    config: ReadConfig
    gpu: GpuSpec
    budget_bytes: int
    prediction: Prediction
    band: Band
    verdict: Verdict
    changes: tuple[Change, ...]
    evaluation_bytes: int = 0
    notes: tuple[str, ...] = ()
    longest_tokens: int | None = None

    @property
    def band_fraction(self) -> float:
        return self.band.widest

    @property
    def margin_bytes(self) -> int:
        return self.budget_bytes - self.prediction.peak_device_bytes

    @property
    def exit_code(self) -> int:
        """For CI: 0 fits, 1 does not or cannot run, 3 uncertain (2, cannot be read, is an error)."""
        return EXIT_CODES[self.verdict]


def judge(prediction: Prediction, budget_bytes: int, band: Band | float, certain_bytes: int = 0) -> Verdict:
    """The verdict: uncertain where the error band straddles the budget, or where only blocks that PyTorch caches, and
    gives back before it runs out of memory, are too much; `certain_bytes`: what lies there whatever the band says.

    Source: PyTorch `c10/cuda/CUDACachingAllocator.cpp` (release_available_cached_blocks, release_cached_blocks).
    Measured: of 23 published runs whose predicted reserved peak is above the card and the allocated one below it 14
    went through (docs/accuracy/verdicts.md).
    """
    below, above = (band, band) if isinstance(band, (int, float)) else band
    peak = prediction.peak_device_bytes
    if max(without_cache_bytes(prediction) * (1 - below), certain_bytes) > budget_bytes:
        return Verdict.DOES_NOT_FIT
    return Verdict.FITS if peak * (1 + above) <= budget_bytes else Verdict.UNCERTAIN


def _stopped(config: ReadConfig, model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> Verdict | None:
    return Verdict.CANNOT_RUN if config.refusals or cannot_run(model, gpu, setup) else None


def without_cache_bytes(prediction: Prediction) -> int:
    """The device peak without what PyTorch's allocator has cached then: what a run needs at least."""
    return prediction.peak_device_bytes - max(0, prediction.peak_reserved_bytes - prediction.peak_allocated_bytes)


def band_of(prediction: Prediction, config: ReadConfig | None = None) -> Band:
    """The band of a step's peak: as far on each side as published runs lie, and wider by each setting of the config
    that is not followed exactly."""
    approximations = config.approximations if config is not None else ()
    num_upper, num_lower = (sum(isinstance(text, kind) for text in approximations) for kind in (UpperBound, LowerBound))
    below, above = prediction.memory_band
    if config is not None and config.label_tokens:  # nothing takes less of the card than by the shorter of both
        below = max(below, 1 - config.label_tokens / config.setup.seq_len_tokens)
    below += APPROXIMATION_BAND_FRACTION * (len(approximations) - num_lower)
    above += APPROXIMATION_BAND_FRACTION * (len(approximations) - num_upper)
    below += (1 - below) * _bounded_fraction(prediction, approximations, UpperBound)
    above += (1 + above) * _bounded_fraction(prediction, approximations, LowerBound)
    return Band(min(0.95, below), above)


def _bounded_fraction(prediction: Prediction, approximations: Sequence[str], kind: type[Bound]) -> float:
    """What the approximations of a kind are about, of the device peak."""
    bounded = _bounded(approximations, kind)
    counted = sum(term.size_bytes for term in prediction.terms if term.category in bounded)
    return counted / prediction.peak_device_bytes if counted else 0.0


def _bounded(approximations: Sequence[str], kind: type[Bound]) -> set[str]:
    return {category for text in approximations if isinstance(text, kind) for category in text.categories}


def certain_bytes(prediction: Prediction, config: ReadConfig) -> int:
    """What lies on the card without doubt: the weights, and the optimizer's states where all settings are followed, but
    for what is counted as an upper bound."""
    sure = {"weights"} if config.approximations else {"weights", "optimizer"}
    sure -= _bounded(config.approximations, UpperBound)
    return sum(term.size_bytes for term in prediction.terms if term.category in sure)


def table_bytes(model: ModelSpec, setup: TrainSetup, names: Sequence[str]) -> int:
    """Bytes of adapters on token tables on each GPU: two factors of rank x rows and rank x width, as trained ones are.

    Source: peft 0.21 `tuners/lora/layer.py`, class `Embedding`.
    """
    lasts = {name.rpartition(".")[2] for name in names}
    edges = sum(table.num_rows + table.dim for table in model.embeddings if table.name.rpartition(".")[2] in lasts)
    num, dtype = setup.lora_rank * edges, setup.resolved_adapter_dtype
    return num * 2 * SIZE_BYTES[dtype] + state_bytes(num, dtype, setup.optimizer) if num else 0


def with_extras(predict: Predict, config: ReadConfig, model: ModelSpec, gpu: GpuSpec) -> Predict:
    """The prediction with what a config holds beside its step: adapters on token tables, another model, and the
    evaluation between two steps."""
    if not (config.adapted_tables or config.beside_bytes or config.eval_seqs):
        return predict

    def predicted(setup: TrainSetup) -> Prediction:
        prediction = predict(setup)
        step_bytes = prediction.peak_device_bytes + extra_bytes(config, model, setup)
        return replace(prediction, peak_device_bytes=max(step_bytes, evaluating_bytes(config, model, gpu, setup)))

    return predicted


def extra_bytes(config: ReadConfig, model: ModelSpec, setup: TrainSetup) -> int:
    """What a config holds beside what its setup says: adapters on token tables, another model."""
    return table_bytes(model, setup, config.adapted_tables) + config.beside_bytes


def evaluating_bytes(config: ReadConfig, model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> int:
    """Device peak of the evaluation between two steps, at most; 0 where it surely stays below the step's."""
    peak_bytes = around.evaluating_bytes(model, gpu, setup, config.eval_seqs, logits=config.eval_logits)
    return peak_bytes + extra_bytes(config, model, setup) if peak_bytes else 0


def _keeps_all_logits(config: ReadConfig) -> bool:
    """Whether logits of the vocabulary pile up on the GPU over a whole evaluation, which is as long as the data."""
    keeps_logits = config.eval_seqs > 0 and config.eval_logits and "eval_accumulation_steps" not in config.values
    return keeps_logits and config.setup.objective_spec.head == "vocabulary"


def _evaluation_notes(config: ReadConfig, model: ModelSpec, decides_bytes: int) -> tuple[str, ...]:
    notes = []
    if decides_bytes:
        keeps = f"{setting_of(config)} {config.setup.micro_batch_seqs} keeps it below"
        if around.evaluates_whole(config.setup):
            keeps = "Liger's loss makes no logits in training alone"
        more = f"takes more than a step, up to {gib(decides_bytes)}"
        samples = f"{config.eval_seqs} {config.setup.objective_spec.sample}s"
        notes.append(f"the evaluation of {samples} at once {more}: {keeps}")
    if _keeps_all_logits(config):
        each = gib(2 * around.logits_bytes(model, config.setup))
        notes.append(
            f"compute_metrics keeps the logits of the whole evaluation on the GPU, {each} for each sequence: "
            "eval_accumulation_steps 1 sends them to the host"
        )
    return tuple(notes)


def reload_bytes(config: ReadConfig, model: ModelSpec, gpu: GpuSpec) -> int:
    """Device memory where a program loads its model once more after the training; 0 where it does not."""
    if not config.loaded_again[0] or config.setup.num_gpus > 1:
        return 0
    between_steps_bytes = around.between_steps_bytes(model, gpu, config.setup)
    return between_steps_bytes + SIZE_BYTES[config.loaded_again[1]] * model.num_params


def _loading_notes(
    config: ReadConfig, model: ModelSpec, gpu: GpuSpec, step_bytes: int, afterwards: int
) -> tuple[str, ...]:
    notes, setup = [], config.setup
    on_node = min(setup.num_gpus, most_per_node(gpu))
    if setup.num_gpus > 1:
        if loading := loading_host_bytes(model, setup, on_node):
            copies = f"each of its {on_node} processes has a copy of the model in fp32"
            notes.append(f"while it loads {copies} in the host's memory: {gib(loading)} of a node's")
        gathers = setup.parallel in ("fsdp2", "zero3") and setup.method == "full" and not setup.sharded_at_loading
        if gathers and setup.stack != "torchtitan":  # which saves as it reads, in shards
            dtype = "bf16" if setup.parallel == "zero3" else setup.weight_dtype
            size = gib(SIZE_BYTES[dtype] * model.num_params)
            notes.append(f"saved as one state dict it is gathered there again: {size} in {dtype}")
    if afterwards > step_bytes:
        notes.append(
            f"{config.loaded_again[0]} loads the model once more while the trainer holds the first: {gib(afterwards)}, "
            'more than a step; del trainer, model and torch.cuda.empty_cache() before it, or device_map="cpu"'
        )
    return tuple(notes)


def check(
    config: ReadConfig,
    model: ModelSpec,
    gpu: GpuSpec,
    budget_bytes: int,
    predict: Predict,
    *,
    samples_per_row: float = 0.0,
    less_fraction: float = 0.0,
) -> CheckResult:
    """Whether a config fits, and the single changes worth making, best first.

    Args:
        samples_per_row: that a packed row holds, 0 where that is not known.
        less_fraction: of the peak, by which it is lower where samples are as short as they seem.
    """
    if reason := halves_refusal(model, config.setup):
        raise NotPlanned(f"{config.path}: {reason}")
    predict_step = with_extras(predict, replace(config, eval_seqs=0), model, gpu)
    of_step = predict_step(config.setup)
    evaluation = evaluating_bytes(config, model, gpu, config.setup)
    decides = evaluation > of_step.peak_device_bytes
    prediction = replace(of_step, peak_device_bytes=evaluation) if decides else of_step
    predict = cache(with_extras(predict, config, model, gpu))
    step_band = band_of(of_step, config)
    step_band = Band(step_band.below + (1 - step_band.below) * less_fraction, step_band.above)
    band = Band(max(step_band.below, EVALUATION_BAND_FRACTION), 0.0) if decides else step_band

    fewer = _with_fewer_evaluated(config, model, gpu, of_step) if decides else None
    tried: list[Tried] = []
    if fewer is not None:
        fits = judge_change(config, config.setup, fewer, predict_step, budget_bytes, step_band)
        tried.append((evaluation_label(config.setup), config.setup, fewer, fits, False))
    singles = single_changes(config.setup, gpu, model, reentrant=config.reentrant, samples_per_row=samples_per_row)
    tried += _judged(config, singles, predict, budget_bytes, step_band)
    changes = [
        Change(
            label=label,
            fields=changed_fields(config.setup, setup),
            setup=setup,
            prediction=after,
            verdict=_stopped(config, model, gpu, setup) or fits,
            saves_bytes=prediction.peak_device_bytes - after.peak_device_bytes,
            speedup=speedup(model, config.setup, setup, predict),
            changes_training=changes_training,
            in_place=config.allows(setup, in_place=True),
        )
        for label, setup, after, fits, changes_training in tried
    ]

    verdict = judge(prediction, budget_bytes, band, certain_bytes(of_step, config))
    afterwards = reload_bytes(config, model, gpu)
    segments = _needs_segments(config, config.setup, predict, budget_bytes, band) if verdict is Verdict.FITS else ()
    more = _keeps_all_logits(config) or afterwards > budget_bytes or segments
    if verdict is Verdict.FITS and (more or judge(of_step, budget_bytes, step_band) != verdict):
        verdict = Verdict.UNCERTAIN
    verdict = _stopped(config, model, gpu, config.setup) or verdict
    evaluation = evaluation if decides else 0
    return CheckResult(
        config=config,
        gpu=gpu,
        budget_bytes=budget_bytes,
        prediction=prediction,
        band=band,
        verdict=verdict,
        changes=() if config.refusals else _ordered(changes, verdict),  # no memory helps what its tool refuses
        evaluation_bytes=evaluation,
        notes=(
            *(measured(f"{CANNOT_RUN}{reason}") for reason in config.refusals),
            *_evaluation_notes(config, model, evaluation),
            *_loading_notes(config, model, gpu, of_step.peak_device_bytes, afterwards),
            *segments,
            *_segment_notes(of_step, config, budget_bytes),
            *_gathered_notes(of_step, model, config.setup, budget_bytes),
        ),
    )


Tried = tuple[str, TrainSetup, Prediction, Verdict, bool]
"""A change's label, its setup, what is predicted of it, whether that fits, whether the trained model may differ."""


def _judged(
    config: ReadConfig,
    singles: Iterable[tuple[str, TrainSetup, bool]],
    predict: Predict,
    budget_bytes: int,
    step_band: Band,
) -> Iterator[Tried]:
    for label, setup, changes_training in singles:
        if config.allows(setup):
            after = predict(setup)
            # a changed setup stands on the formula: its band, where that is wider
            band = step_band.wider(band_of(after, config))
            yield label, setup, after, judge_change(config, setup, after, predict, budget_bytes, band), changes_training


def _with_fewer_evaluated(config: ReadConfig, model: ModelSpec, gpu: GpuSpec, of_step: Prediction) -> Prediction | None:
    """The prediction where as many sequences are evaluated at once as train; None where no more are."""
    if config.eval_seqs <= config.setup.micro_batch_seqs:
        return None
    least = evaluating_bytes(replace(config, eval_seqs=config.setup.micro_batch_seqs), model, gpu, config.setup)
    return replace(of_step, peak_device_bytes=max(of_step.peak_device_bytes, least))


ON_FIXED_SEGMENTS = (
    "fits only where PYTORCH_ALLOC_CONF=expandable_segments:True is in the run's environment, which nothing here says "
    "(--set expandable_segments=true does): on PyTorch's fixed segments the peak is {}"
)
LENGTHS_ON_FIXED_SEGMENTS = (
    "counted as if every micro-batch were as long as the longest: on fixed segments different lengths leave more "
    "cached{}, which PyTorch gives back where memory ends (PYTORCH_ALLOC_CONF=expandable_segments:True avoids it; plan "
    "estimate --lengths says how much it is)"
)
LENGTHS_LEAVE = (0.9, 2.5)
"""What different lengths leave cached on fixed segments, in shares of what the longest takes beside weights and states.

Measured: 36 of 40 published setups of ms-swift 1 that train adapters under checkpointing, away from the card's end,
lie between, median 1.7 (tests/planner/test_check.py). Without adapters the optimizer's step leaves blocks that serve.
"""
PACKED_LEAVE = (0.1, 0.5)
"""The same of packed rows, which differ by a few tokens where nothing fills them up: 0.07 to 0.45 in five published
runs of one author under TRL (tests/planner/test_check.py)."""


def judge_change(
    config: ReadConfig, setup: TrainSetup, after: Prediction, predict: Predict, budget_bytes: int, band: Band
) -> Verdict:
    """Whether a file's setup, changed, fits as surely as the file itself would have to."""
    verdict = judge(after, budget_bytes, band, certain_bytes(after, config))
    if verdict is Verdict.FITS and _needs_segments(config, setup, predict, budget_bytes, band):
        return Verdict.UNCERTAIN
    return verdict


def _needs_segments(
    config: ReadConfig, setup: TrainSetup, predict: Predict, budget_bytes: int, band: Band
) -> tuple[str, ...]:
    """What is said where a file that says nothing of the allocator fits with expandable segments alone."""
    if EXPANDABLE not in config.assumptions:
        return ()
    fixed = predict(setup.replace(expandable_segments=False))
    fits = judge(fixed, budget_bytes, band) is Verdict.FITS
    return () if fits else (risk(ON_FIXED_SEGMENTS.format(gib(fixed.peak_device_bytes))),)


def left_by_lengths_bytes(prediction: Prediction, setup: TrainSetup) -> tuple[int, int]:
    """Bytes that different lengths leave cached beyond the longest's, from and to; (0, 0) where none or not known."""
    resident_bytes = prediction.phase_peaks_bytes.get("load", 0)
    alike = setup.expandable_segments or (setup.packing and setup.trainer.packs_rows)
    if alike or setup.method == "full" or setup.num_gpus > 1 or not resident_bytes:
        return 0, 0
    resident_bytes += sum(term.size_bytes for term in prediction.terms if term.category == "optimizer")
    transient_bytes = max(0, prediction.peak_reserved_bytes - resident_bytes)
    least, most = PACKED_LEAVE if setup.packing else LENGTHS_LEAVE
    return round(least * transient_bytes), round(most * transient_bytes)


def _segment_notes(prediction: Prediction, config: ReadConfig, budget_bytes: int) -> tuple[str, ...]:
    """What is said where only the allocator's cache is too much, else where what it reserves hangs on the samples: of a
    file that says nothing of the allocator too, where that is known."""
    needed, setup = without_cache_bytes(prediction), config.setup
    if needed <= budget_bytes < prediction.peak_device_bytes:
        cached = f"{gib(prediction.peak_device_bytes - needed)} of it are blocks that PyTorch caches"
        return (f"{cached}: it gives them back where memory ends, and runs slower",)
    assumed = EXPANDABLE in config.assumptions
    fixed = setup.replace_trusted(expandable_segments=setup.expandable_segments and not assumed)
    least, most = left_by_lengths_bytes(prediction, fixed)
    if fixed.expandable_segments or (setup.packing and setup.trainer.packs_rows) or (assumed and not most):
        return ()
    return (LENGTHS_ON_FIXED_SEGMENTS.format(f", usually {gib(least)} to {gib(most)}" if most else ""),)


GATHERED_STAY = (
    "DeepSpeed 0.16.0 to 0.16.7 keeps all gathered weights, {} here, from the first backward to the step where "
    "checkpoints are not reentrant: too much for this card (0.16.8 frees them, as use_reentrant does)"
)


def _gathered_notes(of_step: Prediction, model: ModelSpec, setup: TrainSetup, budget_bytes: int) -> tuple[str, ...]:
    """What is said where a fault of older DeepSpeeds under ZeRO-3 decides: a module counts its forwards, of which such
    a checkpoint makes two, and its backwards, of which there is one, and frees its weights when both are equal.

    Source: DeepSpeed 0.16.0 to 0.16.7 `runtime/zero/parameter_offload.py` _post_backward_module_hook (issue 7116,
    mended in 7258). Measured: two CPU ranks of a Llama, 0.16.7: 97 % of its weights stay; 0.16.9 7 %, reentrant 5 %.
    """
    if setup.parallel != "zero3" or not setup.checkpointing or setup.reentrant_checkpointing:
        return ()
    whole = sum(weight_bytes(model, setup).values())
    there = sum(term.size_bytes for term in of_step.terms if term.category == "weights")
    more = max(0, whole + whole // setup.shards - there)
    over = without_cache_bytes(of_step) <= budget_bytes < without_cache_bytes(of_step) + more
    return (risk(GATHERED_STAY.format(gib(whole))),) if over else ()


def evaluation_label(setup: TrainSetup) -> str:
    """The change that evaluates as many sequences at once as train."""
    return f"evaluation of {setup.micro_batch_seqs} at once"


def _ordered(changes: Sequence[Change], verdict: Verdict) -> tuple[Change, ...]:
    """What helps, ordered by gain.

    A config that fits: the faster ones that still fit, by speed. One that does not: those that make it fit (training
    unchanged first, then by speed), then the others that save memory, by bytes.
    """
    fitting = [change for change in changes if change.verdict is Verdict.FITS]
    fitting.sort(key=lambda change: (change.changes_training, -change.speedup))
    if verdict is Verdict.FITS:
        return tuple(change for change in fitting if change.speedup >= MIN_SPEEDUP)
    rest = [change for change in changes if change.verdict is not Verdict.FITS and change.saves_bytes > 0]
    return (*fitting, *sorted(rest, key=lambda change: -change.saves_bytes))


def summary(result: CheckResult) -> str:
    peak, budget = result.prediction.peak_device_bytes, result.budget_bytes
    step_fits = judge(result.prediction, budget, result.band) is Verdict.FITS
    words = {
        Verdict.FITS: "fits",
        Verdict.DOES_NOT_FIT: "does not fit",
        Verdict.UNCERTAIN: "a step fits, the run may not (see Notes)" if step_fits else "may or may not fit",
        Verdict.CANNOT_RUN: "cannot run (see Notes)",
    }[result.verdict]
    sign = "spare" if result.margin_bytes >= 0 else "missing"
    below, above = map(percent, result.band)
    band = f"±{above}" if below == above else f"-{below}, +{above}"
    return f"{words}: {gib(peak)} ({band}) of {gib(budget)}, {gib(abs(result.margin_bytes))} {sign}"
