"""Makes the step profiles and programs of a model for this user, with the libraries that are installed: 1 to 5 CPU
minutes.

    python -m probes.tracing MODEL      # a hub id, an alias, or a directory with a config.json
    python -m probes.tracing MODEL --objective dpo --adapter dora   # also those; what is there is kept
    python -m probes.tracing MODEL --ranks   # only those of ranks of FSDP2 and ZeRO

Plans of it then stand on them instead of the formula (docs/step-profiles.md).
"""

import argparse
import sys
import time

from planner.core.errors import PlannerError, UsageError
from planner.memory.profiles import load_profiles, save_profiles, user_path, user_ranks
from planner.models.resolve import resolve_model
from planner.planning.plan_request import PlanRequest
from planner.speed.step_program import save_programs, user_programs
from probes.tracing.profile_builder import CARDS, ProfileBuilder, of_ranks, planned_structures, versions
from probes.tracing.programs import ProgramBuilder, program_structures


def main(arguments: list[str]) -> int:
    """The exit code: 0 where profiles were made, 2 where the model is none, 3 where no structure of it can be run."""
    parser = argparse.ArgumentParser(prog="python -m probes.tracing")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--objective", choices=("sft", "dpo", "orpo", "reward", "classification"), default="sft")
    parser.add_argument("--adapter", choices=("lora", "dora", "vera"), default="lora")
    parser.add_argument("--ranks", action="store_true")
    given = parser.parse_args(arguments)
    try:
        if given.model is None:
            raise UsageError("one model is asked for", hint="python -m probes.tracing MODEL")
        model = resolve_model(given.model)
        rarer = {"objective": (given.objective,)} if given.objective != "sft" else {}
        rarer |= {"adapter": (given.adapter,)} if given.adapter != "lora" else {}
        structures = planned_structures(model)
        if rarer:
            structures = planned_structures(model, CARDS, PlanRequest(fixed=rarer)) | structures
    except PlannerError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return 2
    if given.ranks:
        structures = of_ranks(model, structures.values())
    started, path = time.monotonic(), (user_ranks if given.ranks else user_path)(model)
    saved = load_profiles(path)
    existing = {} if saved is None or saved.versions != versions() else {key: saved.get(key) for key in saved.keys}
    print(f"running the structures that plans of {model.model_id} ask for ...", file=sys.stderr)
    builder = ProfileBuilder(model, of_rank=given.ranks)
    made = builder.all({key: structure for key, structure in structures.items() if key not in existing})
    profiles = {key: profile for key, profile in (existing | made).items() if profile is not None}
    failures = list(builder.failures.values())
    for why in sorted(set(failures)):
        print(f"no profile of {failures.count(why)} structures: {why[:200]}", file=sys.stderr)
    if not profiles:
        return 3
    save_profiles(path, profiles, versions())
    programs = {}
    if not given.ranks:
        issued = ProgramBuilder(model)
        if programs := issued.all(program_structures(model)):
            save_programs(user_programs(model), issued.tables, programs, versions())
    spent = time.monotonic() - started
    print(f"{len(profiles)} structures, {len(programs)} programs in {spent:.0f} s: {path.parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
