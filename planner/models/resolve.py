"""From what the user typed to a `ModelSpec`: local directory, built-in catalogue, local Hugging Face cache, hub."""

import os
import re
from pathlib import Path

from planner.errors import ConfigError, UnknownModelError, UsageError
from planner.inputs import parse_object, read_bytes
from planner.models import catalogue, hub
from planner.models.adapters import spec_from_config
from planner.models.adapters.fields import shown
from planner.models.config_file import CONFIG_NAME, read_config
from planner.models.spec import ModelSpec

_HUB_PAGE = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]{1,96}(?:/[\w.-]{1,96})?)(?:[/?#].*)?"
)
"""The address of a model's page, as people paste it; group 1 is the hub id."""
INDEX_NAME = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 * 1024 * 1024
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TOLERANCE_FRACTION = 0.25
"""What towers, extra prediction layers and a stored tied head may add, or a saved part lack."""
_NAME_PARTS = re.compile(r"[a-z]+|\d[\d.]*[bm]?")


def resolve_model(name: str, *, revision: str | None = None, ask_hub: bool = False) -> ModelSpec:
    """The model that a directory, the path of a config.json, a hub id or a catalogue name stands for.

    A local directory wins over everything of the same name; then the built-in catalogue, offline and at once; then the
    local Hugging Face cache; then the hub, one attempt of three seconds. With `revision` or `ask_hub` a hub id asks
    the hub first. `config_source` says which one answered.

    Raises:
        UnknownModelError: nothing answers, or no adapter knows the architecture; the hint lists close names.
        ConfigError: a config.json is found and cannot be understood.
        UsageError: a revision of a local path.
    """
    name = name.strip()
    if not name:
        raise UnknownModelError("MODEL is empty", hint="give a hub id, a catalogue name or a directory")
    local = _local_config(name)
    if local is not None and not ((revision or ask_hub) and hub.is_repo_id(name)):
        if revision:
            raise UsageError(f"--revision has no meaning for the local path {shown(name)}", hint="leave it out")
        return _from_directory(name, local)
    if _looks_like_a_path(name):
        page = _HUB_PAGE.fullmatch(name)
        raise UnknownModelError(
            f"no such directory: {shown(name)}",
            hint=f"the hub id on that page is {page[1]}" if page is not None else _hint(name),
        )
    if revision is not None and not hub.is_revision(revision):
        raise UsageError(f"--revision must be a branch, tag or commit, got {shown(revision)}", hint="for example main")
    if revision is not None or ask_hub:
        return _hub_first(name, revision)
    found = catalogue.load(name)
    if found is not None:
        return found
    answers = [hub.from_cache(name, None)]
    if answers[0].config is None:
        answers.append(hub.from_hub(name, None))
    return _spec(name, answers)


def _hub_first(name: str, revision: str | None) -> ModelSpec:
    """Ask the hub; where it gives nothing, the cache, and the catalogue unless a revision was asked for."""
    answer = hub.from_hub(name, revision)
    if answer.config is not None:
        return _spec(name, [answer])
    cached = hub.from_cache(name, revision)
    if cached.config is not None:
        return _spec(name, [cached], note=f" (hub not used: {answer.reason})")
    found = catalogue.load(name) if revision is None else None
    if found is not None:
        note = f"{found.config_source} (hub not used: {answer.reason})"
        return spec_from_config(found.config, model_id=found.model_id, source=note)
    return _spec(name, [cached, answer])


def _spec(name: str, answers: list[hub.HubAnswer], note: str = "") -> ModelSpec:
    """The spec of the first answer that holds a configuration, else an error with every reason."""
    for answer in answers:
        if answer.config is not None:
            return spec_from_config(answer.config, model_id=name, source=answer.source + note)
    reasons = "; ".join(dict.fromkeys(answer.reason for answer in answers))
    raise UnknownModelError(
        f"model {shown(name)} is no local directory and not in the catalogue; {reasons}", hint=_hint(name)
    )


def _with_all_parts(wanted: str, names: tuple[str, ...]) -> list[str]:
    """The shortest names that have every word and number of `wanted`: "llama-7b" means a Llama of 7b."""
    parts = [re.compile(rf"(?<![\d.]){re.escape(part)}") for part in _NAME_PARTS.findall(wanted)]
    return sorted((one for one in names if parts and all(part.search(one) for part in parts)), key=len)[:8]


def _hint(name: str) -> str:
    """Close names of the catalogue, and the way out without a network."""
    from difflib import get_close_matches  # late: the formula path does not need it

    everything = catalogue.all_names()
    wanted = name.lower()[:100]
    close = _with_all_parts(wanted.rpartition("/")[2], everything)
    close += get_close_matches(wanted, everything, n=8, cutoff=0.6)
    close += get_close_matches(wanted.rpartition("/")[2], everything, n=4, cutoff=0.6)
    ids: dict[str, None] = {}
    for one in close:
        entry = catalogue.find(one)
        if entry is not None:
            ids[entry.model_id] = None
    local = "a local directory with config.json works without a network"
    return f"close names: {', '.join(list(ids)[:3])}; {local}" if ids else f"`plan models` lists the catalogue; {local}"


def _looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "/", "~", "\\")) or name.endswith(("/", ".json")) or not hub.is_repo_id(name)


