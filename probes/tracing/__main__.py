"""Makes the step profiles of a model for this user, with the libraries that are installed: 20 to 200 CPU seconds.

    python -m probes.tracing MODEL      # a hub id, an alias, or a directory with a config.json

Plans of it then stand on them instead of the formula (docs/step-profiles.md).
"""

import sys
import time

from planner.errors import PlannerError, UsageError
from planner.memory.profile_store import save_profiles, user_path
from planner.models.resolve import resolve_model
from probes.tracing.profile_builder import build_profiles, versions


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
    print(f"{len(found)} structures in {time.monotonic() - started:.0f} s: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
