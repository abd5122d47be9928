"""Real answers against the JSON Schema that `plan --json-schema` prints, which is made of the types that write them."""

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from finetune_planner.cli.app import run
from finetune_planner.cli.output import INDENT
from reports.brief_json import MAX_BYTES, brief
from reports.json_schema import answer_schema
from reports.plan_json import plan_to_dict
from tests.reports.factories import make_plan

LLAMA = "meta-llama/Llama-3.1-8B"
ASKED = {
    "one card": ([LLAMA, "--gpu", "rtx-4090", "--no-dry-run"], 0),
    "several": ([LLAMA, "--gpu", "h100-sxm", "--gpus", "16", "--method", "full", "--no-dry-run"], 0),
    "nothing fits": ([LLAMA, "--gpu", "rtx-3060", "--method", "full", "--no-dry-run"], 1),
    "rollouts": (["Qwen/Qwen2.5-0.5B", "--gpu", "l4", "--objective", "grpo", "--method", "lora", "--no-dry-run"], 0),
    "experts": (["Qwen/Qwen3-30B-A3B", "--gpu", "h200", "--gpus", "8", "--method", "full", "--no-dry-run"], 0),
    "adapter": ([LLAMA, "--gpu", "a100-80gb", "--adapter", "ia3", "--no-dry-run"], 0),
    "data": (
        ["gpt2", "--gpu", "l40s", "--method", "lora", "--samples", "5000", "--seq-len", "1024", "--no-dry-run"],
        0,
    ),
    "launch files": (["gpt2", "--gpu", "t4", "--no-dry-run"], 0),
    "estimate": (["estimate", LLAMA, "--gpu", "rtx-4090", "--gpus", "2", "--no-dry-run"], 0),
    "estimate dry run": (["estimate", "gpt2", "--gpu", "t4", "--lengths", "500:200"], 0),
    "check": (["check", "train.yaml", "--gpu", "rtx-4090", "--no-dry-run", "--fix"], 1),
    "folder": (["check", ".", "--gpu", "rtx-4090"], 1),
    "which card": (["which-gpu", "gpt2", "--vendor", "Intel", "--method", "lora", "--samples", "5000"], 0),
    "no card": (["which-gpu", LLAMA, "--vendor", "Intel", "--method", "full"], 1),
    "oom": (["oom", "log.txt"], 0),
    "oom alone": (["oom", "log.txt", "--config", "none.yaml"], 0),
    "gpus": (["gpus"], 0),
}
CONFIG = {"model_name_or_path": LLAMA, "per_device_train_batch_size": 4, "max_length": 4096, "bf16": True}
LOG = """Traceback (most recent call last):
  File "loss.py", line 9, in fixed_cross_entropy
    loss = nn.functional.cross_entropy(source, target)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.83 GiB. GPU 0 has a total capacity of 23.51 GiB of which
3.1 GiB is free. Of the allocated memory 18.2 GiB is allocated by PyTorch, and 1.2 GiB is reserved but unallocated.
"""
NAMES = {"estimate": "BriefEstimate", "check": "BriefCheck", "which_gpu": "BriefWhichGpu", "oom": "BriefOom"} | {
    "not_checked": "BriefNotChecked"
}
RECORDED = Path(__file__).parents[2] / "docs" / "answers.schema.json"


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    document = answer_schema()
    jsonschema.Draft202012Validator.check_schema(document)
    return jsonschema.Draft202012Validator(document)


def problems(validator: jsonschema.Draft202012Validator, document: Any) -> list[str]:
    """What speaks against a document, by the branch for its own kind."""
    if isinstance(document, list):
        assert validator.is_valid(document) or "kind" not in document[0]
        return [problem for entry in document if "kind" in entry for problem in problems(validator, entry)]
    name = NAMES.get(document["kind"], "BriefPlan")
    branch_validator = validator.evolve(schema={**validator.schema, "anyOf": [{"$ref": f"#/$defs/{name}"}]})
    return [
        f"{'.'.join(map(str, leaf.absolute_path))}: {leaf.message:.300}"
        for error in branch_validator.iter_errors(document)
        for leaf in (error, *error.context, *(deep for child in error.context for deep in child.context))
    ]


@pytest.mark.parametrize("case", ASKED)
def test_answers_are_of_the_schema_and_the_short_ones_short(
    case: str,
    validator: jsonschema.Draft202012Validator,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words, code = ASKED[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("finetune_planner.app.levels.OVER_MICRO_BATCHES", 8)
    Path("train.yaml").write_text(json.dumps(CONFIG))
    Path("unread.yaml").write_text(json.dumps(CONFIG | {"max_length": -1}))
    Path("log.txt").write_text(LOG)
    written = ["--out", "plan"] if case in ("launch files", "nothing fits") else []
    assert run([*words, *written, "--json=full"]) == code
    whole = json.loads(capsys.readouterr().out)
    short = brief(whole, indent=INDENT)  # as `--json` prints it
    text = json.dumps(short, ensure_ascii=False, indent=INDENT)
    assert problems(validator, short) == []
    assert validator.is_valid(short) == (case != "gpus")
    assert len(text.encode()) <= MAX_BYTES + 1
    if written:
        assert any(launch["files"] for launch in short.get("launch", ())) == (code == 0)
        starts = [launch.get("run", "") for launch in short.get("launch", ())]
        assert any(start.startswith("cd plan && bash launch/run.sh install ") for start in starts) == (code == 0)
    if "workload" in whole:
        whole = whole["chosen" if whole["kind"] == "plan" else "nearest"]
    if "formula" in whole:
        best = next(whole[level] for level in ("dry_run", "formula") if whole[level])
        assert short["memory"]["peak_device_bytes"] == best["peak_device_bytes"]
        assert short["speed"]["tokens_per_s"] == pytest.approx(best["tokens_per_s"], rel=1e-5)


@pytest.mark.parametrize(
    "harm",
    [
        lambda document: document.pop("kind"),
        lambda document: document.update(num_gpus="two"),
        lambda document: document["memory"].update(peak_device_bytes="8 GiB"),
        lambda document: document["setup"].update(colour="red"),
        lambda document: document.update(schema_version=0),
    ],
)
def test_what_is_no_answer_is_refused(harm: Any, validator: jsonschema.Draft202012Validator) -> None:
    document = json.loads(json.dumps(brief(plan_to_dict(make_plan()))))
    assert validator.is_valid(document)
    harm(document)
    assert not validator.is_valid(document)


def test_the_short_answer_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for form in ("--json=full", "--json"):
        assert run(["estimate", "gpt2", "--gpu", "t4", "--no-dry-run", form]) == 0
        printed.append(capsys.readouterr().out)
    assert (
        printed[1] == json.dumps(brief(json.loads(printed[0]), indent=INDENT), ensure_ascii=False, indent=INDENT) + "\n"
    )


def test_a_folder_without_a_training_is_an_answer(validator: jsonschema.Draft202012Validator) -> None:
    assert validator.is_valid([])
    assert not validator.is_valid([{"file": "a.yaml", "verdict": "unreadable", "message": "no kind"}])


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--json-schema"]) == 0
    assert json.loads(capsys.readouterr().out) == answer_schema()


def test_the_recorded_schema_of_the_short_answers_holds() -> None:
    """A change is meant, and raises SCHEMA_VERSION where a reader of the old form would break."""
    text = json.dumps(answer_schema(), indent=1) + "\n"
    if os.environ.get("UPDATE_DOCS"):
        RECORDED.write_text(text)
    assert RECORDED.read_text() == text
