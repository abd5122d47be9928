"""Step profiles: the memory of one structure of step, compiled from runs of the real one; where they are kept, and a
setup's memory by them."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from planner.core.install import installed
from planner.core.packed import read_packed, write_packed
from planner.core.records import dataclass
from planner.core.shipped import DATA, by_model_type
from planner.core.units import MIN_BLOCK_BYTES
from planner.hardware.gpu import GpuSpec
from planner.memory.attention_kernels import attention_kernel
from planner.memory.dtypes import SIZE_BYTES, dtype_policy_of
from planner.memory.states import RankState
from planner.memory.step import (
    GAP_FLOOR_BYTES,
    StepTerms,
    allocator_gap_bytes,
    fixed_segments_gap_bytes,
    profile_loss_gap,
)
from planner.memory.workspace import cublas_workspace_bytes
from planner.models.spec import ModelSpec
from planner.models.structures import Resizer, changes, sizes_of, structure_of
from planner.models.targets import adapted_set
from planner.options.losses import LOSSES
from planner.options.stacks import DEFAULT, stack_of_bytes
from planner.setup import OF_OTHERS, TrainSetup
from planner.setup.allowed import FLEX, XFORMERS
from planner.setup.memory_terms import PHASES, MemoryBreakdown
from planner.setup.memory_terms import Term as SizedTerm

# `StepProfile`: the memory of one structure of training step, compiled from runs of the real step (`probes.tracing`).


MONOMIALS: tuple[tuple[int, int, int, int], ...] = (
    *((batch, length, rank, 0) for rank in (0, 1) for length in (0, 1, 2) for batch in (0, 1)),
    (2, 2, 0, 0),
    (0, 0, 0, 1),
)
"""Powers of micro-batch, length, rank and the loss's tile; the first is 1. Packed samples are one row of micro-batch
times length, whose attention scores grow with the square of that."""
Form = tuple[tuple[int, float], ...]
"""Bytes as a sum of (place in MONOMIALS, factor)."""
Term = tuple[int, float, int]
"""(place in MONOMIALS, factor, whether it comes once every repetition of the layers)."""
Group = tuple[str, str]
"""(category, name) of a memory term."""
LOSS_BEGINS = "loss begins"
"""No phase: what is alive when a micro-batch's loss begins."""
HEAD, FIRST, TURN, LAST = "head", "first", "turn", "last"
"""A rank's moments of the backward (`planner.memory.states.MOMENTS`): what is alive beside STATES."""
GRADIENTS = "gradients"
STATES = frozenset({"weights", "adapters", "optimizer"})
"""Categories that are no part of a rank's profile. Of gradients it has a layer's until that is done, and the head's in
the loss: what an engine that passes them on later has whole."""
BATCH: Group = ("other", "batch")
"""The samples of a micro-batch; the runs hold those of two."""


