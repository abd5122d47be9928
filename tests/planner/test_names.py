"""What people type for a model and for a card: taken for the one that it can mean, asked where it can mean several."""

import itertools
import random
import re

import pytest

from finetune_planner.cli.answer import workload_for
from finetune_planner.cli.request_options import RequestOptions
from planner.core.errors import UnknownGpuError, UnknownModelError, UsageError
from planner.hardware.gpus import all_gpus, card_and_count, find_gpu, find_gpus
from planner.models import catalogue
from planner.models.name_matching import understand
from planner.models.resolve import of_folder, resolve_model
from tests.planner.spoken_names import CARDS, FAMILIES, SPOKEN
from tests.whole import some

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

IDS = [hub_id for ids, _ in catalogue.hub_ids() for hub_id in ids]
ENTRY = {hub_id: number for number, (ids, _) in enumerate(catalogue.hub_ids()) for hub_id in ids}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


BASE = (
    *("Qwen/Qwen3-0.6B-Base", "Qwen/Qwen3-8B-Base", "Qwen/Qwen3-30B-A3B-Base", "Qwen/Qwen3.5-4B-Base"),
    *("HuggingFaceTB/SmolLM3-3B-Base", "tiiuae/Falcon3-7B-Base", "mistralai/Mistral-Nemo-Base-2407"),
    *("unsloth/Qwen3-8B-Base", "unsloth/Qwen3-8B-Base-bnb-4bit", "zai-org/GLM-4.5-Air-Base"),
)
"""Ids as the hub has them; of the last the catalogue has the tuned model alone, whose id names no size."""


@pytest.mark.parametrize("name", BASE)
def test_a_base_model_is_planned_under_its_own_id(name: str) -> None:
    model = resolve_model(name)
    plain = resolve_model(name.removesuffix("-bnb-4bit").removesuffix("-Base").replace("unsloth", "Qwen"))
    assert model.model_id == name
    assert (model.num_layers, model.hidden_size) == (plain.num_layers, plain.hidden_size)


@pytest.mark.parametrize(
    ("path", "model_id"),
    [
        ("/root/autodl-tmp/models/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("./base/Meta-Llama-3.1-8B-Instruct/", "meta-llama/Llama-3.1-8B-Instruct"),
        (r"D:\models\Qwen3-8B", "Qwen/Qwen3-8B"),
        ("/root/.cache/modelscope/hub/Qwen/Qwen2___5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("/hub/models--meta-llama--Llama-3.2-1B/snapshots/4e20de36", "meta-llama/Llama-3.2-1B"),
        *dict.fromkeys(("/data/llama-7b", "/out/Qwen2.5-7B-sft-merged", "/out/checkpoint-500", "/"), None).items(),
    ],
)
def test_a_folder_of_another_machine_is_what_it_is_named_after_or_nothing(path: str, model_id: str | None) -> None:
    spec = of_folder(path)
    assert (spec.model_id if spec is not None else None) == model_id
    assert spec is None or f"planned as {model_id}" in spec.taken_as


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
    by_key = find_gpu(card.key)
    assert by_key == card
    assert (": taken as " in card.taken_as) == (typed in FAMILIES)
    assert not by_key.taken_as or " is sold with " in by_key.taken_as


@pytest.mark.parametrize(("model", "card"), PAIRS)
def test_what_is_typed_plans_what_its_names_plan(model: str, card: str) -> None:
    """Spoken model x card as the box says it: the same work as from hub id and key."""
    name, num = card_and_count(card, None)
    key, _ = CARDS[card]
    typed = workload_for(model, name, RequestOptions(gpus=num))
    named = workload_for(SPOKEN[model], key, RequestOptions(gpus=num))
    assert typed == named
    assert typed.num_gpus == (num or 1)


@pytest.mark.parametrize("typed", ASKED_CARDS)
def test_a_card_that_may_be_several_is_asked(typed: str) -> None:
    with pytest.raises(UnknownGpuError) as error:
        find_gpu(typed)
    assert ASKED_CARDS[typed] <= set(error.value.could_be)
    assert error.value.hint.startswith("say which: ")


@pytest.mark.parametrize("typed", ["colab pro", "12", "none"])  # "Radeon PRO W7900", "RTX A2000 12GB"
def test_a_service_and_a_bare_number_are_no_cards(typed: str) -> None:
    with pytest.raises(UnknownGpuError, match="not in the table") as error:
        find_gpu(typed)
    assert not error.value.could_be
    assert "plan which-gpu" in error.value.hint


def test_a_revision_behind_a_name_is_said_to_be_an_option() -> None:
    with pytest.raises(UsageError) as error:
        resolve_model("Qwen/Qwen3-8B@main")
    assert error.value.hint == "Qwen/Qwen3-8B --revision main"


def test_every_row_in_any_case_and_separators_is_itself_or_one_of_those_asked() -> None:
    draw = random.Random(34)
    for spec in all_gpus():
        for name in (spec.key, spec.name):
            typed = re.sub(r"[- ]", lambda _: draw.choice("-_ "), name)
            typed = "".join(draw.choice((letter.lower(), letter.upper())) for letter in typed)
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
    ("typed", "reason"),
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
def test_a_description_that_cannot_be_read_says_which_field(typed: str, reason: str) -> None:
    with pytest.raises(UsageError) as error:
        find_gpu(typed)
    assert reason in error.value.message
    assert error.value.hint


def test_a_number_that_is_said_twice_must_be_the_same() -> None:
    assert card_and_count("8xH100", 8) == ("H100", 8)
    with pytest.raises(UsageError, match="names 8 cards, --gpus 4"):
        card_and_count("8xH100", 4)


@pytest.mark.parametrize("typed", ASKED)
def test_a_size_a_generation_and_a_variant_are_asked(typed: str) -> None:
    with pytest.raises(UnknownModelError) as error:
        resolve_model(typed)
    assert set(re.findall(r"[\w.-]+/[\w.-]+", error.value.hint)) >= ASKED[typed]
    assert error.value.exit_code == 2


def respelled(hub_id: str, draw: random.Random) -> str:
    """An id in random case with random separators, with its owner or without."""
    owner, _, name = hub_id.rpartition("/")
    name = re.sub(r"[-_]", lambda _: draw.choice("-_ :"), name)
    name = re.sub(r"(?<=\d)\.(?=\d)", lambda _: draw.choice("..-_ "), name)
    name = re.sub(r"(?<=[a-z])[-_ :](?=\d)", lambda match: draw.choice(("", match[0])), name)
    name = f"{owner}/{name}" if owner and draw.random() < 0.5 else name
    return "".join(draw.choice((letter.lower(), letter.upper())) for letter in name)


def test_every_id_in_any_case_and_separators_is_itself_or_one_of_those_asked() -> None:
    draw = random.Random(34)
    for hub_id in some(IDS, 5):
        typed = respelled(hub_id, draw)
        try:
            taken = understand(typed)
            meant = {taken.catalogue_id} if taken is not None else set()
        except UnknownModelError as error:
            meant = set(error.could_be)
        assert ENTRY[hub_id] in {ENTRY.get(candidate) for candidate in meant}, (hub_id, typed, meant)


def test_a_size_that_no_such_model_has_never_resolves() -> None:
    sized = [hub_id for hub_id in IDS if re.search(r"\d[bm]\b", hub_id)]
    for hub_id in random.Random(34).sample(sized, 30):
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
