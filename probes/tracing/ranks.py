"""A run as a rank's: the moments that engines tell apart, and what is alive at them beside what engines hold."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

from planner.memory.profiles import FIRST, GRADIENTS, HEAD, LAST, LOSS_BEGINS, STATES, TURN
from probes.allocator.events import Alloc, Event, Free, Phase, Repetition
from probes.dryrun.trace import Trace

RANK_PHASES = frozenset({"forward", LOSS_BEGINS, "loss", HEAD, FIRST, TURN, LAST, "step"})
"""What a profile of ranks says."""
_OTHER = "other"
"""Moments that no engine tells: the backward's before and behind the layers, and the first layer's."""
Item = Event | Repetition


def moments_of_rank(trace: Trace, every: int) -> Trace:
    """The first micro-batch of a full model's run, its backward told by the engines' moments (`MOMENTS`): as its layers
    begin, the last layer's, those of more layers, and the first ones' but the very first, which the embedding's is part
    of. When a layer is done its gradients are gone.

    Args:
        every: how many layers apart checkpoints lie.
    """
    sections = [*_first_micro_batch(trace)]
    backward = [items for name, items in sections if name.startswith("backward")]
    layers = [items for name, items in sections if name.startswith("backward/")]  # a run of the full depth
    longest = max(backward, key=len)
    layers = [_reduced(trace, layer) for layer in layers or [[item] for item in longest]]
    end, inside, before = len(layers) - 1, False, list[Item]()
    at_end = max(1, end - max(2, every))
    events: list[Item] = []
    for name, items in sections:
        if name.startswith("backward/") or (name == "backward" and items is longest):
            if not inside:
                events += [*_gradients(trace, before), Phase(HEAD), Phase(FIRST), *layers[0]]
                events += [Phase(TURN), *chain(*layers[1:at_end]), Phase(LAST), *chain(*layers[at_end:end])]
                events += [Phase(_OTHER), *layers[end]]
                inside = True
            continue
        before += items
        events += [Phase(_OTHER if name == "backward" else name), *items]
    return replace(trace, events=events)


def _reduced(trace: Trace, items: list[Item]) -> list[Item]:
    """A layer's backward, its gradients released at its end."""
    gone, last = _gradients(trace, items), items[-1]
    if not isinstance(last, Repetition):
        return [*items, *gone]
    external = [*last.external, *[()] * (len(last.pattern.runs) - len(last.external))]
    return [*items[:-1], last._replace(external=[*external[:-1], [*external[-1], *gone]])]


def _gradients(trace: Trace, items: Iterable[Item]) -> list[Event]:
    """The end of the gradients that some events leave."""
    gone: list[Event] = []
    for item in items:
        if isinstance(item, Alloc) and is_gradient(trace, item.id):
            gone.append(Free(item.id))
        elif isinstance(item, Repetition):
            owners = item.pattern.owners
            places = (place for place in item.pattern.left if owners.get(place, ("",))[0] == GRADIENTS)
            gone += [Free(item.first + place) for place in places]
    return gone


def _first_micro_batch(trace: Trace) -> Iterator[tuple[str, list[Item]]]:
    name, items = "", list[Item]()
    for item in trace.events:
        if not isinstance(item, Phase):
            items.append(item)
            continue
        if name:
            yield name, items
        if item.name.startswith("forward") and name.startswith("backward"):
            return
        name, items = item.name, []
    yield name, items


def is_gradient(trace: Trace, number: int) -> bool:
    """Whether a storage is a gradient at the step's begin."""
    return trace.owners.get(number, ("",))[0] == GRADIENTS


def is_state(trace: Trace, number: int) -> bool:
    """Whether a storage is what the rank's engine says."""
    return trace.owners.get(number, ("",))[0] in STATES
