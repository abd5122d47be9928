"""Builds the step profiles and programs that ship (`planner/data/profiles`, `programs`), one file a model or structure
of layers each.

    python -m tools.build_profiles [NAME ...]              # profiles: what is missing, or was made by another dry run
    python -m tools.build_profiles --structures NAME ...   # of these models' structures, for models of any size
    python -m tools.build_profiles --structures --add ...  # to the files what they lack of what people write
    python -m tools.build_profiles --programs [...]        # programs instead of profiles
    python -m tools.build_profiles --objectives [...]      # programs of preferences, rewards and classification
    python -m tools.build_profiles --ranks [...]           # profiles of ranks that keep a part of the states
    python -m tools.build_profiles --minutes 20            # as many as fit; the next call goes on
    python -m tools.build_profiles --check 3 [--seed 1]    # some kept structures against fresh runs
    python -m tools.build_profiles --confirm 3             # made by another dry run, kept where so many agree

Needs torch, no GPU and no weights: 20 to 180 CPU seconds a file.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from planner.core.errors import UnknownModelError
from planner.core.packed import read_packed, write_packed
from planner.core.shipped import by_model_type
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import find_gpu
from planner.memory.engines import engine_of
from planner.memory.profiles import (
    OF_RANKS,
    SCHEMA,
    SHIPPED,
    Piece,
    ProfileMoment,
    StepProfile,
    config_digest,
    find_profile,
    profiled_breakdown,
    profiled_step,
    profiles_of,
    save_profiles,
    structure_key,
)  # fmt: skip
from planner.memory.rank_part import rank_parts
from planner.models import catalogue
from planner.models.families import spec_from_config
from planner.models.spec import AttentionSpec, ModelSpec
from planner.models.structures import sizes_of, structure_of
from planner.models.targets import dropout_refusal, unmatched_targets
from planner.options.kernels import kernels_refusal
from planner.options.losses import TRL_VOCAB_CHUNK
from planner.options.optimizers import OPTIMIZERS
from planner.planning.space import PLANNED_CHECKPOINTING
from planner.setup import TrainSetup
from planner.speed.step_program import OF_OBJECTIVES, save_programs
from planner.speed.step_program import SHIPPED as PROGRAMS
from probes.dryrun import dry_run_report
from probes.dryrun.report import DryRunReport
from probes.tracing.profile_builder import (
    CARDS,
    ProfileBuilder,
    build_profiles,
    of_ranks,
    planned_structures,
    versions,
    with_fused_adapters,
)
from probes.tracing.programs import ProgramBuilder, objective_structures, program_structures


class Programs(NamedTuple):
    """Where programs lie, of which structures of a model they are, and the optimizers whose steps they hold."""

    directory: Path
    structures: Callable[[ModelSpec], dict[str, tuple[TrainSetup, GpuSpec]]]
    optimizers: Sequence[str]

    def save(
        self, path: Path, model: ModelSpec, sizes: Mapping[str, int] | None = None
    ) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        """The programs that were written, and why others could not be made."""
        builder = ProgramBuilder(model, self.optimizers)
        if programs := builder.all(self.structures(model)):
            save_programs(path, builder.tables, programs, versions(), sizes)
        return programs, builder.failures


USUAL_PROGRAMS = Programs(PROGRAMS, program_structures, tuple(OPTIMIZERS))
OBJECTIVE_PROGRAMS = Programs(
    OF_OBJECTIVES, objective_structures, ("adamw-fused", "adamw", "adamw-8bit", "paged-adamw-8bit")
)
"""Of the optimizers that plans walk, and transformers' earlier default; another's step is the formula's."""

GPU = find_gpu(CARDS[0])
SPACINGS = [spacing for spacing in PLANNED_CHECKPOINTING if spacing]
SAME = 0.001
"""A profile's own error is 0.01 % at most (docs/step-profiles.md)."""
SAMPLES = ((1, 1, 6144, 16), (3, 1, 1536, 8), (4, 2, 2048, 32))
"""Micro-batch, accumulation, length, of no more tokens than the model has positions for, and rank: of one
sequence more than a tile of TRL's loss."""


