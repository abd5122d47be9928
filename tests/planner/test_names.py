"""What people type for a model and for a card: taken for the one that it can mean, asked where it can mean several."""

import itertools
import random
import re

import pytest

from planner.cli.answer import workload_for
from planner.cli.wish_options import WishOptions
from planner.errors import UnknownGpuError, UnknownModelError, UsageError
from planner.hardware.gpus import all_gpus, card_and_count, find_gpu, find_gpus
from planner.models import catalogue
from planner.models.resolve import resolve_model
from planner.models.spoken import understand

SPOKEN = {
    "llama 3.1 8b": "meta-llama/Llama-3.1-8B",
    "Llama 3.1 8B Instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "llama3.1:8b": "meta-llama/Llama-3.1-8B",
    "llama-3-1-8b-instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama 3.1 8B Instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "meta-lama/Llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "https://huggingface.co/meta-llama/Llama-3.1-8B/tree/main": "meta-llama/Llama-3.1-8B",
    "lama 3.1 8b": "meta-llama/Llama-3.1-8B",
    "llama 3 8 billion": "meta-llama/Meta-Llama-3-8B",
    "llama2-7b": "meta-llama/Llama-2-7b-hf",
    "llama3.2:1b": "meta-llama/Llama-3.2-1B",
    "llama 3.3 70b": "meta-llama/Llama-3.3-70B-Instruct",
    "qwen3 8b": "Qwen/Qwen3-8B",
    "Qwen 3 8B Base": "Qwen/Qwen3-8B-Base",
    "Qwen/Qwen3-32B-Base": "Qwen/Qwen3-32B",
    "qwen2.5-coder:7b": "Qwen/Qwen2.5-Coder-7B",
    "qwen 2.5 0.5b": "Qwen/Qwen2.5-0.5B",
    "qwen3 30b": "Qwen/Qwen3-30B-A3B",
    "mistral 7b": "mistralai/Mistral-7B-v0.3",
    "mistral-7b": "mistralai/Mistral-7B-v0.3",
    "mistral 7b v0.1": "mistralai/Mistral-7B-v0.1",
    "mistral 7b instruct": "mistralai/Mistral-7B-Instruct-v0.3",
    "mistral nemo 12b": "mistralai/Mistral-Nemo-Base-2407",
    "mixtral 8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "tiny llama 1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "code llama 7b": "codellama/CodeLlama-7b-hf",
    "gemma2:9b": "google/gemma-2-9b",
    "google gemma 3 4b": "google/gemma-3-4b-it",
    "gemma 3 4b base": "google/gemma-3-4b-pt",
    "phi 4": "microsoft/phi-4",
    "phi4 mini": "microsoft/Phi-4-mini-instruct",
    "gpt 2": "openai-community/gpt2",
    "gptj 6b": "EleutherAI/gpt-j-6b",
    "gpt-oss:20b": "openai/gpt-oss-20b",
    "olmo2 7b": "allenai/OLMo-2-1124-7B",
    "smol lm 2 135m": "HuggingFaceTB/SmolLM2-135M",
    "deepseek r1 distill llama 8b": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    "falcon3 7b": "tiiuae/Falcon3-7B-Base",
    "bloom 1.1b": "bigscience/bloom-1b1",
    "vicuna 7b": "lmsys/vicuna-7b-v1.5",
    "whisper large v3": "openai/whisper-large-v3",
    "unsloth/Meta-Llama-3.1-8B": "unsloth/Meta-Llama-3.1-8B",
    "someone/Qwen3-4B": "someone/Qwen3-4B",
}
"""What is typed -> the hub id that a launch file names."""

