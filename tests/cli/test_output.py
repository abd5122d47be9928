"""Where output goes: a reader that went away, links and devices."""

import errno
import io
import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

from finetune_planner.cli.app import open_closed_streams, run
from finetune_planner.cli.output import write_text
from planner.core.errors import EnvironmentProblem
from planner.core.outputs import private_directory

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


class Gone(io.StringIO):
    """A pipe that nobody reads any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


@pytest.mark.parametrize("arguments", [["gpus"], ["gpus", "--json"], ["models", "smollm"], ["--help"]], ids=str)
def test_a_reader_that_went_away_is_no_error(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan ... | head -1` under pipefail: 1 would mean that nothing fits."""
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stdout", Gone())
    monkeypatch.setattr(sys, "stderr", errors)
    assert run(arguments) == 0


def test_closed_streams_and_a_width_of_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert run(["models", "smollm"]) == 0
    assert "HuggingFaceTB/SmolLM2-135M" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    open_closed_streams()
    with sys.stdout, sys.stderr:
        assert run(["gpus", "--json"]) == 0
        assert run(["gpt2", "--gpu", "none"]) == 2


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    """A folder from a stranger holds `report.md -> ~/.bashrc`."""
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    link.symlink_to(real)
    write_text(link, "new")
    assert real.read_text() == "old"
    assert not link.is_symlink()
    assert link.read_text() == "new"


def test_a_link_to_nothing_makes_no_file_elsewhere(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    write_text(link, "new")
    assert not (tmp_path / "elsewhere").exists()


def test_nothing_below_a_named_folder_leads_out_of_it(tmp_path: Path) -> None:
    folder, other_folder = tmp_path / "plan", tmp_path / "elsewhere"
    other_folder.mkdir()
    folder.mkdir()
    (folder / "launch").symlink_to(other_folder)
    with pytest.raises(EnvironmentProblem, match="cannot write"):
        write_text(folder / "launch" / "trl" / "train.py", "new", inside=folder)
    assert list(other_folder.iterdir()) == []
    (tmp_path / "named").symlink_to(folder)  # the folder itself may be a link: a person named it
    write_text(tmp_path / "named" / "plan.json", "new", inside=tmp_path / "named")
    assert (folder / "plan.json").read_text() == "new"


def test_no_command_writes_through_a_link_of_a_stranger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, victim = tmp_path / "plan", tmp_path / "bashrc"
    card = ["--gpu", "rtx-4090", "--no-dry-run"]
    small = ["--global-batch", "4", "--no-extra-packages"]  # hf runs the whole loss, which fits to four sequences
    assert run(["HuggingFaceTB/SmolLM2-135M", *card, *small, "--out", str(folder)]) == 0
    capsys.readouterr()
    script = (folder / "launch/hf/train_hf.py").read_text()  # transformers' only chunked loss is Liger's
    assert "liger" not in script.lower()
    assert "as hf runs it: peak" in script
    assert "liger" not in (folder / "launch/run.sh").read_text()
    assert "--no-extra-packages rules out" in (folder / "report.md").read_text()
    file = tmp_path / "trl.yaml"
    file.write_text(
        "model_name_or_path: HuggingFaceTB/SmolLM2-135M\nper_device_train_batch_size: 64\nmax_length: 1024\n"
    )
    fixing = ["check", str(file), *card, "--memory-gib", "6", "--fix"]
    fixed = tmp_path / "trl.fixed.yaml"
    assert run(fixing) == 1
    fixed.write_text(f"{fixed.read_text()}# MY EDIT")
    assert run(fixing) == 1
    assert fixed.with_name("trl.fixed.yaml.orig").read_text() == f"{fixed.read_text()}# MY EDIT"
    commands = {fixed: fixing, folder / "report.md": ["report", str(folder)]}
    for written, words in commands.items():
        written.unlink(missing_ok=True)
        written.symlink_to(victim)
        assert run(words) in (0, 1), capsys.readouterr().err
        assert not victim.exists(), words
        assert written.is_file(), words
        assert not written.is_symlink(), words


def test_what_a_person_wrote_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--out .` into a folder of the user's own, then into what is a plan's by then, then with an edit in it, twice."""
    monkeypatch.chdir(tmp_path)
    user_files = ["launch/trl/trl-sft.yaml", "plan.json", "report.md"]
    Path("launch/trl").mkdir(parents=True)
    for name in user_files:
        Path(name).write_text("{}")
    words = ["gpt2", "--gpu", "t4", "--no-dry-run", "--seq-len", "64", "--target", "trl", "--out", "."]
    launch = Path(user_files[0])
    for kept in ([f"{name}.orig" for name in user_files], [], [f"{launch}.orig.2"], []):
        assert run(words) == 0
        warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kept as ")]
        assert [line.removeprefix("kept as ").partition(":")[0] for line in warnings] == kept
        assert "# MY EDIT" not in launch.read_text()
        if not kept and len(list(launch.parent.glob("*.orig*"))) == 1:
            launch.write_text(f"{launch.read_text()}# MY EDIT")
    assert launch.with_name(f"{launch.name}.orig.2").read_text().endswith("# MY EDIT")
    assert Path("report.md.orig").read_text() == "{}"
    assert not (set(user_files) - set(Path(".written.sha256").read_text().split()))


def test_devices_and_pipes_are_written_to(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_text(Path(os.devnull), "new")
    assert Path(os.devnull).is_char_device()
    write_text(Path("/dev/stdout"), "to stdout")
    assert capfd.readouterr().out == "to stdout"
    assert Path("/dev/stdout").is_symlink()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(EnvironmentProblem, match="cannot write"):
        write_text(pipe, "nobody reads")  # and it does not wait for ever
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "somebody reads")
        assert os.read(reader, 100) == b"somebody reads"
    finally:
        os.close(reader)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_users_umask_holds(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_text(tmp_path / "plan.json", "{}")
    finally:
        os.umask(before)
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == mode


def test_a_private_directory_of_somebody_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    directory = private_directory()
    assert directory == private_directory() == tmp_path / f"finetune-planner-{os.getuid()}"
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.rmdir()
    directory.symlink_to(tmp_path)  # placed there by another user
    other = private_directory()
    assert other != directory
    assert other.stat().st_mode & 0o777 == 0o700
    directory.unlink()
    directory.mkdir()
    directory.chmod(0o777)
    assert private_directory() != directory


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "plan.json"
    write_text(path, "first")
    before = path.stat().st_ino
    write_text(path, "second")
    assert path.read_text() == "second"
    assert path.stat().st_ino != before
    assert [file.name for file in path.parent.iterdir()] == ["plan.json"]


def test_a_strangers_names_neither_move_the_cursor_nor_turn_a_comment_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = "\x1b\u202e\u2066"
    model, out = tmp_path / f"a{odd}b", tmp_path / "out"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (model / "train.jsonl").write_text(f"{json.dumps(row)}\n" * 9)
    words = [str(model), "--gpu", "rtx-4090", "--no-dry-run", "--dataset", str(model / "train.jsonl")]
    assert run([*words, "--out", str(out)]) == 0
    assert run([*words, "--out", str(out)]) == 0  # and what is said of a folder that is there
    shown = capsys.readouterr()
    assert not set(odd) & set(shown.out + shown.err)
    for path in out.rglob("*.yaml"):
        assert not [line for line in path.read_text().splitlines() if set(odd) & set(line.partition("# ")[2])]
    assert not set(odd) & set((out / "launch" / "README.md").read_text())
