"""SDPA's choice of kernel, and what kernels allocate for themselves."""

import itertools

import pytest

torch = pytest.importorskip("torch")

from planner.hardware.gpus import find_gpu  # noqa: E402
from planner.memory.attention_kernels import STAND_INS, attention_kernel, sdpa_capability  # noqa: E402
from planner.memory.workspace import workspace_bytes  # noqa: E402
from planner.models.spec import AttentionSpec  # noqa: E402
from planner.setup import TrainSetup  # noqa: E402
from probes.dryrun.kernels import Attention, KernelLog, choose_sdpa_kernel, kernels_of, sdpa_of  # noqa: E402
from probes.dryrun.metaops import fused_dropout  # noqa: E402
from probes.dryrun.tracker import Tracker  # noqa: E402
from probes.dryrun.workspaces import efficient_backward, flash_backward  # noqa: E402
from probes.stack.autocast import emulated_autocast  # noqa: E402
from tests.planner.helpers import loaded  # noqa: E402

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
    ("bfloat16", 8, 8, 128, False, 0.0, STAND_INS["unfused"], "math"),
    ("bfloat16", 8, 2, 128, False, 0.0, STAND_INS["xe2"], "flash"),
    ("bfloat16", 8, 8, 256, False, 0.0, STAND_INS["xe2"], "math"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_choose_sdpa_kernel(case: tuple[str, int, int, int, bool, float, tuple[int, int], str]) -> None:
    dtype_name, heads, kv_heads, size, masked, dropout, capability, expected = case
    dtype = getattr(torch, dtype_name)
    query = torch.empty(1, heads, 64, size, dtype=dtype, device="meta")
    key = torch.empty(1, kv_heads, 64, size, dtype=dtype, device="meta")
    mask = torch.empty(1, 1, 64, 64, dtype=torch.bool, device="meta") if masked else None
    kernel, reason = choose_sdpa_kernel(Attention(query, key, key, mask, dropout, enable_gqa=True), capability)
    assert kernel == expected
    assert bool(reason) == (kernel != "flash")


def test_cublas_workspace_sizes() -> None:
    """PyTorch's default ":4096:2:16:8" (KiB times count), and 32 MiB on Hopper."""
    assert workspace_bytes((8, 9)) == (4096 * 2 + 16 * 8) * 1024
    assert {workspace_bytes((major, 0)) for major in (9, 10)} == {32 * MIB}


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


@pytest.mark.parametrize(
    ("head", "per_head"),
    [
        (64, 320 * 64 * 4),  # 300 rows in blocks of 64
        (72, 384 * 96 * 4),  # in blocks of 128; the head in 32s
        (160, 384 * 160 * 4 + 2 * 512 * 160 * 4),  # and keys and values, 400 columns
    ],
)
def test_efficient_backward_accumulates_what_registers_do_not_hold(head: int, per_head: int) -> None:
    query = torch.empty(2, 4, 300, head, dtype=torch.bfloat16, device="meta")
    key = torch.empty(2, 4, 400, head, dtype=torch.bfloat16, device="meta")
    assert list(efficient_backward((query, query, key, key), {}, ())) == [8 * 320 * 4, 8 * per_head]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_dropout_keeps_one_byte_per_element(device: str) -> None:
    """CUDA's fused kernel: the output and a boolean mask, nothing else, with or without autograd."""
    rows = torch.zeros(64, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
    tracker = Tracker(device)
    with tracker, fused_dropout(device):
        dropped = torch.nn.functional.dropout(rows, 0.1)
        assert torch.nn.functional.dropout(rows, 0.1, training=False) is rows
    assert [origin.size_bytes for origin in tracker.origins.values()] == [64 * 128 * 2, 64 * 128]
    dropped.sum().backward()
    assert rows.grad is not None


def test_dropout_is_pytorchs_own_again_afterwards() -> None:
    rows = torch.zeros(64, 128, dtype=torch.bfloat16, device="meta")
    with fused_dropout("meta"):
        pass
    tracker = Tracker("meta")
    with tracker:
        torch.nn.functional.dropout(rows, 0.1)
    assert not any("native_dropout" in origin.op for origin in tracker.origins.values())


def test_math_kernel_stays_fp32_inside_under_autocast() -> None:
    """Autocast casts the call's inputs and excludes itself within: the scores of 8 heads of 64 by 64 are fp32."""
    from transformers import LlamaConfig

    query = torch.empty(1, 8, 64, 32, device="meta")
    key = torch.empty(1, 2, 64, 32, device="meta")
    log = KernelLog(capability=(7, 5))
    tracker = Tracker("meta")
    with kernels_of(log, LlamaConfig()), emulated_autocast(torch.bfloat16), tracker:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
        assert torch.nn.functional.linear(query, key[0, 0]).dtype is torch.bfloat16
    assert set(log.chosen) == {"math"}
    assert out.dtype is torch.bfloat16
    products = [origin.size_bytes for origin in tracker.origins.values() if "bmm" in origin.op]
    assert products == [8 * 64 * 64 * 4, 8 * 64 * 32 * 4]


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.float16, "efficient"), (torch.bfloat16, "math")])
def test_unsloths_heads_are_repeated_for_xformers_before_ampere(dtype: torch.dtype, kernel: str) -> None:
    """Unsloth 2026.10.9 utils/attention_dispatch.py: keys and values as copies of 8 heads, no matrix of scores;
    not of bf16, for which the formula has SDPA's math kernel too."""
    query = torch.empty(1, 8, 64, 32, dtype=dtype, device="meta")
    key = torch.empty(1, 2, 64, 32, dtype=dtype, device="meta")
    log = KernelLog(capability=(7, 5), xformers=True)
    attend, tracker = sdpa_of(log), Tracker("meta")
    with tracker:
        attend(query, key, key, is_causal=True, enable_gqa=True)
    assert set(log.chosen) == {kernel}
    sizes = [origin.size_bytes for origin in tracker.origins.values()]
    assert (8 * 64 * 64 * 4 in sizes) == (kernel == "math")
    assert sizes.count(8 * 64 * 32 * 2) >= (2 if kernel == "efficient" else 0)


