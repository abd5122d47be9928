"""`plan accuracy --rivals PYTHON`: other estimators on the recorded runs, beside this one's formula."""

import json
import subprocess
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

from planner.errors import EnvironmentProblem
from planner.evidence.measured import MeasuredRow, Quantity
from planner.hardware.gpu import GpuSpec
from planner.interchange import setup_to_dict
from planner.memory.model import predict_memory
from planner.memory.types import MemoryBreakdown
from planner.models.spec import ModelSpec
from planner.records import dataclass
from planner.units import GIB

TIMEOUT_S = 600
Lookup = Callable[[MeasuredRow], tuple[ModelSpec, GpuSpec]]


@dataclass(frozen=True, kw_only=True)
class RivalRow:
    """One estimator on one source's runs, and the formula on the same; errors as fractions."""

    name: str
    group: str
    figure: Quantity
    num_configs: int
    num_unanswered: int
    median_error: float
    worst_error: float
    own_median_error: float
    own_worst_error: float


def compare(rows: Sequence[MeasuredRow], pythons: Sequence[Path], lookup: Lookup) -> list[RivalRow]:
    """Every rival that these Pythons have, source by source; of a configuration that was repeated the first run.

    Args:
        lookup: the model and the card of a row.

    Raises:
        EnvironmentProblem: a Python that does not start, or has none of them.
    """
    asked: dict[tuple[str, str], MeasuredRow] = {}
    for row in rows:
        if row.status == "ok" and row.num_gpus == 1 and (row.comparable("reserved") or row.comparable("device")):
            asked.setdefault((row.group, row.config_id), row)
    own = {row.id: predict_memory(*lookup(row), row.setup) for row in asked.values() if row.setup is not None}
    found: list[RivalRow] = []
    for python in pythons:
        answers = _ask(python, [_line(row, lookup) for row in asked.values()])
        errors: dict[tuple[str, str, Quantity], list[tuple[float | None, float]]] = defaultdict(list)
        for row, several in zip(asked.values(), answers, strict=True):
            for answer in several:
                measured = row.measured(answer["figure"])
                if measured is None:
                    continue
                theirs = None if answer["gib"] is None else answer["gib"] * GIB / measured - 1
                errors[answer["name"], row.group, answer["figure"]].append(
                    (theirs, _figure(own[row.id], answer["figure"]) / measured - 1)
                )
        for (name, group, figure), each in sorted(errors.items()):
            answered = [(abs(theirs), abs(ours)) for theirs, ours in each if theirs is not None]
            if answered:
                found.append(_row(name, group, figure, answered, len(each) - len(answered)))
    return found


def _row(
    name: str, group: str, figure: Quantity, errors: Sequence[tuple[float, float]], num_unanswered: int
) -> RivalRow:
    """One line, of (the rival's error, the formula's) of each configuration."""
    theirs, ours = zip(*errors, strict=True)
    return RivalRow(
        name=name,
        group=group,
        figure=figure,
        num_configs=len(errors),
        num_unanswered=num_unanswered,
        median_error=median(theirs),
        worst_error=max(theirs),
        own_median_error=median(ours),
        own_worst_error=max(ours),
    )


def markdown(found: Sequence[RivalRow]) -> str:
    """One table: the rival's error and the formula's, on the runs that the rival answers."""
    lines = [
        "| estimator | runs of | figure | configurations | not answered | median | worst | formula here | worst |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found:
        shares = (row.median_error, row.worst_error, row.own_median_error, row.own_worst_error)
        words = " | ".join(f"{100 * share:.1f} %" for share in shares)
        lines.append(
            f"| {row.name} | {row.group} | {row.figure} | {row.num_configs} | {row.num_unanswered or ''} | {words} |"
        )
    return "\n".join(lines) + "\n"


def _figure(memory: MemoryBreakdown, figure: str) -> int:
    return memory.peak_reserved_bytes if figure == "reserved" else memory.peak_device_bytes


def _line(row: MeasuredRow, lookup: Lookup) -> str:
    assert row.setup is not None  # comparable rows have one
    model, gpu = lookup(row)
    return json.dumps(
        {
            "model": row.model_name,
            "setup": setup_to_dict(row.setup),
            "shape": {"gpu": gpu.key, "memory_gib": gpu.memory_bytes / GIB, **_shape(model)},
        }
    )


def _shape(model: ModelSpec) -> dict[str, Any]:
    """A dense decoder in the words that every estimator has."""
    layer = next(one for one in model.layer_kinds if one.attention is not None)
    assert layer.attention is not None
    return {
        "num_params": model.num_params,
        "hidden_size": model.hidden_size,
        "num_layers": model.num_layers,
        "num_attention_heads": layer.attention.num_heads,
        "num_kv_heads": layer.attention.num_kv_heads,
        "head_dim": layer.attention.head_dim,
        "intermediate_size": layer.mlp.intermediate_size if layer.mlp is not None else 0,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied,
    }


def _ask(python: Path, lines: Sequence[str]) -> list[list[dict[str, Any]]]:
    code = (resources.files("planner") / "cli" / "rival_child.py").read_text(encoding="utf-8")
    try:
        done = subprocess.run(
            [str(python), "-I", "-c", code],
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentProblem(
            f"{python} did not answer: {error}", hint="give the Python of an environment"
        ) from error
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    if len(answers) != len(lines) or not any(answers):
        raise EnvironmentProblem(
            f"{python} has none of canifinetune, fitcheck-llm and fitscout, or failed: {done.stderr[-200:]}",
            hint="install one there: PYTHON -m pip install canifinetune",
        )
    return answers
