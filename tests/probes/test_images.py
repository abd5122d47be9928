"""Pictures: what an encoder holds is what transformers builds, what a picture becomes is what its processors make of
it, and the formula agrees with the dry run."""

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.image_models import LISTED, METHODS, configs, setup_of, spec_of
from planner.core.errors import SetupError
from planner.hardware.gpus import find_gpu
from planner.memory.attention_kernels import missing_kernels
from planner.memory.model import predict_memory
from planner.memory.workspace import context_bytes
from planner.models.encoders import encoder_of, image_tokens, with_vision
from planner.models.families import spec_from_config
from planner.models.spec import ModelSpec
from planner.options.images import Images
from planner.planning.peaks import Family, Rank, SharedLayers, distinct_parts
from planner.setup import TrainSetup
from planner.speed.operators import ISSUERS
from probes.stack.build import bare_model
from probes.stack.configs import load_config
from tests.planner.helpers import loaded
from tests.probes.dryrun_small import agreeing, reported
from tests.whole import these

pytestmark = pytest.mark.usefixtures("warm_children")  # module trees are read by children

TOLERANCE = 0.06
"""The worst of these is 1.9 %, of models with four layers in either half; docs/images.md has those of whole models."""
CARD = find_gpu("h100-sxm")
CONFIGS = configs()
QWEN2, QWEN3, GEMMA, LLAVA = "Qwen2.5-VL-3B-Instruct", "Qwen3-VL-4B-Instruct", "gemma-3-4b-it", "llava-1.5-7b-hf"
MISTRAL, INTERN = "Mistral-Small-3.1-24B-Instruct-2503", "InternVL3-2B-hf"
IDEFICS, SMOL = "SmolVLM-Instruct", "SmolVLM2-500M-Video-Instruct"
HYBRID, PALI, FOURTH = "Qwen3.5-2B", "paligemma-3b-pt-448", "gemma-4-31B-it"
CROSSED = "Llama-3.2-11B-Vision-Instruct"
EVERY = [QWEN2, QWEN3, GEMMA, LLAVA, MISTRAL, INTERN, IDEFICS, SMOL, HYBRID, PALI, FOURTH, CROSSED]

ALSO = [(QWEN2, "lora"), (QWEN3, "full"), (MISTRAL, "lora"), (INTERN, "lora"),
        (FOURTH, "lora, no checkpointing"), (CROSSED, "lora attention"),
        (SMOL, "lora"), (HYBRID, "lora"), (PALI, "qlora")]  # fmt: skip
"""Models that another method tries, and those whose encoder another has: SmolVLM's, Qwen3-VL's, SigLIP."""


def shallow(name: str) -> dict[str, Any]:
    """The published sizes, four layers of each half, the one with windows included."""
    config = copy.deepcopy(CONFIGS[name])
    config.setdefault("vision_config", {})
    config["text_config"]["num_hidden_layers"] = 4
    for field in ("num_hidden_layers", "depth"):
        config["vision_config"][field] = 4
    config["vision_config"] |= {"fullatt_block_indexes": [3]} if name == QWEN2 else {}
    config["vision_config"] |= {"deepstack_visual_indexes": [0, 2]} if name == QWEN3 else {}
    config["text_config"].pop("layer_types", None)
    if name.startswith("gemma-4"):
        config["text_config"] |= {
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "num_kv_shared_layers": 0,
        }
    if name == LLAVA:
        config["vision_config"] |= {"hidden_size": 1024, "model_type": "clip_vision_model", "image_size": 336}
        config["vision_config"] |= {"patch_size": 14, "intermediate_size": 4096, "num_attention_heads": 16}
    if name == CROSSED:
        config["text_config"]["cross_attention_layers"] = [1, 3]
        config["vision_config"] |= {"num_global_layers": 1, "intermediate_layers_indices": [0, 1, 2, 3, 3]}
    if name == GEMMA:
        config["text_config"]["sliding_window_pattern"] = 2
    return config


def model_of(name: str, config: Mapping[str, Any]) -> ModelSpec:
    """The formula's model of a shallow copy."""
    if name in LISTED or name == GEMMA:
        return with_vision(spec_from_config(config, model_id=name, source="test"))
    return spec_of(name, dict(config))


