"""Launch files: one module per target tool. Pure: request in, text out, the same text for the same request.

Each module has `refusal(setup, model)`: why the tool cannot run a setup, "" when it can (or the model is not known);
`differences(setup)`: the settings that it runs otherwise than the setup says; `export(request, differences)`: its
files; `VALIDATED_WITH`: the versions that took such files.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from types import ModuleType

from planner.core.records import dataclass
from planner.frameworks.exporters import common, prepare, several_gpus
from planner.frameworks.exporters.install import too_new, versions
from planner.frameworks.exporters.text import comments, header
from planner.frameworks.exporters.types import (
    PLACEHOLDER_DATASET,
    DatasetChoice,
    Difference,
    Draft,
    ExportRequest,
    Launch,
    LaunchFile,
)
from planner.hardware.gpu import GpuSpec
from planner.models.spec import ModelSpec
from planner.options.images import IMAGE_TARGETS
from planner.options.kernels import kernels_refusal
from planner.options.stacks import STACKS, TARGET_ROWS
from planner.setup import TrainSetup
from planner.setup.allowed import EXPERT_TARGETS, FLEX, XFORMERS


@dataclass(frozen=True)
class Target:
    """One launch target: what it makes of a setup, and its files.

    Attributes:
        name: a stack's where it runs by its own code (`planner.options.stacks`).
    """

    name: str

    @cached_property
    def room(self) -> ModuleType:
        """Its module, imported when it is first asked for."""
        module = TARGET_ROWS[self.name].module
        return import_module(module or f"planner.frameworks.exporters.{self.name.replace('-', '_')}")

    def _unlike(self, setup: TrainSetup, gpu: GpuSpec | None) -> str:
        """Why it has no file for the setup's objective, its pictures or the card, "" where it has."""
        if gpu is not None and gpu.vendor == "Apple" and self.name == "unsloth":
            return f"Unsloth does not run on {gpu.name}: its kernels are Triton's"
        if gpu is not None and gpu.vendor != "Apple" and self.name == "mlx":
            return f"MLX-LM's file is written for Apple's GPUs, not for {gpu.name}"
        grouped = self.name in STACKS and STACKS[self.name].grouped_experts
        if (setup.lora_targets == EXPERT_TARGETS or setup.trainer.grouped_experts) and not grouped:
            return "adapters beside experts in 4 bits, or in the host's memory, are Loggetta's: use --target loggetta"
        if self.name not in OF_TARGETS.get(setup.attention, (self.name,)):
            return f"{setup.attention} is planned for {' and '.join(OF_TARGETS[setup.attention])} alone"
        if self.name not in setup.objective_spec.targets:
            others = ", ".join(setup.objective_spec.targets)
            return f"{setup.objective} is written for {others}"
        if setup.images is not None and self.name not in IMAGE_TARGETS:
            return f"{self.name} files are written for text: images are for {' and '.join(IMAGE_TARGETS)}"
        return ""

    def refusal(self, setup: TrainSetup, model: ModelSpec | None = None, gpu: GpuSpec | None = None) -> str:
        """Why it cannot run a setup of a model on a card (None: not known), "" when it can."""
        reason = self._unlike(setup, gpu) or too_new(model, versions(self.room.VALIDATED_WITH, setup))
        return reason or str(self.room.refusal(setup, model))

    def differences(
        self, setup: TrainSetup, gpu: GpuSpec | None = None, model: ModelSpec | None = None
    ) -> tuple[Difference, ...]:
        """What it runs otherwise than a setup says; nothing for the setup that it makes of another."""
        differences: tuple[Difference, ...] = self.room.differences(setup)
        if model is not None:
            differences = tuple(_without_kernels(differences, model.model_type))
        return tuple(_without_liger(differences)) if gpu is not None and gpu.vendor == "Apple" else differences

    def as_run(self, setup: TrainSetup, model: ModelSpec | None = None, gpu: GpuSpec | None = None) -> TrainSetup | str:
        """The setup that the target really runs, or why it runs none.

        What it makes of a setup must be one that it can run as well.
        """
        if reason := self.refusal(setup, model, gpu):
            return reason
        changes = {difference.field: difference.runs_as for difference in self.differences(setup, gpu, model)}
        runs = (setup.replace(**changes) if changes else setup).run_by(self.name)
        return (changes and self.refusal(runs, model, gpu)) or runs

    def expresses(self, setup: TrainSetup, model: ModelSpec | None = None, gpu: GpuSpec | None = None) -> bool:
        """Whether it runs exactly this setup: `as_run` gives the same."""
        other = self.differences(setup, gpu, model) or self.refusal(setup, model, gpu)
        return not other and setup.run_by(self.name) == setup

    def export(self, request: ExportRequest) -> Launch:
        """Its files for one request."""
        setup, room = request.setup, self.room
        reason = self._unlike(setup, request.gpu)
        objective = setup.objective_spec
        if not reason and setup.micro_batch_seqs < objective.least_samples:
            reason = f"{setup.objective} needs a micro-batch of at least {objective.least_samples} {objective.sample}s"
        runs = self.as_run(setup, request.model, request.gpu)
        group = setup.rollout_settings.num_generations
        if not reason and objective.rolls_out and setup.generation_seqs % group:
            reason = f"a generation of {setup.generation_seqs} completions is not whole groups of {group}"
        if not reason and request.serves and request.num_nodes > 1:
            reason = "no vLLM server is written beside a job on several nodes: use --generator vllm-sleep"
        columns = request.dataset.columns if request.dataset is not None else ""
        if isinstance(runs, str) or (reason := reason or prepare.refusal(self.name, columns, request.loss_on)):
            return Launch(target=self.name, refused=reason or str(runs))
        differences = self.differences(setup, request.gpu, request.model)
        tested = versions(room.VALIDATED_WITH, setup)
        draft: Draft = room.export(request, differences)
        threads = several_gpus.cpu_threads(request, self.name)
        if threads:
            command = draft.command if "OMP_NUM_THREADS" in draft.command else common.after(threads, draft.command)
            draft = replace(draft, command=command, notes=(*draft.notes, several_gpus.THREADS_NOTE))
        files, main = draft.files, draft.main
        made = prepare.command(request, self.name) if draft.complete else ""
        if main is not None:
            command = f"{made} && {draft.command}" if made else draft.command
            head = header(request, draft.title, command, tested, differences=differences, notes=draft.notes)
            files = (LaunchFile(path=main.path, text=comments(head) + main.text), *files)
        parts = {**vars(draft), "files": files, "main": None, "title": "", "prepare": made}
        return Launch(target=self.name, runs=runs, differences=differences, validated_with=tested, **parts)