def test_the_tracker_is_called_without_a_wrapper_of_the_compiler() -> None:
    """`TorchDispatchMode` puts one around `__torch_dispatch__` unless told not to: a call more at every operator."""
    assert Tracker.__torch_dispatch__.__code__.co_filename.endswith("tracker.py")


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEADS = ((8, 8, 64, 64), (8, 2, 128, 128), (16, 16, 192, 128), (8, 8, 256, 256), (4, 4, 320, 320))
CARDS = ("t4", "a100-80gb", "rtx-4090", "h100-sxm", "mi100", "rx-9060-xt-16gb", "rx-7900-xtx", "arc-a770", "arc-b580")
RULE_CASES = list(itertools.product(CARDS, DTYPES, HEADS, (False, True)))


def test_kernel_equals_the_dry_runs_choice() -> None:
    """The formula's rule, on shapes and masks of its own."""
    for case in RULE_CASES:
        gpu, dtype, heads, packing = case
        num_heads, num_kv_heads, head_dim, value_dim = heads
        spec = AttentionSpec(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, value_head_dim=value_dim
        )
        card = find_gpu(gpu)
        # transformers asks for grouped heads (instead of repeating them) without a mask and up to 256 wide
        grouped = num_kv_heads != num_heads and not packing and head_dim <= 256
        kv = num_kv_heads if grouped else num_heads
        query = torch.empty(1, num_heads, 64, head_dim, dtype=DTYPES[dtype], device="meta")
        key = torch.empty(1, kv, 64, head_dim, dtype=DTYPES[dtype], device="meta")
        value = torch.empty(1, kv, 64, value_dim, dtype=DTYPES[dtype], device="meta")
        mask = torch.empty(1, 1, 64, 64, dtype=torch.bool, device="meta") if packing else None
        wanted, reason = choose_sdpa_kernel(
            Attention(query, key, value, mask, enable_gqa=True), sdpa_capability(card, TrainSetup())
        )
        model = loaded("meta-llama/llama-3.1-8b")
        kernel = attention_kernel(model, TrainSetup(packing=packing), card, spec, dtype)
        assert kernel == wanted, (case, reason)
