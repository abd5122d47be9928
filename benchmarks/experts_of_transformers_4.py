"""Formula against a real step of a mixture under transformers 4, whose experts are modules of their own.

    PYTHONPATH=. PYTHON benchmarks/experts_of_transformers_4.py

PYTHON: of an environment with transformers 4, peft, bitsandbytes and torch's CPU build (run on 22 November 2026 with
transformers 4.57.1, peft 0.17.1, bitsandbytes 0.50.2, torch 2.13.0). A Qwen3-MoE of four layers with random weights
takes two steps on the CPU, its storages followed; tests/planner/test_earlier.py keeps what was measured. With
transformers 5 the same script compares the stacked experts.
"""

import warnings
from typing import TYPE_CHECKING

from planner.hardware.gpus import find_gpu
from planner.memory.workspace import cublas_workspace_bytes
from planner.models.adapters import spec_from_config
from planner.models.earlier import of_transformers_4
from planner.planning.predict import predict
from planner.setup import TrainSetup

if TYPE_CHECKING:
    import torch

CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 16,
    "num_experts_per_tok": 4, "vocab_size": 2000, "max_position_embeddings": 2048, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "tie_word_embeddings": False, "architectures": ["Qwen3MoeForCausalLM"],
}  # fmt: skip
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERY = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def setups() -> list[TrainSetup]:
    """16-bit and NF4 bases, adapters on the attention and on the experts too, without and with checkpointing."""
    return [
        TrainSetup(
            method="qlora" if quantization == "nf4" else "lora",
            quantization=quantization,
            precision="bf16-pure",
            adapter_dtype="bf16",
            lora_targets=targets,
            micro_batch_seqs=2,
            seq_len_tokens=512,
            checkpointing=every,
            loss="full",
            stack="plain-loop-drops-outputs",
            optimizer="adamw-fused",
        )
        for quantization in ("none", "nf4")
        for targets in (ATTENTION, EVERY)
        for every in (0, 1)
    ]


def real_peak(setup: TrainSetup) -> int:
    """Allocated peak in bytes of two real steps on the CPU."""
    import peft
    import torch
    import transformers

    from probes.gpu.meters import CpuMeter

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**CONFIG)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.config.use_cache = False
    if setup.quantized:
        _quantize(model)
    if setup.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    adapter = peft.LoraConfig(r=setup.lora_rank, target_modules=list(setup.lora_targets))
    model = peft.get_peft_model(model, adapter, autocast_adapter_dtype=False).train()
    trained = [one for one in model.parameters() if one.requires_grad]
    for one in trained:
        one.data = one.data.to(torch.bfloat16)
    meter = CpuMeter()
    states = [one.quant_state for one in model.parameters() if getattr(one, "quant_state", None) is not None]
    held = [*(one.data for one in model.parameters()), *model.buffers()]
    held += [tensor for state in states for tensor in (state.absmax, state.code)]
    for tensor in {one.untyped_storage().data_ptr(): one for one in held}.values():
        meter.track(tensor)
    optimizer = torch.optim.AdamW(trained, fused=True)
    tokens = torch.randint(0, CONFIG["vocab_size"], (setup.micro_batch_seqs, setup.seq_len_tokens))
    with meter.following():
        for _ in range(2):
            meter.mark("forward")
            loss = model(input_ids=tokens, labels=tokens).loss
            meter.mark("backward")
            loss.backward()
            del loss
            meter.mark("step")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return max(meter.phase_peaks().values())


def _quantize(module: "torch.nn.Module") -> None:
    """Every nn.Linear but the head in NF4, as transformers replaces them."""
    import bitsandbytes
    import torch

    for name, child in list(module.named_children()):
        if type(child) is not torch.nn.Linear:
            _quantize(child)
        elif name != "lm_head":
            made = bitsandbytes.nn.Linear4bit(
                child.in_features, child.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
            )
            made.weight = bitsandbytes.nn.Params4bit(
                child.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=False
            )
            setattr(module, name, made.to("cpu"))


def main() -> None:
    import transformers

    warnings.simplefilter("ignore")
    spec = spec_from_config(CONFIG, model_id="tiny", source="here")
    if transformers.__version__.startswith("4"):
        spec = of_transformers_4(spec)
    card = find_gpu("a100-40gb")
    for setup in setups():
        real = real_peak(setup)
        said = predict(spec, card, setup).peak_allocated_bytes - cublas_workspace_bytes(card)
        where = "every linear" if setup.lora_targets == EVERY else "attention"
        print(f"{setup.quantization:5} {where:12} {setup.checkpointing} {real:10} {said / real - 1:+.1%}", flush=True)


if __name__ == "__main__":
    main()
