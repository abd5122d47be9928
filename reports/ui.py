"""`plan ui`: one page in which a person picks model and GPU, asks for the fastest setup and moves its settings.

Every figure is the formula's own: the page looks it up in the grid of one model on one GPU, a script of its own that
the server computes when it is asked for, or that lies beside a static page. With `--static DIR --table TABLE` it is a
page over the plans of `plan table`, ready for a Hugging Face Space of the kind "static".
"""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from planner.hardware.gpu import GpuSpec
from planner.models.spec import ModelSpec
from planner.options.kernels import KERNELS
from planner.planning.grid import METHODS, Grid
from planner.planning.plan import NoPlan
from planner.planning.useful import useful_tokens_per_s
from planner.setup import TrainSetup
from planner.setup.outcome import Candidate
from reports.plain import clean, joined
from reports.setup_text import short_setup_words
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
        "remedies": [
            [clean(remedy.action) for remedy in answer.remedies if remedy.fits] if isinstance(answer, NoPlan) else []
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
    return _filled("ui.html", offered)


def _filled(name: str, payload: Mapping[str, Any]) -> str:
    """A template with the style and what the page offers."""
    folder = files("reports") / "templates"
    text = (folder / name).read_text(encoding="utf-8")
    text = text.replace("/*STYLE*/", (folder / "style.css").read_text(encoding="utf-8"))
    return text.replace('"OFFERED"', json.dumps(payload, ensure_ascii=True).replace("<", "\\u003c"))


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


Rows = Sequence[Mapping[str, Any]]
TABLE_VERDICTS = (*VERDICTS, "")
"""The last: nothing can be planned, and the words say why."""
FIRST_MODEL = "meta-llama/Llama-3.1-8B"

SPACE_README = """---
title: Which GPU fine-tunes it
emoji: 🧮
colorFrom: blue
colorTo: green
sdk: static
app_file: index.html
pinned: false
license: apache-2.0
short_description: Memory and speed of fine-tuning {models} models on {gpus} GPUs
---

# Which GPU fine-tunes it

{plans} plans by finetune-planner {version}: for each of {models} models the fastest setup that fits on each of {gpus}
GPUs, by method and length. Every figure is a prediction of the formula (how wrong it was: docs/accuracy).

Made with

    plan table --out table
    plan ui --static space --table table

and uploaded as it is: `hf upload USER/NAME space . --repo-type space`. It opens from a folder too.
"""


def table_site(
    models: Iterable[tuple[str, Rows]], gpus: Mapping[str, GpuSpec], version: str
) -> Iterator[tuple[str, str]]:
    """(path, text) of every file of the site: a script for each model, then the page and its README.

    Args:
        models: (model, its rows) in the columns of `plan table`.
        gpus: by key, those of the rows.
    """
    offered: list[list[Any]] = []
    prices = dict[str, float | None]()
    lengths = set[int]()
    methods = dict[str, None]()
    num_plans = 0
    for model, rows in models:
        name = f"data/{model.replace('/', '--')}.js"
        offered.append([model, next((row["num_params"] for row in rows if row["num_params"]), None), name])
        lengths.update(row["seq_len_tokens"] for row in rows)
        methods |= dict.fromkeys(row["method"] for row in rows)
        for row in rows:
            prices[row["gpu"]] = row["usd_per_hour"] or prices.get(row["gpu"])
        num_plans += len(rows)
        yield name, _script(model, rows)
    offered.sort(key=lambda entry: (-(entry[1] or 0), entry[0]))
    shown = [[key, gpus[key].name, gpus[key].memory_bytes, price] for key, price in prices.items() if key in gpus]
    first = FIRST_MODEL if any(entry[0] == FIRST_MODEL for entry in offered) else offered[0][0]
    payload = {"models": offered, "gpus": shown, "lengths": sorted(lengths), "methods": [*methods], "first": first}
    payload |= {"version": version, "plans": num_plans}
    yield "index.html", _filled("table.html", payload)
    counts = {"plans": f"{num_plans:,}", "models": len(offered), "gpus": len(shown)}
    yield "README.md", SPACE_README.format(version=version, **counts)


def _script(model: str, rows: Rows) -> str:
    """A model's rows as a script that hands them to the page: [GPU, length, method, verdict (index of TABLE_VERDICTS),
    missing bytes, peak bytes, tokens/s, place of the setup's words or of the reason]."""
    words = dict[str, int]()
    cells = [
        [
            row["gpu"],
            row["seq_len_tokens"],
            row["method"],
            TABLE_VERDICTS.index("over" if not row["fits"] and not row["problem"] else row["verdict"] or ""),
            row["missing_bytes"],
            row["peak_device_bytes"],
            None if row["tokens_per_s"] is None else round(row["tokens_per_s"]),
            words.setdefault(_words(row), len(words)),
        ]
        for row in rows
    ]
    document = {"rows": cells, "words": [*words]}
    return f"take({json.dumps(model)}, {json.dumps(document, separators=(',', ':'), allow_nan=False)});\n"


def _words(row: Mapping[str, Any]) -> str:
    if row["problem"]:
        return clean(row["problem"])
    usual = TrainSetup()
    setup = usual.replace_trusted(
        **{name: value for name, value in row.items() if name in vars(usual) and value is not None}
    )
    more = (
        setup.quantization if setup.quantized else "",
        setup.precision,
        setup.optimizer,
        f"{setup.attention} attention",
        f"{setup.loss} loss",
        KERNELS[setup.kernels].words if setup.kernels != "eager" else "",
        "packed" if setup.packing else "",
        f"{setup.offload} offloaded" if setup.offload != "none" else "",
    )
    return clean(joined((short_setup_words(setup), *more)))
