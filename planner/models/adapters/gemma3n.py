"""Gemma 3n: four residual streams that each layer updates in turn (AltUp), per-layer embeddings, layers that share keys
and values, the encoder that sees and the one that hears.

Tokens of text pass through the embedders of pictures and of sound too: each has a table of its own for special tokens.

Source: transformers 5.23, models/gemma3n.
Measured: equals the built module tree (tests/probes/test_gemma3n.py).
"""

from collections.abc import Sequence
from dataclasses import replace

from planner.models.adapters.fields import Fields
from planner.models.adapters.parts import SANDWICH, Decoder, gated, gated_mlp, linear, norm
from planner.models.spec import EmbeddingSpec, LayerSpec, LinearSpec, ModelSpec
from planner.models.vision_encoders.mobilenet import NUM_PARAMS, embedder

_TEXT = {
    "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 262400, "max_position_embeddings": 32768,
}  # fmt: skip
_AUDIO = {"hidden_size": 1536, "conf_num_hidden_layers": 12, "conf_num_attention_heads": 8, "conf_conv_kernel_size": 5}
"""Defaults of transformers' classes."""
_TYPES = ("sliding_attention", "full_attention")
_SPARSE_LAYERS = 10
"""Layers whose MLP keeps the largest 5 %, by default of more layers than that."""
_NORMS = (*SANDWICH, "altup.router_norm", "laurel.post_laurel_norm", "post_per_layer_input_norm")
_AUDIO_NORMS = 9
"""Of a layer that hears, as wide as it: two around each of its MLPs and its attention, two of its convolution, a last.
"""


def build(fields: Fields) -> ModelSpec:
    """The multimodal model (`gemma3n`) or the text model alone (`gemma3n_text`)."""
    if fields.text("model_type") == "gemma3n_text":
        return _Text(fields, "model.layers").trunk()
    trunk = _Text(fields.sub("text_config", _TEXT), "model.language_model.layers").trunk()
    vision = fields.optional_sub("vision_config") or Fields({}, f"{fields.where}: vision_config")
    audio = fields.optional_sub("audio_config") or Fields({}, f"{fields.where}: audio_config")
    idle = _audio_encoder(Fields({**_AUDIO, **audio.raw}, audio.where))
    widths = {"vision": vision.count("hidden_size", default=2048), "audio": audio.count("hidden_size", default=1536)}
    for (name, width), given in zip(widths.items(), (vision, audio), strict=True):
        rows = given.count("vocab_size", kind="vocab", default=128)
        made = embedder(width, trunk.hidden_size)
        others = width * (rows + 2)  # its table, and a norm in front of the matrix for tokens and one for features
        part = replace(made, kind="embedder", norms=(), path=f"model.embed_{name}", num_other_params=others)
        idle.append((part, 1))
    return replace(
        trunk,
        built_class="Gemma3nForConditionalGeneration",
        tied=fields.flag("tie_word_embeddings", True),
        idle_layers=tuple(idle),
        num_idle_other_params=NUM_PARAMS,
        attentions=("eager", "sdpa"),  # TimmWrapperModel refuses flash-attention by name
    )


