"""What evaluating, saving and merging take, for a terminal."""

from planner.memory.around import occasions
from planner.outcome import Candidate, Rung
from planner.units import gib
from planner.workload import Workload
from reports.page import Page
from reports.text import RUNG_WORDS


def around(page: Page, workload: Workload, chosen: Candidate) -> None:
    """What evaluating, saving and merging take, with the setting that keeps it so; one GPU."""
    if chosen.setup.num_gpus > 1:
        return
    page.head("Around the steps, at most", RUNG_WORDS[Rung.FORMULA])
    rows = []
    for one in occasions(workload.model, workload.gpu, chosen.setup):
        device, host = (gib(size) if size else "-" for size in (one.device_bytes, one.host_bytes))
        over = "does not fit; " if one.device_bytes > workload.memory_bytes else ""
        rows.append((f"  {one.name}", device, host, over + one.setting))
    page.whole(("  what", "device", "host", "kept so by"), rows, right=("device", "host"))
