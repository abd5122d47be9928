"""What the fidelity levels answer about one setup: predictions, measurements and failures, all plain data."""

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from typing import Literal, NamedTuple

from planner.core.records import dataclass
from planner.setup import TrainSetup
from planner.setup.memory_terms import MemoryTerm


class Fidelity(StrEnum):
    """Where a number comes from. A higher level corrects the lower ones."""

    FORMULA = "formula"
    PROFILE = "profile"
    DRY_RUN = "dry_run"
    TRACE = "trace"
    PROBE = "probe"
    CONFIRM = "confirm"
    RUN = "run"


class Band(NamedTuple):
    """How far below and above a predicted peak the true one may lie, as fractions of it."""

    below: float
    above: float

    @classmethod
    def of_time(cls, fraction: float) -> "Band":
        """Of tokens/s, where a step takes x or / (1 + `fraction`) as long."""
        return cls(1 - 1 / (1 + fraction), fraction)

    def wider(self, other: "Band") -> "Band":
        return Band(max(self.below, other.below), max(self.above, other.above))

    @property
    def widest(self) -> float:
        return max(self)


def speed_sides(time_band_fraction: float | None, bands: Mapping[str, tuple[float, float]]) -> Band | None:
    """The band of tokens/s on each side: of published runs where their stack has some, else of a step that takes x or /
    (1 + `time_band_fraction`) as long."""
    if time_band_fraction is None:
        return None
    sides = Band(*bands.get("tokens_per_s", (0.0, 0.0)))
    if max(sides) and 1 / (1 - sides.below) - 1 > time_band_fraction - 1e-6:
        return sides
    # a band that was widened since holds on both sides
    return sides.wider(Band.of_time(time_band_fraction))


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a level without a GPU (formula, dry run, trace of the launch file) says about one setup.

    Attributes:
        phase_peaks_bytes: allocated peak of each phase, keys of `planner.setup.memory_terms.PHASES`.
        terms: what is alive at the peak, largest first.
        memory_band_fraction: half-width of the error band on memory (0.08: plus or minus 8 %), measured; the accuracy
            report says on what. With `bands` the wider side of what a run needs.
        bands: of a run that anybody may have started, by figure ("allocated", "reserved", "device", "tokens_per_s"), as
            (below, above): in 9 of 10 published runs the measured figure lay from predicted x (1 - below) to
            predicted x (1 + above); "needed": of the device peak without what PyTorch caches and gives back. Empty for
            a plan's own setup, but for an engine's speed, that over links nobody has measured, and where samples that
            differ in length matter.
        step_time_s, tokens_per_s: None where the level does not predict speed.
        time_parts_s: where the time goes, by operator class.
        notes: what a person must know (a math-kernel fallback, an assumption), one sentence each.
        rank_peaks: (name, how many GPUs, their device peak in bytes) of every distinct rank, worst first; empty with
            one GPU. The other figures are the worst rank's; tokens/s are those of all GPUs.
    """

    level: Fidelity
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_device_bytes: int
    peak_phase: str
    phase_peaks_bytes: Mapping[str, int]
    terms: tuple[MemoryTerm, ...]
    memory_band_fraction: float
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    time_band_fraction: float | None = None
    mfu_fraction: float | None = None
    time_parts_s: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    rank_peaks: tuple[tuple[str, int, int], ...] = ()
    bands: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def memory_band(self) -> Band:
        """The band of the device peak on each side, as what decides whether it fits."""
        fraction = self.memory_band_fraction
        sides = self.bands.get("needed", ())
        # a band that was widened since holds on both sides
        return Band(*sides) if sides and max(sides) == fraction else Band(fraction, fraction)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where something was measured. `libraries` maps a distribution name to its version, `settings` what else decides
    a measurement (the allocator's settings) to its value."""

    gpu_name: str
    gpu_key: str | None
    driver: str
    cuda: str
    python: str
    platform: str
    libraries: Mapping[str, str]
    power_limit_w: float | None = None
    device: str = "cuda"
    settings: Mapping[str, str] = field(default_factory=dict)


