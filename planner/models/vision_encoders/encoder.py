"""An encoder that makes tokens of pictures, as a model of its own with what stands between it and the text."""

from dataclasses import replace
from math import isqrt, prod

from planner.core.records import dataclass
from planner.models.families.parts import linear, plain
from planner.models.spec import AttentionSpec, LayerSpec, LinearSpec, ModelSpec, NormSpec, Role, Traits

FP32_BYTES = 4
INT64_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Projector:
    """One network between the encoder and the text, kept whole: no class checkpoints it.

    Attributes:
        layer: its matrices and norms as a layer.
        num: how many such stand side by side (Qwen3-VL's deepstack).
        tokens: rows that pass through it, of one frame.
    """

    layer: LayerSpec
    tokens: int
    num: int = 1


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """An encoder and what one picture becomes in it.

    Attributes:
        model: its layers as a model without embeddings and head.
        frames: pictures that the processor cuts one into, each seen by itself; 1 where it is left whole.
        grid: patches of a frame along height and width.
        patches: rows of a frame in the layers (a class token included).
        tokens: of one picture in the text; `marks`: what its conversation puts around them.
        shape: of a frame as the processor hands it over, in fp32; two numbers where patches of all frames are joined.
        masked_pixels: whether the processor adds a mask of one int64 for each pixel.
        positions: numbers (int64) that it adds to say where the patches of a frame lie.
        projectors: between the layers and the text.
        window_patches: rows that attend to each other in the layers of kind "vision-window".
        named_embeddings: whether its class names its patches' embeddings, so that checkpointing beside adapters makes
            them ask for a gradient (`PreTrainedModel.enable_input_require_grads`).
        num_other_params: outside layers and projectors (patches' convolution, positions), where it is asked.
        clipped: whether every matrix clamps what it takes and what it gives.
        looked_at: whether the text looks at what comes out in layers of its own, and no token stands for it: the
            features then live until the last of those layers is done.
        checkpoints: whether its class takes part in gradient checkpointing.
        joined: whether the frames of a micro-batch are one sequence, kept apart by a mask.
        convolves: whether it is Gemma 3n's, which has no layers of transformers'.
    """

    model: ModelSpec
    grid: tuple[int, int]
    patches: int
    tokens: int
    marks: int
    shape: tuple[int, ...]
    projectors: tuple[Projector, ...]
    frames: int = 1
    num_other_params: int = 0
    window_patches: int = 0
    masked_pixels: bool = False
    positions: int = 0
    named_embeddings: bool = True
    clipped: bool = False
    joined: bool = False
    looked_at: bool = False
    checkpoints: bool = True
    convolves: bool = False

    @property
    def num_windows(self) -> int:
        """Windows of a frame in the layers of kind "vision-window"."""
        side = isqrt(self.window_patches)
        return -(-self.grid[0] // side) * -(-self.grid[1] // side)

    @property
    def input_bytes(self) -> int:
        """A frame as the processor hands it over, with its mask and positions."""
        ints = prod(self.shape[1:]) * self.masked_pixels + self.positions
        return FP32_BYTES * prod(self.shape) + INT64_BYTES * ints

    @property
    def text_tokens(self) -> int:
        """Tokens of a sequence that one picture takes."""
        return self.tokens + self.marks


def mlp(names: tuple[str, ...], hidden: int, inner: int, *, bias: bool = True) -> tuple[LinearSpec, ...]:
    """The matrices of an MLP: three are gated, two are not."""
    roles: tuple[Role, ...] = ("gate", "up", "down") if len(names) == 3 else ("up", "down")
    ways = {"down": (inner, hidden)}
    return tuple(
        linear(name, role, *ways.get(role, (hidden, inner)), bias) for name, role in zip(names, roles, strict=True)
    )


def attention(heads: int, hidden: int, *, rotary: bool = False) -> AttentionSpec:
    """Every head with keys and values of its own."""
    size = hidden // heads
    return AttentionSpec(num_heads=heads, num_kv_heads=heads, head_dim=size, value_head_dim=size, rotary=rotary)


def projector(
    path: str, names: tuple[str, str], norm: NormSpec | None, width: int, out: int, *, inner: int = 0
) -> LayerSpec:
    """Two matrices around a GELU, between them `inner` wide (0: as wide as what comes in)."""
    inner = inner or width
    return LayerSpec(
        kind="projector",
        linears=(linear(names[0], "up", width, inner, True), linear(names[1], "down", inner, out, True)),
        norms=() if norm is None else (norm,),
        mlp=plain(inner, "gelu"),
        path=path,
    )


def one_matrix(
    path: str,
    name: str,
    width: int,
    out: int,
    *,
    norm: NormSpec | None = None,
    bias: bool = False,
    parameter: bool = False,
) -> LayerSpec:
    """A projector of one matrix; `parameter`: a bare one, which PEFT does not adapt."""
    return LayerSpec(
        kind="projector",
        linears=(linear(name, "other", width, out, bias, "parameter" if parameter else "linear"),),
        norms=() if norm is None else (norm,),
        path=path,
    )


def idle(layer: LayerSpec) -> LayerSpec:
    """A layer as weights alone: what its matrices do to a text token has no name."""
    linears = tuple(replace(matrix, role="other") for matrix in layer.linears)
    return replace(layer, linears=linears, attention=None, mlp=None)


def encoder_model(
    trunk: ModelSpec,
    hidden: int,
    layers: tuple[LayerSpec, ...],
    order: tuple[int, ...],
    outer_norms: tuple[NormSpec, ...] = (),
) -> ModelSpec:
    """The layers of an encoder as a model; `order`: of each layer the kind."""
    return ModelSpec(
        model_id=f"{trunk.model_id} (tower)",
        model_type=f"{trunk.model_type}_vision",
        built_class=trunk.built_class,
        hidden_size=hidden,
        vocab_size=0,
        max_position_embeddings=None,
        layer_kinds=layers,
        layer_order=order,
        embeddings=(),
        head=None,
        tied=False,
        outer_norms=outer_norms,
        attentions=trunk.attentions,
        traits=Traits(
            norm="layer" if {norm.kind for layer in layers for norm in layer.norms} == {"layer"} else trunk.traits.norm
        ),
    )
