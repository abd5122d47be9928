"""`plan check --fix`: what a few changes make of a config that does not fit, the least harmful first; of one that fits,
the fastest that trains the same.

Pure, as `planner.planning.check`: the prediction is a function handed in.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from planner.core.errors import SetupError
from planner.core.records import dataclass
from planner.frameworks.tools import changed_fields
from planner.models.spec import ModelSpec
from planner.planning.check import (
    MIN_SPEEDUP,
    CheckResult,
    Verdict,
    band_of,
    evaluation_label,
    judge_change,
    with_extras,
)
from planner.planning.single_changes import Predict, single_changes, speedup
from planner.setup import TrainSetup
from planner.setup.outcome import Prediction

HARM: Mapping[str, int] = {
    **dict.fromkeys(("kernels", "compile", "linear_attention"), 0),
    **dict.fromkeys(("checkpointing", "selective_checkpointing", "activation_offload", "reentrant_checkpointing"), 1),
    **dict.fromkeys(("loss", "attention"), 2),
    **dict.fromkeys(("micro_batch_seqs", "accumulation_steps", "cached_seqs"), 3),
    "optimizer": 4,
    **dict.fromkeys(("method", "quantization", "adapter_dtype", "precision"), 5),
    "lora_rank": 6,
    "seq_len_tokens": 7,
}
"""Field -> how much a change of it takes from a training, least first: what computes the same, what costs time alone,
what rounds otherwise or asks for a package that is built for one PyTorch and one card (flash attention), what learns
less, what reads less. Fields that are not here spread a job over GPUs: 3."""
OTHER_HARM, LENGTH_HARM = 3, 7
CUTS = (2, 4)
"""A sequence is cut to a half before it is cut to a fourth, and never to less."""
BEAM, DEPTH = 6, 4
_ADAPTERS = {"lora_rank": 16, "lora_targets": "all-linear", "precision": "bf16-autocast"}
WITH_ADAPTERS: Mapping[str, Mapping[str, Any]] = {
    "LoRA instead of full fine-tuning": {"method": "lora", **_ADAPTERS},
    "QLoRA instead of full fine-tuning": {"method": "qlora", "quantization": "nf4-double", **_ADAPTERS},
}
"""Other methods, for people to take: no file is changed to them."""


@dataclass(frozen=True, kw_only=True)
class Improved:
    """What a few changes that one setting each can say make of a config.

    Attributes:
        labels: the changes in order, () where nothing helps.
        eval_seqs: how many sequences the evaluation takes at once after them; 0: as many as before.
        needs_new_file: whether the file's form cannot say them: less harm than whatever it can.
    """

    setup: TrainSetup
    labels: tuple[str, ...]
    after: Prediction
    verdict: Verdict
    eval_seqs: int = 0
    needs_new_file: bool = False


Verify = Callable[[TrainSetup], Prediction | None]
MAX_VERIFIED = 6


def harm(before: TrainSetup, after: TrainSetup) -> int:
    return max(_harms(before, after), default=0)


def _harms(before: TrainSetup, after: TrainSetup) -> list[int]:
    """That of each change; SDPA comes with PyTorch."""
    changed = (name for name in changed_fields(before, after) if (name, after.attention) != ("attention", "sdpa"))
    return [HARM.get(name, OTHER_HARM) for name in changed]


def lasting(labels: Iterable[str]) -> tuple[str, ...]:
    """Changes of which none is undone by a later one of its kind: "rank 8", then "rank 4" is the second alone."""
    return tuple({re.sub(r"\d+", "", label): label for label in labels}.values())


def improve(result: CheckResult, model: ModelSpec, predict: Predict, verify: Verify | None = None) -> Improved:
    """The least harmful setup that fits, of a config that does not: with changes that its file's form can hold, where
    those do not cut sequences while others fit whole. Of a config that fits the fastest whose training is the same.
    The same setup where nothing helps.

    Args:
        verify: a better prediction of what was found (a dry run), by which it has to be found again; None: there is
            none.
    """
    verified = dict[TrainSetup, Prediction]()
    improved = _improved(result, model, predict)
    for _ in range(MAX_VERIFIED):
        better = (
            verify(improved.setup)
            if verify is not None and improved.labels and improved.setup not in verified
            else None
        )
        if better is None:
            break
        verified[improved.setup] = better
        improved = _improved(result, model, lambda setup: verified.get(setup) or predict(setup))
    return improved


def _improved(result: CheckResult, model: ModelSpec, predict: Predict) -> Improved:
    if result.evaluation_bytes and result.verdict is not Verdict.FITS:
        # The same config's verdict on its training step alone; its changes are not judged anew: improving does that.
        config = replace(result.config, eval_seqs=0)
        extended = with_extras(predict, config, model, result.gpu)
        prediction = extended(config.setup)
        band = band_of(prediction, config)
        step = replace(
            result,
            config=config,
            prediction=prediction,
            band=band,
            verdict=judge_change(config, config.setup, prediction, extended, result.budget_bytes, band),
            evaluation_bytes=0,
        )
        if step.verdict is Verdict.FITS:  # a smaller evaluation suffices
            search = _Search(step, model, extended)
            improved = search.improved(_Tried(search.start, ()))
        else:
            improved = _improved(step, model, predict)
        labels = (evaluation_label(improved.setup), *improved.labels)
        return replace(improved, labels=labels, eval_seqs=improved.setup.micro_batch_seqs)
    search = _Search(result, model, with_extras(predict, result.config, model, result.gpu))
    if result.verdict is Verdict.FITS:
        return search.improved(search.fastest())
    here = search.least_harm(in_place=True)
    if here is not None and harm(search.start, here.setup) < LENGTH_HARM:
        return search.improved(here)
    anywhere = search.least_harm(in_place=False)
    if anywhere is not None and (here is None or harm(search.start, anywhere.setup) < LENGTH_HARM):
        return replace(search.improved(anywhere), needs_new_file=True)
    return search.with_adapters() if here is None else search.improved(here)


class _Tried(NamedTuple):
    setup: TrainSetup
    labels: tuple[str, ...]


class _Search:
    def __init__(
        self, result: CheckResult, model: ModelSpec, predict: Predict, start: TrainSetup | None = None
    ) -> None:
        self.result, self.model, self.start = result, model, start or result.config.setup
        self._predict, self._known = predict, dict[TrainSetup, Prediction]()

    def predicted(self, setup: TrainSetup) -> Prediction:
        if setup not in self._known:
            self._known[setup] = self._predict(setup)
        return self._known[setup]

    def verdict(self, setup: TrainSetup) -> Verdict:
        after, config = self.predicted(setup), self.result.config
        band = self.result.band.wider(band_of(after, config))
        return judge_change(config, setup, after, self.predicted, self.result.budget_bytes, band)

    def improved(self, tried: _Tried) -> Improved:
        after, verdict = self.predicted(tried.setup), self.verdict(tried.setup)
        return Improved(setup=tried.setup, labels=lasting(tried.labels), after=after, verdict=verdict)

    def _rounds(
        self, allowed: Callable[[TrainSetup, bool], bool], order: Callable[[_Tried], Any]
    ) -> Iterator[list[_Tried]]:
        """What one change, two changes, ... reach, each from the BEAM first of those before."""
        beam, seen, reentrant = [_Tried(self.start, ())], {self.start}, self.result.config.reentrant
        for _ in range(DEPTH):
            candidates = [
                _Tried(after, (*tried.labels, label))
                for tried in beam
                for label, after, trains_otherwise in single_changes(
                    tried.setup, self.result.gpu, self.model, reentrant=reentrant
                )
                if after not in seen and allowed(after, trains_otherwise)
            ]
            seen |= {candidate.setup for candidate in candidates}
            yield candidates
            beam = sorted(candidates, key=order)[:BEAM]

    def least_harm(self, *, in_place: bool) -> _Tried | None:
        """What fits with the least harm, then with the fewest changes; what may fit where nothing certainly does, both
        before sequences are cut."""
        budget, config, whole = self.result.budget_bytes, self.result.config, self.start.seq_len_tokens
        certain: Callable[[TrainSetup], bool] = lambda setup: self.verdict(setup) is Verdict.FITS  # noqa: E731
        likely: Callable[[TrainSetup], bool] = lambda setup: self.predicted(setup).peak_device_bytes <= budget  # noqa: E731

        def worth(tried: _Tried) -> tuple[float, ...]:
            setup = tried.setup
            return setup.seq_len_tokens, -sum(_harms(self.start, setup)), self.predicted(setup).tokens_per_s or 0.0

        tiers = [(level, whole, certain) for level in range(LENGTH_HARM)]
        if self.result.verdict is not Verdict.UNCERTAIN:  # else it may fit as it is
            tiers += [(level, whole, likely) for level in range(LENGTH_HARM)]
        tiers += [(LENGTH_HARM, whole // shorter, certain) for shorter in CUTS]
        for level, shortest, fits in tiers:

            def allowed(after: TrainSetup, _: bool, level: int = level, shortest: int = shortest) -> bool:
                within = harm(self.start, after) <= level and after.seq_len_tokens >= shortest
                return within and config.allows(after, in_place=in_place)

            # the fewest changes after which it fits: of several the longest sequences, then the least harm, then speed
            for candidates in self._rounds(allowed, lambda tried: self.predicted(tried.setup).peak_device_bytes):
                if fitting := [candidate for candidate in candidates if fits(candidate.setup)]:
                    return max(fitting, key=worth)
        return None

    def with_adapters(self) -> Improved:
        """What fits where full fine-tuning does not: adapters, on 4 bits where it takes that; else the start itself."""
        for label, fields in WITH_ADAPTERS.items() if self.start.method == "full" else ():
            try:
                start = self.start.replace(**fields)
            except SetupError:
                continue
            search = _Search(self.result, self.model, self._predict, start)
            fits = search.verdict(start) is Verdict.FITS
            tried = _Tried(start, ()) if fits else search.least_harm(in_place=False)
            if tried is not None and tried.setup.seq_len_tokens == start.seq_len_tokens:
                improved = search.improved(tried)
                return replace(improved, labels=(label, *improved.labels), needs_new_file=True)
        return self.improved(_Tried(self.start, ()))

    def fastest(self) -> _Tried:
        """The fastest whose training is the same; each further change must gain MIN_SPEEDUP."""
        config = self.result.config

        def speed(tried: _Tried) -> float:
            fits = self.verdict(tried.setup) is Verdict.FITS
            return speedup(self.model, self.start, tried.setup, self.predicted) if fits else 0.0

        def allowed(after: TrainSetup, changes_training: bool) -> bool:
            return not changes_training and config.allows(after, in_place=True)

        def order(tried: _Tried) -> tuple[float, int]:
            return -speed(tried), len(tried.labels)

        best = _Tried(self.start, ())
        for candidates in self._rounds(allowed, order):
            fastest = min(candidates, key=order, default=best)
            if speed(fastest) > speed(best) * MIN_SPEEDUP:
                best = fastest
        return best
