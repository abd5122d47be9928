"""The emulated autocast casts what CUDA's autocast casts, where it casts it."""

import pytest

torch = pytest.importorskip("torch")

from probes.stack import autocast  # noqa: E402
from probes.stack.autocast import cached_cast, emulated_autocast, emulation_installed  # noqa: E402

LEFT_OUT = ("upsample", "_upsample")
"""Image resizing: no language model calls it."""


def test_autocast_lists_are_those_of_cuda() -> None:
    """Every operator with an AutocastCUDA kernel in this build is in one of the lists, and nothing else is.

    Left out besides: the promotion of lists (cat, stack), whose kernels promote like the operators themselves, and
    binary cross-entropy, which only raises an error, and cuDNN's own convolutions.
    """
    listed = {
        *autocast.LOWER_PRECISION,
        *autocast.FP32,
        *autocast.FP32_SET_OPT_DTYPE,
        *autocast.FP32_APPEND_DTYPE,
        *autocast.PROMOTE,
    }
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    registered = {
        name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")
    }
    on_cuda = {name for name in registered if has(f"aten::{name}", "AutocastCUDA")}
    missing = {name for name in on_cuda - listed if not name.startswith(LEFT_OUT)}
    assert missing <= {"cat", "stack", "binary_cross_entropy", "cudnn_convolution", "cudnn_convolution_transpose"}
    assert (listed & registered) <= on_cuda


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_autocast_policies(device: str) -> None:
    rows = torch.ones(4, 8, device=device)
    weight = torch.ones(8, 8, device=device)
    half = rows.to(torch.bfloat16)
    with emulated_autocast(torch.bfloat16):
        assert torch.nn.functional.linear(rows, weight).dtype is torch.bfloat16
        assert (rows @ weight).dtype is torch.bfloat16
        assert torch.einsum("ij,jk->ik", rows, weight).dtype is torch.bfloat16
        assert half.pow(2).dtype is torch.float32
        assert torch.softmax(half, -1).dtype is torch.float32
        assert torch.softmax(half, -1, dtype=torch.bfloat16).dtype is torch.bfloat16
        assert half.sum().dtype is torch.float32
        assert torch.nn.functional.layer_norm(half, (8,)).dtype is torch.float32
        assert (half * 2).dtype is torch.bfloat16
        assert rows.double().pow(2).dtype is torch.float64
        with emulated_autocast(torch.bfloat16, enabled=False):
            assert (rows @ weight).dtype is torch.float32
        assert (rows @ weight).dtype is torch.bfloat16
    assert (rows @ weight).dtype is torch.float32


def test_autocast_keeps_casts_of_trained_fp32_leaves_only() -> None:
    trained = torch.ones(4, 4, requires_grad=True)
    frozen = torch.ones(4, 4)
    with emulated_autocast(torch.bfloat16):
        assert cached_cast(trained, torch.bfloat16) is cached_cast(trained, torch.bfloat16)
        assert cached_cast(frozen, torch.bfloat16) is not cached_cast(frozen, torch.bfloat16)
        assert cached_cast(trained * 1, torch.bfloat16) is not cached_cast(trained * 1, torch.bfloat16)
        first = cached_cast(trained, torch.bfloat16)
    with emulated_autocast(torch.bfloat16):
        assert cached_cast(trained, torch.bfloat16) is not first


def test_autocast_gradients_flow_through_the_casts() -> None:
    weight = torch.full((3, 3), 2.0, requires_grad=True)
    with emulated_autocast(torch.bfloat16):
        out = torch.nn.functional.linear(torch.ones(2, 3), weight)
    out.sum().backward()
    assert weight.grad.dtype is torch.float32
    assert weight.grad.tolist() == [[2.0] * 3] * 3


def test_autocast_emulation_is_what_libraries_see_and_set() -> None:
    with emulation_installed(), emulated_autocast(torch.float16):
        assert torch.is_autocast_enabled("meta")
        assert torch.get_autocast_dtype("cpu") is torch.float16
        with torch.autocast("cpu", enabled=False):
            assert not torch.is_autocast_enabled()
        assert torch.is_autocast_enabled()
    assert not torch.is_autocast_enabled("cpu")