SPEED_SPOILING_FLAGS = frozenset({"noise", "loss-emulated", "device-shared", "allocator-retries"})
"""More layers that took no longer than fewer, a stand-in for the loss's own kernels, somebody else on the GPU, memory
so short that the allocator waited for the driver: such step times are not the setup's. Times that only wander
("unstable") are: their median counts, and how far they went is its band."""
SETTLED_FRACTION = 0.01
"""Steps have settled when the medians of two windows differ by no more: what they say of the speed is no better."""
WINDOW_STEPS = 3
"""A wander is seen in medians of so many steps: one slow step moves none."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a probe, a confirmation or a run of the launch file measured, raw.

    Attributes:
        step_times_s: every optimizer step after warm-up, in order (extended to full depth where truncated).
        between_steps_s: what the trainer takes from one step's end to the next one's begin (median), where it was
            there; 0 where these are no trainer's steps.
        trainer_fraction: by how much longer the target's trainer takes for such a step, and `trainer_band_fraction` how
            far that is known to differ (`planner.planning.evidence.bands.trainer_share`); 0 where the steps are the
            trainer's own.
        program: whose steps these are: the launch target of a run, "" of our own step.
        layers_measured: depths that were really run, (full,) for full depth.
        extrapolation_error_fraction: how far the linear extension missed a third depth or the known parameter bytes.
        flags: what disturbed the measurement (docs/probes.md); with one of SPEED_SPOILING_FLAGS there is no speed.
        device_peak_is_nvml: False where the driver could not be asked and reserved plus context stands in.
        copy_bandwidth_bytes_per_s: of a copy within the device's memory just before (read and written bytes both
            counted), None when not measured.
        rank_peaks: with several GPUs, (name, number of ranks, device peak in bytes) of every rank, worst first; the
            figures above are then those of the worst rank, the step times those of the slowest.
        kernels: names of the kernels that one step of the shortest depth ran, those that took longest first; empty on
            the CPU.
    """

    level: Fidelity
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_device_bytes: int
    phase_peaks_bytes: Mapping[str, int]
    step_times_s: tuple[float, ...]
    tokens_per_step: int
    layers_measured: tuple[int, ...]
    environment: Environment
    extrapolation_error_fraction: float | None = None
    mfu_fraction: float | None = None
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    device_peak_is_nvml: bool = True
    copy_bandwidth_bytes_per_s: float | None = None
    rank_peaks: tuple[tuple[str, int, int], ...] = ()
    kernels: tuple[str, ...] = ()
    between_steps_s: float = 0.0
    trainer_fraction: float = 0.0
    trainer_band_fraction: float = 0.0
    program: str = ""

    @property
    def step_time_s(self) -> float:
        """Seconds of an optimizer step as the target's trainer takes it: the median, with what the trainer adds."""
        from statistics import median  # late: it costs a formula-only plan several milliseconds

        return median(self.step_times_s) * (1 + self.trainer_fraction) + self.between_steps_s

    @property
    def time_band_fraction(self) -> float:
        """Half-width of the speed's band: how far the steps wandered (at least by what settled steps may), and how well
        the trainer's share is known."""
        from statistics import median

        times, middle = self.step_times_s, median(self.step_times_s)
        windows = [median(times[end - WINDOW_STEPS : end]) for end in range(WINDOW_STEPS, len(times) + 1)]
        wander = max((abs(window - middle) for window in windows), default=max(times) - min(times))
        seen = wander / middle if middle else 0.0
        return max(seen, SETTLED_FRACTION, abs(self.extrapolation_error_fraction or 0.0)) + self.trainer_band_fraction

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens (padding included) per second at the median step; None where a flag says that it is another's."""
        return None if self.speed_spoiled_by else self.tokens_per_step / self.step_time_s

    @property
    def speed_spoiled_by(self) -> tuple[str, ...]:
        """The flags under which the step times say nothing about the setup."""
        return tuple(flag for flag in self.flags if flag in SPEED_SPOILING_FLAGS)


class FailureKind(StrEnum):
    """Why a dry run or a probe brought no figures back. MACHINE says nothing about the setup: no driver, a full disk, a
    child that never came to its device. It is never kept, and ends whatever was measuring."""

    OUT_OF_MEMORY = "out_of_memory"
    TIMEOUT = "timeout"
    UNSUPPORTED = "unsupported"
    CRASHED = "crashed"
    MACHINE = "machine"


@dataclass(frozen=True, kw_only=True)
class ProbeFailure:
    """An outcome, not an exception: out of memory at a setup is knowledge about that setup."""

    level: Fidelity
    kind: FailureKind
    message: str
    log_path: str | None = None
    log_tail: str = ""


