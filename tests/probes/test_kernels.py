"""The formula's kernel rule against the dry run's choice, on shapes and masks of its own."""

import itertools

import pytest

torch = pytest.importorskip("torch")

from planner.hardware.gpus import find_gpu  # noqa: E402
from planner.memory.attention_kernels import attention_kernel  # noqa: E402
from planner.models.spec import AttentionSpec  # noqa: E402
from planner.setup import TrainSetup  # noqa: E402
from probes.dryrun.kernels import Attention, choose_sdpa_kernel  # noqa: E402
from tests.planner.helpers import loaded  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEADS = ((8, 8, 64, 64), (8, 2, 128, 128), (16, 16, 192, 128), (8, 8, 256, 256), (4, 4, 320, 320))
CASES = list(itertools.product(("t4", "a100-80gb", "rtx-4090", "h100-sxm"), DTYPES, HEADS, (False, True)))


def test_kernel_equals_the_dry_runs_choice() -> None:
    for case in CASES:
        gpu, dtype, heads, packing = case
        num_heads, num_kv_heads, head_dim, value_dim = heads
        spec = AttentionSpec(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, value_head_dim=value_dim
        )
        card = find_gpu(gpu)
        assert card.compute_capability is not None, case
        # transformers asks for grouped heads (instead of repeating them) without a mask and up to 256 wide
        grouped = num_kv_heads != num_heads and not packing and head_dim <= 256
        kv = num_kv_heads if grouped else num_heads
        query = torch.empty(1, num_heads, 64, head_dim, dtype=DTYPES[dtype], device="meta")
        key = torch.empty(1, kv, 64, head_dim, dtype=DTYPES[dtype], device="meta")
        value = torch.empty(1, kv, 64, value_dim, dtype=DTYPES[dtype], device="meta")
        mask = torch.empty(1, 1, 64, 64, dtype=torch.bool, device="meta") if packing else None
        wanted, reason = choose_sdpa_kernel(
            Attention(query, key, value, mask, enable_gqa=True), card.compute_capability
        )
        model = loaded("meta-llama/llama-3.1-8b")
        kernel = attention_kernel(model, TrainSetup(packing=packing), card, spec, dtype)
        assert kernel == wanted, (case, reason)
