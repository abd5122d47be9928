"""`plan ui --static DIR --table TABLE`: a page over the plans of `plan table`: a model's cards at every length and by
every method, ready for a Hugging Face Space of the kind "static".

The page reads one small script for each model; what it shows are the table's rows, nothing is computed.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from planner.hardware.gpu import GpuSpec
from planner.options.kernels import KERNELS
from planner.setup import TrainSetup
from reports.plain import clean, joined
from reports.setup_text import short_setup_words

Rows = Sequence[Mapping[str, Any]]
VERDICTS = ("fits", "tight", "over", "")
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
    folder = files("reports") / "templates"
    text = (folder / "table.html").read_text(encoding="utf-8")
    text = text.replace("/*STYLE*/", (folder / "style.css").read_text(encoding="utf-8"))
    yield "index.html", text.replace('"OFFERED"', json.dumps(payload, ensure_ascii=True).replace("<", "\\u003c"))
    counts = {"plans": f"{num_plans:,}", "models": len(offered), "gpus": len(shown)}
    yield "README.md", SPACE_README.format(version=version, **counts)


def _script(model: str, rows: Rows) -> str:
    """A model's rows as a script that hands them to the page: [GPU, length, method, verdict (index of VERDICTS),
    missing bytes, peak bytes, tokens/s, place of the setup's words or of the reason]."""
    words = dict[str, int]()
    cells = [
        [
            row["gpu"],
            row["seq_len_tokens"],
            row["method"],
            VERDICTS.index("over" if not row["fits"] and not row["problem"] else row["verdict"] or ""),
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
