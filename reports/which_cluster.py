"""Which cluster for a piece of work: what to rent, side by side with what else would do."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from planner.core.records import dataclass
from planner.core.units import count, gib, seconds
from planner.models.spec import ModelSpec
from planner.planning.clusters import ClusterOption, Limits, cheapest, fastest, nearest, smallest
from planner.planning.decision.node import Node
from planner.planning.useful import useful_tokens_per_s
from planner.setup.interchange import SCHEMA_VERSION, setup_to_dict
from reports.command import request_words
from reports.markdown import bullets, document, escape
from reports.markdown import table as markdown_table
from reports.page import Page, Sheet
from reports.plain import clean, joined, plural
from reports.setup_text import adapters_note, gpus_words, layout_words
from reports.text import dollars, host_bytes, host_words, price_dates, samples_speed_words, speed_marks

MAX_ROWS = 20


def assumptions(options: Sequence[ClusterOption]) -> tuple[str, ...]:
    samples = samples_speed_words((option.workload, option.candidate) for option in options)
    notes = (samples, adapters_note(option.candidate.setup for option in options))
    prices = joined(("Prices", price_dates(option.workload for option in options), "are indicative"), " ")
    return (
        "Times are training alone: loading, evaluation, saving and failures are not counted.",
        *filter(None, notes),
        f"{prices}: within one node the median of what providers ask for one GPU; --price sets your own.",
        "GPUs of one node talk over NVLink where the card comes with it, else over PCIe. Several nodes are one "
        "provider's offer: its network and its price (the median one); a card that nobody is known to offer so is "
        "taken in one node only. --interconnect changes it.",
        "Figures are the formula's, of what plan takes on each; without --gpu only clusters are planned that could be "
        "the smallest, the cheapest or the fastest.",
    )


def picks(options: Sequence[ClusterOption]) -> dict[str, ClusterOption]:
    """The options worth naming of one method: smallest, cheapest, fastest; absent where nothing keeps the limits."""
    named = {"smallest": smallest(options), "cheapest": cheapest(options), "fastest": fastest(options)}
    return {name: option for name, option in named.items() if option is not None}


def recommended_node(options: Sequence[ClusterOption]) -> Node | None:
    """The method that approximates least among those that keep the limits on some cluster."""
    return next((node for node in Node if any(option.node == node and option.meets for option in options)), None)


@dataclass(frozen=True)
class ClustersSheet(Sheet):
    """Per method what to take, then every cluster that keeps the limits, cheapest first."""

    model: ModelSpec
    options: Sequence[ClusterOption]
    limits: Mapping[str, Any]

    def render(self, console: Console) -> None:
        page = Page(console)
        page.line(_title(self.model, self.limits), style="bold")
        node = recommended_node(self.options)
        if node is None:
            page.line("No cluster keeps the limits.", style="bold red")
            page.line(self._nearest_words())
            _assumptions(page, self.options)
            return
        for head, lines in _by_method(self.options, self._limits):
            page.line()
            page.line(head, style="bold")
            for words in lines:
                page.line(words, indent=2)
        feasible = self._kept(node)
        page.head(_table_title(node))
        header, rows, right = _table(feasible, wide=page.console.width >= 100)
        page.whole(header, rows[:MAX_ROWS], right=right, fixed=("GPUs",))
        if len(rows) > MAX_ROWS:
            more = len(rows) - MAX_ROWS
            page.line(f"{more} more {plural(more, 'cluster')}: --json lists all.", style="dim", indent=2)
        marks = speed_marks(option.candidate.formula for option in feasible)
        page.line(f"Speeds, and with them times and costs: {marks}.", style="dim", indent=2)
        _assumptions(page, self.options)
        best = cheapest(feasible) or smallest(feasible)
        if best is not None:
            page.head("Next")
            page.command(shlex.join(["plan", *request_words(best.workload)]))

    def markdown(self) -> str:
        blocks: list[str] = []
        node = recommended_node(self.options)
        if node is None:
            blocks.append(f"No cluster keeps the limits. {escape(self._nearest_words())}")
        else:
            for head, lines in _by_method(self.options, self._limits):
                blocks += [f"## {escape(head)}", bullets(lines)]
            blocks += [f"## {_table_title(node)}", markdown_table(*_table(self._kept(node), wide=True))]
        return document(_title(self.model, self.limits), *blocks, "## Assumed", bullets(assumptions(self.options)))

    def document(self) -> dict[str, Any]:
        by_node = {node: [option for option in self.options if option.node == node] for node in Node}
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "which_cluster",
            "model": self.model.model_id,
            **self.limits,
            "recommended_method": recommended_node(self.options),
            "picks": {
                node: {name: _as_json(option) for name, option in picks(options).items()}
                for node, options in by_node.items()
            },
            "options": list(map(_as_json, self.options)),
            "assumptions": list(assumptions(self.options)),
        }

    @property
    def _limits(self) -> Limits:
        return Limits(deadline_s=self.limits["deadline_s"], budget_usd=self.limits["budget_usd"])

    def _nearest_words(self) -> str:
        best = nearest(self.options, self._limits)
        if best is None:
            return "Nothing fits on any of them: allow more GPUs or larger ones."
        return f"The nearest, with {best.node.words}: {_over_words(best, self._limits)}."

    def _kept(self, node: Node) -> list[ClusterOption]:
        return [option for option in self.options if option.node == node and option.meets]


def _by_method(options: Sequence[ClusterOption], limits: Limits) -> list[tuple[str, list[str]]]:
    sections: list[tuple[str, list[str]]] = []
    for node in Node:
        of_node = [option for option in options if option.node == node]
        if not of_node:
            continue
        lines = [f"{label}: {_option_words(option)}" for label, option in picks(of_node).items()]
        if not lines and (best := nearest(of_node, limits)):
            lines = [f"No cluster keeps the limits; the nearest is {_over_words(best, limits)}."]
        sections.append((node.words[0].upper() + node.words[1:], lines))
    return sections


def _over_words(option: ClusterOption, limits: Limits) -> str:
    """An option, with which limits it breaks and by how much."""
    broken: list[str] = []
    if limits.deadline_s is not None and option.duration_s > limits.deadline_s:
        broken.append(f"{seconds(option.duration_s - limits.deadline_s)} over the deadline")
    if limits.budget_usd is not None and option.cost_usd is not None and option.cost_usd > limits.budget_usd:
        broken.append(f"{dollars(option.cost_usd - limits.budget_usd)} over the budget")
    return joined((_option_words(option), *broken))


def _title(model: ModelSpec, limits: Mapping[str, Any]) -> str:
    words = f"Which cluster for {clean(model.model_id)} ({count(model.num_params)} parameters) · "
    words += f"{limits['job']} · {limits['global_batch_seqs']} sequences per step"
    if limits["deadline_s"] is not None:
        words += f" · within {seconds(limits['deadline_s'])}"
    if limits["budget_usd"] is not None:
        words += f" · for {dollars(limits['budget_usd'])} at most"
    return words


def _option_words(option: ClusterOption) -> str:
    cost = "price unknown" if option.cost_usd is None else dollars(option.cost_usd)
    how = layout_words(option.candidate.setup) if option.cluster.num_gpus > 1 else ""
    how = joined((how, host_words(option.workload, option.candidate)))
    return f"{gpus_words(option.workload)}{how and f' ({how})'}, {seconds(option.duration_s)}, {cost}"


def _table_title(node: Node) -> str:
    return f"Clusters that keep the limits with {node.words}, cheapest first"


def _table(
    feasible: Sequence[ClusterOption], *, wide: bool
) -> tuple[tuple[str, ...], list[tuple[str, ...]], tuple[str, ...]]:
    header = ("GPUs", "spread", "tokens/s", "time", "cost", *(("$/hour", "peak") if wide else ()))
    rows: list[tuple[str, ...]] = []
    for option in sorted(feasible, key=lambda each: (each.cost_usd is None, each.cost_usd or 0.0, each.duration_s)):
        price = option.workload.price_per_hour
        hourly = None if price is None else price * option.cluster.num_gpus
        more = ("-" if hourly is None else f"{hourly:,.2f}", gib(option.candidate.formula.peak_device_bytes))
        rows.append(
            (
                f"{option.cluster.num_gpus} × {option.cluster.gpu.key}",
                joined((layout_words(option.candidate.setup), host_words(option.workload, option.candidate))),
                f"{option.candidate.tokens_per_s:,.0f}",
                seconds(option.duration_s),
                "-" if option.cost_usd is None else dollars(option.cost_usd),
                *(more if wide else ()),
            )
        )
    return header, rows, ("tokens/s", "time", "cost", "$/hour", "peak")


def _assumptions(page: Page, options: Sequence[ClusterOption]) -> None:
    page.head("Assumed")
    for words in assumptions(options):
        page.line(f"· {words}", indent=2)


def _as_json(option: ClusterOption) -> dict[str, Any]:
    formula = option.candidate.formula
    return {
        "gpu": option.cluster.gpu.key,
        "num_gpus": option.cluster.num_gpus,
        "num_nodes": option.cluster.num_nodes,
        "method": option.node,
        "meets": option.meets,
        "duration_s": option.duration_s,
        "cost_usd": option.cost_usd,
        "usd_per_gpu_hour": option.workload.price_per_hour,
        "price_source": option.workload.price_source or None,
        "tokens_per_s": option.candidate.tokens_per_s,
        "samples_tokens_per_s": useful_tokens_per_s(option.workload, option.candidate),
        "time_band_fraction": formula.time_band_fraction,
        "peak_device_bytes": formula.peak_device_bytes,
        "budget_bytes": option.candidate.budget_bytes,
        "memory_bytes": option.workload.memory_bytes,
        "host_bytes": host_bytes(option.workload, option.candidate),
        "setup": setup_to_dict(option.candidate.setup),
    }
