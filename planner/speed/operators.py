"""What a run issues: operators with the layouts of their arguments, in the order of a training step. Plain data."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from planner.core.records import dataclass

SIZE_BYTES = {"bool": 1, "uint8": 1, "int8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int32": 4}
SIZE_BYTES |= {"int64": 8, "int16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


class Layout(NamedTuple):
    """How a tensor lies in memory.

    Attributes:
        shape, stride: in elements.
        dtype: torch's name of its type ("bfloat16").
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Elements, repeated ones too."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of its distinct elements: an expanded dimension is read once."""
        shape: Iterable[int] = self.shape
        if 0 in self.stride:
            shape = (size for size, step in zip(self.shape, self.stride, strict=True) if step or size < 2)
        return prod(shape) * SIZE_BYTES.get(self.dtype, 4)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return SIZE_BYTES.get(self.dtype, 4)

    @property
    def dense(self) -> bool:
        """Whether its elements lie without gaps, in whatever order of the dimensions."""
        expected = 1
        for step, size in sorted([(s, n) for s, n in zip(self.stride, self.shape, strict=True) if n > 1]):
            if step != expected:
                return False
            expected = step * size
        return True

    @property
    def order(self) -> tuple[int, ...]:
        """Its dimensions of more than one element, the one with the widest step first."""
        dimensions = [
            (-step, place) for place, (step, size) in enumerate(zip(self.stride, self.shape, strict=True)) if size > 1
        ]
        return tuple([place for _, place in sorted(dimensions)])


class Operator(NamedTuple):
    """One call of an operator or launch of a kernel.

    Attributes:
        name: "aten.mm.default", "bitsandbytes.gemm_4bit.default"; a kernel that no operator launches by its own name.
        inputs, outputs: layouts of its tensors; a list of many is one layout of all their elements.
        numbers: its arguments that are plain numbers, in order (True is 1).
        listed: how many tensors lie in such lists.
    """

    name: str
    inputs: tuple[Layout, ...] = ()
    outputs: tuple[Layout, ...] = ()
    numbers: tuple[float, ...] = ()
    listed: int = 0

    def of_one_row(self) -> "Operator":
        """The same of the first row of the first dimension alone."""
        rows = self.inputs[0].shape[0]
        inputs, outputs = (
            tuple(
                layout._replace(shape=(1, *layout.shape[1:])) if layout.shape[:1] == (rows,) else layout
                for layout in layouts
            )
            for layouts in (self.inputs, self.outputs)
        )
        return self._replace(inputs=inputs, outputs=outputs)


TRAINER = "trainer."
"""Before the names of what is no operator either: what a trainer's Python does with its model, whose only number is how
many modules that has."""
HOST = "host."
"""Before the names of operators on tensors in the host's memory, whose only number is the bytes that they move."""
WAIT = "wait"
"""The name of what is no operator: the host looks at a value, and waits for all that was issued."""
COLLECTIVE = "collective."
"""Before the names of what a rank exchanges with others, which is no operator of the device either. Its numbers: bytes
of the whole tensor, ranks of the group, how far apart these stand, and after which mark of the model's stream it
begins: the n-th last one, 0: after none, -1: it runs on the model's stream itself."""
MARK, JOIN, GRADIENT = "stream.mark", "stream.join", "stream.gradient"
"""Names of what joins streams: an event of the model's stream is recorded; that stream waits for a collective, whose
only number is how many ago it was issued; DistributedDataParallel has a gradient, whose only number are its bytes."""
ISSUERS = ("module", "forward", "no-grad", "engine", "recompute")
"""Who issues: a module call (no operator), Python recording a graph, Python not recording one, autograd's engine in
C++ (the nodes of a backward), Python under the engine (what a checkpoint computes again)."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """What is issued between two marks of a run.

    Attributes:
        phase: one of "forward", "loss", "backward", "step".
        calls: operator x len(ISSUERS) + issuer, in order; operators as they stand in `Program.operators`.
    """

    phase: str
    calls: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Program:
    """The operators of a training step.

    Attributes:
        operators: each kind of call once.
        segments: each once; `micro_batch` and `step` name them by their places, in order, layer after layer.
        micro_batch: one micro-batch; step: clipping, optimizer, release.
        added: operators by which later micro-batches add their gradients to the first one's, and how often, where
            `micro_batch` found none.
        num_modules: of the model's module tree.
    """

    operators: Sequence[Operator]
    segments: Sequence[Segment]
    micro_batch: Sequence[int]
    step: Sequence[int]
    added: Mapping[int, int]
    num_modules: int

    def rows(self) -> dict[str, Any]:
        """As plain lists, for a file."""
        return {
            "operators": self.operators,
            "stretches": [(segment.phase, segment.calls) for segment in self.segments],
            "micro_batch": self.micro_batch,
            "step": self.step,
            "added": [*self.added.items()],
            "num_modules": self.num_modules,
        }


def program_of(rows: Mapping[str, Any]) -> Program:
    """The program whose `rows` were written to a file."""

    def layouts(values: Any) -> tuple[Layout, ...]:
        return tuple(Layout(tuple(shape), tuple(stride), dtype) for shape, stride, dtype in values)

    return Program(
        operators=[
            Operator(name, layouts(inputs), layouts(outputs), tuple(numbers), listed)
            for name, inputs, outputs, numbers, listed in rows["operators"]
        ],
        segments=[Segment(phase=phase, calls=calls) for phase, calls in rows["stretches"]],
        micro_batch=rows["micro_batch"],
        step=rows["step"],
        added=dict(rows["added"]),
        num_modules=rows["num_modules"],
    )
