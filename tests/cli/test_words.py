"""Words for people: shell completion, `plan explain`, `plan init`."""

import io
from pathlib import Path

import pytest

from finetune_planner.cli.app import run
from finetune_planner.cli.lists import glossary, plain
from planner.options.adapters import ADAPTERS
from planner.options.objectives import OBJECTIVES
from planner.options.optimizers import OPTIMIZERS
from reports.terminal import MARKS

BASH, ZSH = "complete_bash", "complete_zsh"


def completed(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shell: str = BASH) -> str:
    monkeypatch.setenv("_PLAN_COMPLETE", shell)
    if shell == BASH:
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    else:
        monkeypatch.delenv("COMP_WORDS", raising=False)
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
    with pytest.raises(SystemExit):
        run([])
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", [BASH, ZSH])
@pytest.mark.parametrize(
    ("line", "there", "missing"),
    [
        ("plan which-g", "which-gpu", "Qwen"), ("plan Qwen/Qwen2.5-1.5", "Qwen/Qwen2.5-1.5B-Instruct", "which-gpu"),
        ("plan gpt2 --gpu rtx-409", "rtx-4090", "rtx-3090"), ("plan --gpu rtx-409", "rtx-4090", "rtx-3090"),
        ("plan make gpt2 --gpu rtx-409", "rtx-4090", "rtx-3090"), ("plan estimate gpt2 --gpu loc", "local", "rtx-3090"),
        ("plan which-cluster gpt2 --gpu h20", "h200", "a100"), ("plan gpt2 --opti", "--optimizer", "--gpu"),
        ("plan --vers", "--version", "Qwen"), ("plan ", "estimate", "Qwen"),
    ],
)  # fmt: skip
def test_models_gpus_and_the_main_jobs_options_are_completed(
    line: str, there: str, missing: str, shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = completed(line, monkeypatch, capsys, shell)
    assert there in shown
    assert missing not in shown


def test_a_word_is_found_however_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["chunked-loss"], ["Chunked", "loss"], ["chunkedloss"]):
        assert run(["explain", *words]) == 0
        assert capsys.readouterr().out.startswith("chunked loss: ")


def test_an_unknown_word_is_an_error_with_what_is_near(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "adamw-fusd"]) == 2
    assert "hint: near it: adamw-fused" in capsys.readouterr().err


def test_every_kind_of_adapter_is_explained_from_its_own_row(capsys: pytest.CaptureFixture[str]) -> None:
    for row in ADAPTERS.values():
        assert run(["explain", row.name]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert row.what in out
        assert row.title.lower() in out.lower()


@pytest.mark.parametrize(
    ("word", "says"),
    [
        *((row.name, row.columns) for row in OBJECTIVES.values()),
        ("num_generations", "vllm"),
        ("gspo", "--objective grpo"),
        ("checkpointing every 4 layers", "checkpointing: Gradient"),
        ("8-bit QLoRA", "QLoRA: LoRA on a base"),
        ("cut", "no entry 'cut'; it stands in that of"),
    ],
)
def test_every_objective_is_explained_and_a_word_by_the_meaning_that_has_it(
    word: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["explain", word]) == 0
    assert says in " ".join(capsys.readouterr().out.split())


def test_the_words_of_a_usual_plan_are_in_the_glossary() -> None:
    glossary_words = {plain(word) for word in glossary()}
    usual = ("adamw-fused", "adamw-8bit", "paged-adamw-8bit")
    assert set(usual) <= set(OPTIMIZERS)
    for word in (
        *usual,
        "bf16-autocast",
        "bf16-mixed",
        "bf16-pure",
        "sdpa",
        "nf4",
        "int8",
        "packing",
        "checkpointing",
        "tight",
        "merges",
        *MARKS,
        "host memory",
        "full loss",
    ):
        assert plain(word) in glossary_words


def answer(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_answers_become_a_plan_and_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("finetune_planner.app.levels.dry_run_possible", lambda: "torch")  # the formula is enough here
    folder = tmp_path / "my plan"
    lines = ["smollm2", "HuggingFaceTB/SmolLM2-135M", "rtx", "3060", "no-such.jsonl", "", "lora", str(folder)]
    answer(monkeypatch, *lines)
    assert run(["init"]) == 0
    out, err = capsys.readouterr()
    assert f"plan HuggingFaceTB/SmolLM2-135M --gpu 3060 --method lora --out '{folder}'" in err
    for words in ("is not one model", "say which: ", "is not one exact device", "no file at no-such.jsonl"):
        assert words in err
    assert "tokens/s" in out
    assert (folder / "launch" / "run.sh").exists()


def test_no_answer_ends_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer(monkeypatch)
    assert run(["init"]) == 2
    assert "it needs a terminal" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("--qlora", "--method qlora"),
        ("--zero3", "--parallel zero3"),
        ("--nf4", "--quantization nf4"),
        ("--wurst", "plan --help"),
    ],
)
def test_an_option_that_is_a_value_of_another_is_answered_with_that(
    word: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["meta-llama/Llama-3.1-8B", "--gpu", "rtx-4090", word]) == 2
    assert f"hint: {hint}" in capsys.readouterr().err
