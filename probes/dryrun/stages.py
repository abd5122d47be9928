"""Jobs whose ranks hold different layers: every distinct stage is traced as the rank that holds it.

Pipelines run PyTorch's own schedules (`probes.stack.pipeline`) in the fake process group: what is sent and received are
tensors that nobody fills. Stages between the second and the last hold no more than the second does and are not traced.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from planner.memory.rank_part import stage_sizes
from planner.setup import TrainSetup
from probes.dryrun.depths import DepthPlan, layer_kinds, plan_depth
from probes.dryrun.fakeworld import fake_world
from probes.dryrun.layout_tracker import LayoutTracker
from probes.dryrun.rank import JobWorld
from probes.dryrun.report import DryRunReport
from probes.dryrun.trace import Owners, load
from probes.patching import Replacement, nothing, replaced
from probes.stack.configs import load_config, num_layers, truncated_config
from probes.stack.parallelize import Layout
from probes.stack.pipeline import pipeline_layout

BOUNDARY = "stage boundary buffers"
Report = Callable[[DepthPlan, "PipelineWorld"], DryRunReport]


def run_stages(raw_config: Mapping[str, Any], setup: TrainSetup, report: Report, *, full_depth: bool) -> DryRunReport:
    """The report of the stage with the highest allocated peak; the others' peaks in its notes."""
    degree = setup.pipeline_degree
    config = load_config(raw_config)
    reports: dict[int, DryRunReport] = {}
    for stage in sorted({0, min(1, degree - 1), degree - 1}):  # between: no more in flight, and no other layers
        part = stage_config(config, degree, stage)
        # FSDP2 reduces all layers' gradients behind the last micro-batch, which repeats no layer's events
        plan = plan_depth(part, checkpointing=setup.checkpointing, full_depth=full_depth or setup.data_degree > 1)
        with fake_world(setup.num_gpus, rank=stage * setup.data_degree):
            reports[stage] = report(plan, PipelineWorld(setup, stage))
    peaks = {stage: stage_report.prediction.peak_allocated_bytes for stage, stage_report in reports.items()}
    worst = max(peaks, key=lambda stage: peaks[stage])
    by_stage = ", ".join(f"{stage + 1}: {peak:,} bytes" for stage, peak in peaks.items())
    note = f"stage {worst + 1} of {degree} holds the most; allocated peaks by stage: {by_stage}"
    prediction = reports[worst].prediction
    return replace(reports[worst], prediction=replace(prediction, notes=(*prediction.notes, note)))


def stage_config(config: Any, num_stages: int, stage: int) -> Any:
    """The configuration of a model of the layers of one stage alone.

    Raises:
        ValueError: layers that no configuration of their own gives (they differ by their place in the model).
    """
    sizes = stage_sizes(num_layers(config), num_stages)
    start, size = sum(sizes[:stage]), sizes[stage]
    part = truncated_config(config, size)
    types = getattr(config.get_text_config(), "layer_types", None)
    if start and types:
        part.get_text_config().layer_types = list(types[start : start + size])
    if layer_kinds(part) != layer_kinds(config)[start : start + size]:
        raise ValueError(f"layers {start} to {start + size - 1} cannot be built without those before them")
    return part


class PipelineWorld(JobWorld):
    """A rank of a pipeline that holds one stage."""

    def __init__(self, setup: TrainSetup, stage: int) -> None:
        super().__init__(setup)
        self._stage = stage

    @contextmanager
    def prepared(self, tracker: LayoutTracker, model: Any, reference: Any) -> Iterator[tuple[Layout, Owners]]:
        setup, device = self._setup, next(model.parameters()).device
        with _static_shapes(tracker), tracker.following_shards() if setup.data_degree > 1 else nullcontext():
            layout = pipeline_layout(model, setup, self._stage, device=device)
            yield layout, load(tracker, model)


def _static_shapes(tracker: LayoutTracker) -> AbstractContextManager[None]:
    """Within it, stages take the shapes that they were given without asking their neighbours, and their receive buffers
    carry their name."""
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining.stage import InferenceMode, PipelineStage

    plain = schedules.PipelineScheduleSingle._initialize_stage

    def agreed(self: Any, stages: Any, has_backward: bool, p2p_done: bool) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        with tracker.labelled(BOUNDARY):
            plain(self, *args, **kwargs)

    def under_way(ops: list[Any], desc: str | None = None) -> list[Any]:
        """A message holds its tensor as long as the schedule holds the message.

        Source: PyTorch 2.13 ProcessGroupNCCL.cpp `pointToPoint`: the work keeps a reference to what is sent.
        """
        return [SimpleNamespace(tensor=op.tensor, wait=nothing) for op in ops]

    replacements: list[Replacement] = [
        (schedules._PipelineSchedule, "_warmup_p2p", agreed),
        (schedules.PipelineScheduleSingle, "_initialize_stage", initialize),
        (PipelineStage, "_post_metadata_inference_cleanup", nothing),
    ]
    if tracker.device_type == "meta":
        replacements.append((schedules, "_batch_p2p", under_way))
    return replaced(replacements)
