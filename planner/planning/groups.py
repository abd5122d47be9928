"""The runs of a walk: the space under every layout, cut into parts in which only loss, optimizer and micro-batch are
open; and what walks of one model know of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

from planner.core.errors import SetupError
from planner.core.records import dataclass
from planner.hardware.gpu import GpuSpec
from planner.memory.attention_kernels import attention_generation, attention_kernel, takes_cudnn
from planner.memory.dtypes import dtype_policy_of
from planner.memory.engines import why_not
from planner.memory.workload import Workload
from planner.memory.workspace import cublas_workspace_bytes
from planner.models.encoders import encoder_of
from planner.models.spec import ModelSpec
from planner.planning.expressed import variants_as_run
from planner.planning.peaks import Family, Peaks, Rank, SharedLayers, distinct_parts
from planner.planning.space import branches, layer_variants, micro_batches
from planner.setup import TrainSetup
from planner.setup.allowed import FLEX, XFORMERS

if TYPE_CHECKING:
    from planner.planning.decision.layouts import Layout


Choices = Mapping[str, tuple[str, ...]]
"""Loss -> the optimizers that can be had with it."""

UNFUSED = frozenset({"eager", "math"})
"""Attention kernels that keep a matrix of tokens x tokens: more memory than any fused one, at less speed."""


@dataclass(slots=True)
class SetupGroup:
    """A branch under one layout with its attention kernels and layers: only loss, optimizer and micro-batch are open.

    Attributes:
        attentions: implementations that run the same `kernels` in every layer, and share all figures.
        choices: loss -> the optimizers that can be had with it.
        pairs: (micro-batch, accumulation).
        ranks: shared by all runs of the branch and spread, made when the first of them asks.
        dominating: the run with the first kernel family and fused attention, never larger; None where this has both, or
            all are asked for.
        ends: of a run that checkpoints some layers, those that checkpoint none and every one, which come before it.
        families: one of each rank, made when the first loss asks.
        peaks: by loss; alike: by loss and optimizers, of all runs of the same memory.
    """

    setup: TrainSetup
    shared: TrainSetup
    attentions: tuple[str, ...]
    kernels: tuple[str, ...]
    choices: Choices
    pairs: tuple[tuple[int, int], ...]
    ranks: list[Rank]
    dominating: "SetupGroup | None" = None
    ends: "tuple[SetupGroup, SetupGroup] | None" = None
    families: list[Family] = field(default_factory=list)
    peaks: dict[str, Peaks] = field(default_factory=dict)
    alike: dict[tuple[str, tuple[str, ...]], Peaks] | None = None

    def whole(self, loss: str) -> TrainSetup:
        """The setup with this loss and the first optimizer that can be had with it, one sequence at a time: how often a
        step generates hangs on all of its sequences."""
        micro, steps = self.pairs[0]
        return self.shared.replace_trusted(loss=loss, optimizer=self.choices[loss][0], accumulation_steps=micro * steps)


class WalkCache:
    """What walks of one model computed: the runs and their memory, for cards that run the same kernels."""

    def __init__(self, model: ModelSpec | None = None) -> None:
        self._model = model
        self._runs: dict[Any, tuple[SetupGroup, ...]] = {}
        self._peaks: dict[Any, dict[tuple[str, tuple[str, ...]], Peaks]] = {}
        self._layers = SharedLayers()

    @cached_property
    def of_copy(self) -> "WalkCache":
        """What walks of the 16-bit copy of packed weights computed."""
        return WalkCache()

    def runs(
        self, workload: Workload, values: Mapping[str, tuple[Any, ...]], layouts: "Sequence[Layout]"
    ) -> Iterable[SetupGroup]:
        """The runs of a workload; named launch targets may ask whose card it is."""
        if self._model is not workload.model and self._model != workload.model:
            vars(self).update(vars(WalkCache(workload.model)))  # forgets all that is of another
        named = (workload.targets, workload.gpu.vendor) if workload.targets else ()
        request = (workload.seq_len_tokens, workload.global_batch_seqs, workload.num_gpus, *workload.fixed.items())
        layout = tuple(tuple(placement.fields.items()) for placement in layouts)
        key = (_memory_kind(workload), named, request, tuple(values.items()), layout)
        if key not in self._runs:
            self._runs[key] = tuple(_runs(workload, values, layouts))
        return self._runs[key]

    def peaks(self, workload: Workload, run: SetupGroup, loss: str) -> Peaks:
        """The peaks of a run with one loss, of the fullest rank."""
        peaks = run.peaks.get(loss)
        if peaks is None:
            if run.alike is None:
                key = (_memory_kind(workload), run.kernels, run.shared, run.pairs)
                run.alike = self._peaks.setdefault(key, {})
            of = (loss, run.choices[loss])
            peaks = run.alike.get(of)
            if peaks is None:
                if not run.ranks:
                    parts = distinct_parts(workload.model, run.setup)
                    run.ranks.extend(Rank(part, workload.gpu, run.setup, run.pairs, self._layers) for part in parts)
                if not run.families:
                    run.families.extend(Family(rank, run.shared, run.kernels) for rank in run.ranks)
                num = len(run.pairs)
                least = range(num) if run.setup.pipeline_degree > 1 else {0, num - 1}
                peaks = run.alike[of] = Peaks([family.peaks(*of) for family in run.families], num, [*least])
            run.peaks[loss] = peaks
        return peaks


def _runs(
    workload: Workload, values: Mapping[str, tuple[Any, ...]], layouts: "Sequence[Layout]"
) -> Iterator[SetupGroup]:
    model, gpu = workload.model, workload.gpu
    for branch in branches(workload, values):
        of_branch = same_kernels(model, gpu, branch, values["attention"], uneven=workload.uneven)
        for fields in [layout.fields for layout in layouts] or [{}]:
            try:
                setup = branch.replace(**fields)
            except SetupError:
                continue
            # not every attention goes with a cut sequence
            cut = setup.context_degree > 1
            groups = same_kernels(model, gpu, setup, values["attention"], uneven=workload.uneven) if cut else of_branch
            pairs, choices = _pairs(workload, setup, values), _choices(model, setup, values)
            if pairs and choices:
                yield from _runs_of(workload, values, setup, groups, choices, pairs)


def _pairs(workload: Workload, setup: TrainSetup, values: Mapping[str, tuple[Any, ...]]) -> tuple[tuple[int, int], ...]:
    """(micro-batch, accumulation) of every way to make the global batch on the copies of a setup; () where none is."""
    own_batch, rest = divmod(workload.global_batch_seqs, setup.data_degree)
    if rest:
        return ()
    least = setup.least_seqs(own_batch)
    batches = values.get("micro_batch_seqs") or ((own_batch,) if least == own_batch else micro_batches(own_batch))
    pairs = [(m, own_batch // m) for m in batches if own_batch % m == 0 and m >= least]
    if setup.rollout is not None and (made := setup.rollout.generation_batch_seqs):
        pairs = [pair for pair in pairs if made % (pair[0] * setup.data_degree) == 0]
    return tuple(pairs)


def _runs_of(
    workload: Workload,
    values: Mapping[str, tuple[Any, ...]],
    setup: TrainSetup,
    groups: Mapping[tuple[str, ...], Sequence[str]],
    choices: Choices,
    pairs: tuple[tuple[int, int], ...],
) -> Iterable[SetupGroup]:
    ranks = list[Rank]()
    # ends come first, then those with more checkpoints
    layers_of = sorted(layer_variants(setup, values), key=lambda layers: int(layers["checkpointing"]))
    runs: dict[tuple[Any, ...], SetupGroup] = {}
    expressed: dict[tuple[Any, ...], Iterable[tuple[tuple[str, ...], Choices]]] = {}
    for kernels, attentions in groups.items():
        for layers in layers_of:
            run_fields = {"attention": attentions[0], **layers}
            shared = setup.replace_trusted(**run_fields)
            if (shared.compile and not shared.compiled) or (
                shared.selective_checkpointing and shared.attention in (XFORMERS, FLEX)
            ):
                continue
            apart = {**layers, "checkpointing": min(2, layers["checkpointing"])}  # how far is no matter of a file's
            alike_files = kernels, *apart.values()
            if alike_files not in expressed:
                expressed[alike_files] = _expressed(workload, shared, attentions, choices)
            for alike, fitting in expressed[alike_files]:
                run_fields["attention"] = alike[0]
                runs[tuple(run_fields.values())] = SetupGroup(setup, shared, alike, kernels, fitting, pairs, ranks)
    _name_dominating(workload, values, groups, runs)
    for (attention, kernels, every, *rest), run in runs.items():
        none, each = (runs.get((attention, kernels, apart, *rest)) for apart in (0, 1))
        if every > 1 and none is not None and each is not None and none.choices == each.choices == run.choices:
            run.ends = none, each
    return runs.values()


def _name_dominating(
    workload: Workload,
    values: Mapping[str, tuple[Any, ...]],
    groups: Mapping[tuple[str, ...], Sequence[str]],
    runs: Mapping[tuple[Any, ...], SetupGroup],
) -> None:
    """Gives every run the one that dominates it, where there is one; `runs` by attention, kernel family and the rest of
    its layers."""
    fused = next((any_of[0] for kernels, any_of in groups.items() if not UNFUSED & set(kernels)), None)
    first = values["kernels"][0] if "kernels" not in workload.fixed else None
    for (attention, kernels, *layers), run in runs.items():
        if fused is not None and "attention" not in workload.fixed and UNFUSED & set(run.kernels):
            attention, layers[-1] = fused, False  # selective checkpointing keeps what only fused kernels have
        other = runs.get((attention, first or kernels, *layers), run)
        if other is not run and all({*run.choices[loss]} <= {*other.choices.get(loss, ())} for loss in run.choices):
            run.dominating = other


def _expressed(
    workload: Workload, shared: TrainSetup, attentions: Sequence[str], choices: Choices
) -> Iterable[tuple[tuple[str, ...], Choices]]:
    """Attentions and the choices that the named launch targets run with each of them; all where none was named."""
    if not workload.targets:
        return [(tuple(attentions), choices)]
    groups: list[tuple[tuple[str, ...], Choices]] = []
    for attention in attentions:
        runnable = {}
        for loss, optimizers in choices.items():
            family = shared.replace_trusted(attention=attention, loss=loss)
            families = [family.replace_trusted(optimizer=optimizer) for optimizer in optimizers]
            fitting = tuple([each.optimizer for each in families if variants_as_run(each, workload) is not None])
            if fitting:
                runnable[loss] = fitting
        if groups and groups[-1][1] == runnable:
            groups[-1] = ((*groups[-1][0], attention), runnable)
        elif runnable:
            groups.append(((attention,), runnable))
    return groups


def _choices(model: ModelSpec, setup: TrainSetup, values: Mapping[str, tuple[Any, ...]]) -> Choices:
    if setup.single_gpu:
        return dict.fromkeys(values["loss"], tuple(values["optimizer"]))
    choices: dict[str, tuple[str, ...]] = {}
    for loss, optimizer in product(values["loss"], values["optimizer"]):
        if not why_not(model, setup.replace_trusted(loss=loss, optimizer=optimizer)):
            choices[loss] = (*choices.get(loss, ()), optimizer)
    return choices


def same_kernels(
    model: ModelSpec, gpu: GpuSpec, branch: TrainSetup, attentions: tuple[str, ...], *, uneven: bool = False
) -> dict[tuple[str, ...], list[str]]:
    """The attention implementations that can exist here, by the kernels that they run in every layer.

    Args:
        uneven: samples may differ in length.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    dtype = dtype_policy_of(branch).attention_input
    windows = branch.images is not None and encoder_of(model, branch.images).window_patches
    for attention in attentions:
        try:
            attended = branch.replace(attention=attention)
        except SetupError:
            continue
        kernels = tuple(
            attention_kernel(model, attended, gpu, layer.attention, dtype) if layer.attention else "none"
            for layer in model.layer_kinds
        )
        # SDPA's kernel has a mask where xformers has none, and takes an encoder's windows one after another
        apart = attention == XFORMERS or (windows and attention == "flash-attention-2")
        alike = groups.setdefault((*kernels, *[attention] * bool(apart)), [])
        # the same bytes at a lower rate are worth a point where padding takes the higher one away
        if uneven or not (alike and takes_cudnn(gpu, alike[0])):
            alike.append(attention)
    return groups


def _memory_kind(workload: Workload) -> tuple[Any, ...]:
    """What of a card decides how much memory a setup takes there."""
    gpu = workload.gpu
    linked = workload.num_gpus > 1 and gpu.nvlink_bytes_per_s > 0
    shared = gpu.memory_bytes if workload.objective_spec.rolls_out else 0  # of which vLLM takes its share
    apple = gpu.vendor == "Apple"
    return attention_generation(gpu), cublas_workspace_bytes(gpu), apple, linked, shared
