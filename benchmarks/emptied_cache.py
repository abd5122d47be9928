"""What an emptied cache costs a step: PEFT's two campaigns of June 2025 against the driver's calls of a step.

    python -m benchmarks.emptied_cache    # needs the torch extra; half a minute

Until 13 November 2025 PEFT's loop (method_comparison/MetaMathQA/run.py) emptied PyTorch's cache after every step, so
that every step asks the driver for its memory anew. Its runs of 17 and 18 June were slower than the repeats of 19 and
20 June under the same versions. Per configuration that was run in both: the milliseconds more of a step, and how often
the allocator's replay of the second of two steps, begun with an emptied cache, asks the driver.
"""

from collections.abc import Iterable, Iterator

from benchmarks.stack_bands import comparable_rows
from finetune_planner.cli.accuracy import _lookup
from planner.planning.evidence.measured import MeasuredRow
from probes.allocator import replay
from probes.allocator.events import EmptyCache, Event, Phase
from probes.allocator.repetitions import Repetition
from probes.dryrun.depths import plan_depth
from probes.dryrun.engine import full_trace
from probes.stack.configs import load_config

SLOW, REPEATED = ("2025-06-17", "2025-06-18"), ("2025-06-19", "2025-06-20")


def pairs() -> Iterator[tuple[MeasuredRow, MeasuredRow]]:
    """(the run of 17 or 18 June, its repeat of 19 or 20 June) of every configuration that a setup expresses."""
    rows = [row for row in comparable_rows() if row.stack == "peft-loop" and row.tokens_per_s]
    for slow in (row for row in rows if row.date in SLOW):
        for again in rows:
            if again.date in REPEATED and (again.group, again.config_id) == (slow.group, slow.config_id):
                yield slow, again


def emptied(events: Iterable[Event | Repetition]) -> Iterator[Event | Repetition]:
    """The events with an emptied cache before every step."""
    before = ""
    for event in events:
        if isinstance(event, Phase):
            if event.name == "forward" and not before.startswith("forward"):
                yield EmptyCache()
            before = event.name
        yield event


def driver_calls(row: MeasuredRow) -> int:
    """How often the second step of a run of the row's mean length asks the driver for memory."""
    model, gpu = _lookup(row)
    setup, capability = row.speed_setup, gpu.compute_capability
    assert setup is not None
    assert capability is not None
    plan = plan_depth(load_config(dict(model.config)), checkpointing=0, full_depth=True)
    events = [*emptied(full_trace(plan, capability, setup).events)]
    step = max(place for place, event in enumerate(events) if isinstance(event, EmptyCache))
    return replay(events).num_driver_calls - replay(events[: step + 1]).num_driver_calls


def main() -> None:
    """Prints the table."""
    print("| configuration | ms more a step | driver's calls | us a call |\n|---|---:|---:|---:|")
    for slow, again in pairs():
        assert slow.speed_setup is not None
        tokens = slow.speed_setup.micro_batch_seqs * slow.speed_setup.seq_len_tokens
        more_s = tokens * (1 / (slow.tokens_per_s or 1.0) - 1 / (again.tokens_per_s or 1.0))
        calls = driver_calls(slow)
        name = f"{slow.speed_setup.adapter}, {slow.config_id}"
        print(f"| {name} | {1e3 * more_s:.1f} | {calls} | {1e6 * more_s / calls:.0f} |")


if __name__ == "__main__":
    main()
