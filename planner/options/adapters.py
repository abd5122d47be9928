"""The kinds of adapters that peft trains beside a frozen base. To add one, add its row.

`TrainSetup.lora_rank` is an adapter's size: what it counts is the row's `size`.
"""

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Literal, final

from planner.core.records import dataclass

Form = Literal["low-rank", "shared", "scales", "rotations", "prompt", "prefix", "norms", "rows"]
"""What is trained: two thin matrices beside each adapted one; vectors around two frozen matrices that all share; a
vector that scales each; a rotation of each one's input; virtual tokens before the sequence, or before each layer's keys
and values; the norms; rows of the embedding."""
MATRIX_FORMS = ("low-rank", "shared", "scales", "rotations")
"""Forms that adapt matrices, which `lora_targets` names."""
TOKEN_FORMS = ("prompt", "prefix")
"""Forms that put virtual tokens before every sequence."""

Shapes = tuple[tuple[int, int], ...]
"""(rows, columns) of trained tensors; 0 columns: a vector."""
_ALL = ("none", "int8", "nf4", "nf4-double")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """One kind of adapter.

    Attributes:
        name: as `TrainSetup.adapter` says it.
        title: its name for people; what: how it works, beside the name.
        form: what is trained.
        size: what `lora_rank` counts, "" where the kind has no size (`lora_rank` is then 0).
        usual_size: peft's default, or its documentation's example where it has none; LoRA's is the planner's own.
        shapes: of the tensors of one matrix [out, in], given (in, out, size, scales the input); None where the kind
            adapts no matrices.
        start_only: LoRA with other start values or another scale: a step is LoRA's to the byte.
        dropout: whether peft has a dropout for it that is counted here.
        quantizations: of the base, as peft's code takes them.
        checkpointing: whether peft runs it under gradient checkpointing.
        conv1d: whether peft's class takes GPT-2's Conv1D.
        returns_input_type: whether an adapted matrix casts its result to its input's type, as a quantized one does.
        merges: whether the trained adapter can be folded into the base, so that serving costs nothing.
        config: peft's configuration class.
        arguments: what is set in it, beside size, targets, alpha, dropout and task.
        trl, axolotl, llamafactory: how the tool's own file says it; None where it cannot. transformers' script can
            always.
        quality: what was published of it against LoRA or full fine-tuning, "" where nothing is cited here.
        source: where it was published, and peft's code.
    """

    name: str
    title: str
    what: str = ""
    form: Form
    size: str = ""
    usual_size: int = 0
    shapes: Callable[[int, int, int, bool], Shapes] | None = None
    start_only: bool = False
    dropout: bool = False
    quantizations: tuple[str, ...] = _ALL
    checkpointing: bool = True
    conv1d: bool = True
    returns_input_type: bool = False
    merges: bool = True
    config: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    trl: Mapping[str, Any] | None = None
    axolotl: Mapping[str, Any] | None = None
    llamafactory: Mapping[str, Any] | None = None
    quality: str = ""
    source: str

    @property
    def adapts_matrices(self) -> bool:
        return self.form in MATRIX_FORMS

    @property
    def like_lora(self) -> bool:
        """Whether its step is LoRA's."""
        return self.start_only or self.name == "lora"


def block_size(in_features: int, requested: int) -> int:
    """The block that OFT really takes: the divisor of the input's width nearest to the one asked for, smaller ones
    first.

    Source: peft 0.21 `tuners/oft/layer.py` adjust_oft_parameters.
    """
    if requested >= in_features:
        return in_features
    above = next(size for size in range(requested, in_features + 1) if in_features % size == 0)
    below = next(size for size in range(requested, 0, -1) if in_features % size == 0)
    return below if requested - below <= above - requested else above


