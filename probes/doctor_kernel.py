"""The smallest Triton kernel, which `probes.doctor_torch` compiles: Triton reads source and globals from a file."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def double(values, out, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """`out` = 2 x `values`, of `size` elements."""
    places = tl.arange(0, size)
    tl.store(out + places, tl.load(values + places) * 2)
