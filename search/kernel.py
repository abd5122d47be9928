"""How alike two setups are: the covariance of the formula's errors over mixed dimensions, with numpy only.

The error of a formula on a setup (log measured / predicted) is modelled as a sum:

    error(x) = bias                      the whole GPU is slower or faster than the table says
             + sum_p share_p(x) error_p  one part of the formula is misjudged (`search.parts`)
             + sum_d effect_d(x_d)       one dimension's value is misjudged beyond that, partly the same everywhere,
                                         partly its own for each recipe
             + interaction(x)            what no sum of single effects explains

Each part is Gaussian, so the whole is a Gaussian process whose covariance is the same sum. Because every dimension has
few distinct values, each part is a small table over levels: a column for 20,000 setups costs a dozen look-ups.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.records import dataclass
from planner.setup import TrainSetup
from search.arrays import Floats, Rows, Target
from search.dimensions import DIMENSIONS, PAIR, PAIR_MEMORY_SD, PAIR_SPEED_SD, RECIPE, Dimension, value_of

Levels = NDArray[np.int16]

BIAS_SD = {"speed": 0.15, "memory": 0.03}
INTERACTION_SD = {"speed": 0.010, "memory": 0.002}
SHARED = 0.65  # share of an effect's variance that is the same in every recipe
SHARED_MODELS = 0.6  # share of the covariance that carries over from another model on the same GPU


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """Setups as small integers: one column per dimension that varies.

    Attributes:
        dimensions: those with more than one value among the setups.
        values: their distinct values, in order of first sight (numbers ascending).
        levels: [setups, dimensions] index into `values`.
        recipes: [setups] number of the combination of the `RECIPE` fields.
        pairs: [setups] number of the combination of the `PAIR` fields.
        groups: [setups] 0 for this task, another number for setups measured on other models.
    """

    dimensions: tuple[Dimension, ...]
    values: tuple[tuple[object, ...], ...]
    levels: Levels
    recipes: NDArray[np.int32]
    pairs: NDArray[np.int32]
    groups: NDArray[np.int32]


def encode(setups: Sequence[TrainSetup], groups: Sequence[int] | None = None) -> Encoding:
    """All setups that will ever be compared (candidates first, then what was measured elsewhere), encoded together."""
    columns, used, values = [], [], []
    for dimension in DIMENSIONS:
        raw = [value_of(setup, dimension.name) for setup in setups]
        distinct = list(dict.fromkeys(raw))
        if len(distinct) < 2:
            continue
        if dimension.kind == "log2":
            distinct.sort()
        index = {value: position for position, value in enumerate(distinct)}
        columns.append(np.fromiter((index[value] for value in raw), dtype=np.int16, count=len(raw)))
        used.append(dimension)
        values.append(tuple(distinct))
    recipes, pairs = _combinations(setups, RECIPE), _combinations(setups, PAIR)
    levels = np.stack(columns, axis=1) if columns else np.zeros((len(setups), 0), dtype=np.int16)
    numbers = np.zeros(len(setups), dtype=np.int32) if groups is None else np.asarray(groups, dtype=np.int32)
    return Encoding(
        dimensions=tuple(used), values=tuple(values), levels=levels, recipes=recipes, pairs=pairs, groups=numbers
    )


def _combinations(setups: Sequence[TrainSetup], names: Sequence[str]) -> NDArray[np.int32]:
    """[setups] number of each setup's combination of some fields."""
    index: dict[tuple[object, ...], int] = {}
    numbers = (index.setdefault(tuple(value_of(setup, name) for name in names), len(index)) for setup in setups)
    return np.fromiter(numbers, dtype=np.int32, count=len(setups))


class ErrorKernel:
    """Covariance of the formula's error between encoded setups, for speed or for memory.

    Args:
        shares: [setups, parts] from `parts.share_matrix`.
        scale: multiplies every standard deviation; 1 for a formula with the nominal error band.
    """

    def __init__(self, encoding: Encoding, target: Target, shares: Floats, *, scale: float = 1.0) -> None:
        self._encoding = encoding
        self._shares = scale * shares
        self._bias = (scale * BIAS_SD[target]) ** 2
        self._interaction = (scale * INTERACTION_SD[target]) ** 2
        self._pair = (scale * (PAIR_SPEED_SD if target == "speed" else PAIR_MEMORY_SD)) ** 2
        self._effects: list[Floats] = []
        self._likeness: list[Floats] = []
        for dimension, values in zip(encoding.dimensions, encoding.values, strict=True):
            sd = scale * (dimension.speed_sd if target == "speed" else dimension.memory_sd)
            correlation = _correlation(dimension, values)
            self._effects.append(sd**2 * correlation)
            if dimension.kind == "category":
                self._likeness.append(np.where(np.eye(len(values)) > 0, 1.0, dimension.alike))
            else:
                self._likeness.append(correlation)
        constant = self._bias + self._interaction + self._pair + sum(float(table[0, 0]) for table in self._effects)
        self.variance: Floats = constant + np.square(self._shares).sum(axis=1)
        """Prior variance of the error of every setup."""

    def column(self, row: int) -> Floats:
        """Covariance of setup `row` with all setups."""
        return self._between(row, slice(None))

    def block(self, rows: Rows) -> Floats:
        """Covariance matrix of the setups `rows`."""
        return self._between(rows[:, None], rows)

    def _between(self, first: Any, second: Any) -> Floats:
        """Covariance of setups with setups, by their numbers, which broadcast."""
        code = self._encoding
        shared = self._bias + np.einsum("...k,...k->...", self._shares[first], self._shares[second])
        effects: Any = 0.0
        product: Any = self._interaction
        for position, (table, likeness) in enumerate(zip(self._effects, self._likeness, strict=True)):
            pairs = code.levels[first, position], code.levels[second, position]
            effects = effects + table[pairs]
            product = product * likeness[pairs]
        same_recipe = code.recipes[first] == code.recipes[second]
        covariance = shared + effects * np.where(same_recipe, 1.0, SHARED) + product
        covariance = covariance + np.where(code.pairs[first] == code.pairs[second], self._pair, 0.0)
        same_group = code.groups[first] == code.groups[second]
        result: Floats = covariance * np.where(same_group, 1.0, SHARED_MODELS)
        return result


def _correlation(dimension: Dimension, values: Sequence[object]) -> Floats:
    """[values, values] correlation of a dimension's effect: 1 on the diagonal.

    Numbers use a Matern 3/2 in the number of doublings between them; a zero (rank 0 of full fine-tuning) is unlike any
    other value.
    """
    if dimension.kind == "category":
        return np.eye(len(values))
    numbers = np.array([float(str(value)) for value in values])
    positive = numbers > 0
    logs = np.log2(np.where(positive, numbers, 1.0))
    distance = np.sqrt(3.0) * np.abs(logs[:, None] - logs[None, :]) / dimension.length
    correlation: Floats = (1.0 + distance) * np.exp(-distance)
    correlation[positive[:, None] != positive[None, :]] = 0.0
    return correlation
