"""`plan ui`: one page in which a person picks model and GPU, asks for the fastest setup and moves its settings.

Every figure is the formula's own: the page looks it up in the grid of one model on one GPU, a script of its own that
the server computes when it is asked for, or that lies beside a static page.
"""

import json
import shlex
from collections.abc import Sequence
from importlib.resources import files

from planner.hardware.gpu import GpuSpec
from planner.models.spec import ModelSpec
from planner.options.kernels import KERNELS
from planner.planning.grid import METHODS, Grid
from planner.planning.plan import NoPlan
from planner.planning.useful import useful_tokens_per_s
from planner.setup.outcome import Candidate
from reports.plain import clean, joined
from reports.terminal import GROUPS, group_bytes
from reports.text import job_words, memory_mark, speed_mark

VERDICTS = ("fits", "tight", "over")


def grid_name(model_id: str, gpu_key: str) -> str:
    """The file name of a grid, without its end."""
    return f"{model_id}--{gpu_key}".replace("/", "--")


def grid_script(grid: Grid, name: str = "") -> str:
    """The grid as a script that hands it to the page, under its name.

    A cell is [verdict (index of VERDICTS), device peak, tokens/s, those that are no padding, places of its two marks,
    bytes of the five groups]; bytes and tokens/s are whole numbers.
    """
    workload, marks = grid.workload, dict[str, int]()
    document = {
        "memory": workload.memory_bytes,
        "budget": workload.budget_bytes,
        "batch": [job.global_batch_seqs for job in grid.workloads],
        "groups": [label for label, _ in GROUPS],
        "methods": grid.methods,
        "lengths": grid.lengths,
        "usual": grid.usual,
        "batches": grid.batches,
        "checkpointing": grid.checkpointing,
        "cells": [
            None if candidate is None else _cell(candidate, grid, at, marks) for at, candidate in enumerate(grid.cells)
        ],
        "marks": list(marks),
        "fastest": grid.fastest(),
        "suggestions": [
            [clean(each.action) for each in answer.suggestions if each.fits] if isinstance(answer, NoPlan) else []
            for answer in grid.answers
        ],
        "fixed": _fixed(grid),
        "jobs": [job_words(job) for job in grid.workloads],
        "tokens": [job.data.epoch_tokens for job in grid.workloads],
        "epochs": [job.epochs for job in grid.workloads],
        "price": None if workload.price_per_hour is None else [workload.price_per_hour, clean(workload.price_source)],
    }
    name = json.dumps(name or grid_name(workload.model.model_id, workload.gpu.key))
    return f"take({name}, {json.dumps(document, separators=(',', ':'), allow_nan=False)});\n"


def page(
    models: Sequence[ModelSpec],
    gpus: Sequence[GpuSpec],
    *,
    writes: bool,
    first: tuple[str, str] | None = None,
    data: Sequence[str] = (),
    sized: bool = False,
) -> str:
    """The page.

    Args:
        models, gpus: what may be picked.
        writes: whether a server stands behind it that hands out launch files.
        first: model and GPU that are shown at first.
        data: the words of a command that name the data set.
        sized: whether its size is known; else the page asks how much is trained on.
    """
    offered = {
        "models": [[model.model_id, model.num_params] for model in models],
        "gpus": [[gpu.key, gpu.name, gpu.memory_bytes] for gpu in gpus],
        "first": first or (models[0].model_id, gpus[0].key),
        "writes": writes,
        "data": clean(shlex.join(data)),
        "sized": sized,
    }
    folder = files("reports") / "templates"
    text = (folder / "ui.html").read_text(encoding="utf-8")
    text = text.replace("/*STYLE*/", (folder / "style.css").read_text(encoding="utf-8"))
    return text.replace('"OFFERED"', json.dumps(offered, ensure_ascii=True).replace("<", "\\u003c"))


def _cell(candidate: Candidate, grid: Grid, at: int, marks: dict[str, int]) -> list[int]:
    workload = grid.workload_of(at)
    groups = group_bytes(candidate, workload.memory_bytes)
    speed = candidate.formula.tokens_per_s or 0
    useful = useful_tokens_per_s(workload, candidate) if speed and workload.data.real_fractions else speed
    return [
        VERDICTS.index(candidate.verdict),
        candidate.formula.peak_device_bytes,
        round(speed),
        round(useful),
        *(
            marks.setdefault(mark, len(marks))
            for mark in (memory_mark(candidate.formula), speed_mark(candidate.formula))
        ),
        *(groups[label] for label, _ in GROUPS),
    ]


def _fixed(grid: Grid) -> list[dict[str, str]]:
    by_length: list[dict[str, str]] = [{} for _ in grid.lengths]
    each = len(grid.batches) * len(grid.checkpointing)
    for at, candidate in enumerate(grid.cells):
        method = grid.methods[at // (each * len(grid.lengths))][0]
        of_length = by_length[at // each % len(grid.lengths)]
        if candidate is not None and method not in of_length:
            setup = candidate.setup
            of_length[method] = clean(
                joined(
                    (
                        setup.precision,
                        setup.quantization if setup.quantized else "",
                        f"{setup.attention} attention",
                        setup.optimizer,
                        f"{setup.loss} loss",
                        KERNELS[setup.kernels].words,
                        "packed rows" if setup.packing else "",
                        "LoRA on all linear layers" if setup.method != "full" else "",
                    )
                )
            )
    assert all(set(settings) <= set(METHODS) for settings in by_length)
    return by_length
