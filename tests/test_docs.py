"""Every command block of README and docs runs as printed.

A fenced `bash` block is run line by line in a fresh directory; `$ plan ...` in a `text` block too, and what stands
below is compared with what is printed, line by line, up to where the page cuts it. A block behind
`<!-- parsed only: REASON -->` needs a GPU, network, minutes or files of one's own: its options are checked against the
command's, its files must exist. `UPDATE_DOCS=1 pytest tests/test_docs.py` writes the printed lines anew; look at the
difference before committing.

MODEL stands for a model, FILE and config.yaml for a launch file."""

import io
import json
import os
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

from finetune_planner.cli.app import COMMANDS, GROUPS, MORE, build_app, complete_arguments, run
from planner.frameworks.exporters import EXPORTERS
from planner.options.stacks import STACKS
from planner.setup import TrainSetup
from tests.planner.launch_sweep import request
from tests.whole import some
from tools import captures

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARK = re.compile(r"<!-- parsed only: (?P<reason>[^>]+) -->\n*$")
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
SHELLS = ("bash", "sh", "shell", "console")
MODEL = "Qwen/Qwen2.5-1.5B"
DRY_RUNNING = ("make", "estimate", "check", "compare", "probe", "race", "tune")


UNLISTED = "Qwen2.5-VL-7B-Instruct"
"""A model that people download and the catalogue lacks, as its config.json has it."""
UNLISTED_CONFIG = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "hidden_size": 3584,
    "intermediate_size": 18944, "max_position_embeddings": 128000, "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 152064,
    "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584},
}  # fmt: skip


class Command(NamedTuple):
    """One command of a page, whether it is run, and the lines printed below it."""

    page: str
    line: int
    text: str
    runs: bool
    printed: tuple[str, ...]


def commands(page: Path) -> list[Command]:
    """The commands of a page: of shell blocks each line (a backslash joins two), of text blocks what follows `$ `."""
    text, page_commands = page.read_text(), []
    for fence in FENCE.finditer(text):
        start = text[: fence.start()].count("\n") + 2
        runs = MARK.search(text[: fence.start()]) is None
        body, name = fence["body"], page.relative_to(ROOT).as_posix()
        if fence["language"] in SHELLS:
            for number, line in enumerate(body.replace("\\\n", " ").splitlines()):
                if line.strip() and not line.lstrip().startswith("#"):
                    page_commands.append(Command(name, start + number, line, runs, ()))
        elif body.startswith("$ "):
            first, *rest = body.splitlines()
            page_commands.append(Command(name, start, first[2:], runs, tuple(rest)))
    return page_commands


ALL = [command for page in PAGES for command in commands(page)]
LEFT = [command for command in ALL if command.runs and not command.printed]
RUN = {*some(LEFT, 8), *(command for command in ALL if command.printed and command.runs)}
"""What prints something on its page, and every eighth of the others, which are parsed."""


