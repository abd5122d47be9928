"""Renders the accuracy of the speed model as Markdown."""

from collections.abc import Mapping
from typing import Any

SPLIT_TITLES = {
    "source": "A whole source held out",
    "gpu": "A whole GPU held out within its source",
    "model": "A whole model held out within its source",
}
UNKNOWN_LENGTHS = ("llamafactory_wiki", "ms_swift_benchmark")
"""Sources that do not say how long their samples were: their tokens/s are samples/s times a guess."""
HEAD = [
    "| source | n | median | 90th pct. | rank corr. (worst) | noise floor median / 90th | 6ND over MFU: "
    "median / 90th | boosted trees: median / 90th |",
    "|---|--:|--:|--:|--:|--:|--:|--:|",
]
NOTES = {
    "fms_acceleration": "A100-80GB, L40; one GPU; full, LoRA, QLoRA",
    "peft_metamathqa": "L40S; one GPU; lengths bucketed, mean used",
    "ml_engineering": "B200; one GPU; pure bf16, with and without compile",
    "llm_foundry": "A100, H100; 8 GPUs under FSDP, communication not predicted",
    "fsdp_qlora": "RTX 3090, 4090; 2 GPUs under DDP",
    "llamafactory_wiki": "A100; sample lengths not stated (taken at the cap): not fitted, not counted",
    "ms_swift_benchmark": "A100; sample lengths guessed from mean and deviation: not fitted, ratios only",
}


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _rank(figures: Mapping[str, Any]) -> str:
    if figures["rank_mean"] is None:
        return ""
    return f"{figures['rank_mean']:.2f} ({figures['rank_worst']:.2f})"


def render(report: Mapping[str, Any]) -> str:
    """The whole page."""
    lines = [
        "# Accuracy of the speed model",
        "",
        f"Made by `python -m benchmarks.speed_accuracy` on {report['date']}, from `benchmarks/data/speed_points.jsonl`",
        "(published runs by others; every row names its source). Errors are |predicted / measured - 1| of tokens/s, on",
        "points that the constants were **not** fitted on. What a prediction contains is in `docs/speed-model.md`.",
        "",
        "What these figures do not say: the model's structure and its stated starting values were chosen by reading",
        "code and data sheets, but also while looking at these same sources, so only the fitted constants are truly",
        "held out. A source nobody has looked at may be worse.",
        "",
    ]
    for kind, title in SPLIT_TITLES.items():
        lines += [
            f"## {title}",
            "",
            *HEAD,
        ]
        rows = report["rows"].get(kind, {})
        lines += [_row(source, figures) for source, figures in rows.items() if source not in UNKNOWN_LENGTHS]
        if kind == "source":
            lines.append(_row("**one GPU, all sources**", report["single_gpu"]))
            lines.append(_row("**one GPU, complete configuration (A)**", report["single_gpu_confidence_a"]))
        lines.append("")
    unknown = report["rows"].get("source", {})
    lines += [
        "## Sources that do not say how long their samples were",
        "",
        "Their tokens/s are samples/s times a guessed length, so a constant factor is unknown and no predictor can be",
        "judged by the absolute error; they are shown for completeness, fitted on by nobody and in no total.",
        "",
        *HEAD,
        *[_row(source, unknown[source]) for source in UNKNOWN_LENGTHS if source in unknown],
        "",
    ]
    lines += ["Sources:", ""]
    lines += [f"- `{name}`: {note}." for name, note in NOTES.items()]
    lines += [
        "",
        "Rank correlation is Spearman's over the configurations of one (model, GPU) with at least four of them:",
        "the mean weighted by how many there are, and the worst. Many configurations differ by less than the noise.",
        "`ml_engineering` has two such groups, four runs each: torch.compile on and off.",
        "The noise floor is the distance of repeats (mostly other versions) from their configuration's median.",
        "",
        "## Ratios (both predictions from the fit without their source)",
        "",
        "| ratio | pairs | median error | 90th pct. |",
        "|---|--:|--:|--:|",
    ]
    for name, figures in report["ratios"].items():
        lines.append(f"| {name} | {figures['pairs']} | {_percent(figures['median'])} | {_percent(figures['p90'])} |")
    covered = report["coverage_source_split"]
    lines += [
        "",
        "## Bands",
        "",
        "Half-width of the 90 % band by what is known of the card: fitted points on the card itself; on its family",
        "(same architecture, consumer or professional); on neither.",
        "",
        "| known | band |",
        "|---|--:|",
        *[f"| {name} | x or / {1 + width:.2f} |" for name, width in report["bands"].items()],
        "",
        f"Coverage, whole sources held out, bands made from other sources only: {_percent(covered['points'])} of the",
        f"points ({_percent(report['coverage']['points'])} over all splits). The level behind the band was set with",
        "these points in view. "
        "By source: " + ", ".join(f"{name} {_percent(value)}" for name, value in covered["by_source"].items()) + ".",
        "",
    ]
    return "\n".join(lines)


def _row(name: str, figures: Mapping[str, Any]) -> str:
    noise = f"{_percent(figures['noise_median'])} / {_percent(figures['noise_p90'])}" if figures["noise_median"] else ""
    return (
        f"| {name} | {figures['n']} | {_percent(figures['median'])} | {_percent(figures['p90'])} | {_rank(figures)} | "
        f"{noise} | {_percent(figures['mfu_median'])} / {_percent(figures['mfu_p90'])} | "
        f"{_percent(figures['boosted_median'])} / {_percent(figures['boosted_p90'])} |"
    )