@pytest.mark.parametrize("name", EVERY)
def test_every_matrix_of_a_tower_is_one_that_transformers_builds(name: str) -> None:
    config = shallow(name)
    model = model_of(name, config)
    encoder = encoder_of(model, Images(width=512, height=512))
    built = bare_model(load_config(config), torch.bfloat16, "sdpa", seeing=True)
    assert model.num_params == sum(parameter.numel() for parameter in built.parameters())
    shapes = {key: tuple(value.shape) for key, value in built.named_parameters()}
    layers = [(layer, f".{index}") for layer, num in encoder.model.layer_counts for index in range(num)]
    layers += [
        (projector.layer, f".{index}" if projector.num > 1 else "")
        for projector in encoder.projectors
        for index in range(projector.num)
    ]
    for layer, place in layers:
        for linear in layer.linears:
            key = f"{layer.path}{place}.{linear.name}"
            if linear.module == "parameter":
                assert shapes[key] == (linear.in_features, linear.out_features)
            else:
                assert shapes[f"{key}.weight"] == (linear.out_features, linear.in_features)
                assert (f"{key}.bias" in shapes) == linear.bias


@pytest.fixture
def without_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolVLM's processor asks for num2words, with which it names the frames of videos."""
    from transformers.models.smolvlm import processing_smolvlm

    monkeypatch.setattr(processing_smolvlm, "num2words", str)


@pytest.mark.usefixtures("without_names")
@pytest.mark.parametrize("name", EVERY)
def test_a_picture_becomes_what_its_processor_makes_of_it(name: str, tmp_path: Path) -> None:
    from probes.phantom.images import KINDS, processor_for
    from probes.phantom.texts import stand_in_tokenizer

    raw = shallow(name)
    config = load_config(raw)
    config.get_text_config().vocab_size = 2048  # a small tokenizer is made faster
    config.image_token_id = 1000
    config.save_pretrained(tmp_path)
    processor = processor_for(name, config, lambda tokens: stand_in_tokenizer(str(tmp_path), tokens))
    model = model_of(name, raw)
    for width, height in ((700, 500), (300, 900), (40, 40)):
        picture = torch.zeros(3, height, width, dtype=torch.uint8).numpy()
        made = processor(images=[[picture]], text=[KINDS[type(processor).__name__].picture], return_tensors="pt")
        encoder = encoder_of(model, Images(width=width, height=height))
        assert int((made["input_ids"] == 1000).sum()) == encoder.tokens
        mask = made.get("pixel_attention_mask", torch.empty(0, dtype=torch.int64))
        pixels = made["pixel_values"]
        ints = mask.numel() + made.get("image_position_ids", torch.empty(0)).numel()
        assert encoder.frames * encoder.input_bytes == 4 * pixels.numel() + 8 * ints, (width, height)
        if "image_grid_thw" in made:
            assert (1, *encoder.grid) == tuple(made["image_grid_thw"][0].tolist())


def test_a_tower_is_that_of_its_own_configuration() -> None:
    """Two models of one shape are equal, and what becomes of a picture stands in the configuration alone."""
    model = loaded("google/gemma-3-4b-it")
    fewer = replace(model, config={**model.config, "mm_tokens_per_image": 64})
    assert fewer == model
    seen = Images(width=896, height=896)
    assert (encoder_of(model, seen).tokens, encoder_of(fewer, seen).tokens) == (256, 64)


PICTURED = [
    (QWEN2, "lora"), (QWEN2, "lora, no checkpointing"), (QWEN3, "lora attention"), (QWEN3, "full"), (GEMMA, "lora"),
    (LLAVA, "qlora"), (MISTRAL, "lora"), (MISTRAL, "lora, no checkpointing"), (INTERN, "lora"), (INTERN, "qlora"),
    (IDEFICS, "lora attention"), (SMOL, "lora"), (HYBRID, "lora"), (PALI, "qlora"),
    (FOURTH, "lora, no checkpointing"), (FOURTH, "qlora"), (CROSSED, "lora attention"), (CROSSED, "full"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "method"), these([case for case in PICTURED if case not in ALSO][::2], PICTURED))
def test_formula_and_dry_run_agree_on_pictures(name: str, method: str) -> None:
    config = shallow(name)
    model = model_of(name, config)
    setup = setup_of(model, METHODS[method], (2, 512, 1, 1))
    agreeing(model, CARD, setup, TOLERANCE, reported(config, (9, 0), setup).prediction)


