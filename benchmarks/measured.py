"""Recorded measurements by others, as shipped with the planner: what predictions are held against.

Every row names its source (repository@commit:path), what was assumed
to turn the run into a `TrainSetup`, and in what it is known to differ from what a setup can say.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median
from typing import Any, Literal

from benchmarks.shared import DATA, loaded, rows_of
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import find_gpu
from planner.models.families import spec_from_config
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from planner.setup.interchange import setup_from_request
from planner.setup.outcome import Prediction

Kind = Literal["all", "memory", "allocated", "reserved", "speed", "oom", "multi"]
Quantity = Literal["allocated", "reserved", "device", "tokens_per_s"]

OWN = "measured_own.jsonl"
SINGLE_GPU = ("measured_single_gpu.jsonl", "measured_published.jsonl", OWN)
"""Collected runs, two estimators' own, and this project's."""
SEVERAL_GPUS = ("measured_multi_gpu.jsonl",)
STACK_OF = {
    "fms-acceleration": "fms-acceleration",
    "hf-trainer": "trl",
    "litgpt": "litgpt",
    "llama-factory": "llamafactory",
    "ms-swift": "hf",
    "peft-loop": "plain-loop-drops-outputs",  # the outputs that it holds beside its longest batch are its shortest's
    "plain-loop": "plain-loop",
    "prime-rl": "prime-rl",
    "torchtitan": "torchtitan",
    "torchtune": "torchtune",
    "unsloth": "unsloth",
}
"""The program that a row names -> the stack of its setup."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """One run that somebody published.

    Attributes:
        group: the source ("fms_acceleration"); `stack` the training program ("hf-trainer", "litgpt", ...).
        model: catalogue id with the same shapes, None when there is none; `model_name` as published.
        config: an inline config.json where the catalogue has no such model but the shape is known.
        gpu: key of the GPU table, None when not in it.
        status: "ok" or "oom"; `inferred` an out-of-memory that the source does not state in words.
        setup: the run as a setup, None when it cannot be expressed (`unmapped` says why).
        speed_seq_len_tokens: the mean length, for speed, where it is not the longest.
        speed_attention: the attention of a setup whose time its own takes, where no setup has that kernel.
        speed_optimizer: the same of an optimizer (AdamW of one tensor after another makes no temporaries, as fused).
        assumed: what the source does not say; differs: what the setup cannot say, beginning with "tokens/s:" or
            "memory:" where it is why another run of the setup would not have the figure.
        unmapped_memory: why the memory figure cannot be compared although the speed can.
        allocated_bytes, reserved_bytes: `max_memory_allocated`, `max_memory_reserved`; device_bytes: the driver's peak.
        tokens_per_s: per GPU. untimed: parts of a step that its time leaves out ("optimizer").
        between_steps_s: of the trainer between two optimizer steps, which `step_time_s` leaves out, where told apart.
        config_id: rows that share it are the same run under other software versions.
    """

    id: str
    group: str
    stack: str
    source: str
    status: str
    method: str
    config_id: str
    parallelism: str = "none"
    num_gpus: int = 1
    date: str = ""
    model: str | None = None
    model_name: str = ""
    num_params: int | None = None
    config: Mapping[str, Any] | None = field(default=None, hash=False)
    gpu: str | None = None
    gpu_name: str | None = None
    setup: TrainSetup | None = None
    speed_seq_len_tokens: int | None = None
    speed_attention: str = ""
    speed_optimizer: str = ""
    assumed: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    unmapped: str = ""
    unmapped_memory: str = ""
    inferred: bool = False
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    device_bytes: int | None = None
    memory_confidence: str | None = None
    tokens_per_s: float | None = None
    untimed: tuple[str, ...] = ()
    step_time_s: float | None = None
    between_steps_s: float | None = None
    speed_confidence: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)
    micro_batch_seqs: int | None = None
    seq_len_tokens: int | None = None

    @property
    def speed_setup(self) -> TrainSetup | None:
        """What a throughput should be compared with: the setup with the mean length, and the attention whose time its
        own takes."""
        if self.setup is None:
            return None
        overrides = {
            "seq_len_tokens": self.speed_seq_len_tokens,
            "attention": self.speed_attention,
            "optimizer": self.speed_optimizer,
        }
        return self.setup.replace(**{name: value for name, value in overrides.items() if value})

    def setup_for(self, what: Quantity) -> TrainSetup | None:
        """The setup whose prediction of a quantity is held against the row."""
        return self.speed_setup if what == "tokens_per_s" else self.setup

    def model_and_gpu(self) -> tuple[ModelSpec, GpuSpec]:
        """Of a comparable row."""
        assert self.gpu is not None
        if self.model is not None:
            return loaded(self.model), find_gpu(self.gpu)
        assert self.config is not None
        return spec_from_config(self.config, model_id=self.model_name, source=self.source), find_gpu(self.gpu)

    def measured(self, what: Quantity) -> float | None:
        """The measured figure of one quantity, None where there is none."""
        figure: float | None = getattr(self, what if what == "tokens_per_s" else f"{what}_bytes")
        return figure

    def comparable(self, what: Quantity) -> bool:
        """Whether a prediction of `what` can be held against this row."""
        if self.setup is None or self.unmapped or self.gpu is None or (self.model is None and self.config is None):
            return False
        if what != "tokens_per_s" and self.unmapped_memory:
            return False
        return self.status == "oom" or self.measured(what) is not None


def predicted_figure(prediction: Prediction, what: Quantity, untimed: Collection[str] = ()) -> float | None:
    """The figure of a prediction that a quantity is compared with; tokens/s without the parts that nobody timed."""
    figure: float | None = getattr(prediction, what if what == "tokens_per_s" else f"peak_{what}_bytes")
    if not untimed or what != "tokens_per_s" or figure is None:
        return figure
    assert prediction.step_time_s is not None
    left_out = sum(prediction.time_parts_s[part] for part in untimed)
    return figure * prediction.step_time_s / (prediction.step_time_s - left_out)


def load_rows(kind: Kind = "all") -> tuple[MeasuredRow, ...]:
    """Recorded rows: "multi" those of several GPUs, all other kinds those of one.

    "memory" (allocated or reserved known), "allocated", "reserved", "speed", "oom"; "all" every single-GPU row.
    """
    rows = _read(SEVERAL_GPUS if kind == "multi" else SINGLE_GPU)
    if kind == "oom":
        return tuple(row for row in rows if row.status == "oom")
    figures = _FIGURES.get(kind)
    if figures is None:
        return rows
    return tuple(row for row in rows if any(row.measured(name) is not None for name in figures))


def own_rows() -> tuple[MeasuredRow, ...]:
    """The runs that this project measured itself."""
    return _read((OWN,))


_FIGURES: Mapping[str, tuple[Quantity, ...]] = {
    "memory": ("allocated", "reserved"),
    "allocated": ("allocated",),
    "reserved": ("reserved",),
    "speed": ("tokens_per_s",),
}
"""Kind of rows -> the figures of which they have one."""


@lru_cache(maxsize=3)
def _read(names: tuple[str, ...]) -> tuple[MeasuredRow, ...]:
    return tuple(row_of(values) for name in names for values in rows_of(DATA / name))


_FOR_READERS = (
    "variant", "reserved_p99_bytes", "loaded_reserved_bytes", "tokens_counted", "len_class", "avg_seq_len_tokens",
)  # fmt: skip
"""What lines say of a run that nothing here compares."""


def row_of(values: dict[str, Any]) -> MeasuredRow:
    """A row from its line."""
    if "setup" in values:
        values["setup"] = setup_from_request({"stack": STACK_OF.get(values["stack"], "trl"), **values["setup"]})
    for name in ("assumed", "differs", "untimed"):
        values[name] = tuple(values.get(name, ()))
    return MeasuredRow(**{name: value for name, value in values.items() if name not in _FOR_READERS})


def version_noise(rows: Iterable[MeasuredRow], what: Quantity) -> tuple[float, ...]:
    """How far apart runs of one configuration lie, as fractions of their median: the floor of any prediction's error.

    One spread (largest less smallest) per configuration measured at least twice, mostly under other library versions.
    """
    repeats: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        value = row.measured(what)
        if value is not None:
            repeats[row.group, row.config_id].append(value)
    return tuple(
        (max(values) - min(values)) / median(values) for _, values in sorted(repeats.items()) if len(values) > 1
    )
