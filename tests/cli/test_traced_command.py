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


@pytest.mark.parametrize(
    ("declared", "words", "expected"),
    [
        ('p.add_argument("--data", "-d", required=True)', (), " --data ..."),
        ('p.add_argument("model")', (), " MODEL"),
        ('g.add_argument("-d", required=True)\ng.add_argument("--n", type=int, required=True)', (), " -d ... --n ..."),
        ('p.add_argument("--data_dir", required=True)', ("--data-dir", "x"), " --data-dir x"),
        ('p.add_argument("--data", required=True)', ("--lr", "1"), " --lr 1 --data ..."),
        ('p.add_argument("--data", default="x")\np.add_argument("rest", nargs="*")', (), ""),
        ('p.add_argument("--data", required=False)', (), ""),
    ],
)
def test_words_that_a_program_insists_on_are_named(declared: str, words: tuple[str, ...], expected: str) -> None:
    assert command(LOOP + declared, words=words) == f"python train.py{expected}"


@pytest.mark.parametrize("line", ["from src.config import X", "import src.config", "def f():\n    from src import a"])
def test_a_program_that_imports_what_lies_here_runs_as_a_module(line: str) -> None:
    Path("src").mkdir()
    Path("src/config.py").touch()
    assert command(LOOP + line, "scripts/train.py") == "python -m scripts.train"
    assert command(LOOP + line, "scripts/my-train.py") == "python scripts/my-train.py"
    assert command(LOOP + "import sys\nsys.path.append('.')\n" + line, "scripts/train.py") == "python scripts/train.py"
    assert command(LOOP + line, "train.py") == "python train.py"
    assert command(LOOP + "import config", "src/train.py") == "python src/train.py"


def test_notebooks_and_scripts_have_commands_of_their_own() -> None:
    assert command("{}", "a b.ipynb") == "'a b.ipynb'"
    assert command("python x.py", "run.sh") == "bash run.sh"
    assert command("def (", "broken.py") == "python broken.py"
