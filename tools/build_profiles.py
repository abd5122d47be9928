"""Builds the step profiles and programs that ship (`planner/data/profiles`, `programs`), one file a model each.

    python -m tools.build_profiles [NAME ...]           # what is missing, or was made by another dry run
    python -m tools.build_profiles --programs [NAME ...]  # the programs of these models, else of all with profiles
    python -m tools.build_profiles --minutes 20         # as many as fit; the next call goes on
    python -m tools.build_profiles --check 3 [--seed 1] # some kept structures against fresh runs
    python -m tools.build_profiles --confirm 3          # made by another dry run, kept where so many structures agree

Needs torch, no GPU and no weights: 20 to 120 CPU seconds a model.
"""

import argparse
import random
import sys
import time
from typing import Any

from planner.core.packed import read_packed, write_packed
from planner.memory.profiles import SCHEMA, SHIPPED, config_digest, load_profiles, profiles_of, save_profiles
from planner.models import catalogue
from planner.models.adapters import spec_from_config
from planner.models.spec import ModelSpec
from planner.models.structures import VOCABULARY_TILE, sizes_of, structure_of
from planner.speed.step_program import SHIPPED as PROGRAMS
from planner.speed.step_program import save_programs
from probes.tracing.check import deviations
from probes.tracing.profile_builder import asked_structures, build_profiles, versions
from probes.tracing.programs import ProgramBuilder, asked_programs

SAME = 0.001
"""A profile's own error is 0.01 % at most (docs/step-profiles.md)."""


def current(model: ModelSpec) -> bool:
    """Whether what is kept of a model was made by this dry run, in this way."""
    kept = load_profiles(SHIPPED / f"{config_digest(model.config)}.json.gz")
    names = ("dry run", "step profile")
    return kept is not None and all(kept.versions.get(name) == versions()[name] for name in names)


def profiled(name: str) -> bool:
    """Whether a model ships profiles."""
    model = catalogue.load(name)
    return model is not None and (SHIPPED / f"{config_digest(model.config)}.json.gz").exists()


def build(names: list[str], minutes: float) -> None:
    """Builds what is not current, in order, until the time is up."""
    end = time.monotonic() + 60 * minutes
    for name in names:
        model = catalogue.load(name)
        if model is None or current(model):
            continue
        if time.monotonic() > end:
            return
        started = time.process_time()
        found, failures = build_profiles(model)
        path = SHIPPED / f"{config_digest(model.config)}.json.gz"
        if found:
            save_profiles(path, found, versions())
        size = path.stat().st_size if found else 0
        why = f"; {len(failures)} without: {next(iter(failures.values()))[:150]}" if failures else ""
        spent = time.process_time() - started
        print(f"{name}: {len(found)} structures, {size:,} bytes, {spent:.0f} CPU s{why}", flush=True)


def build_programs(names: list[str], minutes: float) -> None:
    """Builds the programs of models, in order, until the time is up."""
    end = time.monotonic() + 60 * minutes
    for name in names:
        model = catalogue.load(name)
        if model is None or time.monotonic() > end:
            continue
        started, builder = time.process_time(), ProgramBuilder(model)
        found = builder.all(asked_programs(model))
        path = PROGRAMS / f"{config_digest(model.config)}.json.gz"
        if found:
            save_programs(path, builder.tables, found, versions())
        size, spent = path.stat().st_size if found else 0, time.process_time() - started
        why = f"; {len(builder.failures)} without: {sorted({*builder.failures.values()})[:2]}" * bool(builder.failures)
        print(f"{name}: {len(found)} programs, {size:,} bytes, {spent:.0f} CPU s{why}", flush=True)


def build_structures(names: list[str], minutes: float) -> None:
    """Builds the programs of the structures of these models, each from a model of sizes that share no factor."""
    end, built = time.monotonic() + 60 * minutes, set[str]()
    for name in names:
        model = catalogue.load(name)
        structure = structure_of(model) if model is not None else None
        if model is None or structure is None or structure in built or time.monotonic() > end:
            continue
        built.add(structure)
        for own_heads in (True, False):  # some types take a head for a share of the features
            like = apart(model, own_heads=own_heads)
            if structure_of(like) != structure:
                continue
            started, builder = time.process_time(), ProgramBuilder(like)
            if found := builder.all(asked_programs(like)):
                break
        else:
            print(f"{name}: another structure at other sizes, or no run")
            continue
        path = PROGRAMS / f"{structure}.json.gz"
        save_programs(path, builder.tables, found, versions(), sizes_of(like))
        spent = time.process_time() - started
        why = f"; {len(builder.failures)} without: {sorted({*builder.failures.values()})[:2]}" * bool(builder.failures)
        size = path.stat().st_size
        print(f"{name}: {structure} {len(found)} programs, {size:,} bytes, {spent:.0f} CPU s{why}", flush=True)


