"""A trace for people and machines: the document and its text."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from planner.core.units import gib, percent, seconds
from planner.planning.trace_result import TraceResult
from planner.speed.traced import TracedSpeed
from reports.plain import clean

SCHEMA = 1
RESERVED_WORDS = {
    "load": "load",
    "forward": "forward",
    "backward": "backward",
    "step": "optimizer step",
    "evaluation": "evaluation",
}
SHRINKERS = {
    "loss": "a chunked or fused cross-entropy (TRL: loss_type 'chunked_nll'; use_liger_kernel) or fewer tokens per "
    "micro-batch",
    "activations kept for the backward": "activation checkpointing, a smaller micro-batch or shorter sequences",
    "evaluation": "fewer sequences evaluated at once (per_device_eval_batch_size) and, with compute_metrics, "
    "eval_accumulation_steps; checkpointing does nothing there",
    "gradients of activations, recomputed": "a smaller micro-batch or shorter sequences",
    "optimizer states": "an 8-bit or paged optimizer, or LoRA",
    "optimizer temporaries": "the fused form of the optimizer (adamw_torch_fused)",
    "gradients": "LoRA, or fewer trained parameters",
    "trained weights": "16-bit weights, or LoRA",
    "weights and buffers": "4-bit weights (QLoRA) where they have more, or 16-bit where they are fp32",
}
"""What makes each category smaller."""
PROTECTIONS = {
    "namespaces": "what it writes, renames and deletes is a private copy",
    "landlock": "it can write in a private folder alone, which has copies; its network is cut off in Python only",
    "none": "UNPROTECTED: it writes and deletes your files as when you run it",
}
"""What each kind of protection means for whoever runs the program."""
_ROWS = 8


def document(
    traced: TraceResult,
    needs: TraceResult | None,
    *,
    command: Sequence[str],
    gpu_key: str,
    gpu_name: str,
    memory_bytes: int,
    budget_bytes: int,
    num_steps: int,
    speed: TracedSpeed | None = None,
) -> dict[str, Any]:
    """The whole answer as plain data.

    Args:
        needs: the same program on a card without limit, where the card ran out of memory.
        speed: of its last step, None where that is not known.
    """
    shown = needs or traced
    refused = traced.refusal is not None and traced.status == "out of memory"
    verdict = "does not fit" if refused or shown.peak_device_bytes > memory_bytes else "fits"
    if verdict == "fits" and shown.peak_device_bytes > budget_bytes:
        verdict = "tight"
    largest = shown.by_category[0].name if shown.by_category else ""
    return {
        "schema": SCHEMA,
        "level": "trace",
        "command": list(command),
        "gpu": gpu_key,
        "gpu_name": gpu_name,
        "memory_bytes": memory_bytes,
        "budget_bytes": budget_bytes,
        "steps_wanted": num_steps,
        "verdict": verdict,
        "peak_device_bytes": shown.peak_device_bytes,
        "largest": largest,
        "shrinks_by": SHRINKERS.get(largest, ""),
        "out_of_memory": None if traced.refusal is None else asdict(traced.refusal),
        "speed": None if speed is None else asdict(speed),
        **{name: value for name, value in asdict(replace(shown, program=None)).items() if name != "program"},
    }


def text_lines(answer: Mapping[str, Any]) -> list[str]:
    words = {"fits": "It fits", "tight": "It fits, but takes of the headroom", "does not fit": "It does not fit"}
    lines = [
        f"{shlex.join(answer['command'])} on {answer['gpu_name']}",
        "",
        f"{words[answer['verdict']]}: {gib(answer['peak_device_bytes'])} on the device of the "
        f"{gib(answer['budget_bytes'])} budget ({gib(answer['memory_bytes'])} card)  [trace]",
        f"PyTorch would report {gib(answer['peak_allocated_bytes'])} allocated, "
        f"{gib(answer['peak_reserved_bytes'])} reserved.",
        f"{answer['num_steps']} optimizer step{'s' * (answer['num_steps'] != 1)} ran in {answer['elapsed_s']:.0f} s "
        f"({answer['num_events']:,} allocations and releases).",
    ]
    refusal = answer["out_of_memory"]
    if refusal is not None:
        where = refusal["line"] or refusal["module"] or refusal["op"]
        lines.append(
            f"The card ran out of memory at {clean(where)} ({RESERVED_WORDS[refusal['phase']]}): asked for "
            f"{gib(refusal['requested_bytes'])} with {gib(refusal['allocated_bytes'])} allocated."
        )
    lines += ["", "Allocated peak by phase"]
    for phase, size in answer["phase_peaks_bytes"].items():
        mark = "  <- the peak" if phase == answer["peak_phase"] else ""
        lines.append(f"  {gib(size):>10}  {RESERVED_WORDS.get(phase, phase)}{mark}")
    lines += [
        *_largest_lines("What is alive at the peak", answer["by_category"]),
        *_largest_lines("By module", answer["by_module"]),
        *_largest_lines("By line of the program", answer["by_line"]),
    ]
    lines += _speed_lines(answer["speed"])
    if answer["shrinks_by"]:
        lines += ["", f"Largest: {answer['largest']}. Shrunk by: {answer['shrinks_by']}."]
    lines += ["", *_protection_lines(answer["protection"])]
    speed_notes = answer["speed"]["notes"] if answer["speed"] is not None else ()
    if answer["notes"] or answer["questions"] or speed_notes:
        lines += ["", "Notes"]
        lines += [f"  {clean(note)}" for note in (*answer["notes"], *speed_notes)]
    for what, line, times in answer["questions"]:
        where = f" at {clean(line)}" if line else ""
        lines.append(
            f"  the program asked for {what}{where} ({times} time{'s' * (times != 1)}), which only a GPU knows"
        )
    return lines


def _speed_lines(speed: Mapping[str, Any] | None) -> Iterator[str]:
    if speed is None:
        return
    together = f" of {speed['num_gpus']} GPUs together" if speed["num_gpus"] > 1 else ""
    rate = f"{speed['tokens_per_s']:,.0f} tokens/s{together}, " if speed["tokens_per_s"] else ""
    yield from (
        "",
        f"Speed: {rate}{seconds(speed['step_time_s'])} per step, {percent(speed['mfu_fraction'])} of the card's peak",
    )
    yield f"  (plus or minus {percent(speed['band_fraction'])}; operators priced by the card's rates)  [trace]"
    for title, parts in (("By phase", speed["phases_s"]), ("By kind", speed["parts_s"])):
        words = [
            f"{clean(RESERVED_WORDS.get(name, name))} {percent(part_s / speed['step_time_s'])}"
            for name, part_s in sorted(parts.items(), key=lambda part: -part[1])
            if part_s >= 0.005 * speed["step_time_s"]
        ]
        yield f"  {title}: {', '.join(words)}"
    for title, rows in (("Lines that take the time", speed["by_line"]), ("Modules", speed["by_module"])):
        yield from ("", f"{title} (GPU, then CPU)")
        for row in rows[:_ROWS]:
            yield f"  {seconds(row['device_s']):>8}  {seconds(row['host_s']):>8}  {clean(row['name'])}"


def _protection_lines(protection: Mapping[str, Any]) -> Iterator[str]:
    yield f"Protection: {protection['kind']}: {PROTECTIONS[protection['kind']]}."
    if protection["num_written"] or protection["num_deleted"]:
        yield (
            f"It wrote {protection['num_written']} files ({protection['written_bytes']:,} bytes), of which "
            f"{protection['num_replaced']} had been there before, and deleted {protection['num_deleted']}: redirected."
        )
        yield from (f"  {clean(path)}" for path in protection["paths"])


def _largest_lines(title: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from ("", title)
    for row in rows[:_ROWS]:
        yield f"  {gib(row['size_bytes']):>10}  {clean(row['name'])}"
    if rest := sum(row["size_bytes"] for row in rows[_ROWS:]):
        yield f"  {gib(rest):>10}  {len(rows) - _ROWS} smaller"
