"""The command line: exit codes, hints, stdout is data; hostile input never gives a traceback."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from finetune_planner.cli.app import COMMANDS, GROUPS, build_app, complete_arguments, run
from planner.core.errors import EnvironmentProblem
from planner.core.units import GIB
from planner.models import catalogue

FAST = ["--no-dry-run"]
INTERCHANGE = {
    "model": "Qwen/Qwen2.5-1.5B", "gpu": "rtx-4080", "method": "qlora", "precision": "bf16-pure",
    "quantization": "nf4-double", "kbit_fp32_cast": True, "lora_rank": 16, "lora_targets": "attention",
    "optimizer": "paged-adamw-8bit", "attention": "sdpa", "checkpointing": True, "loss": "full", "micro_batch_seqs": 1,
    "accumulation_steps": 1, "seq_len_tokens": 2048, "num_gpus": 1,
}  # fmt: skip
LEVEL_KEYS = {
    "peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes", "step_time_s", "tokens_per_s", "terms",
}  # fmt: skip


SPREAD = [
    (["--gpus", "0"], "positive"), (["--gpu", "2xrtx-3060"], "--gpu rtx-3060 --gpus 3"),
    (["--gpus", "5000"], "positive"), (["--nodes", "2"], "--gpus 2"), (["--interconnect", "pcie"], "--gpus 2"),
    (["--parallel", "ddp"], "--gpus 2"), (["--tensor-degree", "2"], "--gpus 2"), (["--no-reshard"], "--gpus 2"),
    (["--gpus", "8", "--nodes", "3"], "multiple of --nodes"), (["--gpus", "9"], "multiple of --nodes"),
    (["--gpus", "4", "--interconnect", "nvlink"], "pcie"), (["--gpus", "4", "--interconnect", "wifi"], "ib-400"),
    (["--gpus", "4", "--interconnect", "ib-400"], "--nodes"),
    (["--gpus", "4", "--parallel", "zero9"], "--parallel zero1"),
    (["--gpus", "4", "--offload", "disk"], "--offload none"),
    (["--gpus", "4", "--schedule", "zigzag"], "--schedule 1f1b"), (["--gpus", "4", "--tensor-degree", "0"], "positive"),
    (["--gpus", "4", "--tensor-degree", "3"], "degrees"),
    (["--gpus", "4", "--parallel", "dp", "--tensor-degree", "2"], "ddp or fsdp2"),
    (["--gpus", "4", "--parallel", "ddp", "--offload", "optimizer"], "leave one out"),
    (["--gpus", "64", "--global-batch", "32", "--parallel", "ddp"], "--global-batch 64"),
]  # fmt: skip
"""Words on several GPUs -> what the hint holds."""


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        *((["Qwen/Qwen2.5-1.5B", "--gpu", "t4", *words, *FAST], hint) for words, hint in SPREAD),
        (["gpt2", "--gpu", "rtx-9999"], "rtx-"),
        (["gpt2", "--gpu", "a100"], "a100-80gb"),
        (["gpt2", "--gpu", "t4", "--rank", "-3"], "positive"),
        (["gpt2", "--gpu", "t4", "--lr", "-3"], "--lr 2e-4"),
        (["gpt2", "--gpu", "t4", "--epochs", "nan"], "--epochs 3"),
        (["gpt2", "--gpu", "t4", "--method", "dora"], "--method lora"),
        (["gpt2", "--gpu", "t4", "--method", "full", "--rank", "8"], "leave --rank out"),
        (["gpt2", "--gpu", "t4", "--memory-gib", "nan"], "--memory-gib"),
        (["gpt2", "--gpu", "t4", "--headroom", "99"], "smaller than the card"),
        (["gpt2", "--gpu", "t4", "--nonsense"], "--help"),
        (["gpt2"], "--help"),
        (["models", "no-such-name"], "plan models"),
        (["estimate", "gpt2", "--gpu", "apple-m3-max", "--gpus", "2"], "leave --gpus out"),
        (["estimate"], "plan estimate MODEL"),
        (["gpt2", "--gpu", "t4", "--no-checkpointing", "--checkpoint-every", "2"], "one of the two"),
    ],
    ids=str,
)
def test_bad_input_exits_with_two_and_a_hint(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error:" in captured.err
    assert "hint:" in captured.err
    assert hint in captured.err


def test_an_estimate_that_does_not_fit_says_what_alone_would(capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> str:
        assert run(["estimate", "Qwen/Qwen2.5-1.5B", "--gpu", "rtx-3060", "--no-dry-run", *words]) == 0
        return " ".join(capsys.readouterr().out.split())

    assert "One change should be enough: sequences of 512 tokens." in said("--micro-batch", "2", "--no-checkpointing")
    assert "No single change is enough: plan MODEL --gpu GPU" in said("--micro-batch", "8", "--no-checkpointing")
    assert "enough" not in said("--checkpointing")


def test_what_is_trained_whole_beside_adapters_is_estimated_and_is_no_target(
    capsys: pytest.CaptureFixture[str],
) -> None:
    request = ["estimate", "llama-3.2-1b", "--gpu", "rtx-4090", "--no-dry-run", "--json"]
    peaks = []
    for more in ([], ["--modules-to-save", "embed_tokens"]):
        assert run([*request, *more]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["memory"]["peak_device_bytes"])
    assert peaks[1] - peaks[0] > 2 * 2 * 128_256 * 2048  # at least a copy and its gradients in 16 bits
    assert run(["llama-3.2-1b", "--gpu", "rtx-4090", "--targets", "all-linear,embed_tokens,lm_head"]) == 2
    error = capsys.readouterr().err
    assert "all-linear alone, or names of modules" in error
    assert "--modules-to-save embed_tokens,lm_head of `plan estimate`" in error


def test_estimate_gives_the_interchange_answer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wrong = [{**INTERCHANGE, "gpu": "none"}, {**INTERCHANGE, "lora_targets": [3]}]
    lines = [json.dumps(INTERCHANGE), "{broken", *map(json.dumps, wrong), json.dumps(INTERCHANGE)]
    path = tmp_path / "setups.jsonl"
    path.write_text("\n".join(lines) + "\n")
    assert run(["estimate", "--setups", str(path), "--json=full", *FAST]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    good, broken, unknown, targets, repeat = answers
    assert good == repeat
    assert {key: good["setup"][key] for key in INTERCHANGE} == INTERCHANGE
    assert set(good["formula"]) >= LEVEL_KEYS
    assert good["dry_run"] is None
    assert good["probe"] is None
    assert 1 * GIB < good["formula"]["peak_allocated_bytes"] < 16 * GIB
    assert "error" in broken
    assert "error" in unknown
    assert "lora_targets" in targets["error"]
    for text, message in (("\n", "has no lines"), ("{broken\n{}\n", "none of its 2 lines")):
        path.write_text(text)
        assert run(["estimate", "--setups", str(path), *FAST]) == 2
        assert message in capsys.readouterr().err


def test_a_setup_line_says_its_evaluation_and_its_links(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Beside the setup's own keys: what is evaluated at once between steps, nodes and what links them."""
    alone = {"model": "Qwen/Qwen2.5-0.5B", "gpu": "rtx-4090"}
    two = {**alone, "method": "full", "num_gpus": 2, "parallel": "ddp"}
    linked = {**two, "nodes": 2, "interconnect": "ethernet-25"}
    rows = [alone, {**alone, "eval_batch": 1}, {**alone, "eval_batch": 16}, two, linked, {**alone, "eval_batch": "x"}]
    path = tmp_path / "setups.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(["estimate", "--setups", str(path), "--json=full", *FAST]) == 0
    *estimates, wrong = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    peaks = [estimate["formula"]["peak_device_bytes"] for estimate in estimates]
    assert peaks[0] == peaks[1] < peaks[2] / 9
    assert estimates[4]["formula"]["tokens_per_s"] < 0.6 * estimates[3]["formula"]["tokens_per_s"]
    assert "eval_batch" in wrong["error"]
    assert run(["estimate", "Qwen/Qwen2.5-0.5B", "--gpu", "rtx-4090", "--eval-batch", "16", *FAST]) == 0
    assert "evaluation of 1 at once" in capsys.readouterr().out


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    first = capsys.readouterr().out
    assert len(re.findall(r"^  [a-z][a-z-]* +[A-Z]", first, re.MULTILINE)) == 11  # ten, and `more`
    assert run(["more"]) == 0
    rest = capsys.readouterr().out
    for name in (*COMMANDS, *GROUPS):
        assert (f"\n  {name} " in first) + (f"\n  {name} " in rest) == 1
        assert run([name, "--help"]) == 0
        assert capsys.readouterr().out


