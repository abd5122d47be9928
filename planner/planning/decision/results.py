"""What the walk learned, by spread and by node of the decision tree, and which point is the best of it."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

from planner.core.errors import SetupError
from planner.core.records import dataclass
from planner.core.units import gib
from planner.hardware.gpu import GpuSpec
from planner.memory.engines import why_not
from planner.memory.model import step_profile_of
from planner.memory.states import loading_refusal
from planner.memory.workload import Workload
from planner.models.spec import ModelSpec
from planner.planning.decision.layouts import Layout, LayoutKey, layout_key, layout_order
from planner.planning.decision.node import Node, node_of_setup
from planner.planning.decision.policy import equals, full_quality, point_tie_break, worst_quality
from planner.planning.evidence.bands import dry_run_band, memory_band, profile_band
from planner.planning.evidence.followed import why_no_dry_run
from planner.planning.groups import WalkCache
from planner.planning.plan import CorrectionKey, correction_key
from planner.planning.refine import ANY_SETUP, CANNOT_RUN, exact_bytes, layout_correction_key, stopped
from planner.planning.space import PREFERENCE_FRACTION as PREFERENCE_FRACTION
from planner.planning.space import branches, planned_values
from planner.planning.walk import Padding, WalkedSetup, walk
from planner.setup import TrainSetup
from planner.setup.packages import PACKAGE_PRICES

TIE_FRACTION = 0.01
"""Spreads closer than this in speed are a tie, far below the speed model's error: the simpler one wins."""


@dataclass(slots=True)
class NodeResults:
    """What the walk learned about one node.

    Attributes:
        limits: when its points surely fit, and what of their speed is given for what is preferred; None: no points.
        fitting: the points that fit, in the order of the walk; `sure`: those that fit for sure, or that a dry run will
            look at before anything is said (`Limits`).
        worst_quality: the worst `policy.full_quality` that is taken where something better surely fits.
        nearest: (peak over what would surely fit, point) of the point that fits and has the least of it.
        preferred: of the points that surely fit, and of all that do: after how many walked points, and which.
        margins: `bytes_with_margin` of points that share a setup, by its identity, and an attention.
    """

    walked: int = 0
    infeasible: int = 0
    limits: "Limits | None" = None
    smallest: WalkedSetup | None = None
    smallest_unchecked: WalkedSetup | None = None
    fitting: list[WalkedSetup] = field(default_factory=list)
    sure: list[WalkedSetup] = field(default_factory=list)
    nearest: tuple[float, WalkedSetup] | None = None
    worst_quality: int = 1
    preferred: dict[bool, tuple[int, WalkedSetup | None]] = field(default_factory=dict)
    margins: dict[tuple[int, str], float] = field(default_factory=dict)

    def best(self) -> WalkedSetup | None:
        """The best that surely fits; where nothing does, what comes nearest to it: more memory then never means less
        speed, because it surely fits first."""
        return self.best_sure() or (self.nearest[1] if self.nearest else None)

    def best_sure(self) -> WalkedSetup | None:
        """Of the points that surely fit and are no slower than the fastest of them by more than is given
        (`Limits`): the simplest, then the smallest, then the fastest."""
        return self._preferred(self.sure, sure=True)

    def speed(self, point: WalkedSetup) -> float:
        """Tokens/s of a point, where its samples differ in length."""
        padding = self.limits.padding if self.limits is not None else None
        return point.tokens_per_s * (padding.kept_fraction(point) if padding is not None else 1.0)

    def best_beside(self, wanted: Callable[[TrainSetup], bool] | None = None) -> WalkedSetup | None:
        """The best whose shared setup is wanted, for who is shown it and has no dry run of it: what fits by more than
        its level errs goes first, which all of `sure` does where no dry runs follow."""
        followed = self.limits is not None and self.limits.corrections is not None
        if wanted is None and not followed:
            return self.best_sure()
        points = [point for point in self.sure if wanted is None or wanted(point.shared)]
        fitting = [
            point for point in points if not followed or point.peak_device_bytes <= self.bytes_with_margin(point)
        ]
        return self._find_preferred(fitting or points)

    def best_tight(self) -> WalkedSetup | None:
        """The same of all points that fit, whether or not the error band reaches past the budget."""
        return self._preferred(self.fitting, sure=False)

    @property
    def fit_words(self) -> str:
        """Whether its best fits: "fits", or "may fit" where the error band reaches past the budget."""
        return "fits" if self.sure else "may fit"

    def _preferred(self, points: list[WalkedSetup], *, sure: bool) -> WalkedSetup | None:
        cached = self.preferred.get(sure)
        if cached is None or cached[0] != self.walked:
            cached = self.preferred[sure] = self.walked, self._find_preferred(points, sure=sure)
        return cached[1]

    def _find_preferred(self, points: list[WalkedSetup], *, sure: bool = False) -> WalkedSetup | None:
        """The preferred one of those that padding leaves room; where it leaves none, of all, or none that is sure."""
        if not points or self.limits is None:
            return None
        if not self.worst_quality:
            points = [point for point in points if not full_quality(point.shared)]
            if not points:
                return None

        def preference(point: WalkedSetup) -> tuple[bool, int, int, int, float]:
            lossy, simple = point_tie_break(point.shared, point.attention, point.loss, point.optimizer)
            tight = point.peak_device_bytes > self.bytes_with_margin(point)
            return tight, lossy, simple, point.peak_device_bytes, -point.tokens_per_s

        given, padding, open_points = self.limits.given_fraction, self.limits.padding, points
        while open_points:
            near = near_fastest(open_points, given, PACKAGE_PRICES if given else {}, padding)
            best = min(near, key=preference)
            if padding is None:
                return best
            proven_bytes = self.limits.budget_bytes / (1 + dry_run_band(best.family))
            if padding.fits(best, min(self.limits.taken_bytes(best.family), proven_bytes)):
                return padding.with_own_speed(best)
            open_points = [point for point in open_points if point is not best]
        return None if sure else min(points, key=preference)

    def bytes_with_margin(self, point: WalkedSetup) -> float:
        """The largest peak at which a point fits by more than its level errs."""
        key = id(point.shared), point.attention
        if key not in self.margins:
            setup = point.shared.replace_trusted(attention=point.attention)
            self.margins[key] = self.limits.bytes_with_margin(setup) if self.limits is not None else 0.0
        return self.margins[key]

    def ranked(self) -> list[WalkedSetup]:
        return sorted(self.fitting, key=lambda point: -point.tokens_per_s)


