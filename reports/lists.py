"""The GPU table and the catalogue on the terminal."""

from collections.abc import Iterable

from rich.console import Console

from planner.core.records import dataclass
from planner.core.units import TERA, count, gib
from planner.hardware.gpu import GpuSpec
from reports.page import Page
from reports.plain import clean


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """One line of `plan models`."""

    model_id: str
    model_type: str
    num_params: int
    max_position_embeddings: int | None = None


def render_gpus(rows: Iterable[GpuSpec], console: Console) -> None:
    """The GPU table: what `--gpu` takes, smallest memory first; without marketing names where they would cut keys."""
    page = Page(console)
    names, rate = (("name",), "bf16 TFLOP/s") if console.width >= 70 else ((), "TFLOP/s")
    table = page.table("--gpu", *names, "memory", rate, "GB/s", right=("memory", rate, "GB/s"))
    for gpu in sorted(rows, key=lambda row: (row.memory_bytes, row.key)):
        flops = f"{gpu.bf16_flops_per_s / TERA:.0f}" if gpu.bf16_flops_per_s else "no bf16" if names else "-"
        bandwidth = f"{gpu.memory_bandwidth_bytes_per_s / 1e9:,.0f}"
        name = [clean(gpu.name)] if names else []
        page.row(table, gpu.key, *name, gib(gpu.memory_bytes), flops, bandwidth)
    page.show(table)
    page.line("Memory is what torch reports as usable; TFLOP/s dense with fp32 accumulation.", style="dim")


def render_models(rows: Iterable[ModelRow], console: Console) -> None:
    """The built-in catalogue: model names that need no network."""
    page = Page(console)
    table = page.table("model", "type", "parameters", "context", right=("parameters", "context"))
    for row in rows:
        context = f"{row.max_position_embeddings:,}" if row.max_position_embeddings else "-"
        page.row(table, clean(row.model_id), clean(row.model_type), count(row.num_params), context)
    page.show(table)
