"""Conditions that nothing in a program decides: what the training is where each holds and where it does not.

A program is read once with both ways of such a condition taken together, then each way by itself. What the ways make
different is asked for, never taken from one of them; of the evaluations that may run the largest counts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from operator import attrgetter

from planner.core.errors import ConfigError, NotPlanned, OwnLoop
from planner.core.records import dataclass
from planner.frameworks.readers.types import Missing, ReadConfig
from planner.frameworks.tools import changed_fields

MAX_CONDITIONS = 48
"""Conditions of one program that are tried both ways, in the order in which it meets them, the main file's first."""
MAX_ALONE = 2
"""So many are tried one by one; more at first together: most decide nothing that is asked."""
OF_METHOD = ("lora_rank", "lora_targets", "lora_dropout", "modules_to_save", "adapter", "adapter_dtype", "quantization")
"""Fields that go with the method: who says that says them, or is asked for them beside it."""
NOT_ASKED = (
    "stack", "reentrant_checkpointing", "kbit_fp32_cast", "transformers_version", "trl_version", "bitsandbytes_version",
)  # fmt: skip
"""Fields that another one decides; a version is --assume's."""
DECIDED = attrgetter("setup", "model_id", "missing", "eval_seqs", "eval_logits")
"""What is asked, planned or said of a reading."""

Read = Callable[[Mapping[str, bool]], ReadConfig]
"""The program's reading with some of its conditions decided."""


@dataclass(slots=True)
class _ConditionSearch:
    """`reading`: with the conditions decided that `decided` says; `open_fields`: what they leave open."""

    reading: ReadConfig
    read: Read
    places: Mapping[str, str]
    decided: dict[str, bool] = field(default_factory=dict)
    open_fields: dict[str, Missing] = field(default_factory=dict)
    evaluated: tuple[int, bool] = (0, False)
    note: str = ""

    def ways(self, tests: Sequence[str], reason: str = "") -> dict[bool, ReadConfig]:
        """The readings where all of these hold and where none does, as far as something trains there."""
        readings: dict[bool, ReadConfig] = {}
        for truth in (True, False):
            try:
                readings[truth] = self.read({**self.decided, **dict.fromkeys(tests, truth)})
            except NotPlanned as error:
                if reason and (
                    self.reading.call_line or not isinstance(error, OwnLoop)
                ):  # else: it takes no step there
                    self.open_fields.setdefault(
                        "objective", Missing(field="objective", reason=f"{reason}: {error.message}")
                    )
            except ConfigError:
                pass
        return readings

    def settle(self, tests: Sequence[str]) -> None:
        """Tries conditions: of one that matters the way is kept that leaves least open, with adapters where one has
        them, and the other is held against it."""
        if len(tests) > MAX_ALONE:
            together = self.ways(tests)
            if len(together) == 2 and all(DECIDED(reading) == DECIDED(self.reading) for reading in together.values()):
                return
            self.settle(tests[: len(tests) // 2])
            self.settle(tests[len(tests) // 2 :])
            return
        for test in tests:
            reason = f"{self.places[test]}: depends on a condition ({test:.60})"
            ways = self.ways([test], reason)
            if ways:
                best = min(ways, key=lambda truth: (ways[truth].setup.method == "full", len(ways[truth].missing)))
                self.decided[test], self.reading = best, ways[best]
            self.hold_against(ways, reason)

    def hold_against(self, ways: Mapping[bool, ReadConfig], reason: str) -> None:
        """Asks for what other readings make different."""
        for other in ways.values():
            open_fields = {*self.open_fields, *(entry.field for entry in self.reading.missing)}
            self.open_fields |= {entry.field: entry for entry in other.missing if entry.field not in open_fields}
            for name in differing(self.reading, other):
                self.open_fields.setdefault(name, Missing(field=name, reason=reason))
            if (other.eval_seqs, other.eval_logits) > self.evaluated:
                self.evaluated = other.eval_seqs, other.eval_logits
                self.note = f"it evaluates where a condition holds that is not known: counted ({reason})"


def settle(reading: ReadConfig, conditions: Mapping[str, str], read: Read) -> ReadConfig:
    """The reading with what open conditions decide among what is missing."""
    tests = sorted(conditions, key=lambda test: not conditions[test].startswith(reading.path))[:MAX_CONDITIONS]
    if not tests:
        return reading
    # a length that one way leaves to the data would be taken from a name there
    questions = {entry.field: entry for entry in reading.missing if entry.field == "seq_len_tokens"}
    settling = _ConditionSearch(
        reading, read, conditions, open_fields=questions, evaluated=(reading.eval_seqs, reading.eval_logits)
    )
    settling.settle(tests)
    if len(settling.decided) > 1:  # what holds where none of several does
        settling.hold_against(settling.ways([*settling.decided]), f"depends on {len(settling.decided)} conditions")
    missing = {entry.field: entry for entry in settling.reading.missing} | settling.open_fields
    eval_seqs, eval_logits = settling.evaluated
    return replace(
        settling.reading,
        missing=tuple(missing.values()),
        eval_seqs=eval_seqs,
        eval_logits=eval_logits,
        assumptions=(*settling.reading.assumptions, *filter(None, [settling.note])),
    )


def differing(reading: ReadConfig, other: ReadConfig) -> Iterator[str]:
    """Fields in which two readings of one program differ, as a person would be asked for them."""
    if reading.model_id != other.model_id:
        yield "model"
    fields = changed_fields(reading.setup, other.setup)
    by_method = "method" in fields
    for name in fields:
        if name not in NOT_ASKED and not (by_method and name in OF_METHOD):
            yield name