def near_fastest(
    points: list[WalkedSetup],
    fraction: float,
    prices: Mapping[str, float] | None = None,
    padding: Padding | None = None,
) -> list[WalkedSetup]:
    """The points no slower than the fastest by this share, each taken for slower by the price of its attention and by
    what padding costs it (which is asked only of those that are fast enough on full rows)."""
    prices = prices or {}
    worth = [point.tokens_per_s * (1 - prices.get(point.attention, 0.0)) for point in points]
    if padding is not None:
        fastest = 0.0
        for index in sorted(range(len(points)), key=worth.__getitem__, reverse=True):
            if worth[index] < fastest * (1 - fraction):
                break
            worth[index] *= padding.kept_fraction(points[index])
            fastest = max(fastest, worth[index])
    floor = max(worth) * (1 - fraction)
    return [point for point, speed in zip(points, worth, strict=True) if speed >= floor]


@dataclass(frozen=True, slots=True)
class Limits:
    """When a point surely fits: the one rule by which a tight fit does not win.

    A figure's own band is the reserve that it needs beside the budget: peak x (1 + band) must fit. The band is the
    formula's (`memory_band`) or the step profile's, and the dry run's for a family that it has corrected. Where dry
    runs follow (`refine`) the others may come first by their peak alone: a dry run sees them before they are taken.

    Attributes:
        corrections: ratios that dry runs showed, by family; None: the formula stands alone.
        given_fraction: of the speed, for what is preferred; nothing for who asks for speed.
        gpu: whose step profiles are known.
        padding: what samples that differ in length cost a point; None: they do not differ.
    """

    model: ModelSpec
    budget_bytes: int
    corrections: Mapping[CorrectionKey, float] | None = None
    given_fraction: float = PREFERENCE_FRACTION
    gpu: GpuSpec | None = None
    padding: Padding | None = None

    def ratio(self, setup: TrainSetup) -> float | None:
        """By how much dry runs of a setup's family, or of its layout, correct the formula's peak; None: nothing did."""
        if not self.corrections:
            return None
        if stopped(self.corrections, setup):
            return CANNOT_RUN
        rest = self.corrections.get(ANY_SETUP)
        if not setup.single_gpu:
            rest = self.corrections.get(layout_correction_key(setup), rest)
        return self.corrections.get(correction_key(setup), rest)

    def fitting_bytes(self, setup: TrainSetup) -> int:
        """The largest peak of the formula that fits when it is corrected."""
        return self._before_correction(setup, self.budget_bytes)

    def surely_fitting_bytes(self, setup: TrainSetup) -> int:
        """The largest peak of the formula that fits by more than its level errs when it is corrected."""
        return self._before_correction(setup, int(self.bytes_with_margin(setup)))

    def _before_correction(self, setup: TrainSetup, limit_bytes: int) -> int:
        ratio = self.ratio(setup)
        if not ratio:
            return limit_bytes
        exact = exact_bytes(self.model, setup)
        if exact > limit_bytes:
            return limit_bytes
        budget = limit_bytes - exact
        uncorrected_bytes = int((budget + 1) / ratio) + 1
        while int(uncorrected_bytes * ratio) > budget:
            uncorrected_bytes -= 1
        return exact + uncorrected_bytes

    def bytes_with_margin(self, setup: TrainSetup) -> float:
        """The largest peak at which this setup fits by more than its level errs."""
        if self.corrections is not None and correction_key(setup) in self.corrections:
            band = dry_run_band(setup)
        elif self.gpu is not None and step_profile_of(self.model, self.gpu, setup) is not None:
            band = profile_band(setup)
        else:
            band = memory_band(self.model, setup, self.gpu)
        return self.budget_bytes / (1 + band)

    def taken_bytes(self, setup: TrainSetup) -> float:
        """The largest peak at which this setup is taken before one that only may fit."""
        awaited = self.corrections is not None and correction_key(setup) not in self.corrections
        awaited = awaited and not why_no_dry_run(setup)
        return self.budget_bytes if awaited else self.bytes_with_margin(setup)


