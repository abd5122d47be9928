"""Which weights a ZeRO-3 rank holds whole, and when: DeepSpeed's coordinator of partitioned parameters, re-modelled.

In the first forward and backward the order of the modules is recorded, and a module's weights are released as soon as
it is done. From the second on, weights are also gathered ahead of their use, up to a number of elements per call of a
module (each call asks again, so that what is live in all is the bound), and kept where they are used again soon.

Source: DeepSpeed 0.19.8 runtime/zero/partitioned_param_coordinator.py (`reset_step`, `_fetch_sub_module_impl`,
`release_sub_module`, `__params_to_release`, `release_backward_leftovers`), partition_parameters.py
(`all_gather_coalesced`, `AllGatherCoalescedHandle.wait`).

Pure bookkeeping on names; what it costs is a `Store`'s.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Elements: gathered ahead in one call, kept for a use so near, live in all."""

    prefetch: int
    reuse: int
    live: int


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One parameter as the coordinator sees it; `num` elements."""

    num: int
    persistent: bool
    trained: bool


class Store(Protocol):
    """What a gather does to memory."""

    def begin(self, names: list[str]) -> Any:
        """The gather of these weights is on its way; returns what `finish` and `done` are given."""

    def finish(self, names: list[str], token: Any) -> None:
        """It has arrived: the weights are usable."""

    def done(self, token: Any) -> None:
        """Every weight of the gather has been asked for: its buffer goes."""

    def release(self, name: str) -> None:
        """The weight is only kept in parts again."""


@dataclass(kw_only=True)
class _Gather:
    names: list[str]
    token: Any
    left: int
    arrived: bool = False


@dataclass(kw_only=True)
class Coordinator:
    """One rank's whole weights.

    Attributes:
        weights: every parameter by name, in the model's order.
        modules: the parameters of every module itself, by the module's path (of a leaf: with all below it); others' are
            added by `adopt`.
        leaves: modules whose weights are fetched as one, with nothing below them asking.
        within: the parameters of every module with all below it; needed where there are leaves.
        limits: None where every module releases its weights at once and nothing is gathered ahead.
    """

    weights: dict[str, Weight]
    modules: dict[str, tuple[str, ...]]
    store: Store
    limits: Limits | None
    leaves: frozenset[str] = frozenset()
    within: dict[str, tuple[str, ...]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    _flying: dict[str, _Gather] = field(default_factory=dict)
    _users: dict[str, set[str]] = field(default_factory=dict)
    _active: dict[str, None] = field(default_factory=dict)
    _recomputed: dict[str, set[str]] = field(default_factory=dict)
    _order: list[str] = field(default_factory=list)
    _uses: dict[str, list[int]] = field(default_factory=dict)
    _before: list[int] = field(default_factory=list)
    _queue: deque[tuple[str, int]] = field(default_factory=deque)
    _fetched_for: dict[str, int] = field(default_factory=dict)
    _mode: str = "new"
    _step: int = 0
    _num_live: int = 0

    def start(self) -> None:
        """A forward of the whole model begins."""
        for name in list(self._flying):
            self._arrive(name)
            self._release(name)
        if self._mode == "recording" and self.limits is not None:
            self._mode = "complete"
            self._learn()
        elif self._mode != "complete":
            self._mode = "recording"
            self._order.clear()
        if self._mode == "complete":
            self._queue = deque((name, step) for step, module in enumerate(self._order) for name in self._of(module))
        self._fetched_for.clear()
        self._step = self._num_live = 0

    def adopt(self, module: str, name: str) -> None:
        """A module reads another one's parameter in its forward: from now on it is fetched with the module's own."""
        if name not in self.modules[module]:
            self.modules[module] = (*self.modules[module], name)
        self.hold([name])

    def hold(self, names: Iterable[str]) -> None:
        """Gathers outside the modules' order, which do not count as live."""
        for name in names:
            if name not in self.whole and name not in self._flying:
                self.store.finish([name], self.store.begin([name]))
                self.whole.add(name)

    def fetch(self, module: str, *, forward: bool, recomputed: bool = False) -> None:
        """A module needs its weights, in its forward or before its backward."""
        if self._mode == "recording":
            self._order.append(module)
        elif self._mode == "complete" and (self._step >= len(self._order) or self._order[self._step] != module):
            raise ValueError(f"DeepSpeed's trace breaks: {module} does not come in the order of the first step")
        if not forward:
            self._active[module] = None
        names = self._of(module)
        self._gather(names)
        for name in names:
            users = self._users.setdefault(name, set())
            users.add(module)
            if recomputed and self._active and not self.weights[name].trained:
                owner = next(reversed(self._active))
                self._recomputed.setdefault(owner, set()).add(name)
                users.add(owner)
            if name in self._flying:
                self._arrive(name)
        if self._mode == "complete":
            self._prefetch(names)
        self._step += 1

    def release(self, module: str, *, forward: bool) -> None:
        """A module's forward or backward is done."""
        names = set(self._of(module))
        leaving = self._leaving(module, names) if self._mode == "complete" else set(names)
        if not forward:
            again = self._recomputed.pop(module, set())
            names |= again
            leaving |= {name for name in again if not self.weights[name].persistent}
            self._active.pop(module, None)
        for name in sorted(names):
            self._users.get(name, set()).discard(module)
            if name in leaving:
                self._release(name)

    def end_backward(self) -> None:
        """What modules still hold whose inputs need no gradient, so that nothing told the end of their backward."""
        while self._active:
            module, _ = self._active.popitem()
            for name in sorted({*self._of(module), *self._recomputed.pop(module, ())}):
                self._users.get(name, set()).discard(module)
                if not self.weights[name].persistent:
                    self._release(name)

    def release_all(self) -> None:
        """Before the step every weight is in parts again."""
        for name in self.weights:
            if name in self._flying:
                self._arrive(name)
            self._users.pop(name, None)
            self._release(name)

    # Inside

    def _of(self, module: str) -> tuple[str, ...]:
        return self.modules[module]

    def _learn(self) -> None:
        total = 0
        for step, module in enumerate(self._order):
            self._before.append(total)
            for name in self._of(module):
                self._uses.setdefault(name, []).append(step)
                total += self.weights[name].num

    def _gather(self, names: Iterable[str]) -> None:
        missing = [name for name in names if name not in self.whole and name not in self._flying]
        if missing:
            self._num_live += sum(self.weights[name].num for name in missing)
            one = _Gather(names=missing, token=self.store.begin(missing), left=len(missing))
            self._flying.update((name, one) for name in missing)

    def _arrive(self, name: str) -> None:
        one = self._flying.pop(name)
        if not one.arrived:
            one.arrived = True
            self.store.finish(one.names, one.token)
            self.whole.update(one.names)
        one.left -= 1
        if not one.left:
            self.store.done(one.token)

    def _release(self, name: str) -> None:
        if name in self.whole and not self._users.get(name):
            self.whole.discard(name)
            self.store.release(name)
            self._num_live -= self.weights[name].num

    def _prefetch(self, names: tuple[str, ...]) -> None:
        assert self.limits is not None
        needed = {name for name in names if self._fetched_for.get(name, -1) < self._step}
        found: set[str] = set()
        while self._queue and len(found) < len(needed):
            name, step = self._queue.popleft()
            self._fetched_for[name] = step
            found.add(name)
        room = min(self.limits.live - self._num_live, self.limits.prefetch)
        ahead: dict[str, None] = {}
        num = 0
        while self._queue and num < room:
            name, step = self._queue.popleft()
            self._fetched_for[name] = max(self._fetched_for.get(name, -1), step)
            if name not in self.whole and name not in self._flying and name not in ahead:
                ahead[name] = None
                num += self.weights[name].num
        self._gather(ahead)

    def _leaving(self, module: str, names: set[str]) -> set[str]:
        """Which weights go when their module is done: not those that stay gathered, that a look ahead has passed over
        because they were still there, or that are used again soon."""
        assert self.limits is not None
        candidates = {
            name
            for name in names
            if not self.weights[name].persistent and self._fetched_for.get(name, -1) <= self._step
        }
        if module in self.leaves:
            return self._leaving_leaf(candidates)
        leaving = set()
        start = self._before[self._step] if self._step < len(self._before) else None
        for name in candidates:
            uses = self._uses.get(name, [])
            index = bisect_left(uses, self._step)
            if start is not None and index < len(uses) and self._before[uses[index]] - start < self.limits.reuse:
                continue
            leaving.add(name)
        return leaving

    def _leaving_leaf(self, leaving: set[str]) -> set[str]:
        """A leaf looks for its next use in whole subtrees, so that the whole model's turn counts as one."""
        assert self.limits is not None
        traversed = 0
        for module in self._order[self._step :]:
            if traversed >= self.limits.reuse or not leaving:
                break
            below = self.within[module]
            leaving = leaving.difference(below)
            traversed += sum(self.weights[name].num for name in below)
        return leaving
