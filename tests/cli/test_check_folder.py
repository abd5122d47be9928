"""`plan check` on a folder and for CI: every training found, the worst file decides, nothing else is in the way."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from finetune_planner.cli.app import run as plan
from planner.frameworks.readers.program.source import tree_of
from planner.setup.outcome import Fidelity, speed_level
from tests.reports.factories import make_candidate

Run = Callable[..., tuple[int, str]]
FITS = "model_name_or_path: HuggingFaceTB/SmolLM2-135M\ndtype: bfloat16\nmax_length: 256\n"
TOO_LARGE = "model_name_or_path: meta-llama/Llama-3.1-70B\ndtype: bfloat16\nper_device_train_batch_size: 1\n"
OPEN = "from trl import SFTConfig, SFTTrainer\nSFTTrainer('gpt2', args=SFTConfig(max_length=find())).train()\n"
ONLINE = "from trl import OnlineDPOTrainer\nOnlineDPOTrainer(model='gpt2').train()\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".venv").mkdir()
    (tmp_path / "fits.yaml").write_text(FITS)
    (tmp_path / "sub" / "large.yaml").write_text(TOO_LARGE)
    (tmp_path / "open.py").write_text(OPEN)
    (tmp_path / "online.py").write_text(ONLINE)
    (tmp_path / "helper.py").write_text("def f():\n    return 1\n")
    (tmp_path / "__init__.py").write_text(OPEN)
    (tmp_path / "docker-compose.yml").write_text("services: {db: {image: postgres}}\n")
    (tmp_path / "data.json").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / ".venv" / "fits.yaml").write_text(FITS)
    return tmp_path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`plan check WORDS`: its exit code and stdout."""

    def called(*words: str) -> tuple[int, str]:
        code = plan(["check", *words])
        return code, capsys.readouterr().out

    return called


def test_a_folder_is_searched_and_the_worst_file_decides(folder: Path, run: Run) -> None:
    code, text = run(str(folder), "--gpu", "rtx-3060", "--json=full")
    answers = {answer["file"]: answer["verdict"] for answer in json.loads(text)}
    assert {str(Path(file).relative_to(folder)): verdict for file, verdict in answers.items()} == {
        "sub/large.yaml": "does_not_fit",
        "open.py": "undetermined",
        "fits.yaml": "fits",
        "online.py": "not_planned",
    }
    assert code == 1
    (folder / "sub" / "large.yaml").unlink()
    assert run(str(folder), "--gpu", "rtx-3060")[0] == 3
    (folder / "open.py").unlink()
    assert run(str(folder), "--gpu", "rtx-3060")[0] == 0


def test_data_a_plan_and_a_launcher_s_file_fail_no_ci(tmp_path: Path, run: Run) -> None:
    (tmp_path / "fits.yaml").write_text(FITS)
    (tmp_path / "alpaca.json").write_text(json.dumps([{"instruction": "a", "output": "b"}]))
    (tmp_path / "larger.json").write_text(json.dumps({"rows": [{"instruction": "a", "output": "b"}] * 4_000}))
    (tmp_path / "plan.json").write_text('{"schema_version": 1, "kind": "plan", "workload": {"seq_len_tokens": 8}}')
    (tmp_path / "zero2.json").write_text('{"zero_optimization": {"stage": 2}}')
    code, text = run(str(tmp_path), "--gpu", "rtx-3060")
    assert (code, text.splitlines()[-1]) == (0, "1 fits, 1 not planned")
    assert run(str(tmp_path / "plan.json"), "--gpu", "rtx-3060")[0] == 2  # asked for itself


def test_github_annotations_name_file_line_and_level(folder: Path, run: Run) -> None:
    code, text = run(str(folder), "--gpu", "rtx-3060", "--annotations", "github")
    lines = text.splitlines()
    assert code == 1
    assert [line.split(" ")[0] for line in lines] == ["::error", "::warning", "::notice", "::notice"]
    assert "sub/large.yaml,line=3,title=plan check::" in lines[0]
    assert "--set seq_len=N" in lines[1]
    assert run(str(folder), "--gpu", "rtx-3060", "--annotations", "github", "--json") == (2, "")