def collect_into(
    points: Iterable[WalkedSetup], limits: Limits, results_of: Callable[[TrainSetup], NodeResults]
) -> None:
    """Adds the walked points to the results that `results_of` gives for what they share."""
    shared = node = attention = None
    taken_bytes, least, budget_bytes = 0.0, 1, limits.budget_bytes
    by_attention: dict[str, float] = {}
    for point in points:
        if point.shared is not shared or node is None:  # points come in runs that share their branch
            shared = point.shared
            node, attention, by_attention = results_of(shared), None, {}
            node.limits = limits
            least = point.micro_batch_seqs  # runs begin with the smallest
        if point.attention != attention:
            attention = point.attention
            if attention not in by_attention:
                setup = shared.replace_trusted(attention=attention)
                by_attention[attention] = limits.taken_bytes(setup)
            taken_bytes = by_attention[attention]
        node.walked += 1 + point.beyond
        peak = point.peak_device_bytes
        if point.micro_batch_seqs == least:
            if node.smallest is None or peak < node.smallest.peak_device_bytes:
                node.smallest = point
            if not point.shared.checkpointing and (
                node.smallest_unchecked is None or peak < node.smallest_unchecked.peak_device_bytes
            ):
                node.smallest_unchecked = point
        node.infeasible += point.beyond
        if peak > budget_bytes:
            node.infeasible += 1
            continue
        node.fitting.append(point)
        if peak <= taken_bytes:
            node.sure.append(point)
        if node.nearest is None or peak / taken_bytes < node.nearest[0]:
            node.nearest = peak / taken_bytes, point


LAYOUT_GAIN_FRACTION = PREFERENCE_FRACTION
"""A less simple spread replaces its equal (precision, optimizer) only where it is predicted so much faster."""


SHARED_MEMORY = "the host's memory is the GPU's own: nothing is offloaded"
"""Why a DGX Spark, a Jetson, ... has no setup with states on the host."""


