"""Chat data for a model whose tokenizer has no chat template: every target is handed one, and only there."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml
from jinja2.sandbox import ImmutableSandboxedEnvironment

from planner.frameworks.exporters import EXPORTERS, DatasetChoice, chat
from planner.setup import TrainSetup
from tests.planner.launch_sweep import request

SETUP = TrainSetup(loss="chunked")
TURNS = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]


def rendered(turns: Sequence[Mapping[str, object]], **values: object) -> str:
    return ImmutableSandboxedEnvironment().from_string(chat.TEMPLATE).render(messages=turns, **values)


def test_the_template_renders_turns_ends_and_the_generation_prompt() -> None:
    text = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nSo.<|im_end|></s>\n"
    assert rendered(TURNS, eos_token="</s>") == text
    assert rendered(TURNS[:1], add_generation_prompt=True).endswith("<|im_end|>\n<|im_start|>assistant\n")
    parts = [{"role": "user", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]}]
    assert rendered(parts) == rendered(TURNS[:1])


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("meta-llama/Llama-3.1-8B", True), ("meta-llama/Llama-3.1-8B-Instruct", False), ("google/gemma-2-9b", True),
        ("google/gemma-2-9b-it", False), ("mistralai/Mistral-7B-v0.3", True), ("Qwen/Qwen3-8B-Base", True),
        ("Qwen/Qwen3-8B", None), ("openai-community/gpt2", True),
    ],
)  # fmt: skip
def test_without_files_the_name_says_whether_a_tokenizer_has_a_template(
    name: str, lacks: bool | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("planner.samples.dataset.tokenizer_file", lambda model_id: None)
    assert chat.lacks_template(name) is lacks


def test_models_known_to_split_chats_are_those_whose_templates_do() -> None:
    """As trl 1.16's templates of them: tests/launch/test_data.py prepares rows of each."""
    for name in ("openai/gpt-oss-20b", "Qwen/Qwen3-8B", "unsloth/Qwen3-30B-A3B-bnb-4bit", "Qwen/Qwen3.5-4B"):
        assert chat.splits(name)
    for name in ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen2.5-7B", "zai-org/GLM-4.5"):
        assert not chat.splits(name)


def test_the_files_of_a_tokenizer_count_more_than_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "base-instruct"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "model_max_length": int(1e30)}))
    assert chat.lacks_template(str(folder)) is True
    (folder / chat.TEMPLATE_FILE).write_text(chat.TEMPLATE)
    assert chat.lacks_template(str(folder)) is False
    (folder / chat.TEMPLATE_FILE).unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert chat.lacks_template(str(folder)) is False
    for hostile in ("[" * 100_000, "[]", "9" * 5_000):
        (folder / "tokenizer_config.json").write_text(hostile)
        assert chat.lacks_template(str(folder)) is False  # as its name says


@pytest.mark.parametrize("lacks", [True, False, None])
def test_what_each_target_does_about_a_missing_template(lacks: bool | None) -> None:
    export_request = request(SETUP, lacks_template=lacks)
    trl = EXPORTERS["trl"](export_request)
    paths = {file.path for file in trl.files}
    assert (f"trl/{chat.TEMPLATE_FILE}" in paths) == (lacks is not False)
    assert yaml.safe_load(trl.files[0].text).get("chat_template_path") == (
        f"launch/trl/{chat.TEMPLATE_FILE}" if lacks else None
    )
    assert any(chat.OPTION in note for note in trl.notes) == (lacks is None)
    llamafactory = yaml.safe_load(EXPORTERS["llamafactory"](export_request).files[0].text)
    assert llamafactory.get("template") == ("default" if lacks else "empty")
    axolotl = yaml.safe_load(EXPORTERS["axolotl"](export_request).files[0].text)
    assert axolotl["chat_template"] == "tokenizer_default_fallback_chatml"
    for target in ("hf", "unsloth"):  # scripts ask the tokenizer
        assert "if tokenizer.chat_template is None:" in EXPORTERS[target](export_request).files[0].text


def test_data_that_are_no_chats_need_no_template() -> None:
    export_request = request(SETUP, lacks_template=True, dataset=DatasetChoice(path="a/b", columns="text"))
    trl = EXPORTERS["trl"](export_request)
    assert [file.path for file in trl.files] == ["trl/trl-sft.yaml"]
    assert "chat_template_path" not in trl.files[0].text
