"""`plan check` for people: the verdict, then one line for each fact with its place in the file, which is named once."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding

from planner.core.notes import Place, place_of
from planner.core.units import gib
from planner.planning.check import CheckResult, summary
from planner.setup import TrainSetup
from planner.setup.outcome import speed_level
from reports.page import Page
from reports.plain import clean, plural
from reports.setup_text import layers_words, rollout_words, targets_words
from reports.text import LEVEL_WORDS

SHOWN = 8
"""Terms of memory, and changes, that are shown."""
ALWAYS = (
    "method", "precision", "quantization", "lora_rank", "lora_targets", "optimizer", "attention", "checkpointing",
    "loss", "seq_len_tokens", "micro_batch_seqs", "accumulation_steps", "num_gpus",
)  # fmt: skip
"""Fields of a setup in the order of a person; the others follow where the file says them or where they are unusual."""
NAMES = {
    "micro_batch_seqs": "micro-batch",
    "accumulation_steps": "accumulation",
    "seq_len_tokens": "length",
    "num_gpus": "GPUs",
    "lora_rank": "rank",
    "lora_targets": "targets",
    "lora_dropout": "dropout",
}
OF_ADAPTERS = ("adapter", "adapter_dtype", "lora_rank", "lora_targets", "lora_dropout", "modules_to_save")
DEFAULT = "default of "
VERDICTS = {"fits": "fits", "does_not_fit": "does not fit", "uncertain": "uncertain", "cannot_run": "cannot run"}


def render_check(
    result: CheckResult,
    fixed: Mapping[str, Any] | None,
    console: Console,
    together: Mapping[str, Any] | None = None,
) -> None:
    """The whole answer.

    Args:
        fixed: how --fix ended, where it was asked for.
        together: several changes after which it fits, where no single one is enough.
    """
    page, config, prediction = Page(console), result.config, result.prediction
    level = LEVEL_WORDS[prediction.level]
    page.line(clean(f"{config.path} ({config.format}): {config.model_id} on {result.gpu.name}"), style="bold")
    page.line(f"{summary(result)} [{level}]")
    if prediction.tokens_per_s:
        page.line(f"about {prediction.tokens_per_s:,.0f} tokens/s [{LEVEL_WORDS[speed_level(prediction)]}]")
    page.head("Read")
    rows, defaults = _without_versions(setting_rows(result))
    _table(page, rows, fixed=1)
    if defaults:
        page.line(f"default: {defaults}", style="dim", indent=2)
    page.head("Memory", level)
    terms = [
        (gib(term.size_bytes), f"{'' if term.name.startswith(term.category) else f'{term.category}: '}{term.name}")
        for term in prediction.terms[:SHOWN]
    ]
    _table(page, terms, fixed=1, right=[0])
    if result.changes:
        page.head(
            "Faster, and still fits" if result.exit_code == 0 else "What would help, best first",
            "formula corrected by the dry run" if level == "dry run" else "formula",
        )
        changes = [
            (
                f"{change.label} *" if change.changes_training else change.label,
                gib(change.prediction.peak_device_bytes),
                VERDICTS[change.verdict.value],
                f"speed × {change.speedup:.2f}",
            )
            for change in result.changes[:SHOWN]
        ]
        _table(page, changes, right=[1, 3])
        if any(change.changes_training for change in result.changes[:SHOWN]):
            page.line("*: changes the training", style="dim", indent=2)
    if together is not None:
        page.line(clean(f"together: {'; '.join(together['changes'])}"), indent=2)
        by = "--fix writes them" if together["in_place"] else "this file's form does not take them"
        page.line(f"{gib(together['peak_device_bytes'])}, fits ({by})", indent=4)
    notes = sorted((*result.notes, *prediction.notes), key=lambda note: place_of(note) is not Place.FOUND)
    for title, lines in (
        ("Assumed", config.assumptions),
        ("Not followed exactly (the error band is wider)", config.approximations),
        (plural(len(notes), "Note"), notes),
    ):
        if lines:
            page.head(title)
            for note in lines:
                page.line(f"· {clean(short_place(note, config.path))}", indent=2)
    if fixed is not None:
        _render_fix(page, fixed, fits=result.verdict.value == "fits")


def setting_rows(result: CheckResult) -> list[tuple[str, str, str]]:
    """(name, value, where it was read) of every setting that counts; the place is empty where nobody said it."""
    config, setup = result.config, result.config.setup
    plain = TrainSetup()
    settings = [("model", clean(str(config.model_id)), short_place(config.origins.get("model", ""), config.path))]
    for name in dict.fromkeys((*ALWAYS, *config.origins, *setup.__dataclass_fields__)):
        if not hasattr(setup, name) or name == "stack" or (setup.method == "full" and name in OF_ADAPTERS):
            continue
        if name == "lora_targets" and not setup.kind.adapts_matrices:
            continue
        if name in ALWAYS or name in config.origins or getattr(setup, name) != getattr(plain, name):
            label = setup.kind.size if name == "lora_rank" else NAMES.get(name, name.replace("_", " "))
            place = short_place(config.origins.get(name, ""), config.path)
            settings.append((label or "size", clean(value_words(setup, name)), clean(place)))
    return settings


def value_words(setup: TrainSetup, name: str) -> str:
    value = getattr(setup, name)
    match name:
        case "checkpointing":
            return {0: "off", 1: "on"}.get(value, f"every {value} layers")
        case "lora_targets":
            return targets_words(setup)
        case "modules_to_save" if not value:
            return "no embedding or output head"  # what else is named is said in words
        case "trained_layers":
            return layers_words(setup) or "all"
        case "rollout":
            return f"{setup.rollout_settings.num_generations} of each prompt, {rollout_words(setup)}"
        case "accumulation_steps":
            return f"{value} ({setup.global_batch_seqs:,} {setup.objective_spec.sample}s a step)"
        case "seq_len_tokens":
            return f"{value:,} tokens"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return str(getattr(value, "words", value))


def short_place(words: str, file: str) -> str:
    """The words without the file's own name: "line 7" for "run.yaml:7"."""
    words = re.sub(rf"(?<![\w./-]){re.escape(file)}:(\d+)", r"line \1", words)
    return words.replace(f"{file}:cell ", "cell ")