def named(command: Command) -> str:
    return f"{command.page}:{command.line}"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_children: None) -> Path:
    """An empty directory with a config of each kind that the pages name, made by our own exporters."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    setup = TrainSetup(loss="chunked")
    export_request = request(setup, model_id=MODEL)
    for target, names in {"trl": ("trl.yaml", "config.yaml"), "axolotl": ("axolotl.yaml",)}.items():
        for name in names:
            Path(name).write_text(EXPORTERS[target](export_request).files[0].text)
    for name in ("train.yaml", "old.yaml", "new.yaml"):
        Path(name).write_text(Path("trl.yaml").read_text())
    Path("train.log").write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.51 "
        "GiB of which 1.00 GiB is free. Of the allocated memory 21.00 GiB is allocated by PyTorch, and 200.00 MiB is "
        "reserved by PyTorch but unallocated."
    )
    Path("train.py").write_text(EXPORTERS["hf"](export_request).files[0].text)
    sharded = request(TrainSetup(num_gpus=8, parallel="fsdp2", loss="chunked"), model_id=MODEL)
    Path("fsdp.yaml").write_text(EXPORTERS["accelerate"](sharded).files[0].text)
    zero = request(TrainSetup(num_gpus=8, parallel="zero3", method="full", lora_rank=0, precision="bf16-mixed"))
    Path("ds_z3.json").write_text(EXPORTERS["deepspeed"](zero).files[0].text)
    chats = [("Why?", "word " * (1 + number % 400)) for number in range(400)]
    lines = [
        json.dumps({"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]}) for q, a in chats
    ]
    for name in ("chats.jsonl", "data.jsonl"):
        Path(name).write_text("\n".join(lines))
    Path(UNLISTED).mkdir()
    Path(UNLISTED, "config.json").write_text(json.dumps(UNLISTED_CONFIG))
    return tmp_path


def split(text: str) -> list[list[str]]:
    """The words of each simple command of a line; comments are gone."""
    words = shlex.split(text, comments=True)
    parts: list[list[str]] = [[]]
    for word in words:
        if word in ("&&", "|", ";"):
            parts.append([])
        else:
            parts[-1].append(word)
    return [part for part in parts if part]


def parsed(words: list[str]) -> None:
    """The command exists and takes these options."""
    if words[0].endswith("plan") or words[0] == "plan":
        complete = complete_arguments(words[1:])
        import typer

        command = typer_command(complete)
        with pytest.raises((SystemExit, typer.Exit, Parsed)):
            command.main(complete, standalone_mode=False)
    elif words[0] in ("bash", "python"):
        of_a_module = words[1] == "-m"  # a script of benchmarks/ finds the packages beside it only so
        module = ROOT / words[2].replace(".", "/") if of_a_module else ROOT
        script = module / "__main__.py" if module.is_dir() else module.with_suffix(".py")
        script = script if of_a_module else ROOT / words[1]
        assert script.is_file(), words
        assert of_a_module or script.parent.name != "benchmarks", words
        options = [word for word in words[2:] if word.startswith("--")]
        assert all(f'"{option}"' in script.read_text() for option in options), words


class Parsed(Exception):
    """Raised in place of a command that was parsed."""


def typer_command(words: list[str]):  # type: ignore[no-untyped-def]
    """The application whose commands say that they were parsed instead of running."""
    import typer

    root = typer.main.get_command(build_app(words))

    def stop(*_: object, **__: object) -> None:
        raise Parsed

    def stopped(command: object) -> None:
        for subcommand in getattr(command, "commands", {}).values():
            if hasattr(subcommand, "commands"):
                stopped(subcommand)
            else:
                subcommand.callback = stop

    stopped(root)
    return root


@pytest.mark.parametrize("command", ALL, ids=named)
def test_a_command_of_a_page_runs_as_printed(command: Command, place: Path) -> None:
    line = re.sub(r"\bMODEL\b", MODEL, command.text)
    for words in split(line):
        if command not in RUN or words[0] not in ("plan", ".venv/bin/plan"):
            if words[0] not in ("export", "jq", "cd", "git", "make", "pip", "trl"):
                parsed(words)
            continue
        arguments = complete_arguments(words[1:])
        if arguments[0] in DRY_RUNNING and "--no-dry-run" not in arguments:
            arguments.append("--no-dry-run")  # the same command, in milliseconds
        if arguments[0] == "which-gpu" and not command.printed:
            arguments += ["--vendor", "Intel"]  # of all cards those of one
        output, errors = io.StringIO(), io.StringIO()
        with redirect_stdout(output), redirect_stderr(errors):
            code = run(arguments)
        assert code in (0, 1, 3) if arguments[0] == "check" else code in (0, 1), errors.getvalue()
        if command.printed:
            compare(output.getvalue(), command)


def compare(output: str, command: Command) -> None:
    """The lines of the page are those of the output, up to a line of dots."""
    output_lines = [line.rstrip() for line in output.rstrip().splitlines()]
    shown = [line.rstrip() for line in command.printed]
    cut = next((number for number, line in enumerate(shown) if line.strip() in ("...", "…")), None)
    if os.environ.get("UPDATE_DOCS"):
        page, old = ROOT / command.page, "\n".join(command.printed[:cut])
        new = "\n".join((f"$ {command.text}", *output_lines[:cut], ""))
        page.write_text(page.read_text().replace(f"$ {command.text}\n{old}\n", new))
        return
    assert output_lines[:cut] == shown[:cut]


def test_the_readmes_first_answer_is_what_is_printed(place: Path) -> None:
    page = ROOT / "README.md"
    block = next(fence["body"] for fence in FENCE.finditer(page.read_text()) if fence["body"].startswith("meta-llama/"))
    output = io.StringIO()
    with redirect_stdout(output):
        assert run(["meta-llama/Llama-3.1-8B", "--gpu", "rtx-4090", "--no-dry-run"]) == 0
    output_lines = [line.rstrip() for line in output.getvalue().splitlines()]
    if os.environ.get("UPDATE_DOCS"):
        page.write_text(page.read_text().replace(block, "\n".join(output_lines) + "\n"))
        return
    assert output_lines == block.splitlines()


def test_the_pictures_show_what_is_printed() -> None:
    if os.environ.get("UPDATE_DOCS"):
        captures.write()
    drawn = captures.pictures()
    assert {path.name: path.read_text(encoding="utf-8") for path in captures.FOLDER.iterdir()} == drawn
    assert not any("@font-face" in picture for picture in drawn.values())


def test_the_pages_have_commands_and_few_are_only_parsed() -> None:
    assert len(ALL) >= 90
    assert sum(not command.runs for command in ALL) <= 24


def test_every_question_has_one_command_which_runs() -> None:
    """But for the one that ends by asking."""
    page = ROOT / "docs" / "questions.md"
    parts = page.read_text().split('\n**"')[1:]
    assert sum(bool(re.search(r"/\S+ \d+", part)) for part in parts) >= 19
    assert [len(FENCE.findall(part)) for part in parts] == [1] * len(parts)
    assert sum(not command.runs for command in commands(page)) <= 1


def test_every_block_with_our_commands_is_one_that_is_tested() -> None:
    """No command hides in a block without a language."""
    for page in PAGES:
        for fence in FENCE.finditer(page.read_text()):
            if fence["language"] not in SHELLS and not fence["body"].startswith("$ "):
                assert not re.search(r"^plan ", fence["body"], re.MULTILINE), (page, fence["body"][:80])


def test_every_page_is_in_the_site_and_links_to_what_is_there() -> None:
    """mkdocs.yml names every page of docs/; a relative link names a file (`make docs` checks the anchors too)."""
    listed = set(re.findall(r"- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", FENCE.sub("", page.read_text())):
            assert re.match(r"https?:", target) or (page.parent / target).exists(), f"{page}: {target}"


def test_every_file_command_and_stack_that_a_page_names_is_there() -> None:
    """SECURITY.md's too; docs/accuracy also names files of earlier commits. docs/llms.txt names every page."""
    pages = [*(page for page in PAGES if page.parent.name != "accuracy"), ROOT / "SECURITY.md"]
    folders = "planner|probes|search|reports|finetune_planner|tests|tools|benchmarks"
    for page in pages:
        text = page.read_text()
        for path in re.findall(rf"`((?:{folders})/[\w./-]+)`", text):
            assert path.endswith("NAME.sh") or (ROOT / path).exists(), f"{page}: {path}"
        for word in re.findall(r"`plan ([a-z][\w-]*)[ `]", text):
            assert word in {*COMMANDS, *GROUPS, MORE}, f"{page}: plan {word}"
    row = next(
        row for row in re.findall(r"^\|.*$", (ROOT / "SECURITY.md").read_text(), re.MULTILINE) if "`probe`" in row
    )
    assert set(re.findall(r"`([a-z-]+)`", row.split("|")[1])) <= set(COMMANDS)
    stacks, listed = ((ROOT / "docs" / name).read_text() for name in ("stacks.md", "llms.txt"))
    assert [name for name in STACKS if f"`{name}`" not in stacks] == []
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"({page.name})" not in listed] == []


