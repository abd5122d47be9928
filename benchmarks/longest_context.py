"""The longest sequence that fits by the formula, beside Unsloth's published column.

    python -m benchmarks.longest_context

QLoRA of all linear layers, rank 32, micro-batch 1, the whole card. Unsloth's engine is fused kernels with checkpoints
in host memory and a loss that holds no logits; "HF + FA2" is what the column beside it ran: peft's fp32 cast, flash
attention 2, the logits in full, PyTorch's allocator as it is by default. Of so few and so large blocks that allocator
keeps what no later request fits: the 16-bit logits beside three fp32 copies. With expandable segments, which every
launch file here sets, the same run would reach 14 to 17 % further. A prediction: no GPU has run these here.

The published columns are straight lines through all cards (Llama-3.1-8B: 404.7 and 4,719 tokens per GiB from 12 to
80 GB), so they were continued from what a shorter run reserved, not found by running out. The line of plain Hugging
Face is 2.65 MB a token above 9.7 GiB; the dry run's is 2.68 MB above 9.4 GiB with fixed segments, 2.37 with expandable.

Source: unsloth.ai/docs/basics/unsloth-benchmarks and unsloth.ai/blog/llama3-3 (December 2024; an A100 for the 70B).
"""

from benchmarks.shared import loaded
from planner.hardware.gpus import find_gpu
from planner.memory.model import predict_memory
from planner.setup import TrainSetup

PUBLISHED = (
    ("meta-llama/Llama-3.1-8B", "rtx-4090", 78_475, 5_789),
    ("meta-llama/Llama-3.1-8B", "a100-80gb", 342_733, 28_454),
    ("meta-llama/Llama-3.3-70B-Instruct", "a100-80gb", 89_389, 6_916),
)
"""Model, card, Unsloth's tokens, those of Hugging Face + FA2."""
QLORA = TrainSetup(
    method="qlora", quantization="nf4-double", lora_rank=32, optimizer="adamw-8bit", adapter_dtype="fp32",
    loss="chunked",
)  # fmt: skip
UNSLOTH = QLORA.replace(kernels="fused", activation_offload=True)
PLAIN = QLORA.replace(
    loss="full", attention="flash-attention-2", kbit_fp32_cast=True, stack="hf", expandable_segments=False
)


def longest(model_id: str, gpu_key: str, setup: TrainSetup) -> int:
    """Tokens of the longest sequence, a multiple of 64, whose predicted device peak is at most the card."""
    model, gpu = loaded(model_id), find_gpu(gpu_key)
    fits, too_long = 0, 1 << 15
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        peak = predict_memory(model, gpu, setup.replace(seq_len_tokens=64 * middle)).peak_device_bytes
        fits, too_long = (middle, too_long) if peak <= gpu.memory_bytes else (fits, middle)
    return 64 * fits


def main() -> None:
    for model, gpu, unsloth, plain in PUBLISHED:
        for name, setup, published in (("Unsloth", UNSLOTH, unsloth), ("HF + FA2", PLAIN, plain)):
            predicted_tokens = longest(model, gpu, setup)
            off = 100 * (predicted_tokens / published - 1)
            print(f"{model:34} {gpu:10} {name:9} {published:8,} published {predicted_tokens:8,} {off:+6.1f} %")


if __name__ == "__main__":
    main()