CARDS = {
    "RTX 3060 12GB": ("rtx-3060", None),
    "GeForce RTX 3060 Ti": ("rtx-3060-ti", None),
    "3080 ti": ("rtx-3080-ti", None),
    "RTX 3080 12 GB": ("rtx-3080-12gb", None),
    "2 x RTX 3090": ("rtx-3090", 2),
    "rtx 4060": ("rtx-4060", None),
    "4060 Ti 16GB": ("rtx-4060-ti-16gb", None),
    "4070 Ti": ("rtx-4070-ti", None),
    "RTX 4070 Ti Super": ("rtx-4070-ti-super", None),
    "RTX 4080 SUPER 16GB": ("rtx-4080-super", None),
    "4x4090": ("rtx-4090", 4),
    "RTX 4090 Laptop GPU": ("rtx-4090-laptop", None),
    "RTX 4070 mobile": ("rtx-4070-laptop", None),
    "5080 laptop": ("rtx-5080-laptop", None),
    "NVIDIA GeForce RTX 5090 32GB": ("rtx-5090", None),
    "Quadro RTX 8000": ("quadro-rtx-8000", None),
    "Quadro RTX A6000": ("rtx-a6000", None),
    "RTX A2000 12GB": ("rtx-a2000-12gb", None),
    "RTX 4000 Ada": ("rtx-4000-ada", None),
    "RTX PRO 5000 72GB": ("rtx-pro-5000-blackwell-72gb", None),
    "RTX PRO 6000": ("rtx-pro-6000-blackwell", None),
    "L40S 48GB": ("l40s", None),
    "A10": ("a10", None),
    "a2": ("a2", None),
    "2xT4": ("t4", 2),
    "A100 40GB": ("a100-40gb", None),
    "H100": ("h100-sxm", None),
    "8xH100": ("h100-sxm", 8),
    "8 x H100 80GB": ("h100-sxm", 8),
    "H100:4": ("h100-sxm", 4),
    "H100 94GB": ("h100-nvl", None),
    "GH200": ("gh200", None),
    "B200 192GB": ("b200", None),
    "MI300": ("mi300x", None),
    "MI100": ("mi100", None),
    "7900 XTX": ("rx-7900-xtx", None),
    "Radeon RX 9070 XT": ("rx-9070-xt", None),
    "Strix Halo 128GB": ("radeon-8060s-128gb", None),
    "Intel Arc B580 12GB": ("arc-b580", None),
    "M4": ("apple-m4", None),
    "MacBook Pro M4 Max 64GB": ("apple-m4-max-64gb", None),
    "Jetson AGX Orin": ("jetson-agx-orin-64gb", None),
    "Jetson Thor": ("jetson-agx-thor", None),
    "GTX 1660:6GiB:192GB/s:10TFLOPS:sm75": ("GTX 1660:6GiB:192GB/s:10TFLOPS:sm75", None),
    "2x Some card:12GiB:0.36TB/s:29 TFLOPS": ("Some card:12GiB:360GB/s:29TFLOPS", 2),
}
"""What is typed -> the card's key, and how many."""
FAMILIES = ("H100", "8xH100", "8 x H100 80GB", "H100:4", "H100 94GB", "MI300", "Jetson AGX Orin")
"""Those of which one is by far the usual: it is taken, and said."""
PAIRS = list(zip(itertools.cycle(SPOKEN), [*CARDS, *reversed(CARDS)]))

ASKED = {
    "llama3": {"meta-llama/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-70B"},
    "llama 7b": {"meta-llama/Llama-2-7b-hf"},  # the first LLaMA is another
    "mixtral": {"mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x22B-v0.1"},
    "llama3.1:latest": {"meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-405B"},
    "qwen 7b": {"Qwen/Qwen1.5-7B", "Qwen/Qwen2-7B", "Qwen/Qwen2.5-7B"},
    "deepseek r1 8b": {"deepseek-ai/DeepSeek-R1-Distill-Llama-8B"},
    "whisper": {"openai/whisper-small", "openai/whisper-large-v3"},
    "unsloth/Llama-3.2": {"unsloth/Llama-3.2-1B", "unsloth/Llama-3.2-3B"},
    "gpt oss": {"openai/gpt-oss-20b", "openai/gpt-oss-120b"},
}

