"""The size of every allocation as a polynomial in micro-batch, length, rank and the loss's tile, from a few runs.

A storage holds a tensor whose shape is a product of such numbers and constants of the model, so its bytes are one
monomial, seldom the sum of two. Runs at sizes that share no factor tell monomials apart; what one structure's runs have
shown need not be run again for the next (`Sizes`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from planner.memory.profiles import MONOMIALS, Form, Term


class Point(NamedTuple):
    """Where a structure is run: micro-batch, tokens of a sequence, rank (0: none), tokens of one tile of the loss."""

    micro_batch_seqs: int
    seq_len_tokens: int
    rank: int
    tile_tokens: int


class NoPolynomial(ValueError):
    """The runs of a structure are no polynomial in its sizes."""


POWERS = np.array(MONOMIALS, dtype=np.float64)


def values_at(points: Sequence[Point]) -> Any:
    """The value of each of MONOMIALS at each point, [points, monomials]; rank 0 counts as 1 (nothing has a rank)."""
    base = np.maximum(1.0, np.array(points, dtype=np.float64))
    return np.prod(base[:, None, :] ** POWERS[None, :, :], axis=2)


def value_of(form: Form, values: Any) -> float:
    """Bytes of a form where the monomials have these values."""
    return float(sum(factor * values[index] for index, factor in form))


Terms = dict[Term, int]
"""A sum of terms: how often each comes."""


def add(terms: Terms, others: Mapping[Term, int], sign: int = 1) -> None:
    """Adds others to terms."""
    for term, times in others.items():
        many = terms.get(term, 0) + sign * times
        if many:
            terms[term] = many
        else:
            terms.pop(term, None)


class Model(NamedTuple):
    """A model whose step is looked at: what a number of the model that was run is there, how often what depends on the
    depth comes, and where, [points, monomials]."""

    size: Callable[[int, float], float]
    repeats: int
    values: Any


class Scale:
    """Models and sizes at which terms are compared."""

    def __init__(self, models: Sequence[Model]) -> None:
        self._models = models
        self._bytes_of: dict[Term, Any] = {}

    def of(self, term: Term) -> Any:
        """Bytes of a term, [points of all models]."""
        size_bytes = self._bytes_of.get(term)
        if size_bytes is None:
            index, factor, by_depth = term
            each = [
                model.size(index, factor) * (model.repeats if by_depth else 1) * model.values[:, index]
                for model in self._models
            ]
            size_bytes = self._bytes_of[term] = np.concatenate(each)
        return size_bytes

    def total(self, terms: Terms) -> Any:
        """Of all together."""
        points = sum(len(model.values) for model in self._models)
        return sum((times * self.of(term) for term, times in terms.items()), np.zeros(points))


def fit(points: Sequence[Point], sizes: Sequence[int], *, tiled: bool) -> Form:
    """The simplest form that gives these sizes (bytes) at these points.

    Args:
        tiled: the loss cuts its tokens into tiles; else `tile_tokens` is no variable.

    Raises:
        NoPolynomial: none does.
    """
    wanted = np.array(sizes, dtype=np.float64)
    if not wanted.any():
        return ()
    if np.ptp(wanted) == 0:
        return ((0, float(wanted[0])),)
    values = values_at(points)
    usable = [index for index, powers in enumerate(MONOMIALS) if _varies(points, powers, tiled=tiled)]
    for index in usable:
        factor = wanted[0] / values[0, index]
        if np.abs(factor * values[:, index] - wanted).max() < 1.0:
            return ((index, _whole(factor)),)
    for pair in combinations([0, *usable], 2) if len(points) > 2 else ():
        part = values[:, list(pair)]
        scale = part.max(axis=0)
        solved = np.linalg.lstsq(part / scale, wanted, rcond=None)[0]
        if solved[1] > 0 and np.abs(part / scale @ solved - wanted).max() < 1.0:
            return tuple(
                (index, _whole(coefficient)) for index, coefficient in zip(pair, (solved / scale).tolist(), strict=True)
            )
    raise NoPolynomial(f"{list(sizes)} bytes at {[tuple(point) for point in points]}")


def _whole(value: float) -> float:
    """Without the noise of a division."""
    near = round(value * 64) / 64
    return near if math.isclose(value, near, rel_tol=1e-9) else float(value)


def _varies(points: Sequence[Point], powers: Sequence[int], *, tiled: bool) -> bool:
    """Whether a monomial tells the points apart by all that it has."""
    if powers[3] and not tiled:
        return False
    return any(powers) and all(len({point[axis] for point in points}) > 1 for axis in range(4) if powers[axis])


SMALL_BYTES = 1 << 20
"""Of what is smaller at the usual point the first form stands for every other that meets it."""


Source = tuple[bool, str]
"""Whether the loss makes an allocation, and its category where it has a name, else its operator."""


class Sizes:
    """The forms that runs of one model have shown, by their bytes at the points that structures are run at and by what
    makes them: a tile of the loss may have as many tokens as a layer has features, a 4-bit matrix's scales the bytes of
    an adapter."""

    def __init__(self) -> None:
        self._forms: dict[tuple[Point, Source, int], Form | None] = {}

    def form(self, point: Point, source: Source, size_bytes: int) -> Form | None:
        """The form that gives this size there; None where none is known, or two meet."""
        return self._forms.get((point, source, size_bytes))

    def learn(self, point: Point, source: Source, size_bytes: int, form: Form) -> None:
        """A form that was found, as it is at this point: with one sequence a micro-batch is no variable."""
        if point.micro_batch_seqs == 1:
            factors: dict[int, float] = {}
            for index, factor in form:
                alone = _ALONE.get(index, MONOMIALS.index((0, 2, 0, 0)))
                factors[alone] = factors.get(alone, 0.0) + factor
            form = tuple(sorted(factors.items()))
        key = point, source, size_bytes
        met = self._forms.setdefault(key, form) != form
        if met and size_bytes >= SMALL_BYTES:
            self._forms[key] = None


_ALONE = {index: MONOMIALS.index((0, *powers[1:])) for index, powers in enumerate(MONOMIALS) if powers[:2] != (2, 2)}