@pytest.mark.parametrize("form", [["--annotations", "github"], ["--json=full"], []])
def test_any_name_that_a_file_can_have_is_told(form: list[str], tmp_path: Path, run: Run) -> None:
    """Half characters (a name of other bytes than UTF-8), blanks, per cent."""
    names = [b"\xff.yaml", b"a b%\n.yaml"]
    for name in names:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_text(FITS)
    assert run(str(tmp_path), "--gpu", "rtx-3060", *form)[0] == 0


def test_the_level_of_a_speed_is_the_same_in_words_and_in_json(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        FITS.replace("HuggingFaceTB/SmolLM2-135M", "meta-llama/Llama-3.1-8B")
        + "use_peft: true\nlora_target_modules: all-linear\nlora_dropout: 0\n"
    )
    words = [str(file), "--gpu", "a100-80gb", "--no-dry-run"]
    answer = json.loads(run(*words, "--json")[1])
    assert (answer["memory"]["level"], answer["speed"]["level"]) == ("profile", "formula")
    assert "tokens/s [formula]" in run(*words)[1]
    assert "SDPA gets a mask" in run(*words, "--json=full")[1]
    formula = make_candidate().formula
    dry = replace(formula, level=Fidelity.DRY_RUN)
    assert speed_level(dry) is Fidelity.DRY_RUN
    assert speed_level(replace(dry, time_parts_s={})) is Fidelity.FORMULA  # of several GPUs, by dry_run_of


def test_a_file_that_a_launch_starts_is_answered_for_as_it_is_started(tmp_path: Path, run: Run) -> None:
    """Alone its eight GPUs each hold the whole model; the launch beside it shards it."""
    (tmp_path / "sft.yaml").write_text(TOO_LARGE + "use_peft: true\nmax_length: 512\ngradient_checkpointing: true\n")
    sharded = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}\n"
    (tmp_path / "fsdp.yaml").write_text(f"{sharded}num_processes: 8\n")
    words = (str(tmp_path), "--gpu", "8xh100-sxm")
    assert run(*words)[0] == 1
    (tmp_path / "run.sh").write_text("trl sft --config sft.yaml --accelerate_config fsdp.yaml\n")
    code, text = run(*words)
    assert code == 0
    assert [line.split(": ")[0].split(f"{tmp_path}/") for line in text.splitlines()[:3]] == [
        ["fits  ", name] for name in ("fsdp.yaml", "run.sh", "sft.yaml")
    ]
    assert text.count("as run.sh starts it: meta-llama/Llama-3.1-70B on H100 80GB HBM3: fits") == 2


def test_a_launch_that_is_given_up_answers_for_nothing_it_names(tmp_path: Path, run: Run) -> None:
    """By another form of the folder's path too."""
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "fits.yaml").write_text(FITS)
    (tmp_path / "run.sh").write_text("python broken.py\ntrl sft --config fits.yaml\n")
    (tmp_path / "sub").mkdir()
    code, text = run(str(tmp_path / "sub" / ".."), "--gpu", "rtx-3060")
    broken, *others = text.splitlines()[:3]
    assert code == 2
    assert broken.startswith("unreadable")
    assert "broken.py: " in broken
    assert ["as run.sh starts it: " in line for line in others] == [True, False]


def test_a_module_that_many_programs_import_is_parsed_once(tmp_path: Path, run: Run) -> None:
    """Of a repository the same modules are read for program after program."""
    for number in range(60):
        above = f"from m{number - 1} import A\n" if number % 30 else ""
        (tmp_path / f"m{number}.py").write_text(f"{above}A = {number}  # {tmp_path}\n")
        (tmp_path / f"p{number}.py").write_text(f"import m{number}  # {tmp_path}\n")
    before = tree_of.cache_info().misses
    run(str(tmp_path), "--gpu", "rtx-3060")
    assert tree_of.cache_info().misses - before <= 120
