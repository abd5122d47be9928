"""`plan check`: does an existing config fit, by how much, and which single changes would make it fit or faster.

Pure: the prediction is a function handed in (formula or dry run), the file a `ReadConfig`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from planner.choices.kernels import LIGER_PARTS
from planner.choices.losses import LOSSES
from planner.choices.optimizers import OPTIMIZERS, PLANNED_OPTIMIZERS
from planner.errors import SetupError
from planner.gpu import GpuSpec
from planner.kernels import missing_kernels
from planner.memory.dtypes import SIZE_BYTES
from planner.memory.optimizer import state_bytes
from planner.models.spec import ModelSpec
from planner.outcome import Prediction
from planner.readers.types import ReadConfig
from planner.setup import TrainSetup
from planner.space import PLANNED_CACHES
from planner.stacks import STACKS
from planner.tools import changed_fields
from planner.units import gib, percent

Predict = Callable[[TrainSetup], Prediction]

APPROXIMATION_BAND_FRACTION = 0.10
"""Added to the band for each feature of a config that the memory model does not follow. A judgement, not a fit."""

MIN_SPEEDUP = 1.01
"""A change must promise at least this to be called faster."""

EXIT_FITS, EXIT_DOES_NOT_FIT, EXIT_UNREADABLE, EXIT_UNCERTAIN = 0, 1, 2, 3


class Verdict(StrEnum):
    """What the device peak, with its error band, says against the budget."""

    FITS = "fits"
    DOES_NOT_FIT = "does_not_fit"
    UNCERTAIN = "uncertain"


EXIT_CODES = {
    Verdict.FITS: EXIT_FITS,
    Verdict.DOES_NOT_FIT: EXIT_DOES_NOT_FIT,
    Verdict.UNCERTAIN: EXIT_UNCERTAIN,
}


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change to a setup and what it does.

    Attributes:
        label: what to change, in words.
        fields: the setup fields that differ.
        setup: the whole setup after it.
        saves_bytes: of the device peak; negative when it costs memory.
        speedup: tokens/s after over before (1.0 where unknown).
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
    """The answer for one config on one GPU."""

    config: ReadConfig
    gpu: GpuSpec
    budget_bytes: int
    prediction: Prediction
    band_fraction: float
    verdict: Verdict
    changes: tuple[Change, ...]

    @property
    def margin_bytes(self) -> int:
        """Budget minus predicted device peak."""
        return self.budget_bytes - self.prediction.peak_device_bytes

    @property
    def exit_code(self) -> int:
        """For CI: 0 fits, 1 does not, 3 uncertain (2, cannot be read, is an error)."""
        return EXIT_CODES[self.verdict]


def judge(prediction: Prediction, budget_bytes: int, band_fraction: float) -> Verdict:
    """The verdict: uncertain where the error band straddles the budget."""
    peak = prediction.peak_device_bytes
    if peak * (1 + band_fraction) <= budget_bytes:
        return Verdict.FITS
    return Verdict.DOES_NOT_FIT if peak * (1 - band_fraction) > budget_bytes else Verdict.UNCERTAIN


def table_bytes(model: ModelSpec, setup: TrainSetup, names: Sequence[str]) -> int:
    """Bytes of adapters on token tables on each GPU: two factors of rank x rows and rank x width, as trained ones are.

    Source: peft 0.21 `tuners/lora/layer.py`, class `Embedding`.
    """
    lasts = {name.rpartition(".")[2] for name in names}
    edges = sum(one.num_rows + one.dim for one in model.embeddings if one.name.rpartition(".")[2] in lasts)
    num, dtype = setup.lora_rank * edges, setup.resolved_adapter_dtype
    return num * 2 * SIZE_BYTES[dtype] + state_bytes(num, dtype, setup.optimizer) if num else 0


def including(predict: Predict, config: ReadConfig, model: ModelSpec) -> Predict:
    """The prediction with the adapters on token tables that the config trains beside those on matrices."""
    if not config.adapted_tables:
        return predict

    def predicted(setup: TrainSetup) -> Prediction:
        found = predict(setup)
        extra = table_bytes(model, setup, config.adapted_tables)
        return replace(found, peak_device_bytes=found.peak_device_bytes + extra)

    return predicted


def check(config: ReadConfig, model: ModelSpec, gpu: GpuSpec, budget_bytes: int, predict: Predict) -> CheckResult:
    """Whether a config fits, and the single changes worth making, best first."""
    predict = including(predict, config, model)
    prediction = predict(config.setup)
    band = prediction.memory_band_fraction + APPROXIMATION_BAND_FRACTION * len(config.approximations)
    verdict = judge(prediction, budget_bytes, band)
    changes = []
    for label, setup, changes_training in single_changes(config.setup, gpu, model):
        if not config.allows(setup):
            continue
        after = predict(setup)
        changes.append(
            Change(
                label=label,
                fields=changed_fields(config.setup, setup),
                setup=setup,
                prediction=after,
                # a changed setup stands on the formula: its band, where that is wider
                verdict=judge(after, budget_bytes, max(band, after.memory_band_fraction)),
                saves_bytes=prediction.peak_device_bytes - after.peak_device_bytes,
                speedup=_speedup(prediction, after),
                changes_training=changes_training,
                in_place=config.allows(setup, in_place=True),
            )
        )
    return CheckResult(
        config=config,
        gpu=gpu,
        budget_bytes=budget_bytes,
        prediction=prediction,
        band_fraction=band,
        verdict=verdict,
        changes=_ordered(changes, verdict),
    )


Tried = tuple[str, Mapping[str, object], bool]
"""(label, fields of the setup after it, whether the training changes)."""


def single_changes(setup: TrainSetup, gpu: GpuSpec, model: ModelSpec) -> list[tuple[str, TrainSetup, bool]]:
    """(label, setup, whether training changes) of every change to one decision; the effective batch never changes."""
    tried: list[Tried] = [
        *_checkpointings(setup),
        *_attentions(setup, gpu),
        *_losses_and_kernels(setup, model),
        *(
            (f"{name} optimizer", {"optimizer": name}, False)
            for name in PLANNED_OPTIMIZERS
            if OPTIMIZERS[setup.optimizer].adamw and name != setup.optimizer
        ),
        *_batches(setup),
        *_weights(setup, gpu),
        *(
            (f"sequences of {length} tokens", {"seq_len_tokens": length}, True)
            for length in (setup.seq_len_tokens // 2, setup.seq_len_tokens // 4)
            if length >= 128
        ),
        *_spreads(setup),
    ]
    found: list[tuple[str, TrainSetup, bool]] = []
    for label, values, changes_training in tried:
        try:
            changed = setup.with_(**values)
        except SetupError:
            continue
        if not missing_kernels(model, gpu, changed) and not _refused(model, changed):
            found.append((label, changed, changes_training))
    return found


def _checkpointings(setup: TrainSetup) -> list[Tried]:
    # a trainer that is told to checkpoint takes its own form of it
    form = {} if setup.checkpointing else {"reentrant_checkpointing": STACKS[setup.stack].reentrant_checkpointing}
    off = {"checkpointing": 0, "activation_offload": False, "reentrant_checkpointing": False}
    found: list[Tried] = [
        ("checkpoint every layer", {"checkpointing": 1, **form}, False),
        ("no gradient checkpointing", {**off, "selective_checkpointing": False}, False),
        ("checkpoint every 2nd layer", {"checkpointing": 2, **form}, False),
    ]
    return [one for one in found if one[1]["checkpointing"] != setup.checkpointing]


def _attentions(setup: TrainSetup, gpu: GpuSpec) -> list[Tried]:
    found: list[Tried] = []
    if setup.attention != "flash-attention-2" and gpu.flash_attention_2 and setup.compute_dtype != "fp32":
        found.append(("flash attention 2", {"attention": "flash-attention-2"}, False))
    if setup.attention == "eager":
        found.append(("SDPA attention", {"attention": "sdpa"}, False))
    return found


def _losses_and_kernels(setup: TrainSetup, model: ModelSpec) -> list[Tried]:
    whole = LOSSES[setup.loss].whole_logits
    known = model.model_type in LIGER_PARTS
    found: list[Tried] = [
        (f"{loss} loss (no full logits)", {"loss": loss}, False)
        for loss, row in LOSSES.items()
        if whole and not row.whole_logits and not (loss == "liger" and known)
    ]
    if setup.kernels == "eager" and known:  # one switch in most tools, which takes the loss along
        label = "Liger kernels and loss (no full logits)" if whole else "Liger kernels"
        found.append((label, {"kernels": "liger", "loss": "liger" if whole else setup.loss}, False))
    return found


def _weights(setup: TrainSetup, gpu: GpuSpec) -> list[Tried]:
    """Other types of the weights, 4 bits among them."""
    found: list[Tried] = []
    if setup.precision == "bf16-mixed" and setup.method != "full":
        found.append(("bf16 weights", {"precision": "bf16-autocast"}, False))
    elif setup.precision == "bf16-mixed":
        found.append(("bf16 weights under autocast", {"precision": "bf16-autocast"}, True))
    if setup.precision == "fp32" and gpu.bf16:
        found.append(("bf16 autocast", {"precision": "bf16-mixed"}, True))
    if setup.method == "lora":
        four = {"method": "qlora", "quantization": "nf4-double"}
        dtype = {} if setup.adapter_dtype == "auto" else {"adapter_dtype": "fp32"}
        found.append(("4-bit base (QLoRA)", {**four, **dtype}, True))
    if setup.quantization == "nf4":
        found.append(("double quantization", {"quantization": "nf4-double"}, True))
    return found


def enough_alone(
    setup: TrainSetup, model: ModelSpec, gpu: GpuSpec, budget_bytes: int, predict: Predict
) -> tuple[str, ...]:
    """The single changes that make a setup fit which does not: those that leave the training as it is first, the
    fastest first."""
    before = predict(setup)
    found = []
    for label, other, changes_training in single_changes(setup, gpu, model):
        after = predict(other)
        if after.peak_device_bytes <= budget_bytes:
            found.append((changes_training, -_speedup(before, after), label))
    return tuple(label for *_, label in sorted(found))


def _spreads(setup: TrainSetup) -> list[Tried]:
    """Other ways of spreading the same job over its GPUs; none on one GPU, and none of a job that is split."""
    if setup.data_degree < 2 or setup.data_degree != setup.num_gpus:
        return []
    plain: dict[str, object] = {"shard_degree": 0, "reshard_after_forward": True, "offload": "none"}
    labels = {"ddp": "DDP (no sharding)", "fsdp2": "FSDP2", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
    found: list[Tried] = [
        (label, {**plain, "parallel": parallel}, False)
        for parallel, label in labels.items()
        if parallel != setup.parallel
    ]
    if setup.offload != "none":
        found.append(("nothing in the host's memory", {"offload": "none"}, False))
    elif setup.parallel in ("fsdp2", "zero3"):
        found.append(("weights and optimizer in the host's memory", {"offload": "parameters"}, False))
    return found


def _refused(model: ModelSpec, setup: TrainSetup) -> bool:
    """Whether no engine runs a setup on several GPUs."""
    if setup.num_gpus == 1:
        return False
    from planner.engines import why_not  # one GPU never needs it

    return bool(why_not(model, setup))


def _batches(setup: TrainSetup) -> list[Tried]:
    """Other splits of the same effective batch, nearest first; where that is what trains, gradient caches."""
    if setup.aim.whole_batch:
        sizes = [one for one in PLANNED_CACHES if one < (setup.cached_seqs or setup.micro_batch_seqs)]
        return [(f"a cached loss, {one} sequences at once", {"cached_seqs": one}, False) for one in sizes]
    total = setup.micro_batch_seqs * setup.accumulation_steps
    found: list[Tried] = []
    for micro in (
        1,
        setup.micro_batch_seqs // 4,
        setup.micro_batch_seqs // 2,
        *(setup.micro_batch_seqs * n for n in (2, 4)),
    ):
        if micro >= 1 and micro != setup.micro_batch_seqs and total % micro == 0:
            label = f"micro-batch {micro} x {total // micro} accumulation steps"
            entry: Tried = (
                label,
                {"micro_batch_seqs": micro, "accumulation_steps": total // micro},
                False,
            )
            if entry not in found:
                found.append(entry)
    return found


def _speedup(before: Prediction, after: Prediction) -> float:
    """How much faster samples pass: by step time, which a shorter sequence shortens as well."""
    if not before.tokens_per_s or not after.tokens_per_s:
        return 1.0
    return after.tokens_per_s / before.tokens_per_s


def _ordered(changes: Sequence[Change], verdict: Verdict) -> tuple[Change, ...]:
    """What helps, ordered by gain.

    A config that fits: the faster ones that still fit, by speed. One that does not: those that make it fit (training
    unchanged first, then by speed), then the others that save memory, by bytes.
    """
    if verdict is Verdict.FITS:
        faster = [one for one in changes if one.verdict is Verdict.FITS and one.speedup >= MIN_SPEEDUP]
        return tuple(sorted(faster, key=lambda one: (one.changes_training, -one.speedup)))
    fitting = [one for one in changes if one.verdict is Verdict.FITS]
    rest = [one for one in changes if one.verdict is not Verdict.FITS and one.saves_bytes > 0]
    return (
        *sorted(fitting, key=lambda one: (one.changes_training, -one.speedup)),
        *sorted(rest, key=lambda one: -one.saves_bytes),
    )


def improve(result: CheckResult, model: ModelSpec, predict: Predict) -> tuple[TrainSetup, tuple[str, ...]]:
    """The fastest setup that fits within a few changes that the file's format can hold, and their labels in order.

    Changes that alter the training are taken only where nothing else makes it fit. The same setup and () where
    nothing helps.
    """
    predict = including(predict, result.config, model)
    for may_change_training in (False, True):
        setup, labels = _search(result, model, predict, may_change_training)
        after = predict(setup)
        band = max(result.band_fraction, after.memory_band_fraction)
        if judge(after, result.budget_bytes, band) is Verdict.FITS:
            return setup, labels
    return (
        (setup, labels) if after.peak_device_bytes < result.prediction.peak_device_bytes else (result.config.setup, ())
    )


BEAM, DEPTH = 6, 4


def _search(
    result: CheckResult, model: ModelSpec, predict: Predict, may_change_training: bool
) -> tuple[TrainSetup, tuple[str, ...]]:
    """Beam search over single changes; each further change must gain MIN_SPEEDUP, or bring it to fit."""

    def worth(setup: TrainSetup) -> tuple[bool, float]:
        prediction = predict(setup)
        band = max(result.band_fraction, prediction.memory_band_fraction)
        if judge(prediction, result.budget_bytes, band) is Verdict.FITS:
            return True, prediction.tokens_per_s or 1.0
        return False, -float(prediction.peak_device_bytes)

    start = result.config.setup
    best: tuple[TrainSetup, tuple[str, ...]] = (start, ())
    best_worth = worth(start)
    seen = {start}
    beam: list[tuple[TrainSetup, tuple[str, ...]]] = [(start, ())]
    for _ in range(DEPTH):
        found: list[tuple[tuple[bool, float], TrainSetup, tuple[str, ...]]] = []
        for setup, labels in beam:
            if may_change_training and worth(setup)[0]:
                continue  # it fits: no further change to the training
            for label, after, changes_training in single_changes(setup, result.gpu, model):
                if after in seen or (changes_training and not may_change_training):
                    continue
                if result.config.allows(after, in_place=True):
                    seen.add(after)
                    found.append((worth(after), after, (*labels, label)))
        found.sort(key=lambda one: (one[0], -len(one[2])), reverse=True)
        beam = [(setup, labels) for _, setup, labels in found[:BEAM]]
        if found and _better(found[0][0], best_worth):
            best_worth, best = found[0][0], (found[0][1], found[0][2])
    return best


def _better(new: tuple[bool, float], old: tuple[bool, float]) -> bool:
    if new[0] != old[0]:
        return new[0]
    return new[1] > old[1] * MIN_SPEEDUP if new[0] else new[1] > old[1]


def summary(result: CheckResult) -> str:
    """The verdict in one sentence."""
    peak, budget = result.prediction.peak_device_bytes, result.budget_bytes
    words = {
        Verdict.FITS: "fits",
        Verdict.DOES_NOT_FIT: "does not fit",
        Verdict.UNCERTAIN: "may or may not fit",
    }[result.verdict]
    sign = "spare" if result.margin_bytes >= 0 else "missing"
    band = percent(result.band_fraction)
    return f"{words}: {gib(peak)} (±{band}) of {gib(budget)}, {gib(abs(result.margin_bytes))} {sign}"
