"""A base model (a tokenizer without a chat template) and chat data: the emitted files and run.sh train all the same."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from planner.frameworks.exporters import EXPORTERS, chat
from planner.frameworks.exporters.folder import folder_files
from planner.frameworks.exporters.types import Launch
from planner.setup import TrainSetup
from tests.launch.conftest import Run, chats, export_request, write_jsonl, write_launch
from tests.whole import some

pytestmark = pytest.mark.processes


@pytest.mark.slow
@pytest.mark.parametrize("target", some(["run.sh", "trl", "hf"], 3))
def test_a_tokenizer_without_a_template_is_given_one(
    target: str, tmp_path: Path, tiny_model: Path, launch: Callable[..., Run]
) -> None:
    base = tmp_path / "tiny-base"
    shutil.copytree(tiny_model, base)
    config = json.loads((base / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    (base / chat.TEMPLATE_FILE).unlink(missing_ok=True)
    assert chat.lacks_template(str(base)) is True
    write_jsonl(tmp_path / "chats" / "train.jsonl", chats(8))
    setup = TrainSetup(
        precision="fp32", loss="full" if target == "hf" else "chunked", lora_rank=4, micro_batch_seqs=2,
        seq_len_tokens=128, optimizer="adamw",
    )  # fmt: skip
    lacks_template = None if target == "run.sh" else True  # run.sh finds out for itself
    request = export_request(
        setup, model_id="./tiny-base", path="./chats/train.jsonl", save=True, lacks_template=lacks_template
    )
    emitted = EXPORTERS["trl" if target == "run.sh" else target](request)
    write_launch(tmp_path, emitted)
    write_launch(tmp_path, Launch(target="launch", files=folder_files([emitted], request)))
    run = launch("bash launch/run.sh" if target == "run.sh" else f"{emitted.prepare} && {emitted.command}")
    assert len(run.losses) == 2
    saved = tmp_path / "outputs"
    assert "<|im_start|>" in (saved / chat.TEMPLATE_FILE).read_text() + (saved / "tokenizer_config.json").read_text()