@pytest.mark.parametrize(("words", "next_step"), [("llama3", "plan which-gpu"), ("--gpu 3060", "plan which-model")])
def test_what_is_left_out_is_hinted_at(words: str, next_step: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words.split()) == 2
    assert next_step in capsys.readouterr().err.partition("hint: ")[2]


def test_main_command_is_written_in_only_where_no_subcommand_stands() -> None:
    assert complete_arguments(["gpt2", "--gpu", "t4"])[0] == "make"
    assert complete_arguments(["--gpu", "t4", "gpt2"])[0] == "make"
    assert complete_arguments(["gpus"]) == ["gpus"]
    assert complete_arguments(["help"]) == ["--help"]
    assert complete_arguments(["./gpus"])[0] == "make"
    assert complete_arguments(["llama", "3.1", "8b", "--gpu", "t4"]) == ["make", "llama 3.1 8b", "--gpu", "t4"]
    assert complete_arguments(["which-gpu", "qwen", "3"]) == ["which-gpu", "qwen 3"]
    assert complete_arguments(["compare", "a", "b"]) == ["compare", "a", "b"]
    assert build_app(["gpus"]).registered_commands[0].name == "gpus"


def test_formula_plan_imports_nothing_heavy_and_on_one_gpu_nothing_of_several() -> None:
    code = (
        "import sys; from finetune_planner.cli.app import run;"
        "code = run(['Qwen/Qwen2.5-1.5B', '--gpu', 'rtx-4090', '--no-dry-run']);"
        "heavy = {'torch', 'transformers', 'optuna', 'numpy', 'peft', 'jinja2', 'huggingface_hub'} & set(sys.modules);"
        "heavy |= {name for name in sys.modules if name.startswith('planner.speed.several_gpus')};"
        "print(heavy, file=sys.stderr); sys.exit(9 if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


def test_a_group_without_a_word_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["store"]) == 0
    assert "export" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--target", "nosuch"], "--target must be one of"),
        (["--dataset", "missing.jsonl"], "no data set at"),
        (["--dataset", "./missing"], "no data set at"),
    ],
    ids=str,
)
def test_what_the_launch_files_cannot_have_is_said_before_planning(
    more: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("planner.planning.answer.plan_workload", lambda *_: pytest.fail("planned"))
    assert run(["gpt2", "--gpu", "t4", *FAST, *more]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_launch_files_of_an_earlier_plan_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = Path("my plan")
    plan = ["gpt2", "--gpu", "t4", *FAST, "--out", str(out)]
    assert run([*plan, "--target", "hf"]) == 0
    shown = capsys.readouterr()
    assert "cd 'my plan' && " in " ".join(shown.out.split())
    assert "not of this plan" not in shown.err
    assert run([*plan, "--target", "trl"]) == 0
    assert "launch/hf" in capsys.readouterr().err
    assert (out / "launch" / "hf" / "train_hf.py").exists()


def test_a_directory_that_cannot_be_written_does_not_cost_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("keep me")
    assert run(["gpt2", "--gpu", "t4", *FAST, "--out", str(tmp_path / "file")]) == 3
    assert "is a file" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "keep me"
    assert run(["gpt2", "--gpu", "t4", *FAST, "--out", str(tmp_path / "file" / "below")]) == 3
    shown = capsys.readouterr()
    assert "Train with" in shown.out
    assert "cannot write" in shown.err
    assert "hint:" in shown.err
    assert "free some space" not in shown.err


def test_a_name_of_several_cards_is_answered_for_each_and_asked_about(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["Qwen/Qwen2.5-7B", "--gpu", "a100", *FAST]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    for words in ("A100-SXM4-40GB", "A100-SXM4-80GB", "tokens/s"):
        assert words in err
    assert "a100-80gb" in err


def test_words_of_the_run_reach_the_launch_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["Qwen/Qwen2.5-1.5B", "--gpu", "4090", "--batch-size", "16", "--lr", "1.5e-4", "--epochs", "2", *FAST]
    assert run([*words, "--dataset-tokens", "2000000", "--target", "trl", "--out", str(tmp_path)]) == 0
    assert "2 epochs of 2 M tokens take" in " ".join(capsys.readouterr().out.split())
    text = (tmp_path / "launch" / "trl" / "trl-sft.yaml").read_text()
    assert "learning_rate: 0.00015" in text
    assert "num_train_epochs: 2.0" in text
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["workload"]["global_batch_seqs"] == 16
    assert plan["workload"]["num_epochs"] == 2


def test_a_plan_s_setup_as_data_is_estimated_as_it_was_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The allocator's setting goes with it: a line that says nothing of it is somebody's run, with the stack's own."""
    assert run(["HuggingFaceTB/SmolLM2-135M", "--gpu", "rtx-3060", "--json=full", *FAST]) == 0
    chosen = json.loads(capsys.readouterr().out)["chosen"]
    file = tmp_path / "setups.jsonl"
    file.write_text(json.dumps(chosen["setup"]) + "\n")
    assert run(["estimate", "--setups", str(file), *FAST]) == 0
    estimate = json.loads(capsys.readouterr().out)
    assert estimate["setup"] == chosen["setup"]
    assert estimate["formula"]["peak_device_bytes"] == chosen["formula"]["peak_device_bytes"]


@pytest.mark.parametrize(
    "options",
    [
        ["--adapter", "ln-tuning"],
        [
            "--dataset", "who/what", "--loss-on", "all", "--columns", "question=Frage,answer=Antwort",
            "--method", "lora", "--memory-gib", "11.3333333", "--headroom", "1.23456789", "--lr", "0.00012345678",
        ],
    ],
)  # fmt: skip
def test_the_command_under_next_plans_the_same(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was asked for is asked for again: pasted, it makes the same plan and names the same data set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")
    assert run(["Qwen/Qwen2.5-0.5B", "--gpu", "rtx-4090", "--no-dry-run", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    following = shlex.split(lines[next(at for at, line in enumerate(lines) if line.startswith("Next")) + 1])
    assert following[0] == "plan"
    assert run([*following[1:], "--no-dry-run"]) == 0
    made = json.loads((tmp_path / "my-plan" / "plan.json").read_text())
    capsys.readouterr()
    assert run(["Qwen/Qwen2.5-0.5B", "--gpu", "rtx-4090", "--no-dry-run", "--json=full", *options]) == 0
    assert made["workload"] == json.loads(capsys.readouterr().out)["workload"]
    script = (tmp_path / "my-plan" / "launch" / "prepare_data.py").read_text()
    assert ('DATASET = "who/what"' in script) == ("--dataset" in options)


@pytest.mark.parametrize(
    ("words", "meant"),
    [("chek a.py --gpu rtx-4090", "check"), ("whichgpu mistral", "which-gpu"), ("gpu", "gpus"), ("mistral", "")],
)
def test_a_misspelt_command_is_no_model(words: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words.split()) == 2
    assert capsys.readouterr().err.partition("did you mean plan ")[2].strip("?\n") == meant


def test_a_search_ends_with_its_files_and_a_command_that_starts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report's command asks for all that was asked for; a full disk does not cost what was measured."""
    monkeypatch.setattr("finetune_planner.cli.tune.tune_plan", lambda plan, tuning: plan)
    monkeypatch.chdir(tmp_path)
    arguments = ["tune", "Qwen/Qwen2.5-0.5B", "--gpu", "rtx-4090", "--device", "cpu", "--lr", "3e-05"]
    arguments += ["--method", "lora", "--seq-len", "512", "--goal", "memory", "--out", "found here"]
    assert run(arguments) == 0
    assert "cd 'found here' && bash launch/run.sh install trl && bash launch/run.sh trl" in " ".join(
        capsys.readouterr().out.split()
    )
    command = json.loads(Path("found here/plan.json").read_text())["command"]
    for words in ("plan tune Qwen/Qwen2.5-0.5B", "--seq-len 512", "--method lora", "--lr 3e-05", "--goal memory"):
        assert words in command

    def full(*args: object, **kwargs: object) -> None:
        raise EnvironmentProblem("cannot write: no space left on device", hint="free some space")

    monkeypatch.setattr("finetune_planner.cli.tune.write_out", full)
    assert run(arguments) == 3
    answer = capsys.readouterr()
    assert "It fits" in answer.out
    assert "no space left" in answer.err


def test_a_revision_is_asked_for_again_and_named_beside_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("planner.models.resolve._hub_first", lambda name, revision, like: catalogue.load(name))
    monkeypatch.setenv("COLUMNS", "1000")
    arguments = ["Qwen/Qwen2.5-0.5B", "--gpu", "rtx-4090", "--revision", "v1.1", "--method", "lora", *FAST]
    assert run(arguments) == 0
    assert "--revision v1.1 --out my-plan" in capsys.readouterr().out
    assert run([*arguments, "--out", str(tmp_path)]) == 0
    assert "The launch files name no revision: write v1.1 into them" in capsys.readouterr().out
    assert run([*arguments[:3], *arguments[5:], "--out", str(tmp_path)]) == 0
    assert "name no revision" not in capsys.readouterr().out