def _oft(in_features: int, out_features: int, requested: int, of_input: bool) -> Shapes:
    block = block_size(in_features, requested)
    return ((in_features // block, block * (block - 1) // 2),)


_LOW_RANK: dict[str, Any] = {
    "form": "low-rank",
    "size": "rank",
    "usual_size": 16,
    "dropout": True,
    "config": "LoraConfig",
    "shapes": lambda inner, outer, rank, _: ((rank, inner), (outer, rank)),
}

_ROWS = (
    Adapter(
        name="lora",
        title="LoRA",
        trl={},
        axolotl={},
        llamafactory={},
        quality="equal to full fine-tuning on data that the adapter can hold (Schulman and Thinking Machines 2025, "
        "https://thinkingmachines.ai/blog/lora/); below it on code and mathematics at rank 16 to 256 (Biderman et al. "
        "2024, https://arxiv.org/abs/2405.09673)",
        source="Hu et al. 2021, https://arxiv.org/abs/2106.09685; peft 0.21 tuners/lora",
        **_LOW_RANK,
    ),
    Adapter(
        name="rslora",
        title="rank-stabilised LoRA",
        what="LoRA whose scale is alpha over the root of the rank, not over the rank",
        start_only=True,
        arguments={"use_rslora": True},
        trl={"use_rslora": True},
        axolotl={"peft_use_rslora": True},
        llamafactory={"use_rslora": True},
        quality="lower perplexity than LoRA at high ranks (Llama 2 7B on OpenOrca, rank 4 to 2048), where LoRA's does "
        "not fall with the rank (the paper, figure 1)",
        source="Kalajdzievski 2023, https://arxiv.org/abs/2312.03732; peft 0.21 LoraConfig.use_rslora",
        **_LOW_RANK,
    ),
    Adapter(
        name="pissa",
        title="PiSSA",
        what="LoRA from the base's principal singular vectors",
        start_only=True,
        quantizations=("none",),
        arguments={"init_lora_weights": "pissa_niter_16"},
        axolotl={"peft_init_lora_weights": "pissa_niter_16"},
        llamafactory={"pissa_init": True},
        quality="Mistral 7B on GSM8K: 72.9 % against LoRA's 67.7 % (the paper's abstract, version 3)",
        source="Meng et al. 2024, https://arxiv.org/abs/2404.02948; peft 0.21 tuners/lora/layer.py pissa_init, which "
        "refuses a quantized base",
        **_LOW_RANK,
    ),
    Adapter(
        name="loftq",
        title="LoftQ",
        what="LoRA that starts from what quantization lost",
        start_only=True,
        quantizations=("nf4", "nf4-double"),
        quality="better than QLoRA's start, most at 2 bits and mixed 2 and 4 bits (the paper's abstract)",
        source="Li et al. 2023, https://arxiv.org/abs/2310.08659; peft 0.21 utils/loftq_utils.py "
        "replace_lora_weights_loftq, which reads the 16-bit weights again from their safetensors",
        **_LOW_RANK,
    ),
    Adapter(
        name="dora",
        title="DoRA",
        what="direction by LoRA, magnitude as a vector",
        arguments={"use_dora": True},
        trl={"use_dora": True},
        axolotl={"peft_use_dora": True},
        llamafactory={"use_dora": True},
        quality="commonsense reasoning, average of eight tasks, Llama 7B: 78.4 against LoRA's 74.7 (the paper, "
        "table 1)",
        source="Liu et al. 2024, https://arxiv.org/abs/2402.09353; peft 0.21 tuners/lora/dora.py",
        **_LOW_RANK | {"shapes": lambda inner, outer, rank, _: ((rank, inner), (outer, rank), (outer, 0))},
    ),
    Adapter(
        name="adalora",
        title="AdaLoRA",
        what="rank moved between matrices while training",
        arguments={"total_step": 1000},
        quality="better than its baselines, LoRA among them, most where parameters are few; encoders and summaries "
        "(the paper's abstract)",
        source="Zhang et al. 2023, https://arxiv.org/abs/2303.10512; peft 0.21 tuners/adalora, which starts every "
        "matrix at init_r (12)",
        **_LOW_RANK
        | {
            "usual_size": 12,
            "config": "AdaLoraConfig",
            "shapes": lambda inner, outer, rank, _: ((rank, inner), (rank, 1), (outer, rank)),
        },
    ),
    Adapter(
        name="vera",
        title="VeRA",
        what="vectors around two frozen random matrices that all layers share",
        form="shared",
        size="rank",
        usual_size=256,
        shapes=lambda inner, outer, rank, _: ((outer, 0), (rank, 0)),
        returns_input_type=True,
        config="VeraConfig",
        quality="as good as LoRA on GLUE and E2E with far fewer parameters (the paper's abstract)",
        source="Kopiczko et al. 2024, https://arxiv.org/abs/2310.11454; peft 0.21 tuners/vera",
    ),
    Adapter(
        name="oft",
        title="OFT",
        what="block-wise rotations of each matrix's input",
        form="rotations",
        size="block size",
        usual_size=32,
        shapes=_oft,
        conv1d=False,
        returns_input_type=True,
        config="OFTConfig",
        arguments={"r": 0},
        llamafactory={"finetuning_type": "oft"},
        source="Qiu et al. 2023, https://arxiv.org/abs/2306.07280, and 2025, https://arxiv.org/abs/2506.19847 (on the "
        "input, Cayley-Neumann); peft 0.21 tuners/oft",
    ),
    Adapter(
        name="ia3",
        title="IA3",
        what="a vector that scales keys, values and the MLP's inner layer",
        form="scales",
        shapes=lambda inner, outer, _, of_input: ((1, inner),) if of_input else ((outer, 1),),
        config="IA3Config",
        quality="the adapter of T-Few: 75.8 % on RAFT with T0-11B, 6 points above the best before it (the paper)",
        source="Liu et al. 2022, https://arxiv.org/abs/2205.05638; peft 0.21 tuners/ia3",
    ),
    Adapter(
        name="prompt",
        title="prompt tuning",
        what="virtual tokens before the sequence",
        form="prompt",
        size="virtual tokens",
        usual_size=20,
        merges=False,
        config="PromptTuningConfig",
        quality="matches full fine-tuning on SuperGLUE at T5-XXL (11B), falls short of it on smaller models "
        "(the paper, figure 1)",
        source="Lester et al. 2021, https://arxiv.org/abs/2104.08691; peft 0.21 tuners/prompt_tuning",
    ),
    Adapter(
        name="p-tuning",
        title="P-tuning",
        what="virtual tokens from a small network",
        form="prompt",
        size="virtual tokens",
        usual_size=20,
        merges=False,
        config="PromptEncoderConfig",
        source="Liu et al. 2021, https://arxiv.org/abs/2103.10385; peft 0.21 tuners/p_tuning (three matrices)",
    ),
    Adapter(
        name="prefix",
        title="prefix tuning",
        what="virtual keys and values in every layer",
        form="prefix",
        size="virtual tokens",
        usual_size=20,
        checkpointing=False,
        merges=False,
        config="PrefixTuningConfig",
        quality="table to text with GPT-2 on E2E: as good as full fine-tuning with 0.1 % of the parameters (the paper, "
        "table 1)",
        source="Li and Liang 2021, https://arxiv.org/abs/2101.00190; peft 0.21 tuners/prefix_tuning; peft_model.py "
        "refuses it under gradient checkpointing",
    ),
    Adapter(
        name="ln-tuning",
        title="LN-tuning",
        what="the norms alone",
        form="norms",
        config="LNTuningConfig",
        quality="multi-modal chat models of 13B: more than 20 % above LoRA on average over five tasks, 17.6 % less "
        "memory (the paper's abstract); of text alone nothing is cited here",
        source="Zhao et al. 2024, https://arxiv.org/abs/2312.11420; peft 0.21 tuners/ln_tuning",
    ),
    Adapter(
        name="trainable-tokens",
        title="trainable tokens",
        what="rows of the embedding",
        form="rows",
        size="trained tokens",
        usual_size=16,
        config="TrainableTokensConfig",
        source="peft 0.21 tuners/trainable_tokens",
    ),
)
ADAPTERS: Mapping[str, Adapter] = {row.name: row for row in _ROWS}
"""Every kind by its name."""

REFUSED: Mapping[str, str] = {
    "boft": "peft's BOFT reads a value of its permutation as it is built, which a dry run on meta tensors has not; "
    "oft is its one-factor form",
    "adaption-prompt": "peft's LLaMA-Adapter computes queries and attention twice, for Llama, Mistral and GPT-2 "
    "alone; prefix is the kind of its family that is counted here",
    "bottleneck": "peft has no bottleneck adapters (Houlsby et al. 2019): AdapterHub's adapters package has",
}
"""Kinds that people name and nobody plans here, with the reason and what is nearest."""

if len(ADAPTERS) != len(_ROWS) or set(ADAPTERS) & set(REFUSED):
    raise AssertionError("two kinds of adapters share a name")


def refusal(kind: str) -> str:
    """Why a kind that is not in ADAPTERS is not planned, "" where nobody knows it."""
    return REFUSED.get(kind.lower().replace("_", "-"), "")