def _without_versions(rows: Sequence[tuple[str, str, str]]) -> tuple[list[tuple[str, str, str]], str]:
    """The facts with "default" for "default of TRL 1.16.0", and whose defaults they are, where one tool's are meant."""
    tools = {place for _, _, place in rows if place.startswith(DEFAULT)}
    if len(tools) != 1:
        return list(rows), ""
    (tool,) = tools
    return [(name, value, "default" if place == tool else place) for name, value, place in rows], tool[len(DEFAULT) :]


def _table(page: Page, rows: Sequence[Sequence[str]], *, fixed: int = 0, right: Sequence[int] = ()) -> None:
    names = [str(at) for at in range(len(rows[0]))]
    table = page.table(*names, right=[names[at] for at in right], fixed=names[:fixed], header=False)
    for row in rows:
        page.row(table, *row)
    page.console.print(Padding(table, (0, 0, 0, 2)))


def _render_fix(page: Page, fixed: Mapping[str, Any], *, fits: bool) -> None:
    """How --fix ended; `fits`: whether the file did before."""
    outcome, changes = fixed["verdict"].replace("_", " "), "; ".join(fixed["changes"])
    page.line()
    if fixed["path"]:
        speed = f", about {fixed['tokens_per_s']:,.0f} tokens/s" if fixed["tokens_per_s"] else ""
        page.line(clean(f"wrote {fixed['path']} ({outcome}: {gib(fixed['peak_device_bytes'])}{speed}): {changes}"))
        for line in fixed["diff"]:
            page.command(clean(line))
        if fixed["needs"]:
            page.line(f"needs, where it runs: pip install {' '.join(fixed['needs'])}")
        if fixed["verdict"] != "fits":
            page.line("its band reaches over the limit: it may or may not fit")
    elif fixed["command"]:
        page.line(clean(f"nothing written: what fits, this file's form does not take ({changes})"))
        page.command(clean(fixed["command"]))
    elif fixed["refused"]:
        page.line(clean(f"nothing written: {fixed['refused']}"))
        if changes:
            page.line(clean(f"by hand ({outcome}): {changes}"))
        for line in fixed["by_hand"]:
            page.line(clean(line), indent=2)
    elif fits:
        page.line("it fits, and no change is predicted to be faster: nothing written")
    else:
        page.line("no change that one setting can say makes it fit: nothing written")
