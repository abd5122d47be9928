"""Shell completion: what a shell asks for with the environment, as typer's scripts do."""

import pytest

from finetune_planner.cli.app import run

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
        ("plan which-g", "which-gpu", "Qwen"),
        ("plan Qwen/Qwen2.5-1.5", "Qwen/Qwen2.5-1.5B-Instruct", "which-gpu"),
        ("plan gpt2 --gpu rtx-409", "rtx-4090", "rtx-3090"),
        ("plan --gpu rtx-409", "rtx-4090", "rtx-3090"),
        ("plan make gpt2 --gpu rtx-409", "rtx-4090", "rtx-3090"),
        ("plan estimate gpt2 --gpu loc", "local", "rtx-3090"),
        ("plan which-cluster gpt2 --gpu h20", "h200", "a100"),
        ("plan gpt2 --opti", "--optimizer", "--gpu"),
        ("plan --vers", "--version", "Qwen"),
        ("plan ", "estimate", "Qwen"),
    ],
)
def test_models_gpus_and_the_main_jobs_options_are_completed(
    line: str, there: str, missing: str, shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = completed(line, monkeypatch, capsys, shell)
    assert there in shown
    assert missing not in shown
