"""From what the user typed to a `ModelSpec`: local directory, built-in catalogue, local Hugging Face cache, hub."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PureWindowsPath

from planner.core.errors import ConfigError, UnknownModelError, UsageError
from planner.core.inputs import parse_object, read_bytes
from planner.models import catalogue, hub
from planner.models.config_file import CONFIG_NAME, read_config
from planner.models.copies import DYNAMIC, DYNAMIC_MORE, FOR_INFERENCE, plain_name, unfused
from planner.models.families import spec_from_config
from planner.models.families.fields import shown
from planner.models.spec import ModelSpec

_HUB_PAGE = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]{1,96}(?:/[\w.-]{1,96})?)(?:[/?#:@].*)?"
)
"""The address of a model's page, as people paste it; group 1 is the hub id."""
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")
"""A model's folder in the cache of Hugging Face."""
INDEX_NAME = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 * 1024 * 1024
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TOLERANCE_FRACTION = 0.25
"""What encoders, extra prediction layers and a stored tied head may add, or a saved part lack."""


def model_beside(name: str, folder: Path) -> str:
    """A local model's path as it is seen from here, where a plan in `folder` names it as it was seen from elsewhere."""
    if Path(name).exists():
        return name
    seen = (parent / name for parent in (folder.resolve(), *folder.resolve().parents))
    return next((str(path) for path in seen if (path / "config.json").is_file()), name)


def resolve_model(name: str, *, revision: str | None = None, ask_hub: bool = False, like: str = "") -> ModelSpec:
    """The model that a directory, the path of a config.json, a hub id or what people call it stands for.

    A local directory wins over everything of the same name; then the built-in catalogue, offline and at once, under its
    names and under what they are called ("llama 3.1 8b"); then, for a full hub id, the local Hugging Face cache, the
    hub (one attempt of three seconds), and the catalogue's model of which it is a copy by its name. With `revision` or
    `ask_hub` the hub is asked first. `config_source` says which one answered, `taken_as` what a name was taken for.

    Args:
        like: as `spec_from_config` takes it.

    Raises:
        UnknownModelError: nothing answers, several models could be meant (`could_be`), or no family knows the
            architecture; the hint lists close names.
        ConfigError: a config.json is found and cannot be understood.
        UsageError: a revision of a local path.
    """
    name = name.strip()
    if not name:
        raise UnknownModelError("MODEL is empty", hint="give a hub id, a catalogue name or a directory")
    if FOR_INFERENCE.search(name) and not os.path.isdir(name) and (original := _by_common_name(name)) is not None:
        return original
    local = _local_config(name)
    if local is not None and not ((revision or ask_hub) and hub.is_repo_id(name)):
        if revision:
            raise UsageError(f"--revision has no meaning for the local path {shown(name)}", hint="leave it out")
        return _from_directory(name, local, like)
    page = _HUB_PAGE.fullmatch(name)
    name = name if page is None else page[1]
    if name.startswith((".", "/", "~", "\\")) or name.endswith(("/", ".json")) or name.count("/") > 1:
        raise UnknownModelError(f"no such directory: {shown(name)}", hint=_hint(name))
    if revision is not None and not hub.is_revision(revision):
        raise UsageError(f"--revision must be a branch, tag or commit, got {shown(revision)}", hint="for example main")
    if revision is not None or ask_hub:
        return _hub_first(name, revision, like)
    model, on_hub = catalogue.load(name), hub.is_repo_id(name)
    if model is None and not (on_hub and "/" in name):
        model = _by_common_name(name)
    if model is None and on_hub:  # ids of the hub's first years have no owner
        return _spec(name, [lambda: hub.from_cache(name, None), lambda: hub.from_hub(name, None)], like=like)
    repo, at, its_revision = name.partition("@")
    if model is None and at and hub.is_repo_id(repo):
        raise UsageError(
            f"{shown(name)}: a revision has an option of its own", hint=f"{repo} --revision {its_revision}"
        )
    if model is None:
        raise UnknownModelError(f"no model of the catalogue is called {shown(name)}", hint=_hint(name))
    if like:
        raise UsageError(f"--like {shown(like)}: {model.model_id} is known", hint="leave --like out")
    return model


def _by_common_name(name: str) -> ModelSpec | None:
    """The catalogue's model that people call so, or of which this is a copy by its name; None where it is none.

    Raises:
        UnknownModelError: it may be several.
    """
    from planner.models.name_matching import understand  # late: an id of the catalogue needs none of it

    plain, extra = plain_name(name)
    taken = understand(plain)
    spec = catalogue.load(taken.catalogue_id) if taken is not None else None
    if taken is None or spec is None:
        return None
    words = f"{shown(name)}: {taken.words}"
    words += " (the original is what is trained)" if FOR_INFERENCE.search(name) else ""
    changed = extra | unfused(plain, spec.config)
    if not changed:
        return replace(spec, model_id=taken.model_id, taken_as=words)
    stored = spec_from_config({**spec.config, **changed}, model_id=name, source=spec.config_source)
    if not extra:
        return replace(stored, taken_as=f"{words}, with Llama's layers")
    bits = extra["quantization_config"].get("bits", 4)
    dynamic = f" {DYNAMIC_MORE}" if name.lower().endswith(DYNAMIC) else ""
    return replace(stored, taken_as=f"{words}, in {bits} bits{dynamic}")


