"""`plan ui`: one page in which a person picks model and GPU and slides through the settings.

Every figure is the formula's own: the page looks it up in the grid of one model on one GPU, a script of its own that
the server computes when it is asked for, or that lies beside a static page.
"""

import json
from collections.abc import Sequence
from importlib.resources import files

from planner.choices.kernels import KERNELS
from planner.decision.grid import Grid
from planner.hardware.gpu import GpuSpec
from planner.models.spec import ModelSpec
from planner.outcome import Candidate
from reports.brief import GROUPS, group_bytes
from reports.plain import clean
from reports.text import memory_mark, speed_mark

VERDICTS = ("fits", "tight", "over")


def grid_name(model_id: str, gpu_key: str) -> str:
    """The file name of a grid, without its end."""
    return f"{model_id}--{gpu_key}".replace("/", "--")


def grid_script(grid: Grid) -> str:
    """The grid as a script that hands it to the page.

    A cell is [verdict (index of VERDICTS), device peak, tokens/s, bytes of the five groups]; bytes and tokens/s are
    whole numbers.
    """
    workload = grid.workload
    known = [one for one in grid.cells if one is not None]
    marks = {
        "memory": sorted({memory_mark(one.formula) for one in known}),
        "speed": sorted({speed_mark(one.formula) for one in known}),
    }
    document = {
        "memory": workload.memory_bytes,
        "budget": workload.budget_bytes,
        "batch": workload.global_batch_seqs,
        "groups": [label for label, _ in GROUPS],
        "methods": grid.methods,
        "lengths": grid.lengths,
        "batches": grid.batches,
        "checkpointing": grid.checkpointing,
        "marks": marks,
        "fixed": _fixed_words(known),
        "cells": [None if one is None else _cell(one, workload.memory_bytes) for one in grid.cells],
    }
    name = json.dumps(grid_name(workload.model.model_id, workload.gpu.key))
    return f"take({name}, {json.dumps(document, separators=(',', ':'), allow_nan=False)});\n"


def page(
    models: Sequence[ModelSpec], gpus: Sequence[GpuSpec], *, writes: bool, first: tuple[str, str] | None = None
) -> str:
    """The page.

    Args:
        models, gpus: what may be picked.
        writes: whether a server stands behind it that hands out launch files.
        first: model and GPU that are shown at first.
    """
    offered = {
        "models": [[one.model_id, one.num_params] for one in models],
        "gpus": [[one.key, one.name, one.memory_bytes] for one in gpus],
        "first": first or (models[0].model_id, gpus[0].key),
        "writes": writes,
    }
    folder = files("reports") / "templates"
    text = (folder / "ui.html").read_text(encoding="utf-8")
    style = (folder / "style.css").read_text(encoding="utf-8")
    data = json.dumps(offered, ensure_ascii=True).replace("<", "\\u003c")
    return text.replace("/*STYLE*/", style).replace('"OFFERED"', data)


def _cell(one: Candidate, memory_bytes: int) -> list[int]:
    groups = group_bytes(one, memory_bytes)
    return [
        VERDICTS.index(one.verdict),
        one.formula.peak_device_bytes,
        round(one.formula.tokens_per_s or 0),
        *(groups[label] for label, _ in GROUPS),
    ]


def _fixed_words(known: Sequence[Candidate]) -> str:
    """The settings that no slider changes, in words."""
    if not known:
        return ""
    setup = known[0].setup
    precisions = dict.fromkeys(one.setup.precision for one in known)
    return clean(
        f"{' or '.join(precisions)}, {setup.attention} attention, {setup.optimizer}, {setup.loss} loss, "
        f"{KERNELS[setup.kernels].words}, LoRA on all linear layers, nf4-double for QLoRA"
    )