class ProfileMoment(NamedTuple):
    """One moment: its phase (or LOSS_BEGINS; "step": as it begins), whether an earlier micro-batch's gradients are
    there, and the form of each group that is alive."""

    phase: str
    later: bool
    groups: tuple[tuple[Group, Form], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The moments for some micro-batches and lengths.

    Attributes:
        one_sequence: of micro-batch 1, for which some operators copy less; else of 2 and more.
        shortest_tokens, longest_tokens: of a sequence, both included (None: no end).
    """

    one_sequence: bool
    shortest_tokens: int
    longest_tokens: int | None
    moments: tuple[ProfileMoment, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """The profile of one structure."""

    pieces: tuple[Piece, ...]

    def piece(self, *, one_sequence: bool, tokens: int) -> Piece | None:
        """What was run for such samples, None where nothing was."""
        for piece in self.pieces:
            longest = tokens if piece.longest_tokens is None else piece.longest_tokens
            if piece.one_sequence == one_sequence and piece.shortest_tokens <= tokens <= longest:
                return piece
        return None


class Line(NamedTuple):
    """Bytes at one length and rank: a constant, per micro-batch, per its square, per token of a tile."""

    constant: float
    slope: float
    square: float
    tile: float

    def at(self, micro_batch_seqs: int, tile_tokens: int) -> float:
        """Bytes at a micro-batch."""
        return self[0] + (self[1] + self[2] * micro_batch_seqs) * micro_batch_seqs + self[3] * tile_tokens


class Sizes:
    """Moments at one length and rank, each worked out once: structures share them.

    Args:
        one_row: a micro-batch is one sequence of all its samples (`one_row`), whose moments are those of one sequence.
    """

    def __init__(self, tokens: int, rank: int, *, one_row: bool = False) -> None:
        self._tokens, self._rank, self._one_row = tokens, max(1, rank), one_row
        self._forms: dict[int, tuple[Form, Line]] = {}
        self._moments: tuple[dict[int, tuple[ProfileMoment, Line]], ...] = {}, {}

    def form(self, form: Form) -> Line:
        """One group's."""
        cached = self._forms.get(id(form))
        if cached is None:
            coefficients = [0.0] * 4
            for index, factor in form:
                batch, length, ranks, tile = MONOMIALS[index]
                grows = length if self._one_row else batch
                coefficients[3 if tile else grows] += factor * self._tokens**length * self._rank**ranks
            cached = self._forms[id(form)] = form, Line(*coefficients)
        return cached[1]

    def moments(self, moments: Iterable[ProfileMoment], *, accumulated: bool) -> list[Line]:
        """Of each all groups'; without accumulation of one micro-batch's samples."""
        cache, forms, totals = self._moments[accumulated], self._forms, list[Line]()
        for moment in moments:
            cached = cache.get(id(moment))
            if cached is None:
                constant = slope = square = tile = 0.0
                for group, form in moment.groups:
                    entry = forms.get(id(form))
                    line: Sequence[float] = entry[1] if entry is not None else self.form(form)
                    if group == BATCH and not accumulated:
                        line = [0.5 * value for value in line]
                    constant, slope, square, tile = (
                        constant + line[0], slope + line[1], square + line[2], tile + line[3],
                    )  # fmt: skip
                cached = cache[id(moment)] = moment, Line(constant, slope, square, tile)
            totals.append(cached[1])
        return totals


def _is_tiled(piece: Piece) -> bool:
    """Whether its loss is told apart by tiles."""
    losses = (moment.groups for moment in piece.moments if moment.phase == "loss")
    return any(MONOMIALS[index][3] for groups in losses for _, form in groups for index, _ in form)


sizes_at = lru_cache(maxsize=16)(Sizes)
"""The moments at a length and rank, of all models."""


class ProfiledStep:
    """A structure at one length and rank: allocated bytes at any micro-batch, without optimizer and cuBLAS. Its phase
    "step" is the moment before the optimizer makes anything."""

    def __init__(self, profile: StepProfile, model: ModelSpec, setup: TrainSetup, gpu: GpuSpec | None = None) -> None:
        self._tokens_each = setup.replace_trusted(micro_batch_seqs=1).tokens_per_micro_batch
        self._loss, self._vocabulary = LOSSES[setup.loss], (model.vocab_size, model.hidden_size)
        self._holes = profile_loss_gap(model, setup, cublas_workspace_bytes(gpu) // 2 if gpu is not None else 0)
        flat = one_row(setup)
        self._pieces = {
            one_sequence: profile.piece(one_sequence=one_sequence or flat, tokens=setup.seq_len_tokens)
            for one_sequence in (False, True)
        }
        several = profile.piece(one_sequence=False, tokens=setup.seq_len_tokens)
        self._losses = [moment for moment in several.moments if moment.phase == "loss"] if several is not None else []
        self._sizes = sizes_at(setup.seq_len_tokens, setup.lora_rank, one_row=flat)
        self._lines: dict[tuple[bool, bool, bool], dict[str, list[Line]]] = {}
        self._tiles: dict[int, int] = {}

    @property
    def complete(self) -> bool:
        """Whether such samples were run."""
        return all(piece is not None for piece in self._pieces.values())

    def _piece(self, micro_batch_seqs: int) -> Piece:
        piece = self._pieces[micro_batch_seqs == 1]
        assert piece is not None, "`complete` was not asked"
        return piece

    def _alive(self, micro_batch_seqs: int, *, accumulated: bool) -> list[ProfileMoment]:
        piece = self._piece(micro_batch_seqs)
        moments: Iterable[ProfileMoment] = piece.moments
        if piece.one_sequence and self._is_cut(micro_batch_seqs) and not _is_tiled(piece):
            moments = chain((moment for moment in moments if moment.phase != "loss"), self._losses)
        return [moment for moment in moments if accumulated or not moment.later]

    def _is_cut(self, micro_batch_seqs: int) -> bool:
        """Whether the loss takes more than one tile: the runs of one sequence may have had too few tokens to tell."""
        return self._tile_tokens(micro_batch_seqs) < micro_batch_seqs * self._tokens_each

    def _tile_tokens(self, micro_batch_seqs: int) -> int:
        tokens = self._tiles.get(micro_batch_seqs)
        if tokens is None:
            tiling = self._loss.tiling(micro_batch_seqs * self._tokens_each, *self._vocabulary)
            tokens = self._tiles[micro_batch_seqs] = tiling.tokens
        return tokens

    def _by_phase(self, micro_batch_seqs: int, *, accumulated: bool) -> dict[str, list[Line]]:
        key = micro_batch_seqs == 1, self._is_cut(micro_batch_seqs), accumulated
        by_phase = self._lines.get(key)
        if by_phase is None:
            by_phase = self._lines[key] = {}
            alive = self._alive(micro_batch_seqs, accumulated=accumulated)
            for moment, line in zip(alive, self._sizes.moments(alive, accumulated=accumulated), strict=True):
                by_phase.setdefault(moment.phase, []).append(line)
        return by_phase

    def bytes_at(self, micro_batch_seqs: int, *phases: str, accumulated: bool) -> list[int]:
        """Allocated bytes at the highest moment of each phase (or at LOSS_BEGINS)."""
        lines, tile = self._by_phase(micro_batch_seqs, accumulated=accumulated), self._tile_tokens(micro_batch_seqs)
        return [
            round(max([c + (s + q * micro_batch_seqs) * micro_batch_seqs + t * tile for c, s, q, t in lines[phase]]))
            for phase in phases
        ]

    def groups_at(self, phase: str, micro_batch_seqs: int, *, accumulated: bool) -> dict[Group, int]:
        """What is alive at a phase's highest moment, in bytes that add up to `bytes_at`."""
        tile = self._tile_tokens(micro_batch_seqs)
        moments = [moment for moment in self._alive(micro_batch_seqs, accumulated=accumulated) if moment.phase == phase]
        sizes = [line.at(micro_batch_seqs, tile) for line in self._sizes.moments(moments, accumulated=accumulated)]
        best = moments[sizes.index(max(sizes))]
        by_group = {}
        for group, form in best.groups:
            size = self._sizes.form(form).at(micro_batch_seqs, tile)
            by_group[group] = round(size if accumulated or group != BATCH else size / 2)
        by_group = {group: size for group, size in by_group.items() if size > 0}
        rest = self.bytes_at(micro_batch_seqs, phase, accumulated=accumulated)[0] - sum(by_group.values())
        by_group[max(by_group, key=lambda group: by_group[group])] += rest  # of rounding
        return by_group

    def before_step(self, micro_batch_seqs: int, *, accumulated: bool) -> tuple[int, int]:
        """Allocated bytes at the highest moment before the optimizer's step, and what the allocator holds beyond them
        there, with expandable segments."""
        phases = "forward", "loss", "backward", LOSS_BEGINS
        forward, loss, backward, begins = self.bytes_at(micro_batch_seqs, *phases, accumulated=accumulated)
        layer = max(forward, backward) - begins
        of_loss = self._holes.at(micro_batch_seqs * self._tokens_each * self._vocabulary[1] * SIZE_BYTES["bf16"])
        gap = allocator_gap_bytes(loss=loss - begins, layer=layer, of_loss=of_loss)
        return max(forward, loss, backward), gap


# Where step profiles are kept: those of the catalogue ship in `planner/data/profiles`, others lie in the user's cache.


SCHEMA = 3
"""Rows of tables are text, which is taken apart where it is asked for: a plan asks a tenth."""
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")
SHIPPED = DATA / "profiles"
OF_RANKS = DATA / "rank_profiles"
"""The same of ranks that keep a part of the states (`planner.memory.ranks`)."""
_NO_MATTER = frozenset(
    {"transformers_version", "use_cache", "bos_token_id", "eos_token_id", "initializer_range", "model_id"}
)
"""Keys of a configuration that no training step asks."""


class ModelProfiles:
    """The profiles of one model by structure, read from a file when first asked for.

    Args:
        model: whose they are to be, where the file is of its structure of layers (`planner.models.structures`): its
            numbers are those of a model that was run, and come so often in all and so often each repetition.

    Attributes:
        versions: of what was run.
        without_gradients: of ranks' profiles, by identity, those without gradients (`planner.memory.ranks`).
    """

    def __init__(self, raw: Mapping[str, Any], model: ModelSpec | None = None) -> None:
        self.versions: Mapping[str, str] = raw["versions"]
        self.without_gradients: dict[int, StepProfile] = {}
        self._raw = raw
        self._found: dict[str, StepProfile] = {}
        self._moments: dict[tuple[int, int], ProfileMoment] = {}
        self._forms: dict[tuple[int, int], Form] = {}
        self._groups: list[Group] = [(category, name) for category, name in raw["groups"]]
        self._model = model
        self._sizes = Resizer(raw["sizes"], sizes_of(model)) if model is not None else None
        self._changes = changes(model) if model is not None else []
        self._known: dict[tuple[int, float], float] = {}
        self._parts: dict[int, dict[int, tuple[float, float]]] = {}

    @property
    def keys(self) -> frozenset[str]:
        """The structures that have one."""
        return frozenset(self._raw["profiles"])

    def get(self, key: str, every: int = 0) -> StepProfile | None:
        """The profile of a structure.

        Args:
            every: how many layers apart its checkpoints lie (0: there are none).
        """
        profile = self._found.get(key)
        if profile is None:
            repeats, stored_key = 0, key
            if self._model is not None:
                repeats = self._model.num_layers // max(1, every)
                if not repeats:
                    return None
                stored_key = at_rest(key, self._model.num_layers, every)
            pieces = self._raw["profiles"].get(stored_key)
            if pieces is None:
                return None
            parsed = [self._piece(values, repeats) for values in json.loads(pieces)]
            profile = self._found[key] = StepProfile(pieces=tuple([piece for piece in parsed if piece is not None]))
        return profile

    def _piece(self, values: Sequence[Any], repeats: int) -> Piece | None:
        alone, shortest, longest, numbers = values
        if self._model is not None:
            if shortest > 1 and self._raw["changes"] != self._changes:
                return None
            if shortest == 1:
                longest = self._changes[0] - 1 if self._changes else None
        return Piece(
            one_sequence=bool(alone),
            shortest_tokens=shortest,
            longest_tokens=longest,
            moments=tuple(
                [
                    self._moments.get((moment_number, repeats)) or self._moment(moment_number, repeats)
                    for moment_number in numbers
                ]
            ),
        )

    def _moment(self, number: int, repeats: int) -> ProfileMoment:
        phase, later, *alive = json.loads(self._raw["moments"][number])
        forms, pairs = self._forms, zip(alive[::2], alive[1::2], strict=True)
        groups = tuple(
            [(self._groups[group], forms.get((form, repeats)) or self._form(form, repeats)) for group, form in pairs]
        )
        moment = self._moments[number, repeats] = ProfileMoment(phase, bool(later), groups)
        return moment

    def _form(self, number: int, repeats: int) -> Form:
        values = json.loads(self._raw["forms"][number]) if number not in self._parts else ()
        if self._sizes is None:
            form = tuple(zip(values[::2], map(float, values[1::2]), strict=True))
        else:
            parts = self._parts.get(number) or self._parts_of(number, values)
            form = tuple([(index, fixed + each * repeats) for index, (fixed, each) in parts.items()])
        self._forms[number, repeats] = form
        return form

    def _parts_of(self, number: int, values: Sequence[float]) -> dict[int, tuple[float, float]]:
        """Of a form by monomial: its factor in all, and each repetition."""
        assert self._sizes is not None
        parts = self._parts[number] = {}
        for index, factor, fixed, each in zip(values[::4], values[1::4], values[2::4], values[3::4], strict=True):
            place = int(index)
            size = self._known.get((place, factor))
            if size is None:
                size = self._known[place, factor] = resized_bytes(self._sizes, place, factor)
            so_far = parts.get(place, (0.0, 0.0))
            parts[place] = so_far[0] + fixed * size, so_far[1] + each * size
        return parts


def resized_bytes(sizes: Resizer, index: int, factor: float) -> float:
    """The factor of a monomial for a model, of that of the one that was run."""
    product = sizes.product(factor)
    return product if index else math.ceil(product / MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def config_digest(config: Mapping[str, Any]) -> str:
    """16 hexadecimal digits that stand for what a configuration makes of a step."""
    relevant = {name: value for name, value in config.items() if name not in _NO_MATTER and not name.startswith("_")}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True, default=str).encode()).hexdigest()[:16]


def profiled_kind(setup: TrainSetup) -> bool:
    """Whether profiles are made of such setups: text on one GPU, whole weights or adapters whose matrices have a rank,
    objectives whose sizes are the samples' alone (but supervised training with all logits: tiles of pairs are others);
    no full loss in pieces of so many tokens, of which there are more the more there are.
    """
    covered = setup.objective == "sft" or (setup.objective in _OBJECTIVES and setup.loss == "full")
    partly = setup.images is not None or setup.compile or setup.trained_layers or setup.frozen_encoder or setup.pads
    cut = setup.loss == "full" and setup.trainer.loss_chunk_tokens > 0
    older = any(_LATER(setup)) and setup.uses_older_code_paths
    plain = setup.single_gpu and covered and not partly and not cut and not older
    return plain and setup.attention not in (XFORMERS, FLEX) and setup.adapter in _ADAPTERS


_LATER = attrgetter(*OF_OTHERS)
_OBJECTIVES = ("dpo", "orpo", "reward", "classification")
_LIKE_LORA = ("lora", "rslora", "pissa")
"""Adapters that differ in numbers alone."""
_ADAPTERS = (*_LIKE_LORA, "dora", "vera")


def structure_key(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> str:
    """What names a structure: fields beside their defaults, of all setups whose step holds the same bytes those of one,
    and the kernels that its attention runs on this card. A dropout's size does not matter.

    Measured: dry runs of 12 pairs each of Llama-3.2-1B, Gemma-2-2B, Qwen3-0.6B and Mistral-7B, full, LoRA and QLoRA:
    other stacks, the same bytes; fp16, 0.0001 % apart at most (the loss scaler), of
    int8 0.2 % of the forward; packed rows, 0.003 % (positions).
    """
    kernels = _attention_kernels(model, gpu, setup)
    same: dict[str, Any] = {"reentrant_checkpointing": setup.reentrant_checkpointing and setup.checkpointing > 0}
    if setup.method != "full":
        same["lora_targets"] = adapted_set(model, setup.lora_targets)
    own_gate = setup.trainer.gates_with_lora and setup.kernels == "fused" and same.get("lora_targets") != "all-linear"
    if setup.pauses_checkpointing and not setup.modules_to_save:
        same["stack"] = DEFAULT  # in which Axolotl trains preferences
    elif setup.seqs_per_sample == 1 and not (setup.modules_to_save or own_gate):  # pairs, saved: each trainer's own
        same["stack"] = stack_of_bytes(
            setup.stack, full_loss=setup.loss == "full", autocast=setup.autocast_dtype is not None
        )
    if one_row(setup) and kernels == "flash":
        same["packing"] = False
    if "bf16" not in setup.precision:
        same["precision"] = setup.precision.replace("fp16", "bf16")
        same["resolved_adapter_dtype"] = setup.resolved_adapter_dtype.replace("fp16", "bf16")
    return _key(kernels, model, setup, same)


def program_key(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> str:
    """The same of a step program, whose setups take the same time too."""
    return _key(_attention_kernels(model, gpu, setup), model, setup, {})


def one_row(setup: TrainSetup) -> bool:
    """Whether a micro-batch of packed samples is one sequence to all but flash attention's own bounds: no mask."""
    return setup.packing and setup.attention == "flash-attention-2" and not setup.trainer.packs_rows


def _attention_kernels(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> str:
    dtype = setup.autocast_dtype or dtype_policy_of(setup).attention_input
    kernels = {
        attention_kernel(model, setup, gpu, layer.attention, dtype) if layer.attention else "none"
        for layer in model.layer_kinds
    }
    return "+".join(sorted(kernels))


def _key(kernels: str, model: ModelSpec, setup: TrainSetup, same: Mapping[str, Any]) -> str:
    values = [kernels]
    for name in _FIELDS:
        if name != "resolved_adapter_dtype" or setup.method != "full":
            values.append(str(same[name] if name in same else getattr(setup, name)).replace(" ", ""))
    rarer = (
        ("objective", setup.objective, "sft"),
        ("adapter", "lora" if setup.adapter in _LIKE_LORA else setup.adapter, "lora"),
        ("linear attention", setup.linear_attention, "torch"),
        ("saved", "+".join(setup.modules_to_save), ""),
        ("reference", "precomputed" if setup.precomputed_reference else "", ""),
        ("stacks", "fp32" if setup.wide_stacks and model.expert_stacks else "", ""),
    )
    values.append("dropout" if setup.lora_dropout else "-")
    values += [f"{name}={value}" for name, value, usual in rarer if value != usual]
    return " ".join(values)


_FIELDS = (
    "method", "precision", "quantization", "kbit_fp32_cast", "lora_targets", "resolved_adapter_dtype", "checkpointing",
    "loss", "packing", "kernels", "activation_offload", "selective_checkpointing", "quantize_experts", "stack",
    "reentrant_checkpointing",
)  # fmt: skip


def respaced(key: str, every: int) -> str:
    """The key of the structure that differs in how many layers apart checkpoints lie."""
    words = key.split(" ")
    words[_SPACING[words[1]]] = str(every)
    return " ".join(words)


_SPACING = {
    "full": _FIELDS.index("checkpointing"),
    **dict.fromkeys(("lora", "qlora"), 1 + _FIELDS.index("checkpointing")),
}
"""Where the spacing of checkpoints stands in a key, by method."""


def at_rest(key: str, num_layers: int, every: int) -> str:
    """The key in a file of a structure of layers, of which so many leave so many behind the last whole period."""
    rest = num_layers % max(1, every)
    return f"{key} +{rest}" if rest else key


def find_profile(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> StepProfile | None:
    """The profile of a setup's structure, None where there is none. A rank of DDP does what one GPU does."""
    if setup.parallel == "ddp" and not setup.is_split:
        setup = setup.replace_trusted(num_gpus=1, parallel="none")
    if not profiled_kind(setup):
        return None
    profiles = profiles_of(model)
    if profiles is None or gpu.vendor == "Apple":
        return None
    return profiles.get(structure_key(model, gpu, setup), setup.checkpointing)


def profiles_of(model: ModelSpec) -> ModelProfiles | None:
    """All profiles of a model: those that the user made with the libraries that are installed, else shipped ones."""
    return model.once("profiles", _read_profiles)


def rank_profiles_of(model: ModelSpec) -> ModelProfiles | None:
    """The same of ranks."""
    return model.once("rank profiles", lambda spec: _read_profiles(spec, OF_RANKS, "ranks-"))


def _read_profiles(model: ModelSpec, shipped: Path | None = None, before: str = "") -> ModelProfiles | None:
    if model.built_class == by_model_type("seeing_class").get(model.model_type):
        return None  # with its encoder: runs are of the class of text alone
    digest, shipped = config_digest(model.config), shipped or SHIPPED
    profiles = _own_profiles(f"{before}{digest}") or load_profiles(shipped / f"{digest}.json.gz")
    structure = structure_of(model) if profiles is None else None
    raw = read_packed(shipped / f"{structure}.json.gz", SCHEMA, shipped=True) if structure else None
    return ModelProfiles(raw, model) if raw else profiles


def _own_profiles(name: str) -> ModelProfiles | None:
    candidates = [
        profiles for path in user_directory().glob(f"{name}-*.json.gz") if (profiles := load_profiles(path)) is not None
    ]
    if not candidates:
        return None
    here = library_versions()
    return next(
        (candidate for candidate in candidates if {name: candidate.versions.get(name) for name in here} == here), None
    )


@cache
def library_versions() -> Mapping[str, str]:
    """Installed versions of what a step executes; "absent" where one is missing."""
    return dict.fromkeys(LIBRARIES, "absent") | installed(LIBRARIES)


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


def user_ranks(model: ModelSpec) -> Path:
    """The same of its ranks' profiles."""
    return user_path(model).with_name(f"ranks-{user_path(model).name}")


@lru_cache(maxsize=8)
def load_profiles(path: Path) -> ModelProfiles | None:
    """The profiles of a file; None where there is none that can be read."""
    raw = read_packed(path, SCHEMA, shipped=path.parent in (SHIPPED, OF_RANKS))
    return ModelProfiles(raw) if raw and raw["profiles"] else None


def save_profiles(
    path: Path,
    profiles: Mapping[str, StepProfile],
    versions: Mapping[str, str],
    like: ModelSpec | None = None,
) -> None:
    """Writes the profiles of a model; the same ones give the same bytes.

    Args:
        like: the model that was run for all of its structure of layers.
    """
    shared: dict[str, dict[Any, int]] = {"forms": {}, "groups": {}, "moments": {}}

    def number(table: str, value: Any) -> int:
        return shared[table].setdefault(value, len(shared[table]))

    packed = {}
    for key, profile in sorted(profiles.items()):
        pieces: list[Sequence[Any]] = []
        for piece in profile.pieces:
            numbers = []
            for phase, later, alive in piece.moments:
                pairs = [(number("groups", group), number("forms", tuple(chain(*form)))) for group, form in alive]
                numbers.append(number("moments", (phase, int(later), *chain(*pairs))))
            pieces.append([int(piece.one_sequence), piece.shortest_tokens, piece.longest_tokens, numbers])
        packed[key] = text_of(pieces)
    tables = {name: [*table] if name == "groups" else [*map(text_of, table)] for name, table in shared.items()}
    raw: dict[str, Any] = {"schema": SCHEMA, "versions": dict(versions), **tables}
    if like is not None:
        raw |= {"sizes": sizes_of(like), "changes": changes(like)}
    write_packed(path, {**raw, "profiles": packed})
    load_profiles.cache_clear()


def text_of(row: Sequence[Any]) -> str:
    """A row of a table."""
    return json.dumps(row, separators=(",", ":"))


# The memory of a setup by its structure's step profile: what runs of the real step showed, and the optimizer's states.
# One GPU, or a rank of DDP, whose buckets come beside.


def profiled_step(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> ProfiledStep | None:
    """A setup's structure at its length and rank; None where it has no profile, or none of such samples."""
    profile = find_profile(model, gpu, setup)
    return None if profile is None else step_of(profile, model, setup, gpu)


def step_of(
    profile: StepProfile, model: ModelSpec, setup: TrainSetup, gpu: GpuSpec | None = None
) -> ProfiledStep | None:
    """A profile at a setup's length and rank; None where such samples were not run: beyond a window FlashAttention is
    handed no mask, and what was run there is SDPA."""
    windows = (layer.attention.window_tokens for layer in model.layer_kinds if layer.attention is not None)
    if setup.attention == "flash-attention-2" and any(window and window <= setup.seq_len_tokens for window in windows):
        return None
    step = ProfiledStep(profile, model, setup, gpu)
    return step if step.complete else None


def reserved_peak(before: tuple[int, int], at_end: int) -> int:
    """What the allocator holds at the peak: of the highest moment before the optimizer's step, with what lies beyond it
    there (`ProfiledStep.before_step`), and of that step."""
    return max(sum(before), at_end + GAP_FLOOR_BYTES)


def profiled_breakdown(step: ProfiledStep, gpu: GpuSpec, setup: TrainSetup, state: RankState) -> MemoryBreakdown:
    """The terms of one setup on one GPU, or on a rank of DDP.

    Args:
        state: what it holds, for the optimizer's states and temporaries and for DDP's buckets.
    """
    micro, accumulated, terms = setup.micro_batch_seqs, setup.adds_gradients, StepTerms()
    states, temporaries = state.optimizer_bytes(setup.optimizer)
    load, *sizes, begins = step.bytes_at(micro, *PHASES, LOSS_BEGINS, accumulated=accumulated)
    for phase in PHASES:
        terms.add((phase,), as_terms(step.groups_at(phase, micro, accumulated=accumulated)))
    terms.add(PHASES, buckets(state))
    terms.add_states(gpu, setup, states)
    terms.add(("step",), [("optimizer", f"temporaries of {setup.optimizer}", temporaries)])
    if setup.expandable_segments:
        before, at_end = step.before_step(micro, accumulated=accumulated), sizes[-1] + temporaries
        gap = reserved_peak(before, at_end) - max(before[0], at_end)
    else:
        dynamic = {phase: size - load for phase, size in zip(PHASES[1:-1], sizes, strict=False)}
        gap = fixed_segments_gap_bytes(saved=max(0, begins - load), **dynamic)
    return terms.breakdown(gpu, setup, gap, profiled=True)


def as_terms(groups: Mapping[Group, int]) -> list[SizedTerm]:
    """Of a moment's groups."""
    return [(category, name, size) for (category, name), size in groups.items()]  # type: ignore[misc]


def buckets(state: RankState) -> list[SizedTerm]:
    """DDP's, which are there all along and no part of what one GPU does."""
    return [term for term in state.terms_at("resident") if term[0] == "gradients"]
