"""Makes the step profiles and programs of a model for this user, with the libraries that are installed: 1 to 5 CPU
minutes.

    python -m probes.tracing MODEL      # a hub id, an alias, or a directory with a config.json

Plans of it then stand on them instead of the formula (docs/step-profiles.md, docs/step-programs.md).
"""

import sys
import time

from planner.errors import PlannerError, UsageError
from planner.memory.profile_store import save_profiles, user_path
from planner.models.resolve import resolve_model
from planner.speed.step_program import save_programs, user_programs
from probes.tracing.profile_builder import build_profiles, versions
from probes.tracing.programs import ProgramBuilder, asked_programs


def main(arguments: list[str]) -> int:
    """The exit code: 0 where profiles were made, 2 where the model is none, 3 where no structure of it can be run."""
    try:
        if len(arguments) != 1:
            raise UsageError("one model is asked for", hint="python -m probes.tracing MODEL")
        model = resolve_model(arguments[0])
    except PlannerError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return 2
    started, path = time.monotonic(), user_path(model)
    print(f"running the structures that plans of {model.model_id} ask for ...", file=sys.stderr)
    found, failures = build_profiles(model)
    for why in sorted(set(failures.values())):
        print(f"no profile of {sum(one == why for one in failures.values())} structures: {why[:200]}", file=sys.stderr)
    if not found:
        return 3
    save_profiles(path, found, versions())
    builder = ProgramBuilder(model)
    programs = builder.all(asked_programs(model))
    if programs:
        save_programs(user_programs(model), builder.tables, programs, versions())
    spent = time.monotonic() - started
    print(f"{len(found)} structures, {len(programs)} programs in {spent:.0f} s: {path.parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
