"""Whisper: an encoder of clips of one length behind two convolutions, and a decoder of text. Defaults are its class's.

Source: transformers 5.23 `models/whisper/modeling_whisper.py`, `configuration_whisper.py`.
"""

from dataclasses import replace

from planner.core.errors import ConfigError
from planner.models.adapters.fields import Fields
from planner.models.adapters.parts import Decoder, layer_norm, linear, plain, plain_mlp
from planner.models.spec import EmbeddingSpec, FrontEnd, LayerSpec, LinearSpec, ModelSpec

_KERNEL = 3


class _Half(Decoder):
    """The encoder or the decoder: names of its sizes, its layers' parts."""

    HIDDEN = ("d_model",)
    KV_HEADS = HEAD_DIM = ""

    def __init__(self, fields: Fields, side: str) -> None:
        self.LAYERS = (f"{side}_layers",)
        self.HEADS = (f"{side}_attention_heads",)
        super().__init__(fields)
        self.side = side
        self.inner = fields.count(f"{side}_ffn_dim", kind="intermediate")
        self.activation = fields.text("activation_function", default="gelu")

    def projections(self, prefix: str, *, of_encoder: bool = False) -> tuple[LinearSpec, ...]:
        """k (without a bias), v, q and o."""
        names = (("k_proj", "k", False), ("v_proj", "v", True), ("q_proj", "q", True), ("out_proj", "o", True))
        made = (linear(f"{prefix}.{name}", role, self.hidden, self.hidden, bias) for name, role, bias in names)  # type: ignore[arg-type]
        return tuple(replace(one, of_encoder=of_encoder and one.role in ("k", "v")) for one in made)

    def layer(self, clip_tokens: int) -> LayerSpec:
        """One layer; the decoder's looks at an encoder's output of `clip_tokens` rows."""
        decodes = self.side == "decoder"
        linears, names = self.projections("self_attn"), ["self_attn_layer_norm", "final_layer_norm"]
        if decodes:
            linears += self.projections("encoder_attn", of_encoder=True)
            names.insert(1, "encoder_attn_layer_norm")
        cross = self.softmax(rotary=False, cross=True, causal=False, key_tokens=clip_tokens)
        return LayerSpec(
            kind=self.side,
            linears=linears + plain_mlp(self.hidden, self.inner, ("fc1", "fc2"), True),
            norms=tuple(layer_norm(name, self.hidden) for name in names),
            attention=self.softmax(rotary=False, causal=decodes),
            cross_attention=cross if decodes else None,
            mlp=plain(self.inner, self.activation),
            path=f"model.{self.side}.layers",
            fixed_tokens=0 if decodes else clip_tokens,
        )


def build(fields: Fields) -> ModelSpec:
    """The layers are the encoder's, then the decoder's; the encoder's sinusoids are a table that never trains."""
    if fields.has("encoder_layerdrop") and (fields.raw["encoder_layerdrop"] or fields.raw.get("decoder_layerdrop")):
        raise ConfigError(f"{fields.where}: layerdrop is not supported", hint="set it to 0 in both halves")
    encoder, decoder = _Half(fields, "encoder"), _Half(fields, "decoder")
    hidden, mels = decoder.hidden, fields.count("num_mel_bins", kind="heads", default=80)
    clip = fields.count("max_source_positions", kind="position", default=1500)
    decoder.max_positions = fields.count("max_target_positions", kind="position", default=448)
    decoder.final_norm = tuple(layer_norm(f"{side}.layer_norm", hidden) for side in ("encoder", "decoder"))
    halves = {half.side: half.layer(clip) for half in (encoder, decoder)}
    order = ["encoder"] * encoder.num_layers + ["decoder"] * decoder.num_layers
    spec = decoder.spec(
        "WhisperForConditionalGeneration",
        order,
        halves.__getitem__,
        tied=True,
        tables=(
            EmbeddingSpec(name="decoder.embed_positions", num_rows=decoder.max_positions, dim=hidden),
            EmbeddingSpec(name="encoder.embed_positions", num_rows=clip, dim=hidden, frozen=True),
        ),
        num_outer_other_params=hidden * (_KERNEL * (mels + hidden) + 2),
        is_encoder_decoder=True,
        front_end=FrontEnd(mel_bins=mels, frames=2 * clip, path="model.encoder"),
    )
    assert spec.head is not None
    return replace(spec, head=replace(spec.head, name="proj_out"))
