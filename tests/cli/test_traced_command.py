"""The command that a program which cannot be read is traced by."""

from pathlib import Path

import pytest

from finetune_planner.cli.checking import ANY, exact

LOOP = "import torch\nloss.backward()\n"


def command(text: str, name: str = "train.py", words: tuple[str, ...] = ()) -> str:
    file = Path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return exact(f"{ANY} runs it", file, "t4", words).removeprefix("plan trace --gpu t4 -- ").removesuffix(" runs it")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_words_of_a_program_are_named() -> None:
    assert command(LOOP, words=("--lr", "1")) == "python train.py --lr 1"


def test_notebooks_and_scripts_have_commands_of_their_own() -> None:
    assert command("{}", "a b.ipynb") == "'a b.ipynb'"
    assert command("python x.py", "run.sh") == "bash run.sh"
    assert command("def (", "broken.py") == "python broken.py"