def test_every_page_that_code_names_is_there() -> None:
    """`docs/NAME.md` in a docstring or a message; `others`: of the projects that are cited."""
    for folder in ("planner", "probes", "search", "reports", "finetune_planner", "tools", "benchmarks", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            for page in re.findall(r"(?<![\w/])docs/([\w/-]+\.md)", file.read_text(encoding="utf-8")):
                others = page in ("NAME.md", "TRAINING.md", "RESULTS.md") or page.startswith("source/")
                assert others or (ROOT / "docs" / page).is_file(), f"{file}: docs/{page}"


def test_every_benchmark_that_is_named_is_started_as_it_can_be() -> None:
    """`python -m benchmarks.NAME` finds the packages beside it, `python benchmarks/NAME.py` does not; each is there."""
    makefile = (ROOT / "Makefile").read_text()
    texts = {page: page.read_text() for page in [*PAGES, *(ROOT / "benchmarks").glob("*.py"), ROOT / "CHANGELOG.md"]}
    texts[ROOT / "Makefile"] = makefile.replace("$(PY)", "python")
    started = {name for text in texts.values() for name in re.findall(r"python -m benchmarks\.([a-z0-9_]+)", text)}
    there = {path.stem for path in (ROOT / "benchmarks").iterdir()}
    assert len(started) > 20
    assert started <= there
    for file, text in texts.items():
        assert not re.search(r"python3? benchmarks/\w+\.py", text), file


def test_every_test_that_a_page_or_the_mutation_tool_names_exists() -> None:
    """A page names the test that holds a promise; `::name` alone is one of the file named before it."""
    for path, name in re.findall(r'"(tests/[\w/]+\.py)(?:::(\w+))?"', (ROOT / "tools" / "mutation.py").read_text()):
        assert f"\ndef {name}(" in f"{(ROOT / path).read_text()}\ndef (", f"{path}::{name}"
    named = 0
    for page in PAGES:
        file = ""
        for path, name in re.findall(r"`(tests/[\w/]+\.py)?(?:::(\w+))?`", page.read_text()):
            file = path or file
            if not (path or name):
                continue
            assert (ROOT / file).is_file(), f"{page}: {file}"
            assert not name or f"\ndef {name}(" in (ROOT / file).read_text(), f"{page}: {file}::{name}"
            named += bool(name)
    assert named > 25
