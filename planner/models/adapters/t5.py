"""T5 and Flan-T5: encoder and decoder, relative positions held by the first layer of each, no scaling of logits."""

from dataclasses import replace

from planner.models.adapters.fields import Fields
from planner.models.adapters.parts import Decoder, gated, linear, norm, plain
from planner.models.spec import LayerSpec, LinearSpec, MlpSpec, ModelSpec


class _T5(Decoder):
    """The names of T5's matrices; the head is tied whatever the config says (transformers 5)."""

    HIDDEN = ("d_model", "hidden_size")
    LAYERS = ("num_layers", "num_hidden_layers")
    HEADS = ("num_heads", "num_attention_heads")
    KV_HEADS = ""
    HEAD_DIM = "d_kv"
    token_table = "shared"

    def projections(self, prefix: str) -> tuple[LinearSpec, ...]:
        """q, k, v and o."""
        width = self.num_heads * self.head_dim
        inputs = (linear(f"{prefix}.{role}", role, self.hidden, width) for role in ("q", "k", "v"))
        return (*inputs, linear(f"{prefix}.o", "o", width, self.hidden))

    def mlp(self, prefix: str, mixer: MlpSpec) -> tuple[LinearSpec, ...]:
        """wi and wo, or wi_0, wi_1 and wo where the MLP is gated."""
        inner = mixer.intermediate_size
        down = linear(f"{prefix}.wo", "down", inner, self.hidden)
        if mixer.kind == "plain":
            return (linear(f"{prefix}.wi", "up", self.hidden, inner), down)
        gate = linear(f"{prefix}.wi_0", "gate", self.hidden, inner)
        return (gate, linear(f"{prefix}.wi_1", "up", self.hidden, inner), down)


def build(fields: Fields) -> ModelSpec:
    """The layers are the encoder's, then the decoder's."""
    base = _T5(fields, head_dim=64)
    num_decoder = fields.count("num_decoder_layers", kind="layers", default=base.num_layers)
    buckets = fields.count("relative_attention_num_buckets", kind="intermediate", default=32)
    mixer = _mixer(fields)
    base.final_norm = tuple(norm(f"{side}.final_layer_norm", base.hidden) for side in ("encoder", "decoder"))

    def layer(key: tuple[bool, bool]) -> LayerSpec:
        decoder, first = key
        last = 2 if decoder else 1
        linears = base.projections("layer.0.SelfAttention")
        if decoder:
            cross = base.projections("layer.1.EncDecAttention")
            linears += tuple(replace(one, of_encoder=one.role in ("k", "v")) for one in cross)
        return LayerSpec(
            kind="decoder" if decoder else "encoder",
            linears=linears + base.mlp(f"layer.{last}.DenseReluDense", mixer),
            norms=tuple(norm(f"layer.{index}.layer_norm", base.hidden) for index in range(last + 1)),
            attention=base.softmax(rotary=False, causal=decoder),
            cross_attention=base.softmax(rotary=False, cross=True, causal=False) if decoder else None,
            mlp=mixer,
            num_other_params=buckets * base.num_heads if first else 0,
            path="decoder.block" if decoder else "encoder.block",
        )

    order = [(False, index == 0) for index in range(base.num_layers)]
    order += [(True, index == 0) for index in range(num_decoder)]
    spec = base.spec("T5ForConditionalGeneration", order, layer, is_encoder_decoder=True, attentions=("eager", "sdpa"))
    return replace(spec, tied=True)


def _mixer(fields: Fields) -> MlpSpec:
    """`feed_forward_proj`: an activation, or "gated-" and an activation."""
    inner = fields.count("d_ff", kind="intermediate")
    projection = fields.text("feed_forward_proj", default="relu")
    if projection.count("-") > 1 or (projection.count("-") == 1 and not projection.startswith("gated-")):
        raise fields.wrong(f"feed_forward_proj must be like 'relu' or 'gated-gelu', got {projection!r}")
    if not projection.startswith("gated-"):
        return plain(inner, projection)
    return gated(inner, "gelu_new" if projection == "gated-gelu" else projection.removeprefix("gated-"))