Evidence = Prediction | Measurement | ProbeFailure


def sides_of(evidence: Evidence) -> Band | None:
    """How far the true tokens/s may lie on each side; None where nothing says."""
    if isinstance(evidence, Prediction):
        return speed_sides(evidence.time_band_fraction, evidence.bands)
    if isinstance(evidence, ProbeFailure) or evidence.time_band_fraction is None:
        return None
    return Band(evidence.time_band_fraction, evidence.time_band_fraction)


HOST_BOUND = "host-bound: "
"""How a note begins that says how long the GPU waits for the CPU."""

Fit = Literal["fits", "tight", "over"]


def speed_level(evidence: Evidence) -> Fidelity:
    """Where a speed figure comes from: beside a step profile's memory, and that of a dry run that gave no times, stands
    the formula's."""
    untimed = isinstance(evidence, Prediction) and evidence.level is Fidelity.DRY_RUN and not evidence.time_parts_s
    return Fidelity.FORMULA if untimed or evidence.level is Fidelity.PROFILE else evidence.level


CANNOT_RUN = "this cannot run: "
"""How a note begins that says why nothing runs a setup."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One setup with all that is known about it.

    `fits` and `tokens_per_s` speak from the highest level that answered.
    """

    setup: TrainSetup
    budget_bytes: int
    formula: Prediction
    dry_run: Prediction | ProbeFailure | None = None
    trace: Prediction | ProbeFailure | None = None
    probe: Measurement | ProbeFailure | None = None
    run: Measurement | ProbeFailure | None = None

    @property
    def levels(self) -> tuple[tuple[Fidelity, Evidence], ...]:
        """What was asked, the lowest first."""
        answered_by = {name: getattr(self, name) for name in ("dry_run", "trace", "probe", "run")}
        answers = [(Fidelity(name), evidence) for name, evidence in answered_by.items() if evidence is not None]
        return ((self.formula.level, self.formula), *answers)

    @property
    def memory_evidence(self) -> Prediction | Measurement:
        """The highest level that gave memory figures."""
        return next(evidence for _, evidence in reversed(self.levels) if not isinstance(evidence, ProbeFailure))

    @property
    def notes(self) -> tuple[str, ...]:
        """What every level that answered says, the highest first; what a lower one knows stays true, but for how long
        the GPU waits."""
        answered = (evidence for _, evidence in reversed(self.levels) if not isinstance(evidence, ProbeFailure))
        notes: dict[str, str] = {}
        for note in (note for evidence in answered for note in evidence.notes):
            notes.setdefault(HOST_BOUND if note.startswith(HOST_BOUND) else note, note)
        return tuple(notes.values())

    @property
    def speed_evidence(self) -> Prediction | Measurement:
        """The highest level that gave a step time."""
        for evidence in (self.run, self.probe, self.dry_run):
            if isinstance(evidence, (Prediction, Measurement)) and evidence.tokens_per_s is not None:
                return evidence
        return self.formula

    @property
    def cannot_run(self) -> str:
        """Why nothing runs it, whatever its memory; "" where something does."""
        reasons = (note.removeprefix(CANNOT_RUN) for note in self.formula.notes if note.startswith(CANNOT_RUN))
        return next(reasons, "")

    @property
    def fits(self) -> bool:
        """Device peak within the budget on the highest level, something runs it, and neither probe nor run ran out."""
        if self.cannot_run:
            return False
        failed = (evidence for evidence in (self.probe, self.run) if isinstance(evidence, ProbeFailure))
        if any(failure.kind is FailureKind.OUT_OF_MEMORY for failure in failed):
            return False
        return self.memory_evidence.peak_device_bytes <= self.budget_bytes

    @property
    def verdict(self) -> Fit:
        """Whether it fits for sure: "tight" where a predicted peak's error band reaches past the budget."""
        evidence = self.memory_evidence
        above = evidence.memory_band.above if isinstance(evidence, Prediction) else 0.0
        if not self.fits:
            return "over"
        return "tight" if evidence.peak_device_bytes * (1 + above) > self.budget_bytes else "fits"

    @property
    def tokens_per_s(self) -> float:
        """Tokens/s from the highest level that has one; 0 where nobody knows."""
        return self.speed_evidence.tokens_per_s or 0.0