def of_folder(path: str) -> ModelSpec | None:
    """The catalogue's model that a folder of another machine is named after: `/data/models/Qwen2.5-7B-Instruct`, one of
    the caches of Hugging Face (`models--Qwen--Qwen2.5-7B`) or ModelScope (`Qwen2___5-7B`). None where it is named after
    none, or after several."""
    from planner.models.name_matching import understand  # late: a model of its own name needs none of it

    cached = _CACHED.search(path)
    folder = PureWindowsPath(path.replace("___", ".")).name  # takes both slashes
    name = f"{cached[1]}/{cached[2]}" if cached else f"local/{folder}"
    try:
        taken, spec = understand(plain_name(name)[0]), _by_common_name(name)
    except UnknownModelError:
        return None
    original = catalogue.load(taken.catalogue_id) if taken is not None else None
    if spec is None or original is None:
        return None
    words = f"{shown(path)}: no config.json at hand: planned as {original.model_id}, which it is named after"
    return replace(spec, model_id=original.model_id, taken_as=words)


def _hub_first(name: str, revision: str | None, like: str) -> ModelSpec:
    """Ask the hub; where it gives nothing, the cache, and the catalogue unless a revision was asked for."""
    spoken = None if ("/" in name and hub.is_repo_id(name)) or catalogue.find(name) else _by_common_name(name)
    taken_as = spoken.taken_as if spoken is not None else ""
    name = spoken.model_id if spoken is not None else name
    answer = hub.from_hub(name, revision)
    if answer.config is not None:
        return replace(_spec(name, [lambda: answer], like=like), taken_as=taken_as)
    cached = hub.from_cache(name, revision)
    if cached.config is not None:
        note = f" (hub not used: {answer.reason})"
        return replace(_spec(name, [lambda: cached], note=note, like=like), taken_as=taken_as)
    model = (spoken or catalogue.load(name)) if revision is None else None
    if model is not None:
        return replace(model, config_source=f"{model.config_source} (hub not used: {answer.reason})")
    return _spec(name, [lambda: cached, lambda: answer], revision=revision, like=like)


def _spec(
    name: str,
    sources: Sequence[Callable[[], hub.HubAnswer]],
    *,
    note: str = "",
    revision: str | None = None,
    like: str = "",
) -> ModelSpec:
    """The spec of the first answer that holds a configuration, else of what the name is a copy of, else an error with
    every reason."""
    reasons = []
    for ask in sources:
        answer = ask()
        if answer.config is not None:
            return spec_from_config(answer.config, model_id=name, source=answer.source + note, like=like)
        reasons.append(answer.reason)
    if "/" in name and revision is None and (copy := _by_common_name(name)) is not None:
        return copy
    catalogued = catalogue.find(name) if revision is not None else None
    where = f"the catalogue has no revision {shown(revision)}" if catalogued else "not in the catalogue"
    raise UnknownModelError(
        f"model {shown(name)} is no local directory and {where}; {'; '.join(dict.fromkeys(reasons))}",
        hint=f"leave --revision out to plan the catalogue's {catalogued.model_id}" if catalogued else _hint(name),
    )


def meant(name: str) -> list[str]:
    """Lower-case hub ids of the catalogue that a name may mean, best first: what `resolve_model` takes or asks about,
    else those that hold it, else close ones."""
    from planner.models.name_matching import understand

    entry = catalogue.find(name)
    try:
        taken = understand(plain_name(name)[0]) if entry is None else None
    except UnknownModelError as error:
        return list(error.could_be)
    entry = catalogue.find(taken.catalogue_id) if taken is not None else entry
    if entry is not None:
        return [entry.model_id.lower()]
    return [*catalogue.names_with(name)] or [hub_id.lower() for hub_id in _close(name)]


def _close(name: str) -> list[str]:
    from planner.core.close import close_names
    from planner.models.name_matching import of_other_size

    close = of_other_size(name) or close_names(name.lower().rpartition("/")[2], catalogue.all_names(), num=12)
    return list(
        dict.fromkeys(entry.model_id for candidate in close if (entry := catalogue.find(candidate)) is not None)
    )


def _hint(name: str) -> str:
    ids = _close(name)
    local = "a local directory with config.json works without a network"
    return f"close names: {', '.join(ids[:3])}; {local}" if ids else f"`plan models` lists the catalogue; {local}"


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


def _from_directory(name: str, path: Path, like: str) -> ModelSpec:
    """The spec of a local config.json; the source says when it hides a hub model of the same name."""
    source = f"local file {os.path.abspath(path)}"
    if hub.is_repo_id(name) and catalogue.find(name) is not None:
        source += f" (a directory of this name wins over the hub model {name}; --hub asks the hub)"
    # A trainer loads the directory, so that is the model's name even when its config.json was pointed at.
    model_id = str(path.parent) if path.name == CONFIG_NAME and not os.path.isdir(name) else name
    spec = spec_from_config(read_config(path), model_id=model_id, source=source, like=like)
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
            f"{stored / 1e9:.5g} B",
            hint="the configuration lacks a size, or belongs to another model: take both from the same revision",
        )