@dataclass(slots=True)
class WalkResults:
    """Results of every (layout, node) walked so far.

    Attributes:
        refused: (layout, node) -> why no engine runs it, where none of the node's branches can run.
        too_large_for_hosts: layout -> bytes that would lie in every node's host, beyond what it is taken to hold.
        whole: `nodes` of what was walked, until more is.
    """

    cache: WalkCache = field(default_factory=WalkCache)
    by_layout_and_node: dict[tuple[LayoutKey, Node], NodeResults] = field(default_factory=dict)
    walked: list[Layout] = field(default_factory=list)
    refused: dict[tuple[LayoutKey, Node], str] = field(default_factory=dict)
    too_large_for_hosts: dict[LayoutKey, int] = field(default_factory=dict)
    whole: dict[Node, NodeResults] = field(default_factory=dict)

    def of(self, shared: TrainSetup) -> NodeResults:
        """The facts that a point with this shared setup adds to."""
        key = (layout_key(shared), node_of_setup(shared))
        return self.by_layout_and_node.get(key) or self.by_layout_and_node.setdefault(key, NodeResults())

    def of_node(self, node: Node) -> dict[LayoutKey, NodeResults]:
        return {key: results for (key, name), results in self.by_layout_and_node.items() if name == node}

    def nodes(self) -> dict[Node, NodeResults]:
        """Results of every node over all layouts; of the points that fit those of its best layout (`best_layout`)."""
        if self.whole:
            return self.whole
        # of full fine-tuning, whether what has no fp32 master weights may be taken under any layout
        full_results = self.of_node(Node.FULL).values()
        worst = worst_quality((point.shared, point.tokens_per_s) for results in full_results for point in results.sure)
        for results in full_results:
            results.worst_quality, results.preferred = worst, {}
        for node in Node:
            by_layout = self.of_node(node)
            whole = self.whole[node] = merged(by_layout.values())
            best = best_layout(by_layout)
            taken = by_layout[layout_key(best.shared)] if best is not None else NodeResults()
            whole.fitting, whole.sure, whole.nearest = taken.fitting, taken.sure, taken.nearest
        return self.whole


def merged(parts: Collection[NodeResults]) -> NodeResults:
    """The facts of several spreads as those of one node."""
    whole = NodeResults()
    for part in parts:
        whole.limits = part.limits or whole.limits
        whole.walked += part.walked
        whole.infeasible += part.infeasible
        whole.fitting += part.fitting
        whole.sure += part.sure
        for name in ("smallest", "smallest_unchecked"):
            mine, other = getattr(whole, name), getattr(part, name)
            if other is not None and (mine is None or other.peak_device_bytes < mine.peak_device_bytes):
                setattr(whole, name, other)
    return whole


def best_layout(by_layout: Mapping[LayoutKey, NodeResults]) -> WalkedSetup | None:
    """The best point over all layouts, None where nothing fits.

    DDP needs no gathering and no tuning, FSDP2 no package beside PyTorch, DeepSpeed no other training loop: each gives
    way to the next only where that is clearly faster. Within a family the fastest counts; within one percent the
    simplest. A spread that surely fits goes before all that only may.
    """
    sure = [results for results in by_layout.values() if results.best_sure() is not None]
    families: dict[int, list[tuple[float, WalkedSetup]]] = {}
    for results in sure or by_layout.values():
        if (point := results.best()) is not None:
            plain = not point.shared.is_split and point.shared.offload == "none"
            family = _FAMILIES.get(point.shared.parallel, 3) if plain else 3
            families.setdefault(family, []).append((results.speed(point), point))
    taken, taken_speed = None, 0.0
    for number in sorted(families):
        # The simplest spread of those within one percent of the fastest.
        floor = max(speed for speed, _ in families[number]) * (1 - TIE_FRACTION)
        close = [each for each in families[number] if each[0] >= floor]
        speed, best = min(close, key=lambda each: (layout_order(each[1].shared), -each[0]))
        worth = LAYOUT_GAIN_FRACTION if taken is not None and equals(taken.family, best.family) else 0.0
        if taken is None or speed > taken_speed * (1 + worth):
            taken, taken_speed = best, speed
    return taken


_FAMILIES = {"ddp": 0, "fsdp2": 1, "zero1": 2, "zero2": 2, "zero3": 2}
"""Of plain spreads; 3: anything split, offloaded or in one process."""


