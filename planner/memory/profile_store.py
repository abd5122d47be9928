"""Where step profiles are kept: those of the catalogue ship in `planner/data/profiles`, others lie in the user's cache.

One compressed file a model, named by the digest of its configuration. Forms, groups and moments that several structures
share are written once.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from planner.hardware.gpu import GpuSpec
from planner.hardware.kernels import attention_kernel
from planner.memory.dtypes import dtype_policy_of
from planner.memory.step_profile import Form, Group, Piece, ProfileMoment, StepProfile
from planner.models.spec import ModelSpec
from planner.packed import read_packed, write_packed
from planner.setup import OF_OTHERS, TrainSetup

SCHEMA = 1
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")
SHIPPED = Path(__file__).parent.parent / "data" / "profiles"
_NO_MATTER = frozenset(
    {"transformers_version", "use_cache", "bos_token_id", "eos_token_id", "initializer_range", "model_id"}
)
"""Keys of a configuration that no training step asks."""


class ModelProfiles:
    """The profiles of one model by structure, read from a file when first asked for.

    Attributes:
        versions: of what was run.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.versions: Mapping[str, str] = raw["versions"]
        self._raw = raw
        self._found: dict[str, StepProfile] = {}
        self._moments: dict[int, ProfileMoment] = {}
        self._forms: dict[int, Form] = {}
        self._groups: list[Group] = [(category, name) for category, name in raw["groups"]]

    @property
    def keys(self) -> frozenset[str]:
        """The structures that have one."""
        return frozenset(self._raw["profiles"])

    def get(self, key: str) -> StepProfile | None:
        """The profile of a structure."""
        found = self._found.get(key)
        if found is None and key in self._raw["profiles"]:
            found = self._found[key] = StepProfile(pieces=tuple(map(self._piece, self._raw["profiles"][key])))
        return found

    def _piece(self, values: Sequence[Any]) -> Piece:
        alone, shortest, longest, own, gaps = values
        return Piece(
            one_sequence=bool(alone),
            shortest_tokens=shortest,
            longest_tokens=longest,
            moments=tuple(self._moments.get(one) or self._moment(one) for one in own),
            gaps=tuple((tokens, share) for tokens, share in gaps),
        )

    def _moment(self, number: int) -> ProfileMoment:
        phase, later, alive = self._raw["moments"][number]
        groups = tuple([(self._groups[group], self._forms.get(form) or self._form(form)) for group, form in alive])
        found = self._moments[number] = ProfileMoment(phase, bool(later), groups)
        return found

    def _form(self, number: int) -> Form:
        found = self._forms[number] = tuple((index, float(factor)) for index, factor in self._raw["forms"][number])
        return found


