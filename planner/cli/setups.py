"""The options that name one setup, declared once: `plan estimate` and `plan probe`."""

from typing import Any, ClassVar

from planner.cli import cluster_options, options, setup_flags
from planner.cli.setup_flags import Flag, given, takes_flags
from planner.option_values import positive

_ONE = (*setup_flags.SPACE, *setup_flags.RUN)
_ANY = (*setup_flags.SPLIT, setup_flags.ADAPTER, *setup_flags.AIM, *setup_flags.FORMULA_ALONE)


@takes_flags(*_ONE, *setup_flags.SHARED, wished=False)
class SetupOptions:
    """One setup as flags; None: the setup's own default."""

    attention: str | None = None
    seq_len: int | None = None
    gpus: cluster_options.Gpus = None
    rows: ClassVar[tuple[Flag, ...]] = (*_ONE, *setup_flags.SHARED)

    def num_gpus(self) -> int:
        """GPUs of the whole job.

        Raises:
            UsageError: a count that cannot be meant.
        """
        return positive("gpus", self.gpus, maximum=setup_flags.MAX_GPUS) or 1

    def values(self) -> dict[str, Any]:
        """What was given, as fields of the interchange form; a quantized base is QLoRA's.

        Raises:
            UsageError: values out of range, or flags that contradict each other.
        """
        said = given(self, self.rows)
        found = {row.of: row.read(row.word, value) for row, value in said.items() if row not in setup_flags.SPREAD}
        found |= self._more()
        if "method" not in found and found.get("quantization", "none") != "none":
            found["method"] = "qlora"
        num_gpus = self.num_gpus()
        shared = {row.key: [value] if row.many else value for row, value in said.items() if row in setup_flags.SPREAD}
        return found | cluster_options.one_setup(num_gpus, cluster_options.spread_fields(num_gpus, **shared))

    def _more(self) -> dict[str, Any]:
        """Fields that have no row of their own."""
        return {}


@takes_flags(*_ANY, wished=False)
class AnySetupOptions(SetupOptions, options.RolloutOptions, options.ImageOptions):
    """With what a formula can say and no probe here runs: split matrices and layers, other stacks."""

    objective: options.Objective = None
    rows: ClassVar[tuple[Flag, ...]] = (*SetupOptions.rows, *_ANY)

    def _more(self) -> dict[str, Any]:
        rollout = self.rollout(self.objective, self.seq_len)
        found = {"objective": self.objective, "rollout": rollout, "images": self.images()}
        return {name: value for name, value in found.items() if value is not None}