def _local_config(name: str) -> Path | None:
    """The config.json that `name` stands for as a path, None where there is no such path.

    Raises:
        ConfigError: there is such a path, and it is neither a directory nor a JSON file.
    """
    try:
        path = Path(name).expanduser() if name.startswith("~") else Path(name)
        if path.is_dir():
            return path / CONFIG_NAME
        if not os.path.lexists(path):
            return None
    except (OSError, ValueError, RuntimeError):  # too long for a path, a null byte, no home directory
        return None
    if path.suffix == ".json":
        return path
    if hub.is_repo_id(name) and catalogue.find(name) is not None:
        return None  # an unrelated file that happens to be called "gpt2"
    raise ConfigError(
        f"{shown(name)} is neither a directory nor a config.json", hint="give the directory that holds config.json"
    )


def _from_directory(name: str, path: Path) -> ModelSpec:
    """The spec of a local config.json; the source says when it hides a hub model of the same name."""
    source = f"local file {os.path.abspath(path)}"
    if hub.is_repo_id(name) and catalogue.find(name) is not None:
        source += f" (a directory of this name wins over the hub model {name}; --hub asks the hub)"
    # A trainer loads the directory, so that is the model's name even when its config.json was pointed at.
    model_id = str(path.parent) if path.name == CONFIG_NAME and not os.path.isdir(name) else name
    spec = spec_from_config(read_config(path), model_id=model_id, source=source)
    _check_against_weights(spec, path.parent)
    return spec


def _check_against_weights(spec: ModelSpec, directory: Path) -> None:
    """Refuses a configuration that describes another model than the index of the weights beside it.

    Only where the index tells its size and the configuration its data type; quantized checkpoints are left alone.

    Raises:
        ConfigError: the sizes contradict each other by more than `TOLERANCE_FRACTION`.
    """
    file = directory / INDEX_NAME
    config = spec.config
    size = _BYTES.get(str(config.get("dtype") or config.get("torch_dtype") or ""))
    if size is None or config.get("quantization_config") or not file.is_file():
        return
    metadata = parse_object(read_bytes(file, max_bytes=MAX_INDEX_BYTES), str(file)).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, bool) or not isinstance(total, (int, float)) or total <= 0:
        return
    stored = total / size
    if abs(stored / spec.num_params - 1) > TOLERANCE_FRACTION:
        raise ConfigError(
            f"{directory}: config.json describes {spec.num_params / 1e9:.2f} B parameters, {INDEX_NAME} holds "
            f"{stored / 1e9:.2f} B",
            hint="the configuration lacks a size, or belongs to another model: take both from the same revision",
        )