def test_windows_attend_by_themselves_and_flash_attention_takes_them_in_one_call() -> None:
    """Qwen2.5-VL, two pictures of 36 x 36 patches: each has 16 windows of 8 x 8, 8 that are cut to 8 x 4, one of 4 x 4,
    in three of the four layers."""
    config, forward = shallow(QWEN2), ISSUERS.index("forward")
    setup = setup_of(model_of(QWEN2, config), METHODS["lora"], (2, 512, 1, 1))
    calls = Counter[tuple[int, int]]()
    for each in (setup, setup.replace(attention="flash-attention-2")):
        program = reported(config, (9, 0), each).program
        for call in (call for place in program.micro_batch for call in program.segments[place].calls):
            operator, issuer = program.operators[call // len(ISSUERS)], call % len(ISSUERS)
            if issuer == forward and operator.name.startswith("aten._scaled_dot_product"):
                seqs, _, rows, _ = operator.inputs[0].shape
                calls[seqs, rows] += 1
    whole = {(1, 36 * 36): 2 * 2, (1, setup.seq_len_tokens): 2 * 4}
    assert calls == {(1, 64): 96, (1, 32): 48, (1, 16): 6, (32, 64): 3, (16, 32): 3, (2, 16): 3, **whole}


def test_every_gpu_of_a_job_sees_its_own_pictures() -> None:
    config = shallow(GEMMA)
    model = model_of(GEMMA, config)
    setup = setup_of(model, METHODS["lora"], (1, 768, 2, 2)).replace(num_gpus=2, parallel="ddp")
    agreeing(model, CARD, setup, TOLERANCE, reported(config, (9, 0), setup).prediction)
    with pytest.raises(SetupError, match="images are not planned with parallel 'fsdp2'"):
        setup.replace(parallel="fsdp2")


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_job_on_text_alone_leaves_the_encoder_of_every_gpu_without_gradients(method: str) -> None:
    """DDP's buckets hold them all the same, and it stopped in the second step before it was told to look for them."""
    config = shallow(QWEN2)
    setup = TrainSetup(**METHODS[method], seq_len_tokens=768, num_gpus=2, parallel="ddp")
    agreeing(model_of(QWEN2, config), CARD, setup, TOLERANCE, reported(config, (9, 0), setup).prediction)


def test_the_mask_of_joined_pictures_grows_with_the_square_of_the_micro_batch() -> None:
    model = model_of(MISTRAL, shallow(MISTRAL))
    images = Images(width=1024, height=1024)
    setup = TrainSetup(loss="chunked", images=images, seq_len_tokens=2048)
    part = distinct_parts(model, setup)[0]
    pairs = [(micro, 1) for micro in (1, 2, 3, 5)]
    family = Family(Rank(part, CARD, setup, pairs, SharedLayers()), setup, ("eager",))
    peaks = family.peaks("chunked", ["adamw-fused"])
    walked = [peaks(place)[0] for place in range(len(pairs))]
    alone = [predict_memory(model, CARD, setup.replace(micro_batch_seqs=micro)) for micro in (1, 2, 3, 5)]
    context = context_bytes(CARD)  # the walk adds it to these
    assert walked == pytest.approx([prediction.peak_device_bytes - context for prediction in alone], rel=0.0001)


def test_pixels_of_all_micro_batches_are_on_the_card() -> None:
    model = spec_of(GEMMA, CONFIGS[GEMMA])
    setup = setup_of(model, {}, (1, 512, 1, 2))
    more = setup.replace(accumulation_steps=10)
    less, grown = (predict_memory(model, CARD, each).peak_allocated_bytes for each in (setup, more))
    assert grown - less == 8 * 4 * 3 * 896 * 896


def test_flash_attention_has_no_mask_for_the_pictures_of_gemma() -> None:
    images = Images(width=512, height=512)
    setup = TrainSetup(attention="flash-attention-2", images=images)
    model = spec_of(GEMMA, CONFIGS[GEMMA])
    assert "takes no mask" in missing_kernels(model, CARD, setup)
    assert not missing_kernels(model, CARD, setup.replace(images=None))
    assert not missing_kernels(model, CARD, setup.replace(attention="sdpa"))


def test_what_has_no_eyes_is_refused_by_name() -> None:
    text = loaded("meta-llama/Llama-3.2-1B")
    with pytest.raises(SetupError, match="takes no images"):
        image_tokens(text, Images(width=512, height=512))
    unknown = replace(text, model_type="kosmos", config={"vision_config": {"depth": 1}})
    with pytest.raises(SetupError, match="what kosmos makes of a picture is not known here"):
        image_tokens(unknown, Images(width=512, height=512))
    for changes in ({"packing": True}, {"attention": "eager"}, {"objective": "dpo"}, {"kernels": "liger"}):
        with pytest.raises(SetupError, match="images are not planned with"):
            TrainSetup(images=Images(width=512, height=512), **changes)
