"""What the terms of one layer's activations need to know of a setup, and what they add up to."""

from dataclasses import replace

from planner.hardware.kernels import Kernel
from planner.memory.dtypes import SIZE_BYTES, DtypePolicy
from planner.memory.traits import Traits
from planner.records import dataclass
from planner.setup import TrainSetup


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerContext:
    """What one layer's activation terms need to know: the setup's types, which matrices are adapted, the kernel.

    `stacks`: peft adapts whole stacks of experts (`ParamWrapper`), which materialises the merged stack.
    `fused`: what is computed by kernels of its own (`planner.choices.kernels.parts_of`).
    `looked_at`: rows of pictures that this layer attends to instead of its own tokens, of the micro-batch.
    """

    setup: TrainSetup
    dtypes: DtypePolicy
    adapted: frozenset[str]
    kernel: Kernel
    tokens: int
    hidden: int
    traits: Traits
    stacks: bool = False
    fused: frozenset[str] = frozenset()
    looked_at: int = 0

    @property
    def row_tokens(self) -> int:
        """Keys of one query: the sequence, or the whole micro-batch where packing flattens it into one row, or the
        pictures of its sample."""
        setup = self.setup
        if self.looked_at:
            return self.looked_at // setup.micro_batch_seqs
        return self.tokens if setup.packing and not setup.by.packs_rows else setup.seq_len_tokens + setup.virtual_tokens

    def of_length(self, tokens: int) -> "LayerContext":
        """The same for sequences of so many tokens; 0: of their own length."""
        if not tokens:
            return self
        setup = self.setup.replace_trusted(seq_len_tokens=tokens)
        return replace(self, setup=setup, tokens=setup.forward_tokens)

    @property
    def unpacked_bytes(self) -> int:
        """Of one weight of a stack of experts as it is unpacked: NF4 into the weights' type, 8 bits into fp32.

        Source: bitsandbytes 0.50 `int8_vectorwise_dequant`; Axolotl 0.21 `monkeypatch/moe_quant.py`.
        """
        return 4 if self.setup.quantization == "int8" else SIZE_BYTES[self.dtypes.table]

    @property
    def key_tokens(self) -> int:
        """Tokens that have keys and values: those that pass through the layer, and a prefix's."""
        prefixed = self.setup.kind.form == "prefix"
        return self.tokens + prefixed * self.setup.micro_batch_seqs * self.setup.virtual_tokens

    @property
    def of_keys(self) -> "LayerContext":
        """The same of the rows that keys and values are made of."""
        return replace(self, tokens=self.looked_at) if self.looked_at else self

    @property
    def trained(self) -> bool:
        """Whether the base weights themselves are trained."""
        return self.setup.method == "full"

    @property
    def tunes_norms(self) -> bool:
        """Whether the adapter is copies of the norms."""
        return self.setup.adapter == "ln-tuning"


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What matrices that share one input keep of it, in bytes.

    `pinned` is kept even under checkpointing; `pinned_again` is the part of it that something else keeps as well.
    """

    base: int = 0
    adapters: int = 0
    pinned: int = 0
    pinned_again: int = 0


@dataclass(slots=True)
class Saved:
    """Bytes kept for the backward by part.

    `pinned` is kept even where the layer is checkpointed: bitsandbytes' int8 multiplication, and its old one of 4 bits,
    stores its input on the autograd context itself, past the hooks of non-reentrant checkpointing.
    """

    norm: int = 0
    attention: int = 0
    scores: int = 0
    mlp: int = 0
    adapters: int = 0
    pinned: int = 0
    pinned_again: int = 0
    late: int = 0
    """Of all these, what stands behind the attention: gone when the attention's own backward begins."""
    fed: int = 0
    """Of all these, what the MLP keeps, its norm apart."""
    behind: int = 0
    """Of all these, what a norm behind the MLP keeps: gone when the MLP's own backward begins, not there yet when its
    forward ends."""
    down: int = 0
    """Of all these, what the MLP's last matrix and its adapter keep of their input: gone when the activation's own
    backward begins."""

    @property
    def total(self) -> int:
        """All parts, what two operators keep counted once."""
        return self.norm + self.attention + self.scores + self.mlp + self.adapters + self.pinned - self.pinned_again

    def add(self, part: str, inputs: Inputs) -> None:
        """Adds what matrices keep of their inputs, what their own weights keep to one part."""
        setattr(self, part, getattr(self, part) + inputs.base)
        self.adapters += inputs.adapters
        self.pinned += inputs.pinned
        self.pinned_again += inputs.pinned_again