def config_digest(config: Mapping[str, Any]) -> str:
    """16 hexadecimal digits that stand for what a configuration makes of a step."""
    kept = {name: value for name, value in config.items() if name not in _NO_MATTER and not name.startswith("_")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


def profiled_kind(setup: TrainSetup) -> bool:
    """Whether profiles are made of such setups: text on one GPU, whole weights or adapters whose matrices have a rank,
    objectives whose sizes are the samples' alone (but supervised training with all logits: tiles of pairs are others).
    """
    known = setup.objective == "sft" or (setup.objective in _OBJECTIVES and setup.loss == "full")
    plain = setup.alone and known and setup.images is None and not setup.compile
    plain = plain and not (any(_LATER(setup)) and setup.computed_otherwise)
    return plain and setup.adapter in _ADAPTERS and not setup.trained_layers and not setup.frozen_encoder


_LATER = attrgetter(*OF_OTHERS)
_OBJECTIVES = ("dpo", "orpo", "reward", "classification")
_LIKE_LORA = ("lora", "rslora", "pissa")
"""Adapters that differ in numbers alone."""
_ADAPTERS = (*_LIKE_LORA, "dora", "vera")


def structure_key(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> str:
    """What names a structure: its fields beside the defaults, and the kernels that its attention runs on this card."""
    dtype = dtype_policy_of(setup).attention_input
    found = {
        attention_kernel(model, setup, gpu, layer.attention, dtype) if layer.attention else "none"
        for layer in model.layer_kinds
    }
    return key_with(setup, found)


def key_with(setup: TrainSetup, kernels: Iterable[str]) -> str:
    """`structure_key` for layers whose attention runs these kernels. A dropout's size does not matter."""
    values = [str(value) for value in (_OF_FULL if setup.method == "full" else _OF_ADAPTERS)(setup)]
    adapter = "lora" if setup.adapter in _LIKE_LORA else setup.adapter
    rarer = (
        ("objective", setup.objective, "sft"),
        ("adapter", adapter, "lora"),
        ("linear attention", setup.linear_attention, "torch"),
        ("saved", "+".join(setup.modules_to_save), ""),
        ("reference", "precomputed" if setup.precomputed_reference else "", ""),
    )
    values += [
        "dropout" if setup.lora_dropout else "-",
        *(f"{name}={own}" for name, own, usual in rarer if own != usual),
    ]
    return " ".join(["+".join(sorted({*kernels})), *values])


_FIELDS = (
    "method", "precision", "quantization", "kbit_fp32_cast", "lora_targets", "resolved_adapter_dtype", "checkpointing",
    "loss", "packing", "kernels", "activation_offload", "selective_checkpointing", "quantize_experts", "stack",
    "reentrant_checkpointing",
)  # fmt: skip
_OF_ADAPTERS, _OF_FULL = attrgetter(*_FIELDS), attrgetter(*(one for one in _FIELDS if one != "resolved_adapter_dtype"))


def find_profile(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> StepProfile | None:
    """The profile of a setup's structure, None where there is none. A rank of DDP does what one GPU does."""
    if setup.parallel == "ddp" and not setup.is_split:
        setup = setup.replace_trusted(num_gpus=1, parallel="none")
    if not profiled_kind(setup):
        return None
    known = profiles_of(model)
    return known.get(structure_key(model, gpu, setup)) if known is not None and gpu.vendor != "Apple" else None


def profiles_of(model: ModelSpec) -> ModelProfiles | None:
    """All profiles of a model: those that the user made with the libraries that are installed, else shipped ones."""
    return model.once("profiles", _read_profiles)


def _read_profiles(model: ModelSpec) -> ModelProfiles | None:
    digest = config_digest(model.config)
    return _own_profiles(digest) or load_profiles(SHIPPED / f"{digest}.json.gz")


def _own_profiles(digest: str) -> ModelProfiles | None:
    """What this user made with the libraries that are installed."""
    found = [kept for path in user_directory().glob(f"{digest}-*.json.gz") if (kept := load_profiles(path)) is not None]
    if not found:
        return None
    here = library_versions()
    return next((one for one in found if {name: one.versions.get(name) for name in here} == here), None)


def library_versions() -> dict[str, str]:
    """Installed versions of what a step executes; "absent" where one is missing."""
    from importlib.metadata import PackageNotFoundError, version  # late: it loads a mail reader

    found = dict.fromkeys(LIBRARIES, "absent")
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def user_directory() -> Path:
    """Where profiles lie that a user made (`python -m probes.tracing MODEL`)."""
    try:
        from platformdirs import user_cache_path
    except ImportError:  # a bare GPU machine
        return Path.home() / ".cache" / "finetune-planner" / "step-profiles"
    return user_cache_path("finetune-planner") / "step-profiles"


def user_path(model: ModelSpec) -> Path:
    """The file of a model's profiles for the libraries that are installed."""
    versions = hashlib.sha256(json.dumps(library_versions(), sort_keys=True).encode()).hexdigest()[:8]
    return user_directory() / f"{config_digest(model.config)}-{versions}.json.gz"


@lru_cache(maxsize=8)
def load_profiles(path: Path) -> ModelProfiles | None:
    """The profiles of a file; None where there is none that can be read."""
    raw = read_packed(path, SCHEMA, shipped=path.parent == SHIPPED)
    return ModelProfiles(raw) if raw and raw["profiles"] else None


def save_profiles(path: Path, profiles: Mapping[str, StepProfile], versions: Mapping[str, str]) -> None:
    """Writes the profiles of a model; the same ones give the same bytes."""
    shared: dict[str, dict[Any, int]] = {"forms": {}, "groups": {}, "moments": {}}

    def number(table: str, value: Any) -> int:
        return shared[table].setdefault(value, len(shared[table]))

    found = {}
    for key, profile in sorted(profiles.items()):
        pieces: list[Sequence[Any]] = []
        for one in profile.pieces:
            own = []
            for phase, later, alive in one.moments:
                pairs = tuple((number("groups", group), number("forms", form)) for group, form in alive)
                own.append(number("moments", (phase, int(later), pairs)))
            pieces.append([int(one.one_sequence), one.shortest_tokens, one.longest_tokens, own, one.gaps])
        found[key] = pieces
    raw = {"schema": SCHEMA, "versions": dict(versions), **{name: [*table] for name, table in shared.items()}}
    write_packed(path, {**raw, "profiles": found})
    load_profiles.cache_clear()
