"""Every kind of adapter as peft itself builds it: how many parameters it trains, and the memory of a step with it."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from planner.choices.adapters import ADAPTERS  # noqa: E402
from planner.errors import SetupError  # noqa: E402
from planner.exporters import EXPORTERS  # noqa: E402
from planner.hardware.gpus import find_gpu  # noqa: E402
from planner.interchange import setup_from_dict  # noqa: E402
from planner.memory.model import predict_memory  # noqa: E402
from planner.memory.trained import trained_parameters  # noqa: E402
from planner.models.adapters import spec_from_config  # noqa: E402
from planner.outcome import Prediction  # noqa: E402
from probes.dryrun import dry_run  # noqa: E402
from probes.stack.adapters import add_adapters  # noqa: E402
from tests.planner.launch_sweep import request  # noqa: E402
from tests.probes.dryrun_small import small_config  # noqa: E402
from tests.probes.meta_models import build_on_meta  # noqa: E402

TYPES = ("llama", "qwen3", "gemma2", "phi3", "gpt2", "gpt_neox")
"""Six ways to name and shape a layer: grouped keys, norms of heads, a width of heads of its own, fused matrices, Conv1D
with biases, LayerNorm with a parallel block."""


def test_trained_parameters_equal_pefts_of_every_kind() -> None:
    """All kinds on six model types; the model is built once per type and peft's wrapping is undone by building anew."""
    for model_type in TYPES:
        config = small_config(model_type)
        spec = spec_from_config(config, model_id=model_type, source="test")
        for kind, row in ADAPTERS.items():
            setup = setup_from_dict(
                {
                    "adapter": kind,
                    "checkpointing": row.checkpointing,
                    "lora_rank": 6 if row.size else 0,
                    **({"method": "qlora"} if "none" not in row.quantizations else {}),
                }
            )
            if kind == "oft" and model_type == "gpt2":  # neither side takes Conv1D
                with pytest.raises(SetupError, match="Conv1D"):
                    trained_parameters(spec, setup)
                continue
            with torch.device("meta"):
                wrapped = add_adapters(build_on_meta(config), setup)
            real = sum(one.numel() for one in wrapped.parameters() if one.requires_grad)
            assert trained_parameters(spec, setup).num == real, (model_type, kind)


def test_the_scripts_own_lines_train_as_many_parameters() -> None:
    """The configuration that a launch script of transformers holds, given to peft."""
    import peft

    config = small_config("llama")
    spec = spec_from_config(config, model_id="llama", source="test")
    for kind, row in ADAPTERS.items():
        targets = {"lora_targets": ["k_proj", "v_proj", "down_proj"]} if kind == "ia3" else {}
        if kind == "adalora" or "none" not in row.quantizations:
            continue
        setup = setup_from_dict({"adapter": kind, "checkpointing": row.checkpointing, "loss": "full", **targets})
        text = EXPORTERS["hf"](request(setup, model=spec)).files[0].text
        name = "lora" if row.form == "low-rank" else "adapter"
        lines = text[text.index(f"\n{name} = ") :]
        made: dict[str, Any] = {}
        exec(lines[: lines.index("\n)\n") + 3].replace("pissa_niter_16", "gaussian"), vars(peft), made)
        with torch.device("meta"):
            wrapped = peft.get_peft_model(build_on_meta(config), made[name])
        real = sum(one.numel() for one in wrapped.parameters() if one.requires_grad)
        assert trained_parameters(spec, setup).num == real, kind


AGREE, STEP = 0.01, 0.002
"""Formula against dry run on two layers, at the peak and in the optimizer's step; whole models lie nearer
(benchmarks/adapter_kinds.py)."""


@pytest.mark.parametrize("kind", [name for name, row in ADAPTERS.items() if not row.start_only])
def test_formula_and_dry_run_agree_on_every_kind(kind: str) -> None:
    """peft's own code on meta tensors: what it keeps, its temporaries, its virtual tokens."""
    layers = 4 if kind == "prefix" else 2  # whose one parameter is as wide as all layers, also those that are repeated
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": layers, "vocab_size": 8000}
    shape["head_dim"] = 64
    config = small_config("llama") | shape | {"num_attention_heads": 16, "num_key_value_heads": 4}
    model, card = spec_from_config(config, model_id="small", source="test"), find_gpu("a100-80gb")
    targets = {"lora_targets": ["k_proj", "v_proj", "down_proj"]} if kind == "ia3" else {}
    checkpointing = ADAPTERS[kind].checkpointing
    loss = "chunked" if ADAPTERS[kind].adapts_matrices else "full"  # of the rest the loss is the peak
    size = {"lora_rank": 200} if kind == "prefix" else {}
    setup = setup_from_dict({
        "adapter": kind, "checkpointing": checkpointing, "seq_len_tokens": 1024, "loss": loss, **targets, **size
    })  # fmt: skip
    found = dry_run(model, card, setup, use_cache=False)
    assert isinstance(found, Prediction), found
    formula = predict_memory(model, card, setup)
    assert formula.peak_allocated_bytes == pytest.approx(found.peak_allocated_bytes, rel=AGREE)
    assert formula.phase_bytes["step"] == pytest.approx(found.phase_peaks_bytes["step"], rel=STEP)
