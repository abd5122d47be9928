"""`ModelSpec`: the module inventory of one causal language model, as plain data.

A spec is what the formula level knows of a model: every module that transformers would build, with its shape, in the
order of the layers. Adapters (one per architecture family) derive it from `config.json`; the dry run reads the real
module tree instead and a test compares the two.
"""

import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import field, fields
from functools import cached_property
from typing import Any, Literal, TypeVar, cast

from planner.core.records import dataclass
from planner.core.shipped import model_types

T = TypeVar("T")
_NOT_YET = object()
_OF_POSITIONS = re.compile(r"wpe|pos_|posit")
"""Names of tables of positions."""

Role = Literal[
    "q", "k", "v", "qkv", "o",              # attention projections ("qkv": fused)
    "gate", "up", "down", "gate_up",        # MLP ("up" and "down" also name a plain MLP's two matrices)
    "router",                               # mixture-of-experts gate
    "mixer",                                # projections of linear attention / state-space / latent-attention layers
    "other",
]  # fmt: skip
ModuleKind = Literal["linear", "conv1d", "parameter"]
NormKind = Literal["rms", "layer"]


LACKING = ("checkpointing", "bare-head", "encoder", "causal")
"""What a model class may lack: gradient checkpointing; logits that are its last hidden states times a matrix alone; the
encoder of a pair of which `AutoModelForCausalLM` builds the decoder; a place among what that builds at all."""


