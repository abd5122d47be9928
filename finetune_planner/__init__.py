"""`finetune-planner` from Python: what the command `plan` does, without a shell.

    from finetune_planner import plan

    answer = plan("meta-llama/Llama-3.1-8B", "rtx-4090", seq_len=2048)
    answer                       # in a notebook: the same short answer as on the terminal
    answer.chosen.setup          # a frozen TrainSetup
    answer.to_dataframe()        # the chosen setup and what stands beside it, one row each
    answer.write("my-plan")      # plan.json, reports and launch files

Errors are `PlannerError`s with a `hint`; that nothing fits is an answer (`answer.fits`), not an error.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune_planner.answers import Checked, Comparison, Estimate, Planned, Table, Traced
    from finetune_planner.api import (
        check,
        compare,
        compare_targets,
        estimate,
        plan,
        trace,
        which_cluster,
        which_gpu,
        which_model,
    )
    from planner import __version__
    from planner.cli import main
    from planner.errors import PlannerError

__all__ = [
    "Checked",
    "Comparison",
    "Estimate",
    "Planned",
    "PlannerError",
    "Table",
    "Traced",
    "__version__",
    "check",
    "compare",
    "compare_targets",
    "estimate",
    "main",
    "plan",
    "trace",
    "which_cluster",
    "which_gpu",
    "which_model",
]


def __getattr__(name: str) -> Any:
    """What is asked for, imported then: in a wheel every part of the program lies below this package, and a child
    process or a traced program needs little of it."""
    if name not in __all__:
        raise AttributeError(name)
    from finetune_planner import answers, api
    from planner import __version__, cli, errors

    found = {"__version__": __version__, "main": cli.main, "PlannerError": errors.PlannerError}
    for one in (answers, api):
        found |= {public: getattr(one, public) for public in __all__ if hasattr(one, public)}
    globals().update(found)
    return found[name]