def deviations(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> Iterator[tuple[str, float, float]]:
    """(words, profile / dry run - 1 of the allocated peak, of the reserved one) of a structure at some sizes; nothing
    where either has none."""
    for micro, steps, tokens, rank in SAMPLES:
        length = min(tokens, model.learned_positions or tokens)
        sizes = {"micro_batch_seqs": micro, "accumulation_steps": steps, "seq_len_tokens": length}
        sample = setup.replace(**sizes, lora_rank=rank if setup.method != "full" else 0)
        step = profiled_step(model, gpu, sample)
        report = dry_run_report(model, gpu, sample, use_cache=False)
        if step is None or not isinstance(report, DryRunReport):
            continue
        state = engine_of(sample).state(rank_parts(model, sample)[0], sample, accumulated=sample.adds_gradients)
        mine, seen = profiled_breakdown(step, gpu, sample, state), report.prediction
        reserved = mine.peak_reserved_bytes / seen.peak_reserved_bytes - 1
        yield f"{micro} x {length}, {steps} steps", mine.peak_allocated_bytes / seen.peak_allocated_bytes - 1, reserved


def path_of(model: ModelSpec, shipped: Path = SHIPPED) -> Path | None:
    """The file that a model's profiles are read from."""
    exact, structure = shipped / f"{config_digest(model.config)}.json.gz", structure_of(model)
    shared = shipped / f"{structure}.json.gz"
    return exact if exact.exists() else shared if structure is not None and shared.exists() else None


def current(path: Path | None) -> bool:
    """Whether a file was made by this dry run, in this way."""
    stored = read_packed(path, SCHEMA, shipped=True) if path is not None else None
    names = ("dry run", "step profile")
    return stored is not None and all(stored["versions"].get(name) == versions()[name] for name in names)


def profiled(name: str) -> bool:
    model = catalogue.load(name)
    return model is not None and path_of(model) is not None


def build(names: list[str], minutes: float, *, programs: Programs | None, ranks: bool, add: bool = False) -> None:
    """Builds the profiles that are not current, or programs, in order, until the time is up.

    Args:
        add: to the files that there are what they lack of what people write, and nothing else.
    """
    end = time.monotonic() + 60 * minutes
    shipped = programs.directory if programs else OF_RANKS if ranks else SHIPPED
    for name in names:
        model = catalogue.load(name)
        if model is None or (not add and current(path_of(model, shipped))):
            continue
        if time.monotonic() > end:
            return
        started, path = time.process_time(), shipped / f"{config_digest(model.config)}.json.gz"
        built: Mapping[str, Any]
        if add and not path.exists():
            continue
        if add:
            said = _added(path, ProfileBuilder(model), as_people_write(model))
            print(f"{name}: {said}, {time.process_time() - started:.0f} CPU s", flush=True)
            continue
        if programs:
            built, failures = programs.save(path, model)
        else:
            built, failures = build_profiles(model, ranks=ranks)
            if built:
                save_profiles(path, built, versions())
        print(f"{name}: {_said(path, built, failures)}, {time.process_time() - started:.0f} CPU s", flush=True)


def _added(
    path: Path,
    builder: ProfileBuilder,
    asked: Mapping[str, tuple[TrainSetup, GpuSpec]],
    like: ModelSpec | None = None,
) -> str:
    """What was written: a file's profiles, and those of what is asked that it lacks."""
    stored, raw = stored_profiles(path), read_packed(path, SCHEMA, shipped=True)
    assert raw is not None, f"{path} is to be added to"
    built = builder.all({key: pair for key, pair in asked.items() if key not in stored})
    save_profiles(path, {**stored, **built}, raw["versions"], like)
    return _said(path, built, builder.failures) or "nothing"


def build_structures(
    names: list[str], minutes: float, *, programs: Programs | None, ranks: bool, add: bool = False
) -> None:
    """Builds the files of the structures of these models, each from a model of sizes that share no factor; `add` as in
    `build`."""
    end, built = time.monotonic() + 60 * minutes, set[str]()
    for name in names:
        model = catalogue.load(name)
        structure = structure_of(model) if model is not None else None
        if model is None or structure is None or structure in built or time.monotonic() > end:
            continue
        built.add(structure)
        path = (programs.directory if programs else OF_RANKS if ranks else SHIPPED) / f"{structure}.json.gz"
        if (not add and current(path)) or (add and not path.exists()):
            continue
        started = time.process_time()
        for own_heads in (True, False):  # some types take a head for a share of the features
            at_depth = partial(apart, model, own_heads=own_heads)
            try:
                alike = structure_of(at_depth()) == structure
            except UnknownModelError:  # a class that lets nobody say the size of a head
                continue
            if not alike:
                continue
            if programs:
                summary = _said(path, *programs.save(path, like := at_depth(), sizes_of(like)))
            else:
                summary = _structure_profiles(model, at_depth, ranks, add=add)
            if summary:
                print(f"{name}: {structure} {summary}, {time.process_time() - started:.0f} CPU s", flush=True)
                break
        else:
            print(f"{name}: another structure at other sizes, or no run", flush=True)


def _structure_profiles(model: ModelSpec, at_depth: Callable[..., ModelSpec], ranks: bool, *, add: bool = False) -> str:
    """What was written; nothing where no run was possible."""
    like = at_depth()
    structure = structure_of(model)
    candidates = [
        candidate
        for name in catalogue.names()
        if (candidate := catalogue.load(name)) and structure_of(candidate) == structure
    ]
    others = sorted((other for other in candidates if other is not model), key=lambda other: other.num_params)
    members = [model, *others[:1], *others[-1:]]
    for other in others:  # depths that leave other layers behind the last checkpoint
        if any(other.num_layers % every not in {of.num_layers % every for of in members} for every in SPACINGS):
            members.append(other)
    builder = ProfileBuilder(like, members, lambda depth: at_depth(num_layers=depth).config, of_rank=ranks)
    path = (OF_RANKS if ranks else SHIPPED) / f"{structure}.json.gz"
    if add:
        return _added(path, builder, as_people_write(like), like)
    requested = {key: pair for of in reversed(members[:3]) for key, pair in planned_structures(of).items()}
    if ranks:
        requested = of_ranks(like, requested.values())
    else:
        fused = with_fused_adapters(like, [pair for pair in requested.values() if not pair[0].activation_offload])
        requested |= as_people_write(like, requested.values())
        requested |= {structure_key(like, gpu, setup): (setup, gpu) for setup, gpu in fused}
    if profiles := builder.all(requested):
        save_profiles(path, profiles, versions(), like)
    return _said(path, profiles, builder.failures)


def as_people_write(
    model: ModelSpec, walked: Iterable[tuple[TrainSetup, GpuSpec]] = ()
) -> dict[str, tuple[TrainSetup, GpuSpec]]:
    """What files ask that no plan walks, by key: of what is walked with all layers checkpointed or none transformers'
    own kernels and a dropout; and what 722 published files ask most (docs/step-profiles.md)."""
    by_itself = tuple(by_model_type("peft_targets").get(model.model_type, ()))
    cases = [(setup, GPU) for setup in (*_of_files(by_itself), *_of_other_files(by_itself))]
    for setup, gpu in walked:
        other = setup.activation_offload or setup.selective_checkpointing or setup.loss == "liger"
        if setup.checkpointing <= 1 and not other:
            eager = setup.replace(kernels="eager")
            cases += [(eager, gpu), (eager.replace(lora_dropout=0.05 * (setup.method != "full")), gpu)]
    asked = {}
    for setup, gpu in cases:
        if setup.method != "full" and unmatched_targets(model, setup.lora_targets):
            continue
        if not (kernels_refusal(setup.kernels, model.model_type) or dropout_refusal(model, setup)):
            asked[structure_key(model, gpu, setup)] = setup, gpu
    return asked


_CHECKPOINTED = {"checkpointing": 1}
_REENTRANT = {"checkpointing": 1, "reentrant_checkpointing": True}
_KEPT = {"checkpointing": 0}


def _of_files(by_itself: tuple[str, ...]) -> Iterator[TrainSetup]:
    """Transformers' own kernels, fp32 adapters under autocast, reentrant checkpoints (Axolotl, LLaMA-Factory), adapters
    on attention or on what PEFT adapts by itself alone, checkpoints on the host (Unsloth), preferences."""
    usual: dict[str, Any] = {"accumulation_steps": 2, "optimizer": "adamw", "loss": "full", "kernels": "eager"}
    whole = TrainSetup(method="full", lora_rank=0, precision="bf16-autocast", **usual, **_CHECKPOINTED)
    yield from (whole.replace(**kept) for kept in (_CHECKPOINTED, _REENTRANT, _KEPT))
    yield from (whole.replace(loss="liger", kernels="liger", **kept) for kept in (_CHECKPOINTED, _REENTRANT))
    yield from (whole.replace(loss="liger", **kept) for kept in (_CHECKPOINTED, _KEPT))
    yield from (whole.replace(precision=precision, **_REENTRANT) for precision in ("bf16-mixed", "bf16-pure"))
    on_host = {"loss": "chunked", "activation_offload": True}
    yield from (whole.replace(precision=precision, **on_host) for precision in ("bf16-autocast", "bf16-pure"))
    yield from (whole.replace(objective="dpo", precision=precision) for precision in ("bf16-autocast", "bf16-mixed"))
    for method, quantization in (("lora", "none"), ("qlora", "nf4-double"), ("qlora", "int8")):
        adapters = whole.replace(method=method, quantization=quantization, lora_rank=16, adapter_dtype="fp32")
        dropped = adapters.replace(lora_dropout=0.05)
        yield from (
            setup.replace(loss=loss, **_REENTRANT) for setup in (adapters, dropped) for loss in ("full", "liger")
        )
        if quantization == "int8":
            continue
        yield adapters.replace(objective="dpo", adapter_dtype="auto")
        yield from (setup.replace(**kept) for setup in (adapters, dropped) for kept in (_CHECKPOINTED, _KEPT))
        yield from (dropped.replace(loss=loss) for loss in ("liger", "chunked"))
        yield dropped.replace(loss="chunked", **_KEPT)
        yield from (adapters.replace(kernels=kernels, **on_host) for kernels in ("eager", "fused"))
        for few in ("attention", by_itself) if by_itself else ("attention",):
            of_few = dropped.replace(lora_targets=few)
            yield from (of_few.replace(**kept) for kept in (_CHECKPOINTED, _REENTRANT, _KEPT))
            yield of_few.replace(lora_dropout=0.0, **_REENTRANT)
            yield of_few.replace(lora_dropout=0.0, **on_host)


def _of_other_files(by_itself: tuple[str, ...]) -> Iterator[TrainSetup]:
    """16-bit adapters without checkpoints (LitGPT, whose own loss comes beside), of queries and values or of all but
    the gate; TRL's and transformers' own defaults with chunks; k-bit's fp32 cast."""
    usual: dict[str, Any] = {"accumulation_steps": 2, "optimizer": "adamw", "loss": "full", "kernels": "eager"}
    whole = TrainSetup(method="full", lora_rank=0, precision="bf16-autocast", **usual, **_CHECKPOINTED)
    for kernels, kept in (("liger", _CHECKPOINTED), ("liger", _REENTRANT), ("eager", _REENTRANT)):
        yield whole.replace(loss="chunked", kernels=kernels, **kept)
    yield whole.replace(precision="bf16-mixed", loss="chunked", **_REENTRANT)
    yield whole.replace(precision="bf16-pure", **_KEPT)
    for method, quantization in (("lora", "none"), ("qlora", "nf4"), ("qlora", "nf4-double")):
        adapters = whole.replace(method=method, quantization=quantization, lora_rank=16, lora_dropout=0.05)
        for few in ("all-linear", by_itself) if by_itself else ("all-linear",):
            if quantization != "nf4-double":
                yield adapters.replace(precision="bf16-pure", adapter_dtype="bf16", lora_targets=few, **_KEPT)
            if quantization != "nf4":
                fp32 = adapters.replace(adapter_dtype="fp32", lora_targets=few)
                yield fp32.replace(precision="bf16-pure", lora_dropout=0.0, **_REENTRANT)
                yield fp32.replace(kbit_fp32_cast=method == "qlora", **_REENTRANT)
        yield adapters.replace(adapter_dtype="bf16" if method == "qlora" else "fp32")
        yield adapters.replace(adapter_dtype="fp32", lora_targets=_NO_GATE, **_REENTRANT)


_NO_GATE = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")


def stored_profiles(path: Path) -> dict[str, StepProfile]:
    """The profiles of a file, with the terms that they are kept in."""
    raw = read_packed(path, SCHEMA, shipped=True)
    if raw is None:
        return {}
    numbers = 4 if "sizes" in raw else 2
    forms = [tuple(zip(*[iter(values)] * numbers, strict=True)) for values in map(json.loads, raw["forms"])]
    groups = [tuple(group) for group in raw["groups"]]
    moments = [
        ProfileMoment(
            phase,
            bool(later),
            tuple((groups[group], forms[form]) for group, form in zip(alive[::2], alive[1::2], strict=True)),
        )
        for phase, later, *alive in map(json.loads, raw["moments"])
    ]

    def piece(alone: int, shortest: int, longest: int | None, numbers: list[int]) -> Piece:
        chosen = tuple(moments[number] for number in numbers)
        return Piece(one_sequence=bool(alone), shortest_tokens=shortest, longest_tokens=longest, moments=chosen)

    profiles = raw["profiles"].items()
    return {key: StepProfile(pieces=tuple(piece(*values) for values in json.loads(pieces))) for key, pieces in profiles}


def _said(path: Path, built: Mapping[str, Any], failures: Mapping[str, str]) -> str:
    why = f"; {len(failures)} without: {sorted({*failures.values()})[:2]}" * bool(failures)
    return f"{len(built)} structures, {path.stat().st_size:,} bytes{why}" if built else ""


_SPELLINGS = {
    "hidden_size": ("n_embd",),
    "intermediate_size": ("ffn_dim", "n_inner", "ffn_hidden_size"),
    "num_attention_heads": ("n_head",),
    "num_key_value_heads": ("num_kv_heads",),
    "num_hidden_layers": ("n_layer",),
}
"""What older types call a size."""


def apart(model: ModelSpec, *, own_heads: bool, num_layers: int = 37) -> ModelSpec:
    """A model of the same layers whose sizes have each an odd factor of their own.

    Args:
        own_heads: whether all heads together have another size than the features.
    """
    attention = model.layer_kinds[0].attention
    assert attention is not None
    whole, rest = divmod(model.vocab_size, TRL_VOCAB_CHUNK)
    scaling = model.config.get("rope_scaling") or {}
    paired = any(
        isinstance(value, list) for value in scaling.values()
    )  # one for each pair that its class counts itself
    own_heads = own_heads and not paired
    hidden, heads, head = _apart_heads(attention, own_heads=own_heads)
    groups = attention.num_heads > attention.num_kv_heads
    config: dict[str, Any] = {
        **model.config, "hidden_size": hidden, "intermediate_size": 7424, "moe_intermediate_size": 7424,
        "num_attention_heads": heads,
        "num_key_value_heads": 1 if attention.num_kv_heads == 1 else 7 if groups else heads,
        "num_hidden_layers": num_layers, "max_window_layers": num_layers,
        "head_dim": head, "shared_expert_intermediate_size": 41 * 128,
        "pad_token_id": 0, "vocab_size": whole * TRL_VOCAB_CHUNK + (31_744 if rest else 0),
    }  # fmt: skip
    if not own_heads:
        del config["head_dim"]
    for name, others in _SPELLINGS.items():
        config |= {other: config[name] for other in others if other in model.config}
    rotated = int(head * attention.rotary_fraction)
    if "rotary_dim" in config:
        config["rotary_dim"] = rotated
    if embedded := config.get("word_embed_proj_dim"):
        config["word_embed_proj_dim"] = hidden if embedded == model.hidden_size else 17 * 64
    if paired:
        config["rope_scaling"] = {
            name: value[:1] * (rotated // 2) if isinstance(value, list) else value for name, value in scaling.items()
        }
    return spec_from_config(config, model_id=f"{model.model_type}-apart", source="sizes apart")


def _apart_heads(attention: AttentionSpec, *, own_heads: bool) -> tuple[int, int, int]:
    """Features, heads and the size of one, of which the share that is rotated is whole pairs."""
    large = attention.head_dim > 128
    if not own_heads:
        return (3120, 15, 208) if large else (3080, 35, 88)
    if int(104 * attention.rotary_fraction) % 2:
        return 77 * 64, 49, 80
    return 3080, 35, 208 if large else 104


def check(num: int, seed: int) -> int:
    """How many of some kept structures differ from fresh runs; each is printed, and how far they are in all."""
    draw, wrong = random.Random(seed), 0
    models = [
        candidate
        for name in catalogue.names()
        if (candidate := catalogue.load(name)) is not None and profiles_of(candidate)
    ]
    errors: dict[str, list[float]] = {"allocated": [], "reserved": []}
    for _ in range(num):
        model = draw.choice(models)
        structures = planned_structures(model) | as_people_write(model)
        kept = sorted(key for key, (setup, gpu) in structures.items() if find_profile(model, gpu, setup) is not None)
        key = draw.choice(kept)
        setup, gpu = structures[key]
        for words, *pair in deviations(model, gpu, setup):
            wrong += abs(pair[0]) > 0.003
            for values, error in zip(errors.values(), pair, strict=True):
                values.append(error)
            print(f"{pair[0]:+.4%} reserved {pair[1]:+.2%} {model.model_id} {words} [{key}]", flush=True)
    for name, values in errors.items():
        far = sorted(map(abs, values))
        print(
            f"{name}: {len(values)} points of {len(models)} models, median {statistics.median(far):.4%}, "
            f"95th {far[int(0.95 * (len(far) - 1))]:.3%}, {min(values):+.3%} to {max(values):+.3%}"
        )
    return wrong


def confirm(names: list[str], num: int, seed: int) -> None:
    """Models made by another dry run in the same way: those of which this one says the same are marked as its own."""
    draw = random.Random(seed)
    for name in names:
        model = catalogue.load(name)
        path = path_of(model) if model is not None else None
        if model is None or path is None or current(path):
            continue
        raw = read_packed(path, SCHEMA, shipped=True)
        if raw["versions"]["step profile"] != versions()["step profile"]:
            continue
        drawn = draw.sample(sorted(planned_structures(model).items(), key=lambda entry: entry[0]), num)
        errors = [abs(error) for _, (setup, gpu) in drawn for _, error, _ in deviations(model, gpu, setup)]
        same = bool(errors) and max(errors) < SAME
        if same:
            write_packed(path, {**raw, "versions": versions()})
        print(f"{name}: {'the same' if same else 'not the same'}, worst of {len(errors)} {max(errors):.4%}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop beginning new models after so long")
    parser.add_argument("--programs", action="store_true", help="programs (speed) instead of profiles (memory)")
    parser.add_argument("--objectives", action="store_true", help="programs of other objectives than sft")
    parser.add_argument("--ranks", action="store_true", help="profiles of ranks that keep a part of the states")
    parser.add_argument("--structures", action="store_true", help="of their structures of layers, for any size")
    parser.add_argument("--add", action="store_true", help="to files that there are what they lack of what people ask")
    parser.add_argument("--check", type=int, default=0, metavar="N", help="compare N kept structures with fresh runs")
    parser.add_argument("--confirm", type=int, default=0, metavar="N", help="compare N structures of each model")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.check:
        return int(check(args.check, args.seed) > 0)
    names = args.names or list(catalogue.names())
    programs = OBJECTIVE_PROGRAMS if args.objectives else USUAL_PROGRAMS if args.programs else None
    if args.confirm:
        confirm(names, args.confirm, args.seed)
    elif args.structures:
        build_structures(names, args.minutes, programs=programs, ranks=args.ranks, add=args.add)
    else:
        names = [name for name in names if args.names or not programs or profiled(name)]
        build(names, args.minutes, programs=programs, ranks=args.ranks, add=args.add)
    return 0


if __name__ == "__main__":
    sys.exit(main())