class _Text(Decoder):
    """The text trunk."""

    def __init__(self, text: Fields, path: str) -> None:
        super().__init__(text, kv_heads=2, head_dim=256)
        self.path = path
        self.window = text.count("sliding_window", kind="window", default=512)
        self.per_layer = text.count("hidden_size_per_layer_input", default=256)
        self.rank = text.count("laurel_rank", default=64)
        self.streams = text.count("altup_num_inputs", kind="heads", default=4)
        self.bias = text.flag("attention_bias", False)
        self.activation = text.text("hidden_activation", default="gelu_pytorch_tanh")
        self.full = self._pattern()
        self.first_shared = self.first_sharing(self.full, default=15)

    def _pattern(self) -> tuple[bool, ...]:
        """Whether each layer is global."""
        return tuple(
            self.fields.layers_of("full_attention", _TYPES, self.num_layers, lambda index: (index + 1) % 5 == 0)
        )

    def _per_layer(self, name: str) -> Sequence[object] | None:
        """A list with an entry for every layer, None where the field is none."""
        found = self.fields.raw.get(name)
        if not isinstance(found, list | tuple):
            return None
        if len(found) != self.num_layers:
            raise self.fields.wrong(f"{name} must have {self.num_layers} entries, one per layer, got {len(found)}")
        return found

    def _widths(self) -> list[int]:
        """Of every layer's MLP."""
        name = "intermediate_size"
        listed = self._per_layer(name) or [self.fields.raw[name]] * self.num_layers
        return [Fields({name: one}, self.fields.where).count(name, kind="intermediate") for one in listed]

    def _sparse(self) -> list[bool]:
        """Whether each layer's MLP keeps its largest numbers alone."""
        name = "activation_sparsity_pattern"
        listed = self._per_layer(name)
        if listed is None:
            many = _SPARSE_LAYERS if self.num_layers > _SPARSE_LAYERS else 0
            return [index < many for index in range(self.num_layers)]
        return [Fields({name: one}, self.fields.where).positive(name) for one in listed]

    def layer(self, key: tuple[bool, bool, int, bool]) -> LayerSpec:
        """One kind of layer: global or local, with its own keys and values or another's, of this width."""
        full, shared, width, sparse = key
        norms = [norm("self_attn.q_norm", self.head_dim, rows=self.num_heads)]
        if not shared:
            norms.append(norm("self_attn.k_norm", self.head_dim, rows=self.num_kv))
            norms.append(norm("self_attn.v_norm", self.head_dim, rows=self.num_kv, weight=False))
        kept = ("q", "o") if shared else ("q", "k", "v", "o")
        return LayerSpec(
            kind="full" if full else f"sliding-{self.window}",
            linears=(
                *(one for one in self.attention(bias=self.bias, o_bias=self.bias) if one.role in kept),
                *gated_mlp(self.hidden, width),
                *self._beside(),
            ),
            norms=(*norms, *(norm(name, self.hidden) for name in _NORMS)),
            attention=self.softmax(None if full else self.window),
            mlp=gated(width, f"sparse-{self.activation}" if sparse else self.activation),
            num_other_params=self.hidden,  # the scale of what AltUp corrects
            path=self.path,
        )

    def _beside(self) -> tuple[LinearSpec, ...]:
        """AltUp's matrices, LAuReL's two and the layer's own input's."""
        streams, hidden = self.streams, self.hidden
        return (
            linear("altup.correction_coefs", "other", streams, streams),
            linear("altup.prediction_coefs", "other", streams, streams**2),
            linear("altup.modality_router", "other", hidden, streams),
            linear("laurel.linear_left", "other", hidden, self.rank),
            linear("laurel.linear_right", "other", self.rank, hidden),
            linear("per_layer_input_gate", "other", hidden, self.per_layer),
            linear("per_layer_projection", "other", self.per_layer, hidden),
        )

    def trunk(self) -> ModelSpec:
        """The text model."""
        packed = self.num_layers * self.per_layer
        rows = self.fields.count("vocab_size_per_layer_input", kind="vocab", default=262144)
        self.final_norm += (norm("per_layer_projection_norm", self.per_layer),)
        shared = [index >= self.first_shared for index in range(self.num_layers)]
        ends = (str(index) for _ in range(2) for index in range(self.streams - 1))
        return self.spec(
            "Gemma3nForCausalLM",
            tuple(zip(self.full, shared, self._widths(), self._sparse(), strict=True)),
            self.layer,
            tied=True,
            tables=(EmbeddingSpec(name="embed_tokens_per_layer", num_rows=rows, dim=packed),),
            outer_linears=(
                linear("per_layer_model_projection", "other", self.hidden, packed),
                *(linear(name, "other", self.hidden, self.hidden) for name in ends),
            ),
            logit_softcap=self.fields.positive("final_logit_softcapping")
            or not self.fields.has("final_logit_softcapping"),
        )


def _audio_encoder(audio: Fields) -> list[tuple[LayerSpec, int]]:
    """The conformer that hears, which no plan uses."""
    width, path = audio.count("hidden_size"), "model.audio_tower"
    heads = audio.count("conf_num_attention_heads", kind="heads")
    audio.divides("conf_num_attention_heads", heads, "hidden_size", width)
    halves = [("ffw_layer_start", width), ("ffw_layer_end", width)]
    layer = LayerSpec(
        kind="audio",
        linears=(
            *(linear(f"{name}.ffw_layer_1", "other", one, 4 * one) for name, one in halves),
            *(linear(f"{name}.ffw_layer_2", "other", 4 * one, one) for name, one in halves),
            linear("attention.attn.relative_position_embedding.pos_proj", "other", width, width),
            *(linear(f"attention.attn.{name}_proj", "other", width, width) for name in ("q", "k", "v")),
            linear("attention.post", "other", width, width),
            linear("lconv1d.linear_start", "other", width, 2 * width),
            linear("lconv1d.linear_end", "other", width, width),
        ),
        norms=tuple(norm(f"norm_{index}", width) for index in range(_AUDIO_NORMS)),
        num_other_params=width // heads + width * audio.count("conf_conv_kernel_size"),  # a scale, a convolution
        path=f"{path}.conformer",
    )
    pair = audio.raw.get("sscp_conv_channel_size")
    first, second = pair if isinstance(pair, list | tuple) and len(pair) == 2 else (128, 32)
    channels = Fields({"first": first, "second": second}, f"{audio.where}: sscp_conv_channel_size")
    first, second = channels.count("first"), channels.count("second")
    bins = audio.count("input_feat_size", default=128)
    convolutions = LayerSpec(
        kind="idle-part",
        linears=(linear("input_proj_linear", "other", bins // 4 * second, width),),
        num_other_params=9 * first + first + 9 * first * second + second,  # two of 3 x 3 with their norms
        path=f"{path}.subsample_conv_projection",
    )
    return [(layer, audio.count("conf_num_hidden_layers", kind="layers")), (convolutions, 1)]
