"""Why did that one fail, or crawl? Shared blame over values and pairs of values, cleared by runs that went well.

A probe that crashes, or is far slower or larger than any error of the formula explains (a fallback kernel, a missing
library), has one cause: a value of some field, or two values together. Every suspect that a good run shares is cleared.
The rest share the blame in proportion to how often such a cause is seen, and a candidate loses as much of its chance as
the suspects it shares hold of the blame.
"""

import numpy as np

from planner.core.records import dataclass
from search.residual import Encoding, Floats

UNSUSPECTED = 0.01  # chance left to a candidate that shares every suspect with a failure
CLEARED = 0.05  # chance that a failure whose every suspect has run elsewhere repeats on a setup that shares all of them
NAMED = 100.0  # how much more a value is suspected that the failure's message names
PAIR_BLAME = 0.02  # of any two values, relative to the product of their fields' blame
KNOWN_PAIRS = {
    frozenset(("attention", "precision")),  # SDPA's math kernel for fp32 hidden states (FINDINGS, torch 2.13)
    frozenset(("attention", "kbit_fp32_cast")),
    frozenset(("attention", "packing")),
    frozenset(("compile", "quantization")),
    frozenset(("compile", "checkpointing")),
    frozenset(("precision", "optimizer")),
}
KNOWN_PAIR_BLAME = 0.5
WORDS = {"compile": ("compil", "dynamo", "inductor"), "quantization": ("quantiz", "4bit", "8bit", "bitsandbytes")}
"""Words by which messages name a field, whatever its value; a field that is off is not named."""
OFF = ("none", "False", "0")


@dataclass(frozen=True, kw_only=True)
class FailedTrial:
    """A candidate that failed (or crawled), with the message it left, in lower case.

    Attributes:
        pairs_only: it did run, so single values are little to blame: most of them have an own error in the formula's
            error model already.
    """

    row: int
    message: str = ""
    pairs_only: bool = False


class FailureAttribution:
    """All incidents and all good runs so far."""

    def __init__(self, encoding: Encoding, num: int) -> None:
        self._encoding = encoding
        self._levels = encoding.levels[:num]
        self._failed_trials: list[FailedTrial] = []
        self._good: list[int] = []
        self._chance: Floats | None = None
        names = [dimension.name for dimension in encoding.dimensions]
        single = np.array([dimension.attribution for dimension in encoding.dimensions])
        pair = PAIR_BLAME * np.sqrt(np.outer(single, single))
        for i, first in enumerate(names):
            for j, second in enumerate(names):
                if frozenset((first, second)) in KNOWN_PAIRS:
                    pair[i, j] = KNOWN_PAIR_BLAME * np.sqrt(single[i] * single[j])
        self._single, self._pair = single, np.triu(pair, k=1)

    def went_well(self, row: int) -> None:
        """A run without surprise clears its values and pairs."""
        self._good.append(row)
        self._chance = None

    def failed_trial(self, failed_trial: FailedTrial) -> None:
        """One more surprise."""
        self._failed_trials.append(failed_trial)
        self._chance = None

    def chance(self) -> Floats:
        """Per candidate, the probability that no known cause of trouble strikes it. Not to be changed in place."""
        if self._chance is None:
            self._chance = self._computed()
        return self._chance

    def _computed(self) -> Floats:
        chance = np.ones(len(self._levels))
        for failed_trial in self._failed_trials:
            single, pair = self._weights(failed_trial)
            total = single.sum() + pair.sum()
            shared = (self._levels == self._encoding.levels[failed_trial.row]).astype(np.float64)
            if total > 0:
                share = (shared @ single + ((shared @ pair) * shared).sum(axis=1)) / total
                chance *= np.maximum(1.0 - share, UNSUSPECTED)
            else:
                chance *= 1.0 - CLEARED * shared.mean(axis=1)
        return chance

    def _weights(self, failed_trial: FailedTrial) -> tuple[Floats, Floats]:
        """Blame of the incident's values and pairs of values, after what good runs cleared."""
        levels = self._encoding.levels
        cleared = np.zeros(len(self._single), dtype=bool)
        cleared_pair = np.zeros_like(self._pair, dtype=bool)
        for row in self._good:
            same = levels[row] == levels[failed_trial.row]
            cleared |= same
            cleared_pair |= np.outer(same, same)
        named = self._named(failed_trial)
        single = np.where(cleared, 0.0, self._single * named)
        if failed_trial.pairs_only:
            single = single * 0.3
        # A message that names both accuses the two together: torch.compile may fail on quantized weights only.
        both = np.where(np.outer(named > 1, named > 1), NAMED**2, 1.0)
        return single, np.where(cleared_pair, 0.0, self._pair * both)

    def _named(self, failed_trial: FailedTrial) -> Floats:
        """How much more each value is suspected because the message names it."""
        text = _letters(failed_trial.message)
        factors = np.ones(len(self._single))
        for position, dimension in enumerate(self._encoding.dimensions):
            value = str(self._encoding.values[position][self._encoding.levels[failed_trial.row, position]])
            if value in OFF:
                continue
            words = (dimension.name if value in ("True", "1") else value, *WORDS.get(dimension.name, ()))
            if any(len(word) > 2 and _letters(word) in text for word in words):
                factors[position] = NAMED
        return factors


def _letters(text: str) -> str:
    """Without what one spells with a hyphen and another with an underscore or nothing."""
    return text.lower().replace("-", "").replace("_", "")