def add_layouts(
    workload: Workload,
    values: Mapping[str, tuple[Any, ...]],
    results: WalkResults,
    chosen: Sequence[Layout],
    corrections: Mapping[CorrectionKey, float] | None = None,
) -> None:
    """Adds the points of these layouts to the facts; `corrections` as in `Limits`."""
    if not chosen:
        return
    values = planned_values(workload, values)
    results.walked += [layout for layout in chosen if layout not in results.walked]
    results.whole = {}
    given = 0.0 if workload.prefer == "speed" else PREFERENCE_FRACTION
    padding = Padding(workload) if workload.uneven else None
    limits = Limits(workload.model, workload.budget_bytes, corrections, given, workload.gpu, padding)
    points: Iterable[WalkedSetup] = walk(
        workload, values, chosen, results.cache, limits.fitting_bytes, limits.surely_fitting_bytes
    )
    limited = workload.host_bytes or workload.gpu.shares_host_memory or "offload" not in workload.fixed
    if limited and (True in values["activation_offload"] or any(layout.stage == "offload" for layout in chosen)):
        points = _within_host_memory(workload, results, points)
    collect_into(_corrected(points, limits) if corrections else points, limits, results.of)
    _note_refusals(workload, values, results, chosen)


def _within_host_memory(
    workload: Workload, results: WalkResults, points: Iterable[WalkedSetup]
) -> Iterator[WalkedSetup]:
    """The points whose offloaded states and checkpoints the host can hold, or a usual one; of the others those with
    states are refused with their bytes.

    Who asks for offloading and says nothing of the machine knows it: nothing is left out then.
    """
    from planner.memory.engines.host import assumed_host_bytes, host_bytes_per_node  # one GPU never needs it

    limit = assumed_host_bytes(workload)
    num_nodes = workload.cluster.num_nodes if workload.cluster is not None else 1
    wanted = not workload.host_bytes and "activation_offload" in workload.fixed
    for point in points:
        if point.shared.offload == "none" and not point.shared.activation_offload:
            yield point
            continue
        plain = point.shared.replace_trusted(optimizer=point.optimizer, checkpointing=1, attention="sdpa")
        if plain.activation_offload:
            plain = plain.replace_trusted(
                checkpointing=point.shared.checkpointing, micro_batch_seqs=point.micro_batch_seqs
            )
        need = host_bytes_per_node(workload.model, plain, num_nodes)
        if need <= limit or (plain.offload == "none" and wanted):
            yield point
        elif plain.offload != "none":
            key = layout_key(point.shared)
            results.too_large_for_hosts[key] = min(need, results.too_large_for_hosts.get(key, need))
            there = f"{gib(need)} would lie in every node's host memory, which is taken to hold {gib(limit)}"
            reason = f"{there} (--host-memory says how much yours has)" if limit else SHARED_MEMORY
            results.refused.setdefault((key, node_of_setup(point.shared)), reason)


def _note_refusals(
    workload: Workload, values: Mapping[str, tuple[Any, ...]], results: WalkResults, chosen: Iterable[Layout]
) -> None:
    """Why a layout has no point of a node: the engines' reason for the first of its branches."""
    if workload.num_gpus == 1:
        return
    one_per_node: dict[Node, TrainSetup] = {}
    for branch in branches(workload, values):
        one_per_node.setdefault(node_of_setup(branch), branch)
    for layout in chosen:
        for node, branch in one_per_node.items():
            try:
                setup = branch.replace(**layout.fields, optimizer=values["optimizer"][0])
            except SetupError:
                continue
            key = (layout_key(setup), node)
            if key in results.by_layout_and_node or key in results.refused:
                continue
            model, budget = workload.model, workload.budget_bytes
            if reason := why_not(model, setup) or loading_refusal(model, setup, budget):
                results.refused[key] = reason


def _corrected(points: Iterable[WalkedSetup], limits: Limits) -> Iterator[WalkedSetup]:
    """The points with the peaks of corrected families, beyond what is exact, multiplied by their ratio."""
    for point in points:
        if (ratio := limits.ratio(point.shared)) is not None:
            exact = exact_bytes(limits.model, point.shared)
            point = point._replace(peak_device_bytes=exact + int((point.peak_device_bytes - exact) * ratio))
        yield point
