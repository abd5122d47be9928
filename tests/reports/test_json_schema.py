"""Real answers against the JSON Schema that `plan --json-schema` prints, which is made of the types that write them."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from planner.cli.app import run
from reports.brief_json import MAX_BYTES
from reports.json_schema import answer_schema

LLAMA = "meta-llama/Llama-3.1-8B"
ASKED = {
    "one card": ([LLAMA, "--gpu", "rtx-4090", "--no-dry-run"], 0),
    "dry run": (["Qwen/Qwen2.5-0.5B", "--gpu", "rtx-3060"], 0),
    "several": ([LLAMA, "--gpu", "h100-sxm", "--gpus", "16", "--method", "full", "--no-dry-run"], 0),
    "nothing fits": ([LLAMA, "--gpu", "rtx-3060", "--method", "full", "--no-dry-run"], 1),
    "rollouts": (["Qwen/Qwen2.5-0.5B", "--gpu", "h100-sxm", "--objective", "grpo", "--no-dry-run"], 0),
    "experts": (["Qwen/Qwen3-30B-A3B", "--gpu", "h200", "--gpus", "8", "--no-dry-run"], 0),
    "adapter": ([LLAMA, "--gpu", "a100-80gb", "--adapter", "ia3", "--no-dry-run"], 0),
    "data": ([LLAMA, "--gpu", "l40s", "--samples", "5000", "--seq-len", "1024", "--no-dry-run"], 0),
}


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    document = answer_schema()
    jsonschema.Draft202012Validator.check_schema(document)
    return jsonschema.Draft202012Validator(document)


def problems(validator: jsonschema.Draft202012Validator, document: Any) -> list[str]:
    """What speaks against a document, by the branch for its own kind."""
    name = {"plan": "Plan", "no_plan": "NoPlan"}[document["kind"]] if "workload" in document else "BriefPlan"
    own = validator.evolve(schema={**validator.schema, "anyOf": [{"$ref": f"#/$defs/{name}"}]})
    return [
        f"{'.'.join(map(str, leaf.absolute_path))}: {leaf.message:.300}"
        for error in own.iter_errors(document)
        for leaf in (error, *error.context, *(deep for one in error.context for deep in one.context))
    ]


@pytest.mark.parametrize("case", ASKED)
def test_answers_whole_and_brief_are_of_the_schema(
    case: str, validator: jsonschema.Draft202012Validator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, code = ASKED[case]
    assert run([*words, "--json", "--out", str(tmp_path / "plan")]) == code
    whole = json.loads(capsys.readouterr().out)
    assert problems(validator, whole) == []
    assert problems(validator, json.loads((tmp_path / "plan" / "plan.json").read_text())) == []
    assert run([*words, "--json=brief"]) == code
    text = capsys.readouterr().out
    assert problems(validator, json.loads(text)) == []
    assert len(text.encode()) <= MAX_BYTES


@pytest.mark.parametrize(
    "harm",
    [
        lambda one: one.pop("chosen"),
        lambda one: one["chosen"].update(fits="yes"),
        lambda one: one["chosen"]["formula"].update(peak_device_bytes="8 GiB"),
        lambda one: one["workload"].update(colour="red"),
        lambda one: one.update(schema_version=0),
    ],
)
def test_what_is_no_answer_is_refused(
    harm: Any, validator: jsonschema.Draft202012Validator, capsys: pytest.CaptureFixture[str]
) -> None:
    words, _ = ASKED["one card"]
    assert run([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert validator.is_valid(document)
    harm(document)
    assert not validator.is_valid(document)


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--json-schema"]) == 0
    assert json.loads(capsys.readouterr().out) == answer_schema()
