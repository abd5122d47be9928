"""`plan check` of a hybrid: transformers' own loop is counted unless flash-linear-attention is known to be there."""

from pathlib import Path

import pytest

from finetune_planner.cli.checking import CheckRequest, checked
from planner.hardware.gpus import find_gpu
from planner.memory.model import predict_memory
from planner.planning.check import CheckResult
from planner.setup import TrainSetup
from tests.planner.helpers import loaded

FILE = """\
model_name_or_path: Qwen/Qwen3.5-4B
dataset_name: some/data
use_peft: true
lora_target_modules: [q_proj, v_proj]
dtype: bfloat16
bf16: true
per_device_train_batch_size: 1
max_length: 2048
"""


def _checked(folder: Path, text: str = FILE, request: CheckRequest | None = None) -> CheckResult:
    file = folder / "train.yaml"
    file.write_text(text)
    return checked(file, "rtx-4090", request)[0]


def test_the_loop_is_counted_and_what_installing_the_package_gives_is_said(tmp_path: Path) -> None:
    result = _checked(tmp_path)
    assert result.config.setup.linear_attention == "torch"
    change = next(change for change in result.changes if change.fields == ("linear_attention",))
    assert change.label == "flash-linear-attention, installed"
    assert change.speedup > 2
    assert change.saves_bytes > 0
    assert not change.in_place
    note = next(note for note in result.prediction.notes if "with flash-linear-attention installed" in note)
    assert "packed" not in note
    packed = _checked(tmp_path, f"{FILE}packing: true\n").prediction.notes
    assert any("refuses packed samples" in note for note in packed)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("requirements.txt", "trl\nflash-linear-attention>=0.4\n"),
        ("requirements.txt", "fla-core==0.6.0\n"),
        ("run.sh", "pip install trl flash-linear-attention\n"),
        ("../run.sh", "      pip install trl flash-linear-attention==0.6.0\n"),
    ],
)
def test_what_a_run_installs_is_read_beside_it(tmp_path: Path, name: str, text: str) -> None:
    folder = tmp_path / "trl"
    folder.mkdir()
    (folder / name).write_text(text)
    result = _checked(folder)
    assert result.config.setup.linear_attention == "fla"
    assert any("what it installs names it" in assumption for assumption in result.config.assumptions)


@pytest.mark.parametrize("text", ["# flash-linear-attention\n", "my-flash-linear-attention-fork\n", "trl\n"])
def test_a_comment_and_another_package_are_not_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "requirements.txt").write_text(text)
    assert _checked(tmp_path).config.setup.linear_attention == "torch"


def test_the_command_line_can_say_it(tmp_path: Path) -> None:
    request = CheckRequest.of(assume=["flash-linear-attention==0.6.0"])
    assert _checked(tmp_path, request=request).config.setup.linear_attention == "fla"


def test_a_model_without_such_layers_has_no_path(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("flash-linear-attention\n")
    assert _checked(tmp_path, FILE.replace("Qwen3.5-4B", "Qwen3-4B")).config.setup.linear_attention == "torch"


def test_the_loop_of_an_older_transformers_keeps_more() -> None:
    """Until 5.17: squares of up to 63 rows, 4 x 87,360 bytes per chunk and head, instead of two solutions of 128."""
    model, gpu = loaded("Qwen/Qwen3.5-4B"), find_gpu("rtx-3090")
    setup = TrainSetup(checkpointing=0, seq_len_tokens=512, loss="chunked", transformers_version="5.17")
    newer, older = (predict_memory(model, gpu, setup.replace(transformers_version=each)) for each in ("5.17", "5.16"))
    kept = 24 * 512 * 32 * (4 * 87_360 / 64 - 4 * 256)  # layers, tokens, heads
    assert older.peak_allocated_bytes - newer.peak_allocated_bytes == pytest.approx(kept, rel=0.01)
