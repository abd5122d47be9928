"""A trace for people and machines: the document, its text and its timeline picture."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from html import escape
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
    rate = f"{speed['tokens_per_s']:,.0f} tokens/s, " if speed["tokens_per_s"] else ""
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


_COLOURS = {"load": "#7f7f7f", "forward": "#0072b2", "backward": "#e69f00", "step": "#009e73", "evaluation": "#cc79a7"}
"""Okabe and Ito's, which colour-blind people tell apart."""
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 900, 356, 60, 56, 50
_FAR = 2
"""A budget of so many peaks and more would press the run to the ground: it is said above the picture."""


def svg(answer: Mapping[str, Any]) -> str:
    """Allocated memory along the run as a picture, phases by colour, its peak and the budget as lines."""
    points, budget_bytes, peak_bytes = answer["timeline"], answer["budget_bytes"], answer["peak_allocated_bytes"]
    far = budget_bytes > _FAR * peak_bytes
    top = (1.1 * peak_bytes if far else max(peak_bytes, budget_bytes)) or 1
    step, ground = (_WIDTH - _LEFT) / max(1, len(points)), _HEIGHT - _BOTTOM

    def y(size: float) -> float:
        return round(ground - (ground - _TOP) * size / top, 1)

    def line(size: int, words: str, colour: str, *, right: bool = False) -> str:
        place = f'x="{_WIDTH - 4}" text-anchor="end"' if right else f'x="{_LEFT + 4}"'
        return (
            f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y(size)}" y2="{y(size)}" stroke="{colour}" '
            f'stroke-dasharray="4 3"/>\n<text {place} y="{y(size) - 4}" fill="{colour}">{words}</text>\n'
        )

    bars = [
        f'<rect x="{_LEFT + index * step:.1f}" y="{y(size)}" width="{step + 0.3:.1f}" '
        f'height="{ground - y(size):.1f}" fill="{_COLOURS.get(phase, "#bbb")}"/>'
        for index, (_, size, phase) in enumerate(points)
    ]
    seen = [phase for phase in _COLOURS if any(phase == name for *_, name in points)]
    legend = "".join(
        f'<rect x="{_LEFT + 10 + index * 130}" y="{_HEIGHT - 16}" width="10" height="10" fill="{_COLOURS[phase]}"/>'
        f'<text x="{_LEFT + 25 + index * 130}" y="{_HEIGHT - 7}">{RESERVED_WORDS[phase]}</text>'
        for index, phase in enumerate(seen)
    )
    title = f"{escape(clean(shlex.join(answer['command'])))}: allocated memory"
    device = f"{gib(answer['peak_device_bytes'])} on the device of the {gib(budget_bytes)} budget"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="11">\n<title>{title}</title>\n<rect width="100%" height="100%" fill="#fff"/>\n'
        f'<text x="{_LEFT}" y="14">{title}</text>\n'
        f'<text x="{_LEFT}" y="30">with what PyTorch and CUDA keep beside it {device}</text>\n'
        + "\n".join(bars)
        + "\n"
        + line(peak_bytes, f"peak {gib(peak_bytes)} allocated", "#000")
        + ("" if far else line(budget_bytes, f"budget {gib(budget_bytes)}", "#c00", right=True))
        + f'<text x="2" y="{_TOP}">{gib(round(top))}</text>\n<text x="2" y="{ground}">0</text>\n'
        f'<text x="{_LEFT}" y="{ground + 14}">allocations and releases, in order</text>\n{legend}\n</svg>\n'
    )
