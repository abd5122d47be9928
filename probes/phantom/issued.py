"""What a traced program issues: its operators, launches, module calls and waits, by line and module, step by step."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from planner.speed.operators import HOST, ISSUERS, TRAINER, WAIT, Operator, Program, Segment
from probes.dryrun.fastmeta import Remembered
from probes.dryrun.operators import ENGINE, FORWARD, RECOMPUTE, OperatorLog
from probes.dryrun.streams import Stream
from probes.phantom.origins import Origins, user_line

if TYPE_CHECKING:
    from collections.abc import Mapping

_aten = torch.ops.aten
SYNCHRONISES = frozenset({_aten.nonzero.default, _aten.masked_select.default, _aten._unique2.default})
"""Operators whose result's size only the values say: the host waits for it."""


class Issued(OperatorLog):
    """The log of a traced program.

    Attributes:
        places: of each call what it belongs to, as numbers of `names`.
        names: (line of the program, module).
        steps: (optimizer, place at which its step began, place at which it ended).
        repeats: (place at which a micro-batch was left out, beginning and end of the one that it repeats).
    """

    def __init__(self, origins: Origins) -> None:
        super().__init__()
        self._origins = origins
        self.places: list[int] = []
        self.names: dict[tuple[str, str], int] = {}
        self.steps: list[tuple[int, int, int]] = []
        self.repeats: list[tuple[int, int, int]] = []
        self._op_names: dict[int, str] = {}
        self._training = -1  # place at which the first module ran in training
        self._stepping = 0
        self._micro_batch = 0
        self._ran = (0, 0)
        self._num_modules: dict[int, int] = {}

    # Telling

    def ran(self, func: Any, args: Any, kwargs: Any, out: Any, remembered: Remembered) -> None:
        if self._training < 0 and not self._origins.num_forwards:
            return
        if self._training < 0:
            self._training = len(self.calls)
        name = self._op_names.get(id(func))
        if name is None:
            name = str(func)
            if isinstance(func, torch._ops.OpOverload):
                self._op_names[id(func)] = name
        self.add(func, name, args, kwargs, out, remembered)
        if func in SYNCHRONISES or (func is _aten.index.Tensor and masks_of(args[1])):
            self.waited()

    def waited(self) -> None:
        self.launched(WAIT, (), ())

    def travelled(self, tensor: torch.Tensor, *, to_host: bool, is_pinned: bool, waits: bool) -> None:
        """A copy between host and device; `waits`: the host does until it is done."""
        aside = Stream.current is not Stream.main
        name = f"pcie.{'to_host' if to_host else 'to_device'}{'_pinned' * is_pinned}{'_aside' * aside}"
        self.launched(name, (tensor,), ())
        if waits:
            self.waited()

    def on_host(self, func: Any, moved_bytes: int) -> None:
        """An operator on tensors of the host, which computes it before it issues anything else."""
        self.noted(Operator(f"{HOST}{func}", numbers=(float(moved_bytes),)))

    def launch(self, name: str, arguments: Sequence[Any]) -> None:
        if self._training >= 0:
            self.launched(name, [argument for argument in arguments if isinstance(argument, torch.Tensor)], ())

    def trainer(self, what: str, model: Any) -> None:
        """transformers' Trainer walks over its model."""
        num = self._num_modules.get(id(model))
        if num is None:
            num = self._num_modules[id(model)] = sum(1 for _ in model.modules())
        self.calls.append(self._number(Operator(f"{TRAINER}{what}", numbers=(float(num),))) * len(ISSUERS) + FORWARD)

    def micro_batch_begins(self) -> None:
        self._micro_batch = len(self.calls)

    def micro_batch_ends(self) -> None:
        self._ran = self._micro_batch, len(self.calls)

    def micro_batch_repeats(self) -> None:
        del self.calls[self._micro_batch :], self.places[self._micro_batch :]
        self.repeats.append((len(self.calls), *self._ran))

    def step_begins(self) -> None:
        self._stepping = len(self.calls)

    def step_ends(self, optimizer: int) -> None:
        self.steps.append((optimizer, self._stepping, len(self.calls)))

    def _place(self) -> None:
        missing = len(self.calls) - len(self.places)
        if missing > 0:
            key = str(user_line() or ""), self._origins.module
            self.places += [self.names.setdefault(key, len(self.names))] * missing

    def add(self, func: Any, name: str, args: Any, kwargs: Any, out: Any, remembered: Remembered) -> None:
        super().add(func, name, args, kwargs, out, remembered)
        if id(func) not in self._views:  # a view costs next to nothing: it goes with what comes after it
            self._place()

    def noted(self, made: Operator) -> None:
        if self._training >= 0:
            super().noted(made)
            self._place()

    def module_called(self, module: Any, args: Any) -> None:
        if self._training >= 0:
            super().module_called(module, args)

    # Asking

    def rows(self) -> "Mapping[str, Any] | None":
        """The last whole step as a program in plain lists, with the place of every call; None where none ended."""
        if not self.steps or not 0 <= self._training < self.steps[-1][-1]:
            return None
        optimizer, stepping, end = self.steps[-1]
        earlier = [earlier_step for earlier_step in self.steps[:-1] if earlier_step[0] == optimizer]
        begin = earlier[-1][2] if earlier else max(self._training, 0)
        stepping = self._last_gradient(begin, stepping)
        self.places += [self.places[-1] if self.places else 0] * (len(self.calls) - len(self.places))
        segments: list[Segment] = []
        places: list[list[int]] = []
        order: list[int] = []
        by_range: dict[tuple[int, int], list[int]] = {}
        for first, last in self._ranges(begin, stepping):
            if (first, last) not in by_range:
                by_range[first, last] = []
                for phase, start, stop in self._phases(first, last):
                    by_range[first, last].append(len(segments))
                    segments.append(Segment(phase=phase, calls=self.calls[start:stop]))
                    places.append(self.places[start:stop])
            order += by_range[first, last]
        step = [len(segments)]
        segments.append(Segment(phase="step", calls=self.calls[stepping:end]))
        places.append(self.places[stepping:end])
        program = Program(
            operators=self.operators, segments=segments, micro_batch=order, step=step, added={}, num_modules=0
        )
        ranks = {} if self.exchanges is None else {"num_ranks": torch.distributed.get_world_size()}
        return {**program.rows(), "places": places, "names": [*self.names], **ranks}

    def _last_gradient(self, begin: int, end: int) -> int:
        """Where the last backward before `end` is over: what follows (clipping) belongs to the step."""
        for at in range(end - 1, begin, -1):
            if self.calls[at] % len(ISSUERS) in (ENGINE, RECOMPUTE):
                return at + 1
        return end

    def _ranges(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The calls from one place to another, cut where micro-batches that were left out stand."""
        cuts = {begin, end}
        repeats = [repeat for repeat in self.repeats if begin <= repeat[0] <= end]
        for at, first, last in repeats:
            cuts |= {at, first, last} if first >= begin else {at}
        edges = sorted(cuts)
        for first, last in pairwise(edges):
            yield first, last
            for at, start, stop in repeats:
                if at == last and start >= begin:
                    yield start, stop

    def _phases(self, first: int, last: int) -> Iterator[tuple[str, int, int]]:
        """Forward and backward, told by who issues; a module's call goes with what was there."""
        num = len(ISSUERS)
        begin, phase = first, "forward"
        for at in range(first, last):
            issuer = self.calls[at] % num
            now = "backward" if issuer in (ENGINE, RECOMPUTE) else phase if issuer == 0 else "forward"
            if now != phase:
                if at > begin:
                    yield phase, begin, at
                begin, phase = at, now
        if last > begin:
            yield phase, begin, last


def masks_of(indices: Any) -> list[torch.Tensor]:
    """Those of an indexing's indices that select elements."""
    return [index for index in indices if index is not None and index.dtype in (torch.bool, torch.uint8)]
