"""What people type for a model: taken for the one that it can mean, asked where it can mean several, never guessed."""

import random
import re

import pytest

from planner.errors import UnknownModelError
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