READ_BOTH_WAYS = model_types("reads_both_ways")
"""Types whose models are encoders alone; of the others, those that are built to fill masks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearSpec:
    """One matrix [out_features, in_features] of a layer, possibly repeated.

    Attributes:
        name: dotted module name below its layer ("self_attn.q_proj"); PEFT matches its last part.
        role: what it does.
        module: "linear" (nn.Linear) and "conv1d" (GPT-2's Conv1D) are what PEFT's "all-linear" adapts and bitsandbytes
            quantizes; "parameter" is a bare nn.Parameter (stacked experts), which neither touches.
        num: how many such matrices the layer holds (experts); 0: another layer holds it, and both multiply with it.
        num_active: through how many of them each token passes (top-k experts); equals `num` for dense layers.
        kept: nothing quantizes it: a checkpoint that is published quantized holds it in 16 bits, or its class is a
            child of nn.Linear, which transformers passes over (`integrations/bitsandbytes.py`: `type(module) is`).
        of_encoder: its input is the encoder's output (keys and values of a cross attention).
        refused: PEFT puts no adapter there: its class does more than a product, or PEFT names it as unfit.
        expert_parallel: a rank's share of experts that are spread over GPUs (`planner.memory.rank_part`), maybe one.
    """

    name: str
    role: Role
    in_features: int
    out_features: int
    bias: bool = False
    module: ModuleKind = "linear"
    num: int = 1
    num_active: int = 1
    kept: bool = False
    of_encoder: bool = False
    refused: bool = False
    expert_parallel: bool = False

    @property
    def quantizes(self) -> bool:
        """Whether a quantized base holds it in fewer bits."""
        return self.module != "parameter" and not self.kept

    @property
    def is_stack(self) -> bool:
        """Whether it is the experts of a layer in one bare parameter."""
        return self.module == "parameter" and self.is_expert

    @property
    def is_expert(self) -> bool:
        """Whether it stands for routed experts, stacked or modules of their own (`planner.models.earlier`)."""
        return self.num > 1 or self.expert_parallel

    @property
    def leaf(self) -> str:
        """The last part of the dotted name, what `target_modules` matches."""
        return self.name.rpartition(".")[2]

    @property
    def num_weights(self) -> int:
        return self.num * self.in_features * self.out_features

    @property
    def num_bias(self) -> int:
        return self.num * self.out_features if self.bias else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class NormSpec:
    """One normalisation module of `size` elements, applied to `rows_per_token` rows per token (heads, for q/k)."""

    name: str
    kind: NormKind
    size: int
    bias: bool = False
    weight: bool = True
    rows_per_token: int = 1

    @property
    def num_params(self) -> int:
        return self.size * (int(self.weight) + int(self.bias))


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """How a layer mixes tokens.

    Attributes:
        kind: "softmax" (any scaled-dot-product attention, latent attention included) or "linear" (gated delta rule,
            state space: no tokens x tokens matrix).
        head_dim: of queries and keys; `value_head_dim` of values.
        window_tokens: sliding window, None for full attention.
        rotary: whether rotary position embeddings are applied to q and k; `rotary_fraction` to what part of each head.
        softcap: whether logits are soft-capped (eager only; flash kernels take it as an argument).
        sinks: attention sinks (gpt-oss).
        cross: cross attention of an encoder-decoder; where it is the layer's only one, keys and values are of pictures
            (Llama 3.2 Vision).
        causal: whether a query sees no key behind its own place.
        key_tokens: so many keys whatever the sequence's length (a cross attention's, of a fixed encoder); 0: as many as
            queries.
        sees_ahead: the tokens of one picture attend to each other both ways, which takes a mask (Gemma 3).
        padded: sequences are padded behind a mask (Gemma 4's encoder).
        adds_mask: that mask is added as it is, one in the model's type for all layers; elsewhere each makes its own of
            a boolean one.
    """

    kind: Literal["softmax", "linear"] = "softmax"
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    window_tokens: int | None = None
    rotary: bool = True
    rotary_fraction: float = 1.0
    softcap: bool = False
    sinks: bool = False
    cross: bool = False
    causal: bool = True
    key_tokens: int = 0
    sees_ahead: bool = False
    padded: bool = False
    adds_mask: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpSpec:
    """The channel mixer: "gated" (three matrices), "plain" (two) or "moe" (routed experts, each gated or plain)."""

    kind: Literal["gated", "plain", "moe"]
    intermediate_size: int
    activation: str
    num_experts: int = 0
    num_active_experts: int = 0
    shared_intermediate_size: int = 0
    gated_experts: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One kind of layer.

    Attributes:
        kind: a short name for people ("full", "sliding-4096", "linear-attention+moe", "vision").
        path: dotted name of the list that holds such layers ("model.layers", "encoder.block"); a module's full name is
            path.index.name. For an idle part that is no list, the part's own name.
        num_other_params: parameters in neither linears nor norms (a convolution, scales, attention sinks, a relative
            position table).
        fixed_tokens: so many tokens of every sequence pass through it, whatever the text's length (Whisper's encoder);
            0: the text's.
        frozen: nothing of it trains and it has no adapters, where other layers do (`planner.memory.trained.parted`).
    """

    kind: str
    linears: tuple[LinearSpec, ...]
    norms: tuple[NormSpec, ...] = ()
    attention: AttentionSpec | None = None
    mlp: MlpSpec | None = None
    cross_attention: AttentionSpec | None = None
    parallel_residual: bool = False
    num_other_params: int = 0
    path: str = "model.layers"
    fixed_tokens: int = 0
    frozen: bool = False

    @property
    def is_cross_attention(self) -> bool:
        """Whether it attends to pictures instead of to the text."""
        return self.attention is not None and self.attention.cross

    @property
    def every_second_product(self) -> tuple[LinearSpec, ...]:
        """The matrices whose results torchtitan's selective checkpointing keeps: of `aten.mm` every second, from the
        first on; with a bias a matrix is `aten.addmm`, and a stack of experts a grouped product.

        Source: torchtitan 0.2 `distributed/activation_checkpoint.py` _apply_op_sac.
        """
        return tuple(linear for linear in self.linears if not (linear.is_stack or linear.bias))[::2]

    @property
    def num_params(self) -> int:
        return (
            sum(linear.num_weights + linear.num_bias for linear in self.linears)
            + sum(norm.num_params for norm in self.norms)
            + self.num_other_params
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingSpec:
    """One lookup table [num_rows, dim]; `frozen`: its class never trains it (Whisper's sinusoids)."""

    name: str
    num_rows: int
    dim: int
    frozen: bool = False

    @property
    def num_params(self) -> int:
        return self.num_rows * self.dim


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontEnd:
    """Two convolutions of kernel 3 around GELUs that make an encoder's input of sound (Whisper): the second halves the
    frames.

    Attributes:
        mel_bins: numbers of a frame.
        frames: of a clip, which is padded or cut to them.
        path: dotted name of the module that holds conv1 and conv2.
    """

    mel_bins: int
    frames: int
    path: str

    @property
    def seconds(self) -> float:
        """Of a clip: a frame is taken every 160 samples of 16,000 a second (`WhisperFeatureExtractor`)."""
        return self.frames / 100

    @property
    def input_elements(self) -> int:
        """Numbers of one clip as the feature extractor gives it."""
        return self.mel_bins * self.frames


NormStyle = Literal["rms", "rms-fp32", "layer", "layer-cast-back", "layer-composed"]
"""How a class's norms work: "rms-fp32" multiplies rows with their weight in fp32, before the cast back (a trained
weight keeps fp32 rows); "layer-cast-back" takes an fp32 copy and casts back; "layer-composed" is made of single
operations in fp32, of which two tensors are kept."""
ATTENTION_DROPOUTS = ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob", "dropout_rate")
RESIDUAL_DROPOUTS = (
    *("resid_pdrop", "residual_dropout", "resid_dropout", "hidden_dropout", "hidden_dropout_prob", "dropout"),
    "dropout_rate",
)
"""What configurations call a dropout of attention scores, and of what is added to the residual stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """What one class of transformers does in its own way, where it changes memory.

    Attributes:
        attention_dropout, residual_dropout: whether its own dropouts are on while it trains.
        joins_rotated: joins the rotated part of each head and the rest even where nothing is left.
        dense_experts: pushes every token through every expert, weighted by zero where it was not routed.
        extra_expert_copies: further tensors of the intermediate size that an expert keeps.
        plain_softmax: its eager softmax stays in its input's type, where others ask for fp32.
        scales_logits: multiplies its logits by a number, which makes others of them (Granite, Cohere).
        position_bias: adds a learned matrix of positions to its scores.
        streams: residual streams side by side, of which a layer updates one and predicts the others (Baykal et al.
            2023, Alternating Updates for Efficient Transformers, https://arxiv.org/abs/2301.13310).
    """

    norm: NormStyle = "rms"
    attention_dropout: bool = False
    residual_dropout: bool = False
    joins_rotated: bool = False
    dense_experts: bool = False
    extra_expert_copies: int = 0
    plain_softmax: bool = False
    scales_logits: bool = False
    position_bias: bool = False
    streams: int = 1


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model: its layers, what stands before and after them, and where the facts came from.

    Attributes:
        model_id: the name the user gave, resolved (hub id or directory name).
        model_type: transformers' `model_type`.
        built_class: the class `AutoModelForCausalLM` (or Seq2Seq) builds.
        layer_kinds: the distinct kinds of layer.
        layer_order: index into `layer_kinds` for every layer in order; len() is the depth.
        embeddings: token, position, per-layer, token-type tables, tied head counted here once.
        head: the output projection; `tied` says that it shares the token embedding's storage.
        outer_linears: matrices outside the layers (opt-350m's project_in/out, per-layer projections).
        outer_norms: final norm, embedding norm.
        num_outer_other_params: other parameters outside the layers.
        idle_layers: layers that hold weights but see no text token (a vision encoder), as (layer, repeats).
        num_idle_other_params: the rest of such encoders.
        logit_softcap: whether the final logits are soft-capped (two more copies of the logits).
        attentions: the attention implementations that transformers' class supports.
        is_encoder_decoder: T5, Whisper and their like.
        front_end: the convolutions before the first layer of what hears; None: it reads text.
        traits: what its class does in its own way.
        lacks: what transformers' class does not have, of `LACKING`.
        moved_targets: module names of earlier versions that PEFT takes for stacked parameters, each with their role.
        from_tree: whether it was read off the module tree that transformers builds, for lack of a known family.
        like: the kind whose geometry a type that nobody knows was given (`--like`), "" for a known one.
        config: the raw configuration, for the dry run and the probe.
        config_source: where it came from, one line.
        taken_as: which model another name than its own was taken for, one sentence; "" for its own.
    """

    model_id: str
    model_type: str
    built_class: str
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int | None
    layer_kinds: tuple[LayerSpec, ...]
    layer_order: tuple[int, ...]
    embeddings: tuple[EmbeddingSpec, ...]
    head: LinearSpec | None
    tied: bool
    outer_linears: tuple[LinearSpec, ...] = ()
    outer_norms: tuple[NormSpec, ...] = ()
    num_outer_other_params: int = 0
    idle_layers: tuple[tuple[LayerSpec, int], ...] = ()
    num_idle_other_params: int = 0
    logit_softcap: bool = False
    is_encoder_decoder: bool = False
    front_end: FrontEnd | None = None
    traits: Traits = Traits()
    attentions: tuple[str, ...] = ("eager", "sdpa", "flash-attention-2")
    lacks: tuple[str, ...] = ()
    moved_targets: tuple[tuple[str, str], ...] = ()
    from_tree: bool = False
    like: str = ""
    config: Mapping[str, Any] = field(repr=False, compare=False, hash=False, default_factory=dict)
    config_source: str = field(compare=False, default="")
    taken_as: str = field(compare=False, default="")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once: specs are keys of caches that a walk of the space asks thousands of times."""
        return hash((self.model_id, self.model_type, self.layer_kinds, self.layer_order, self.tied))

    @cached_property
    def _worked_out(self) -> dict[Hashable, Any]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy works everything out anew: what is kept here tells parts apart by their identity."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def once(self, key: Hashable, work_out: Callable[["ModelSpec"], T]) -> T:
        """What is worked out of this very object, once: a walk asks thousands of times, and models of one shape are
        equal whatever their configurations say."""
        cached = self._worked_out.get(key, _NOT_YET)
        if cached is _NOT_YET:
            cached = self._worked_out[key] = work_out(self)
        return cast(T, cached)

    @property
    def num_layers(self) -> int:
        """Depth: layers in order (encoder and decoder together)."""
        return len(self.layer_order)

    @cached_property
    def layer_counts(self) -> tuple[tuple[LayerSpec, int], ...]:
        """Each kind of layer with how often it occurs."""
        counts = [0] * len(self.layer_kinds)
        for index in self.layer_order:
            counts[index] += 1
        return tuple(zip(self.layer_kinds, counts, strict=True))

    @cached_property
    def expert_stacks(self) -> tuple[int, ...]:
        return tuple(linear.num for layer in self.layer_kinds for linear in layer.linears if linear.is_stack)

    @cached_property
    def num_expert_parallel_weights(self) -> int:
        """Elements of experts that are distributed over GPUs (`planner.memory.rank_part.expert_shard`)."""
        return sum(
            linear.num_weights * num
            for layer, num in self.layer_counts
            for linear in layer.linears
            if linear.expert_parallel
        )

    @cached_property
    def learned_positions(self) -> int | None:
        """Tokens of the longest sequence whose positions its table has rows for; None where they are computed."""
        learned = any(_OF_POSITIONS.search(table.name) for table in self.embeddings)
        return self.max_position_embeddings if learned else None

    @property
    def reads_both_ways(self) -> bool:
        """Whether it is an encoder alone, of which a text's tokens see those behind them: it predicts no next one. A
        configuration may say otherwise of its type (Reformer, XLM)."""
        encoder = self.model_type in READ_BOTH_WAYS and not (self.config.get("is_decoder") or self.config.get("causal"))
        return encoder or self.built_class.endswith("ForMaskedLM")

    @property
    def unscored(self) -> str:
        """Why it is trained to no score of a sequence, "" where it may be."""
        if self.model_type not in model_types("unscored"):
            return ""
        return f"transformers has no class of {self.model_type} that scores (AutoModelForSequenceClassification)"

    @cached_property
    def num_encoder_layers(self) -> int:
        """Of an encoder-decoder: the layers before the first that looks at what others gave."""
        if not self.is_encoder_decoder:
            return 0
        return sum(num for layer, num in self.layer_counts if layer.cross_attention is None)

    @cached_property
    def encoder_tokens(self) -> int:
        """Tokens of every sequence in an encoder of fixed length; 0: there is none."""
        return max((layer.fixed_tokens for layer in self.layer_kinds), default=0)

    @cached_property
    def num_embedding_params(self) -> int:
        return sum(table.num_params for table in self.embeddings)

    @cached_property
    def num_head_params(self) -> int:
        """Parameters of an untied head, 0 when tied or absent."""
        if self.head is None or self.tied:
            return 0
        return self.head.num_weights + self.head.num_bias

    @cached_property
    def num_params(self) -> int:
        """Unique parameters of the module tree, a tied head counted once.

        Measured: equals the built module tree for all 180 catalogue models (tests/planner/test_models.py).
        """
        total = self.num_embedding_params + self.num_head_params + self.num_outer_other_params
        if self.tied and self.head is not None:
            total += self.head.num_bias
        total += sum(linear.num_weights + linear.num_bias for linear in self.outer_linears)
        total += sum(norm.num_params for norm in self.outer_norms)
        total += sum(layer.num_params * num for layer, num in self.layer_counts)
        total += sum(layer.num_params * num for layer, num in self.idle_layers) + self.num_idle_other_params
        return total

    @cached_property
    def num_active_params(self) -> int:
        """Parameters that one text token is multiplied with: idle encoders, idle experts and lookup tables left out,
        the head counted (tied or not)."""
        total = self.head.num_weights if self.head is not None else 0
        total += sum(linear.num_weights for linear in self.outer_linears)
        for layer, num in self.layer_counts:
            total += num * sum(linear.in_features * linear.out_features * linear.num_active for linear in layer.linears)
        return total
