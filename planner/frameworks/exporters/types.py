"""What an exporter takes and gives: a request in, files and declared differences out. Pure and deterministic."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from planner.core.errors import UsageError
from planner.core.records import dataclass
from planner.frameworks.hyperparameters import Hyperparameters
from planner.hardware.gpu import GpuSpec
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup

PLACEHOLDER_DATASET = "YOUR_DATASET"
"""Stands where the user's dataset belongs; every file marks the line."""


@dataclass(frozen=True, kw_only=True)
class DatasetChoice:
    """The dataset of a launch file.

    Attributes:
        path: hub id, or a local file or directory, relative to where the launch command runs.
        columns: the kind of its samples (`planner.samples.rows.kinds_of`); "" where nobody has seen them.
        local: whether `path` is on disk; plain: whether every target's loader takes such a file.
        names: known name -> the column that has it, where columns have other names.
        fields: the columns of its first row; () where nobody has seen them.
    """

    path: str
    columns: str = "messages"
    split: str = "train"
    local: bool = False
    plain: bool = True
    names: Mapping[str, str] = field(default_factory=dict)
    fields: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """All that a launch file is made of.

    Attributes:
        model_id: hub id or directory, as the user gave it.
        model: its inventory; None where unknown (then "attention" targets take the usual four names).
        gpu: for the header and the environment; None leaves GPU-specific lines out.
        dataset: None writes a marked placeholder.
        output_dir: relative directory the run writes to.
        save: whether checkpoints are saved on the way (the final model always is).
        num_steps: optimizer steps of the run, None where they are not known.
        step_s: seconds that a step is predicted to take, 0 where none are.
        loss_on: "answers", where the data have any, or "all" tokens.
        held_out: samples that are evaluated instead of trained on; None: a share, of data whose number is not known.
        about: sentences for the header (predicted peak, level).
        lacks_template: whether the tokenizer has no chat template; None: not known.
        num_nodes: machines over which `setup.num_gpus` are spread evenly.
    """

    model_id: str
    setup: TrainSetup
    hyper: Hyperparameters
    model: ModelSpec | None = None
    gpu: GpuSpec | None = None
    dataset: DatasetChoice | None = None
    output_dir: str = "outputs"
    save: bool = True
    logging_steps: int = 10
    num_steps: int | None = None
    step_s: float = 0.0
    loss_on: str = "answers"
    held_out: int | None = None
    about: tuple[str, ...] = ()
    lacks_template: bool | None = None
    num_nodes: int = 1

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.setup.num_gpus % self.num_nodes:
            raise UsageError(
                f"{self.setup.num_gpus} GPUs cannot be spread evenly over {self.num_nodes} nodes",
                hint="--gpus counts all GPUs of the job, over all nodes",
            )

    @property
    def columns(self) -> str:
        """The data set's columns; where nobody said, those that the objective trains on."""
        kinds = self.setup.objective_spec.data
        columns = self.dataset.columns if self.dataset is not None else kinds[0]
        return columns if columns in kinds else kinds[0]

    @property
    def evaluates(self) -> bool:
        """Whether samples are held out and evaluated between steps, which takes no more than a step."""
        setup = self.setup
        seen = setup.images is None and not (self.model is not None and self.model.front_end is not None)
        whole = setup.context_degree == 1 and setup.pipeline_degree == 1
        return setup.objective_spec.supervised and seen and whole and self.held_out != 0

    @property
    def gpus_per_node(self) -> int:
        """GPUs of one machine that train."""
        return self.setup.num_gpus // self.num_nodes

    @property
    def serves(self) -> bool:
        """Whether a vLLM server has a GPU beside those."""
        return self.setup.objective_spec.rolls_out and self.setup.rollout_settings.generator == "vllm-server"

    @property
    def job_gpus_per_node(self) -> int:
        """GPUs of one machine that a job asks for."""
        return self.gpus_per_node + self.serves


@dataclass(frozen=True, kw_only=True)
class LaunchFile:
    """One file of a launch: a relative path and its text."""

    path: str
    text: str
    executable: bool = False


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A setting that the target runs otherwise than planned, and why. Written into the file and the plan."""

    field: str
    planned: Any
    runs_as: Any
    reason: str

    def sentence(self) -> str:
        """One line for a file's header."""
        return f"{self.field}: planned {_plain(self.planned)}, runs as {_plain(self.runs_as)} ({self.reason})"


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What a target's module makes of a setup that the target can run.

    Attributes:
        main: the file that starts the run, still without its head (`planner.frameworks.exporters.text.header`), which
        has `title`;
            files: all others.
        command: the one command that starts the run, from the directory that holds `launch/`.
        complete: False for a part that other files need, which its command alone does not start.
        prepare: the command before it that makes the data, "" where they are read as they are.
        server: the command of a server that must run beside it on a GPU of its own, "" where it needs none.
        python: oldest Python that the tested versions install on.
    """

    title: str = ""
    main: LaunchFile | None = None
    files: tuple[LaunchFile, ...] = ()
    command: str = ""
    notes: tuple[str, ...] = ()
    complete: bool = True
    prepare: str = ""
    server: str = ""
    python: str = "3.11"


@dataclass(frozen=True, kw_only=True)
class Launch(Draft):
    """What one target gets: its files and command, or why there are none (and then no files).

    Attributes:
        runs: the setup that really runs, None where there are no files or they are beside all targets'. Reading the
            files back gives it.
        differences: settings in which it is not the one that was asked for.
        refused: why the target has no files for this setup; "" when it has.
        validated_with: distribution -> version that accepted such files.
        about: what is predicted of the run, as in the files' headers.
        peak_device_bytes, level: the prediction of what really runs and its level; 0 and "" where nobody predicted.
    """

    target: str
    runs: TrainSetup | None = None
    differences: tuple[Difference, ...] = ()
    refused: str = ""
    validated_with: Mapping[str, str] = field(default_factory=dict)
    about: tuple[str, ...] = ()
    peak_device_bytes: int = 0
    level: str = ""

    @property
    def unsupported(self) -> tuple[str, ...]:
        """What the target cannot express, one sentence each."""
        sentences = (difference.sentence() for difference in self.differences)
        return (self.refused, *sentences) if self.refused else tuple(sentences)


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in value)
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
