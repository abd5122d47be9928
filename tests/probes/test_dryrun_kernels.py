"""SDPA's choice of kernel, and what kernels allocate for themselves."""

import pytest

torch = pytest.importorskip("torch")

from probes.dryrun.kernels import choose_sdpa_kernel  # noqa: E402
from probes.dryrun.workspaces import cublas_workspace_bytes, efficient_backward, flash_backward  # noqa: E402

MIB = 1 << 20
CASES = [
    # dtype, heads, kv heads, head size, mask, dropout, capability, kernel
    ("bfloat16", 8, 8, 128, False, 0.0, (8, 0), "flash"),
    ("bfloat16", 8, 2, 128, False, 0.0, (9, 0), "flash"),
    ("float16", 8, 2, 128, False, 0.0, (7, 5), "math"),
    ("float16", 8, 8, 128, False, 0.0, (7, 5), "efficient"),
    ("bfloat16", 8, 8, 128, False, 0.0, (7, 5), "math"),
    ("float32", 8, 8, 128, False, 0.0, (8, 0), "efficient"),
    ("float32", 8, 2, 128, False, 0.0, (8, 0), "math"),
    ("bfloat16", 8, 8, 128, True, 0.0, (8, 0), "efficient"),
    ("bfloat16", 8, 8, 256, False, 0.0, (8, 9), "flash"),
    ("bfloat16", 8, 8, 256, False, 0.1, (8, 9), "efficient"),
    ("bfloat16", 8, 8, 224, False, 0.0, (8, 9), "efficient"),
    ("bfloat16", 8, 8, 512, False, 0.0, (8, 0), "efficient"),
    ("bfloat16", 8, 8, 36, True, 0.0, (8, 0), "math"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_choose_sdpa_kernel(case: tuple[str, int, int, int, bool, float, tuple[int, int], str]) -> None:
    dtype_name, heads, kv_heads, size, masked, dropout, capability, expected = case
    dtype = getattr(torch, dtype_name)
    query = torch.empty(1, heads, 64, size, dtype=dtype, device="meta")
    key = torch.empty(1, kv_heads, 64, size, dtype=dtype, device="meta")
    mask = torch.empty(1, 1, 64, 64, dtype=torch.bool, device="meta") if masked else None
    kernel, reason = choose_sdpa_kernel(query, key, key, mask, dropout, capability)
    assert kernel == expected
    assert bool(reason) == (kernel != "flash")


def test_cublas_workspace_sizes() -> None:
    """PyTorch's default ":4096:2:16:8" (KiB times count), and 32 MiB on Hopper."""
    assert cublas_workspace_bytes((8, 9)) == (4096 * 2 + 16 * 8) * 1024
    assert cublas_workspace_bytes((9, 0)) == 32 * MIB


def test_flash_backward_accumulates_in_fp32_and_expands_grouped_heads() -> None:
    """2 sequences, 8 heads over 2, 1000 tokens (rounded to 1024), head size 64."""
    query = torch.empty(2, 8, 1000, 64, dtype=torch.bfloat16, device="meta")
    key = torch.empty(2, 2, 1000, 64, dtype=torch.bfloat16, device="meta")
    sizes = list(flash_backward((query, query, key, key), {}, ()))
    assert sizes == [2 * 8 * 1024 * 4, 2 * 8 * 1024 * 64 * 4, 2 * 1000 * 8 * 64 * 2, 2 * 1000 * 8 * 64 * 2]
    assert len(list(flash_backward((query, query, query, query), {}, ()))) == 2


def test_efficient_backward_needs_no_accumulator_in_fp32() -> None:
    query = torch.empty(1, 4, 128, 64, dtype=torch.float32, device="meta")
    assert list(efficient_backward((query, query, query, query), {}, ())) == [4 * 128 * 4]
