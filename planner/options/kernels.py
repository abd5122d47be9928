"""The kernel families: what computes norms, rotary embedding, gated activation and LoRA. To add one, add its row."""

from collections.abc import Mapping, Sequence
from typing import final

from planner.core.records import dataclass
from planner.core.shipped import by_model_type, model_types
from planner.options.stacks import TARGET_ROWS, written_by


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class KernelFamily:
    """One family of kernels around the matrix multiplications.

    Attributes:
        name: as `TrainSetup.kernels` says it.
        parts: what of a layer it computes as one kernel each, where it knows the model's type: "norm" (RMSNorm),
            "head-norm" (the RMSNorm of queries and keys), "rotary", "gated" (activation times up projection), "lora"
            (a matrix and its adapter as one autograd function; an MLP of three such as one).
        triton: whether its kernels are Triton's.
        package: what a plain transformers stack installs for it; "" for none. Axolotl and Unsloth bring "fused" along.
        only: launch targets whose files alone can ask for it; (): every tool on transformers can.
        nvidia: whether it is known to run on NVIDIA's cards only.
        tie_break: breaks ties in speed: fewer packages; smaller is simpler.
        words: what it is called where a person reads.
    """

    name: str
    parts: frozenset[str]
    triton: bool
    package: str
    tie_break: int
    words: str
    only: tuple[str, ...] = ()
    nvidia: bool = False


LIGER = "liger-kernel"
LAYER_PARTS = frozenset({"norm", "head-norm", "rotary", "gated"})
_ROWS = (
    KernelFamily(name="eager", parts=frozenset(), triton=False, package="", tie_break=0, words="eager kernels"),
    KernelFamily(name="liger", parts=LAYER_PARTS, triton=True, package=LIGER, tie_break=1, words="Liger kernels"),
    KernelFamily(
        name="fused",
        parts=LAYER_PARTS | {"lora"},
        triton=True,
        package="",
        tie_break=2,
        words="fused LoRA kernels",
        only=("axolotl", "unsloth"),
        nvidia=True,
    ),
)
KERNELS: Mapping[str, KernelFamily] = {row.name: row for row in _ROWS}
"""Every family by its name."""

LIGER_PARTS: Mapping[str, frozenset[str]] = {
    name: frozenset(parts) for name, parts in by_model_type("liger_parts").items()
}
"""Model type -> the parts that Liger's switch computes in it. Left out: types of which it changes little or what is not
modelled (Llama 4, Gemma 4, DeepSeek, Qwen3-Next). Routed experts stay transformers': Liger's own grouped kernel for
them is switched off in what is written here.

Source: liger-kernel 0.8.5 `transformers/monkey_patch.py` (`tools/build_types.py`).
"""
LIGER_LOSS = model_types("liger_loss")
"""Model types whose loss Liger fuses with the head. For any other a trainer's Liger switch leaves the logits held in
full, and says so in a log line at most; for Granite it patches layers and refuses the fused loss.

Source: liger-kernel 0.8.5 `transformers/monkey_patch.py` MODEL_TYPE_TO_APPLY_LIGER_FN, whose functions fuse it unless
they are told not to.
"""
USUAL_TYPE = "llama"
"""The type whose kernels a model is taken to have that nobody named."""
FUSED_LORA = model_types("unsloth")
"""Model types whose attention and MLP both Axolotl and Unsloth run as fused LoRA functions.

Source: Unsloth's `models/loader.py` (types with a class of its own); Axolotl docs/lora_optims and
`monkeypatch/lora_kernels.py` QKV_PATCHES, which have all of them.
"""


COMPILED = LAYER_PARTS | {"lora", "inputs"}
"""What torch.compile makes one kernel of in any layer; "inputs": what several matrices multiplied is kept once, in the
type that is multiplied.

Source: PyTorch 2.13 `torch/_functorch/partitioners.py` min_cut_rematerialization_partition: of what the backward needs
the cut with the fewest bytes is kept, chains of elementwise operations, norms and casts are recomputed, but not what a
product of the backward reads.
"""


def kernels_refusal(kernels: str, model_type: str) -> str:
    """Why a family does not run a model type on any card, "" where it does."""
    if not KERNELS[kernels].parts:
        return ""
    row = KERNELS[kernels]
    if "lora" in row.parts and model_type not in FUSED_LORA:
        return f"no tool has {row.words} for {model_type}"
    return "" if model_type in LIGER_PARTS else f"Liger has no layer kernels for {model_type}"


MEASURED_ON, NUM_MEASURED = "a100-80gb", 35
"""Pairs of runs with and without fused kernels: fms-acceleration's (benchmarks/speed_ratios.py)."""
COMPILES_NOTHING = (
    "flash attention inside checkpointed layers leaves torch.compile's graph, and those layers then run as they are"
)
"""See `TrainSetup.compiled`."""


def speed_note(kernels: str, gpu_key: str, *, compiled: bool = False) -> str:
    """How little stands behind the speed of a kernel family, or of torch.compile, one sentence; "" for neither."""
    if compiled:
        return (
            "What torch.compile gains is a prediction: 6 pairs of runs (B200, A100, H100) were measured, 9 % off in "
            "the median, 28 % at most; compiling itself (minutes, at the first step and once more at a second length) "
            "is not counted."
        )
    if not KERNELS[kernels].parts:
        return ""
    here = "on this card" if gpu_key == MEASURED_ON else "on an A100, none on this card"
    return f"What {KERNELS[kernels].words} gain is a prediction: {NUM_MEASURED} pairs of runs measured {here}."


PLANNED_KERNELS = ("liger", "eager")
"""What is walked where neither a family nor a launch target was named; eager stays where the others gain too little."""


def planned_kernels(targets: Sequence[str], objective: str) -> tuple[str, ...]:
    """What a plan for these launch targets tries, or where none is named for those that have a file for the objective:
    the first one's, as the others are held to it."""
    return TARGET_ROWS[next(iter(targets or written_by(objective)))].kernels or PLANNED_KERNELS


def running(parts: frozenset[str]) -> str:
    """The family that computes just these parts of a layer, "" where none does."""
    return next((row.name for row in _ROWS if row.parts == parts), "")
