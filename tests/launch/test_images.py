"""TRL's file for pictures really trains: two steps of a tiny LLaVA, with the plan's batch and adapters in its tower."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.image_models import METHODS, configs, setup_of, spec_of
from finetune_planner.cli.app import run
from planner.frameworks.exporters import EXPORTERS, ExportRequest
from planner.frameworks.hyperparameters import choose
from planner.memory.trained import trained_parameters
from planner.models.encoders import with_vision
from planner.models.spec import ModelSpec
from planner.options.images import Images
from planner.setup import TrainSetup
from probes.module_tree import spec_of_tree
from tests.launch.conftest import Run, export_request, make_data, num_saved, two_steps
from tests.whole import some

pytestmark = pytest.mark.processes

SIDE, PATCH = 32, 8
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}<|end|>{% endfor %}"
)


SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "hidden_size": 32}
FRAME = {"image_size": SIDE, "patch_size": PATCH}


def _llava(pictures: Any, tokenizer: Any) -> tuple[Any, Any]:
    """(processor, configuration) of LLaVA."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig
    from transformers.models.llava.processing_llava import LlavaProcessor

    processor = LlavaProcessor(
        pictures(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    vision, text = CLIPVisionConfig(**SIZES, **FRAME), LlamaConfig(**SIZES, **_text(tokenizer))
    image = tokenizer.convert_tokens_to_ids("<image>")
    return processor, LlavaConfig(vision_config=vision, text_config=text, image_token_index=image)


def _idefics(pictures: Any, tokenizer: Any) -> tuple[Any, Any]:
    """(processor, configuration) of Idefics 3: a picture is cut into tiles."""
    from transformers import Idefics3Config, LlamaConfig
    from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    made = pictures(size={"longest_edge": 4 * SIDE}, max_image_size={"longest_edge": SIDE})
    processor = Idefics3Processor(made, tokenizer, image_seq_len=4, chat_template=TEMPLATE)
    text = LlamaConfig(**SIZES, **_text(tokenizer))
    vision, image = Idefics3VisionConfig(**SIZES, **FRAME), tokenizer.convert_tokens_to_ids("<image>")
    return processor, Idefics3Config(vision_config=vision, text_config=text, image_token_id=image, scale_factor=2)


def _mllama(pictures: Any, tokenizer: Any) -> tuple[Any, Any]:
    """(processor, configuration) of Llama 3.2 Vision: every second layer of its text looks at the picture."""
    from transformers import MllamaConfig
    from transformers.models.mllama.configuration_mllama import MllamaTextConfig, MllamaVisionConfig
    from transformers.models.mllama.processing_mllama import MllamaProcessor

    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image|>"]})
    made = pictures(size={"height": SIDE, "width": SIDE})
    processor = MllamaProcessor(made, tokenizer, chat_template=TEMPLATE.replace("<image>", "<|image|>"))
    text = MllamaTextConfig(**SIZES, **_text(tokenizer), cross_attention_layers=[1])
    sizes = {"vision_output_dim": 64, "intermediate_layers_indices": [0], "num_global_layers": 1}
    vision = MllamaVisionConfig(**SIZES | {"attention_heads": 4}, **FRAME, **sizes)
    image = tokenizer.convert_tokens_to_ids("<|image|>")
    return processor, MllamaConfig(vision_config=vision, text_config=text, image_token_index=image)


def _text(tokenizer: Any) -> dict[str, int]:
    return {
        "num_key_value_heads": 2,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 1024,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


MADE = {"llava": _llava, "idefics3": _idefics, "mllama": _mllama}


def tiny_model_with_vision(kind: str, folder: Path, tiny_llama: Path) -> ModelSpec:
    """A random model of two and two layers with its processor, as a model folder; its inventory."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer
    from transformers.models.auto import image_processing_auto

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = TEMPLATE
    name = image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES[kind]["pil"]
    processor, config = MADE[kind](image_processing_auto.get_image_processor_class_from_name(name), tokenizer)
    processor.save_pretrained(folder)
    config.text_config.vocab_size = len(processor.tokenizer)  # with the processor's own marks
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return with_vision(spec_of_tree(json.loads((folder / "config.json").read_text()), model_id=kind, source="test"))


def write_rows(folder: Path, num: int) -> None:
    """Conversations about a picture, as a directory that `load_dataset` takes."""
    from datasets import Dataset, Features, Image, List, Value
    from PIL import Image as Pictures

    message = {"role": Value("string"), "content": Value("string")}
    features = Features({"images": List(Image()), "messages": List(message)})
    messages = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "The capital of France."}]
    rows = [{"images": [Pictures.new("RGB", (40, 30))], "messages": messages} for _ in range(num)]
    folder.mkdir()
    Dataset.from_list(rows, features=features).to_parquet(folder / "train.parquet")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tokens"), some([("idefics3", 256), ("llava", 128), ("mllama", 64)], 3))
def test_two_steps_on_pictures_train_as_planned(
    kind: str, tokens: int, tmp_path: Path, tiny_model: Path, launch: Callable[..., Run]
) -> None:
    model = tiny_model_with_vision(kind, tmp_path / "tiny-eyes", tiny_model)
    write_rows(tmp_path / "rows", 8)
    setup = TrainSetup(
        precision="fp32",
        loss="chunked",
        lora_rank=4,
        micro_batch_seqs=2,
        accumulation_steps=2,
        seq_len_tokens=tokens,
        images=Images(width=40, height=30),
    )
    emitted = EXPORTERS["trl"](export_request(setup, path="./rows", model_id="./tiny-eyes", model=model, held_out=None))
    assert not emitted.refused
    two_steps(launch, tmp_path, emitted, setup)
    assert num_saved(tmp_path / "outputs") == trained_parameters(model, setup).num  # the encoder's adapters among them


def test_targets_without_a_file_for_pictures_refuse_by_name() -> None:
    setup = TrainSetup(images=Images(width=512, height=512))
    for name in ("hf", "axolotl", "unsloth"):
        refused = EXPORTERS[name](ExportRequest(model_id="a", setup=setup, hyper=choose(setup))).refused
        assert refused == f"{name} files are written for text: images are for trl and llamafactory"


def test_what_trl_hands_paligemma_shows_every_token_those_after_it() -> None:
    """Its collator passes on the processor's token types, which are zero in the answer too."""
    import torch
    from transformers import GemmaConfig, PaliGemmaConfig, PaliGemmaForConditionalGeneration, SiglipVisionConfig

    text = GemmaConfig(**SIZES, num_key_value_heads=2, head_dim=8, vocab_size=64)
    vision = SiglipVisionConfig(**SIZES, **FRAME)
    config = PaliGemmaConfig(vision_config=vision, text_config=text, image_token_id=63)
    torch.manual_seed(0)
    model = PaliGemmaForConditionalGeneration(config).eval()
    ids = torch.arange(1, 9).unsqueeze(0)
    other = ids.clone()
    other[0, -1] = 9
    for kinds, sees in ((torch.zeros_like(ids), True), (torch.ones_like(ids), False)):
        first, second = (model(input_ids=token_ids, token_type_ids=kinds).logits[0, 0] for token_ids in (ids, other))
        assert torch.equal(first, second) != sees
    pali = spec_of("paligemma-3b-pt-448", configs()["paligemma-3b-pt-448"])
    setup = setup_of(pali, METHODS["lora attention"], (1, 512, 1, 1))
    refused = EXPORTERS["trl"](ExportRequest(model_id="a", model=pali, setup=setup, hyper=choose(setup))).refused
    assert refused.endswith("nothing is learned; plan with --target llamafactory")


def test_llamafactory_is_told_the_template_of_the_type() -> None:
    templates = {}
    names = (
        "InternVL3-2B-hf",
        "Llama-3.2-11B-Vision-Instruct",
        "Mistral-Small-3.1-24B-Instruct-2503",
        "SmolVLM-Instruct",
        "paligemma-3b-pt-448",
    )
    for name in names:
        model = spec_of(name, configs()[name])
        setup = setup_of(model, METHODS["lora attention"], (1, 512, 1, 1)).replace(loss="full")
        launch = EXPORTERS["llamafactory"](ExportRequest(model_id=name, model=model, setup=setup, hyper=choose(setup)))
        assert not any("No template" in note for note in launch.notes)
        lines = (line for file in launch.files for line in file.text.splitlines())
        templates[name] = launch.refused or next(line for line in lines if line.startswith("template: "))
    assert templates == {
        "InternVL3-2B-hf": "template: intern_vl",
        "Llama-3.2-11B-Vision-Instruct": "template: mllama",
        "Mistral-Small-3.1-24B-Instruct-2503": "template: mistral_small",
        "SmolVLM-Instruct": "LLaMA-Factory has no template for the pictures of idefics3",
        "paligemma-3b-pt-448": "template: paligemma",
    }


@pytest.mark.parametrize("inline", [False, True])
def test_local_pictures_are_found_counted_and_stand_where_they_were_shown(
    inline: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`datasets` takes no path of a .jsonl, and a run elsewhere does not see paths that the data say from beside it."""
    shown: list[dict[str, Any]] = [
        {"type": "text", "text": "What is"},
        {"type": "image"},
        {"type": "text", "text": "?"},
    ]
    asked: Any = "What is<image>?" if inline else shown
    row = {"images": ["seen/0.png"], "messages": [_said("user", asked), _said("assistant", "A cat.")]}
    (tmp_path / "seen").mkdir()
    (tmp_path / "seen" / "0.png").touch()
    (tmp_path / "shown.jsonl").write_text((json.dumps(row) + "\n") * 4)
    words = ["Qwen/Qwen2-VL-2B-Instruct", "--gpu", "l40s", "--dataset", str(tmp_path / "shown.jsonl")]
    pictures = ["--images-per-sample", "1", "--image-size", "448", "--target", "trl"]
    assert run([*words, *pictures, "--no-dry-run", "--out", str(tmp_path / "out")]) == 0
    assert "320 tokens, 258 of them of 1 image" in " ".join(capsys.readouterr().out.split())
    script = (tmp_path / "out/launch/run.sh").read_text()
    assert "torchvision pillow" in script
    assert "prepare_data.py pictures" in script
    make_data(tmp_path / "out", "pictures")
    made = [json.loads(line) for line in (tmp_path / "out/launch/data/pictures/train.jsonl").read_text().splitlines()]
    turns = [_said("user", shown), _said("assistant", [{"type": "text", "text": "A cat."}])]
    assert made == 4 * [{"images": ["../seen/0.png"], "messages": turns}]


def _said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}
