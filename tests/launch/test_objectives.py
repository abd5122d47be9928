"""The TRL files of other objectives really train: two steps on the tiny model, with the plan's batch and adapters."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.frameworks.exporters import TARGETS, DatasetChoice
from planner.options.objectives import OBJECTIVES
from planner.options.rollouts import Rollout
from planner.setup import TrainSetup
from tests.launch.conftest import FACTS, Run, export_request, num_saved, prepared, two_steps, write_jsonl, write_launch
from tests.launch.test_spread import layout
from tests.launch.test_trl import HIDDEN, lora_params
from tests.whole import these


def pairs(num: int) -> list[dict[str, Any]]:
    """Preferences for a right answer over a wrong one, in plain text."""
    return [
        {"prompt": f"What is the {subject}? ", "chosen": f"The {subject} is {right}.", "rejected": "I do not know."}
        for subject, right in (FACTS[index % len(FACTS)] for index in range(num))
    ]


def completions(num: int) -> list[dict[str, Any]]:
    """Right and wrong answers, each by itself."""
    return [
        {"prompt": row["prompt"], "completion": row[kind], "label": kind == "chosen"}
        for row in pairs(num // 2)
        for kind in ("chosen", "rejected")
    ]


def prompts(num: int) -> list[dict[str, Any]]:
    """Questions with the answer that the example's reward looks for."""
    return [{"prompt": row["prompt"], "answer": row["chosen"]} for row in pairs(num)]


def labelled(num: int) -> list[dict[str, Any]]:
    """Right and wrong answers with what they are."""
    return [{"text": row["completion"], "label": "yes" if row["label"] else "no"} for row in completions(num)]


def related(num: int) -> list[dict[str, Any]]:
    """Questions with their right answers, and a wrong one for who takes it."""
    return [{"anchor": row["prompt"], "positive": row["chosen"], "negative": row["rejected"]} for row in pairs(num)]


ROWS: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    "dpo": pairs, "kto": completions, "reward": pairs, "orpo": pairs, "grpo": prompts, "rloo": prompts,
    "classification": labelled, "embedding": related,
}  # fmt: skip


CACHED = {"cached_seqs": 1, "hard_negatives": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "changes"),
    these(
        [("dpo", {}), ("orpo", {}), ("grpo", {}), ("classification", {}), ("embedding", CACHED)],
        [*((name, {}) for name in ROWS), ("embedding", CACHED)],
    ),
)
def test_two_steps_of_every_objective_train(
    objective: str, changes: dict[str, Any], place: Path, launch: Callable[..., Run]
) -> None:
    row = OBJECTIVES[objective]
    setup = TrainSetup(
        objective=objective,
        precision="fp32",
        loss=row.losses[0],
        lora_rank=4,
        micro_batch_seqs=2,
        accumulation_steps=2,
        seq_len_tokens=64,
        rollout=Rollout(num_generations=2, completion_tokens=8) if row.rolls_out else None,
        **changes,
    )
    write_jsonl(place / "data" / "train.jsonl", ROWS[objective](16))
    data = DatasetChoice(path="./data", local=True, columns=row.data[0])
    request = export_request(setup, dataset=data, held_out=None, lacks_template=False)
    emitted = TARGETS[row.stack("trl")].export(request)
    assert not emitted.unsupported
    if emitted.prepare:
        prepared(place, request, "rows")
    run = two_steps(launch, place, emitted, setup)
    prompts_each = setup.rollout_settings.num_generations if row.rolls_out else 1
    assert run.state["epoch"] == pytest.approx(2 * setup.global_batch_seqs / prompts_each / 16)
    assert all(loss > 0 for loss in run.losses) or row.rolls_out  # alike rewards leave nothing to learn
    assert json.loads((place / "outputs" / "adapter_config.json").read_text())["r"] == 4
    score = HIDDEN * (2 if objective == "classification" else 1) if row.head == "score" else 0
    assert num_saved(place / "outputs") == lora_params(4) + score


@pytest.mark.slow
@pytest.mark.processes
def test_fsdp2_shares_a_reference_that_knows_what_the_policy_knew(place: Path, launch: Callable[..., Run]) -> None:
    """Before the first step both say the same, so that its loss is ln 2."""
    setup = TrainSetup(
        objective="dpo", method="full", lora_rank=0, precision="fp32", loss="chunked", micro_batch_seqs=2,
        seq_len_tokens=64, num_gpus=2, parallel="fsdp2",
    )  # fmt: skip
    write_jsonl(place / "data" / "train.jsonl", pairs(16))
    data = DatasetChoice(path="./data", local=True, columns="preference")
    request = export_request(setup, dataset=data, held_out=None)
    emitted = TARGETS["trl"].export(request)
    prepared(place, request, "rows")
    write_launch(place, emitted)
    run = layout(launch, place, emitted.command)
    assert run.losses[0] == pytest.approx(math.log(2), abs=1e-4)
