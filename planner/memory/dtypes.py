"""Data types as they flow through one training step: what is fp32 and what is 16-bit, decided in one place."""

from planner.core.records import dataclass
from planner.setup import TrainSetup
from planner.setup.allowed import SAVED_EMBEDDINGS

SIZE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def promote(first: str, second: str) -> str:
    """PyTorch's type promotion between floating types: equal stays, different 16-bit types or fp32 give fp32."""
    return first if first == second else "fp32"


@dataclass(frozen=True, kw_only=True, slots=True)
class DtypePolicy:
    """Data types of one setup's forward.

    Attributes:
        table: embedding tables, norms, biases and whatever is not quantized.
        stacks: stacks of experts, which multiply in their own type.
        residual: the hidden states between layers.
        compute: inputs and outputs of matrix multiplications.
        autocast: the autocast type, None without.
        adapter: LoRA matrices.
        quantized: whether the base is.
        returns_input: whether matrices return their input's type: bitsandbytes', and those of adapters that cast back.
    """

    table: str
    stacks: str
    residual: str
    compute: str
    autocast: str | None
    adapter: str
    quantized: bool
    returns_input: bool

    @property
    def attention_input(self) -> str:
        """Data type of queries, keys and values as the attention kernel sees them."""
        return self.autocast or (self.residual if self.returns_input else self.compute)

    def linear_out(self, input_dtype: str) -> str:
        """Data type that a base projection returns.

        Source: bitsandbytes 0.50 `Linear4bit.forward` casts to its compute dtype and back to the input's; PyTorch
        autocast returns its own type; peft 0.21 `tuners/vera/layer.py` and `tuners/oft/layer.py` cast back.
        """
        if self.returns_input:
            return input_dtype
        return self.autocast or self.compute


def copies_dtype(setup: TrainSetup) -> str:
    """Data type of an embedding and head that peft trains whole beside the adapters: that of their weights; TRL casts
    what is trained beside a quantized base to the adapters'.

    Source: peft 0.21 `utils/other.py` ModulesToSaveWrapper (deepcopy); trl 1.16 `SFTTrainer.__init__`.
    """
    if setup.quantized and setup.stack == "trl":
        return setup.resolved_adapter_dtype
    return "fp32" if setup.kbit_fp32_cast else setup.weight_dtype


def dtype_policy_of(setup: TrainSetup) -> DtypePolicy:
    """The data types of a setup.

    With `kbit_fp32_cast`, peft casts embeddings, norms and head to fp32, so the residual stream is fp32. Under
    autocast with 16-bit weights the residual stream keeps the weights' type; with fp32 weights, or those of the other
    16-bit type, it is fp32.

    Source: peft 0.21 `prepare_model_for_kbit_training`, `tuners/ia3/bnb.py` Linear4bit.forward, `tuners/lora/dora.py`
    and `tuners/adalora/bnb.py` (cast back without autocast alone); PyTorch autocast op
    lists; transformers 5.23 modeling code.
    """
    casts_back = setup.kind.returns_input_type and setup.lora_targets == "all-linear"
    table = "fp32" if setup.kbit_fp32_cast else setup.weight_dtype
    residual = promote(table, setup.autocast_dtype or table)
    if {*setup.modules_to_save} & {*SAVED_EMBEDDINGS}:  # the copy that trains makes the hidden states
        residual = promote(residual, copies_dtype(setup))
    if setup.kind.form == "scales" and setup.quantized and setup.lora_targets == "all-linear":
        # the layer takes fp32 without autocast, and under it hands on what its result times the scales is
        residual = promote(residual, setup.resolved_adapter_dtype if setup.autocast_dtype else "fp32")
    if setup.adapter == "dora" and setup.quantized and setup.autocast_dtype:  # so is what its magnitude scales
        residual = promote(residual, setup.resolved_adapter_dtype)
    if setup.adapter == "adalora" and setup.quantization == "int8":  # and what is divided by the rank, which is fp32
        residual = "fp32"
    return DtypePolicy(
        table=table,
        stacks="fp32" if setup.wide_stacks else table,
        residual=residual,
        compute=setup.compute_dtype,
        autocast=setup.autocast_dtype,
        adapter=setup.resolved_adapter_dtype,
        quantized=setup.quantized,
        returns_input=setup.quantized or casts_back,
    )