OF_TARGETS = {XFORMERS: ("axolotl",), FLEX: ("trl", "hf")}
"""Attentions that not every target has -> those for which they are planned."""


def _without_kernels(differences: tuple[Difference, ...], model_type: str) -> Iterator[Difference]:
    """What a target runs otherwise of a model type that its kernels do not run: the layers as they are."""
    for difference in differences:
        if difference.field != "kernels" or not kernels_refusal(difference.runs_as, model_type):
            yield difference
        elif difference.planned != "eager":
            yield replace(difference, runs_as="eager")


def _without_liger(differences: tuple[Difference, ...]) -> Iterator[Difference]:
    """What a target runs otherwise where Liger, which it would take, has no kernels: the plain loss and layers."""
    plain = {"loss": "full", "kernels": "eager"}
    for difference in differences:
        if difference.runs_as != "liger":
            yield difference
        elif difference.planned != plain[difference.field]:
            reason = "Liger's kernels are Triton's, which does not compile for Apple's GPUs"
            yield replace(difference, runs_as=plain[difference.field], reason=reason)


TARGETS: Mapping[str, Target] = {name: Target(name) for name in TARGET_ROWS}
"""Target name -> what it makes of a setup, and its files."""
EXPORTERS: Mapping[str, Callable[[ExportRequest], Launch]] = {name: target.export for name, target in TARGETS.items()}
"""Target name -> its files for one request: the same text for the same request, always."""

__all__ = [
    "EXPORTERS",
    "PLACEHOLDER_DATASET",
    "TARGETS",
    "DatasetChoice",
    "Difference",
    "ExportRequest",
    "Launch",
    "LaunchFile",
    "Target",
]