ASKED_CARDS = {
    "A100": {"a100-40gb", "a100-80gb"},
    "V100": {"v100-16gb", "v100-32gb"},
    "4060 ti": {"rtx-4060-ti-8gb", "rtx-4060-ti-16gb"},
    "5060 Ti": {"rtx-5060-ti-8gb", "rtx-5060-ti-16gb"},
    "RTX A2000": {"rtx-a2000-6gb", "rtx-a2000-12gb"},
    "RTX 6000": {"quadro-rtx-6000", "rtx-6000-ada", "rtx-pro-6000-blackwell"},
    "jetson orin": {"jetson-agx-orin-64gb", "jetson-orin-nx-16gb"},
    "RTX 3080 Laptop": {"rtx-3080-laptop-8gb", "rtx-3080-laptop-16gb"},
}

IDS = [one for ids, _ in catalogue.hub_ids() for one in ids]
ENTRY = {one: number for number, (ids, _) in enumerate(catalogue.hub_ids()) for one in ids}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("typed", SPOKEN)
def test_a_spoken_name_is_taken_for_the_one_model_that_it_can_mean_and_it_is_said(typed: str) -> None:
    spec = resolve_model(typed)
    assert spec.model_id == SPOKEN[typed]
    if not typed.startswith("https:"):
        assert spec.taken_as.startswith(repr(typed))
    assert not resolve_model(spec.model_id).taken_as or "named after" in spec.taken_as


@pytest.mark.parametrize("typed", CARDS)
def test_a_card_is_what_its_box_says_and_a_choice_among_several_is_said(typed: str) -> None:
    card, num = find_gpus(typed)
    assert (card.key, num) == CARDS[typed]
    assert bool(card.taken_as) == (typed in FAMILIES)
    again = find_gpu(card.key)
    assert (again, again.taken_as) == (card, "")


@pytest.mark.parametrize(("model", "card"), PAIRS)
def test_what_is_typed_plans_what_its_names_plan(model: str, card: str) -> None:
    """Spoken model x card as the box says it: the same work as from hub id and key."""
    name, num = card_and_count(card, None)
    key, _ = CARDS[card]
    typed = workload_for(model, name, WishOptions(gpus=num))
    named = workload_for(SPOKEN[model], key, WishOptions(gpus=num))
    assert typed == named
    assert typed.num_gpus == (num or 1)


@pytest.mark.parametrize("typed", ASKED_CARDS)
def test_a_card_that_may_be_several_is_asked(typed: str) -> None:
    with pytest.raises(UnknownGpuError) as error:
        find_gpu(typed)
    assert ASKED_CARDS[typed] <= set(error.value.could_be)
    assert error.value.hint.startswith("say which: ")


def test_every_row_in_any_case_and_separators_is_itself_or_one_of_those_asked() -> None:
    draw = random.Random(34)
    for spec in all_gpus():
        for name in (spec.key, spec.name):
            typed = re.sub(r"[- ]", lambda _: draw.choice("-_ "), name)
            typed = "".join(draw.choice((one.lower(), one.upper())) for one in typed)
            try:
                meant = {find_gpu(typed).key}
            except UnknownGpuError as error:
                meant = set(error.could_be)
            assert spec.key in meant, (spec.key, typed, meant)


