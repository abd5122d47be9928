"""`finetune-planner` from Python: what the command `plan` does, without a shell.

    from finetune_planner import plan

    answer = plan("meta-llama/Llama-3.1-8B", "rtx-4090", seq_len=2048)
    answer                       # in a notebook: the same short answer as on the terminal
    answer.chosen.setup          # a frozen TrainSetup
    answer.to_dataframe()        # the chosen setup and what stands beside it, one row each
    answer.write("my-plan")      # plan.json, reports and launch files

Errors are `PlannerError`s with a `hint`; that nothing fits is an answer (`answer.fits`), not an error.
"""

import gc
from importlib import import_module
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
    from finetune_planner.cli import main
    from planner import __version__
    from planner.core.errors import PlannerError

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

_HOMES = {"main": "finetune_planner.cli", "__version__": "planner.core.version", "PlannerError": "planner.core.errors"}
_HOMES |= dict.fromkeys((name for name in __all__ if name[0].isupper() and name not in _HOMES), f"{__name__}.answers")


def __getattr__(name: str) -> Any:
    """What is asked for, imported then: in a wheel every part of the program lies below this package, and the command,
    a child process or a traced program needs little of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "main":
        # Its imports and a plan make tens of thousands of small objects that live until it ends: collecting them time
        # and again costs the command more than they hold.
        gc.set_threshold(200_000)
    attribute = globals()[name] = getattr(import_module(_HOMES.get(name, f"{__name__}.api")), name)
    return attribute


def __dir__() -> list[str]:
    return __all__