_SPELLINGS = {
    "hidden_size": ("n_embd", "word_embed_proj_dim"),
    "intermediate_size": ("ffn_dim", "n_inner", "ffn_hidden_size"),
    "num_attention_heads": ("n_head",),
    "num_key_value_heads": ("num_kv_heads",),
    "num_hidden_layers": ("n_layer",),
}
"""What older types call a size."""


def apart(model: ModelSpec, *, own_heads: bool) -> ModelSpec:
    """A model of the same layers whose sizes have each an odd factor of their own.

    Args:
        own_heads: whether all heads together have another size than the features.
    """
    attention = model.layer_kinds[0].attention
    assert attention is not None
    whole, rest = divmod(model.vocab_size, VOCABULARY_TILE)
    heads = 1 if attention.num_kv_heads == 1 else 7 if attention.num_heads > attention.num_kv_heads else 35
    config: dict[str, Any] = {
        **model.config, "hidden_size": 3080, "intermediate_size": 7424, "moe_intermediate_size": 7424,
        "num_attention_heads": 35, "num_key_value_heads": heads, "num_hidden_layers": 37, "max_window_layers": 37,
        "head_dim": 104 if attention.head_dim <= 128 else 208, "shared_expert_intermediate_size": 41 * 128,
        "pad_token_id": 0, "vocab_size": whole * VOCABULARY_TILE + (31_744 if rest else 0),
    }  # fmt: skip
    if not own_heads:
        del config["head_dim"]
    for name, others in _SPELLINGS.items():
        config |= {other: config[name] for other in others if model.config.get(other) is not None}
    return spec_from_config(config, model_id=f"{model.model_type}-apart", source="sizes apart")


def check(num: int, seed: int) -> int:
    """How many of some kept structures differ from fresh runs; each is printed."""
    draw, wrong = random.Random(seed), 0
    kept = [one for name in catalogue.names() if (one := catalogue.load(name)) is not None and profiles_of(one)]
    for _ in range(num):
        model = draw.choice(kept)
        key, (setup, gpu) = draw.choice(sorted(asked_structures(model).items(), key=lambda one: one[0]))
        for words, error in deviations(model, gpu, setup):
            wrong += abs(error) > 0.003
            print(f"{error:+.4%} {model.model_id} {words} [{key}]", flush=True)
    return wrong


def confirm(names: list[str], num: int, seed: int) -> None:
    """Models made by another dry run in the same way: those of which this one says the same are marked as its own."""
    draw = random.Random(seed)
    for name in names:
        model = catalogue.load(name)
        if model is None or current(model) or not profiled(name):
            continue
        path = SHIPPED / f"{config_digest(model.config)}.json.gz"
        raw = read_packed(path, SCHEMA, shipped=True)
        if raw["versions"]["step profile"] != versions()["step profile"]:
            continue
        asked = draw.sample(sorted(asked_structures(model).items(), key=lambda one: one[0]), num)
        errors = [abs(error) for _, (setup, gpu) in asked for _, error in deviations(model, gpu, setup)]
        same = bool(errors) and max(errors) < SAME
        if same:
            write_packed(path, {**raw, "versions": versions()})
        print(f"{name}: {'the same' if same else 'not the same'}, worst of {len(errors)} {max(errors):.4%}", flush=True)


def main() -> int:
    """Builds or checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop beginning new models after so long")
    parser.add_argument("--programs", action="store_true", help="programs (speed) instead of profiles (memory)")
    parser.add_argument("--structures", action="store_true", help="programs of their structures, for any size")
    parser.add_argument("--check", type=int, default=0, metavar="N", help="compare N kept structures with fresh runs")
    parser.add_argument("--confirm", type=int, default=0, metavar="N", help="compare N structures of each model")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.check:
        return int(check(args.check, args.seed) > 0)
    names = args.names or list(catalogue.names())
    if args.confirm:
        confirm(names, args.confirm, args.seed)
    elif args.structures:
        build_structures(names, args.minutes)
    elif args.programs:
        build_programs([one for one in names if args.names or profiled(one)], args.minutes)
    else:
        build(names, args.minutes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