def test_a_memory_size_that_no_such_card_has_never_resolves() -> None:
    for spec in all_gpus():
        name = re.sub(r"[ -]?\d+ ?gb\b", "", spec.key, flags=re.IGNORECASE).replace("-", " ")
        with pytest.raises(UnknownGpuError) as error:
            find_gpu(f"{name} 5.1GB")
        assert error.value.hint


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("x:12:360GB/s:29TFLOPS", "'12' is no memory"),
        ("x:12GiB:360:29TFLOPS", "'360' is no bandwidth"),
        ("x:12GiB:360GB/s:29", "'29' is no rate"),
        ("x:12GiB:360GB/s", "three figures, got 2"),
        ("x:12GiB:360GB/s:29TFLOPS:8.6:9", "three figures, got 5"),
        ("x:12GiB:360GB/s:29TFLOPS:volta", "is no compute capability"),
        ("x:12GiB:360GB/s:2900000TFLOPS", "is no card's"),
        (":12GiB:360GB/s:29TFLOPS", "a name and three figures"),
        ("8xH100", "names 8 cards"),
    ],
)
def test_a_description_that_cannot_be_read_says_which_field(typed: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        find_gpu(typed)
    assert said in error.value.message
    assert error.value.hint


def test_a_number_that_is_said_twice_must_be_the_same() -> None:
    assert card_and_count("8xH100", 8) == ("H100", 8)
    with pytest.raises(UsageError, match="names 8 cards, --gpus 4"):
        card_and_count("8xH100", 4)


@pytest.mark.parametrize("typed", ASKED)
def test_a_size_a_generation_and_a_variant_are_asked(typed: str) -> None:
    with pytest.raises(UnknownModelError) as error:
        resolve_model(typed)
    assert set(error.value.hint.removeprefix("say which: ").split(", ")) >= ASKED[typed]
    assert error.value.exit_code == 2


def respelled(hub_id: str, draw: random.Random) -> str:
    """An id in random case with random separators, with its owner or without."""
    owner, _, name = hub_id.rpartition("/")
    name = re.sub(r"[-_]", lambda _: draw.choice("-_ :"), name)
    name = re.sub(r"(?<=\d)\.(?=\d)", lambda _: draw.choice("..-_ "), name)
    name = re.sub(r"(?<=[a-z])[-_ :](?=\d)", lambda found: draw.choice(("", found[0])), name)
    name = f"{owner}/{name}" if owner and draw.random() < 0.5 else name
    return "".join(draw.choice((one.lower(), one.upper())) for one in name)


def test_every_id_in_any_case_and_separators_is_itself_or_one_of_those_asked() -> None:
    draw = random.Random(34)
    for hub_id in IDS:
        typed = respelled(hub_id, draw)
        try:
            taken = understand(typed)
            meant = {taken.catalogue_id} if taken is not None else set()
        except UnknownModelError as error:
            meant = set(error.could_be)
        assert ENTRY[hub_id] in {ENTRY.get(one) for one in meant}, (hub_id, typed, meant)


def test_a_size_that_no_such_model_has_never_resolves() -> None:
    sized = [one for one in IDS if re.search(r"\d[bm]\b", one)]
    for hub_id in random.Random(34).sample(sized, 60):
        name = re.sub(r"\d+(\.\d+)?(?=[bm]\b)", "6.13", hub_id, count=1)
        for typed in (name, name.rpartition("/")[2].replace("-", " "), f"someone/{name.rpartition('/')[2]}"):
            assert not _resolves(typed), typed


def _resolves(typed: str) -> bool:
    try:
        return catalogue.load(typed) is not None or understand(typed) is not None
    except UnknownModelError:
        return False


@pytest.mark.parametrize(
    ("typed", "first"),
    [
        ("llama 3.1 9b", "meta-llama/Llama-3.1-8B"),
        ("lama 3.1 9b", "meta-llama/Llama-3.1-8B"),
        ("qwen3 7b", "Qwen/Qwen3-8B"),
        ("mixtral 7b", "mistralai/Mixtral-8x7B-v0.1"),
        ("quen3 8b", "Qwen/Qwen3-8B"),
    ],
)
def test_the_nearest_size_is_the_first_that_is_offered(typed: str, first: str) -> None:
    with pytest.raises(UnknownModelError) as error:
        resolve_model(typed)
    assert error.value.hint.removeprefix("close names: ").split(", ")[0] == first


def test_a_part_of_a_name_finds_the_models_that_have_it_whatever_its_separators() -> None:
    assert catalogue.names_with("Llama 3.1") == catalogue.names_with("llama-3.1")
    assert "qwen/qwen3-8b" in catalogue.names_with("qwen3:8b")
    assert catalogue.names_with("") == catalogue.names()
