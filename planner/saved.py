"""Modules that are trained whole beside adapters (PEFT's `modules_to_save`), which the memory formula does not hold."""

from collections.abc import Sequence

from planner.memory.dtypes import SIZE_BYTES
from planner.memory.optimizer import state_bytes
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup

HEADS = ("lm_head", "embed_out", "output", "output_layer")


def saved_params(model: ModelSpec, names: Sequence[str]) -> int:
    """Elements of the modules that these names end in: tables, the head, matrices of the layers; norms are left out."""
    num = 0
    for name in names:
        last = name.rpartition(".")[2]
        tables = [one.num_params for one in model.embeddings if one.name.rpartition(".")[2] == last]
        if tables:
            num += sum(tables)
        elif last in HEADS:
            num += model.vocab_size * model.hidden_size
        else:
            num += sum(
                repeats * one.num * one.in_features * one.out_features
                for layer, repeats in model.layer_counts
                for one in layer.linears
                if one.name.rpartition(".")[2] == last
            )
    return num


def table_bytes(model: ModelSpec, setup: TrainSetup, names: Sequence[str]) -> int:
    """Bytes of adapters on token tables on each GPU: two factors of rank x rows and rank x width, as trained ones are.

    Source: peft 0.21 `tuners/lora/layer.py`, class `Embedding`.
    """
    lasts = {name.rpartition(".")[2] for name in names}
    edges = sum(one.num_rows + one.dim for one in model.embeddings if one.name.rpartition(".")[2] in lasts)
    num, dtype = setup.lora_rank * edges, setup.resolved_adapter_dtype
    return num * 2 * SIZE_BYTES[dtype] + state_bytes(num, dtype, setup.optimizer) if num else 0


def saved_bytes(model: ModelSpec, setup: TrainSetup, names: Sequence[str], *, fp32: bool = False) -> int:
    """Bytes that training modules whole adds on each GPU: PEFT's copy of them, its gradients and optimizer states.

    The copy has the base's type (`ModulesToSaveWrapper` copies the module; `cast_adapter_dtype` leaves it alone), or
    fp32 where the base was prepared for k-bit training, and under fp16 with Unsloth. All three live to the step.

    Source: peft 0.21 `utils/other.py` (the type read off a small model); unsloth `models/llama.py`, `get_peft_model`.
    Not counted: activations that only trained weights keep; that Unsloth moves the frozen table to the host.
    """
    num = saved_params(model, names)
    if not num or setup.method == "full":
        return 0
    dtype = "fp32" if fp32 or setup.kbit_fp32_cast else setup.weight_dtype
    whole = num * 2 * SIZE_BYTES[dtype] + state_bytes(num, dtype, setup.optimizer)
    return whole // setup.data_degree if setup.parallel in ("fsdp2", "zero3") else whole
