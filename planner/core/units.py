"""Units for people. Data holds bytes, seconds and fractions; GiB, ms and % exist only here.

Importing this module costs nothing: no dependency.
"""

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TERA = 1.0e12
MIN_BLOCK_BYTES = 512
"""Smallest block of PyTorch's caching allocator, to which every request is rounded up (`kMinBlockSize`)."""


def gib(size_bytes: float) -> str:
    """`size_bytes` as text in GiB with two decimals, or MiB below 0.1 GiB."""
    if abs(size_bytes) < 0.1 * GIB:
        return f"{size_bytes / MIB:.1f} MiB"
    return f"{size_bytes / GIB:.2f} GiB"


def signed_gib(size_bytes: float) -> str:
    return f"{'-' if size_bytes < 0 else '+'}{gib(abs(size_bytes))}"


def percent(fraction: float, decimals: int = 0) -> str:
    return f"{100 * fraction:.{decimals}f} %"


def count(number: float) -> str:
    """A large count as text: 1.54 B, 7.3 M, 12.1 k."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * size:  # 999.6 M would round to 1e+03 M
            return f"{number / size:.3g} {suffix}"
    return f"{number:.0f}"


def seconds(duration_s: float) -> str:
    """A duration as text: 480 ms, 12.3 s, 4 min 10 s, 3 h 05 min, 2.1 days."""
    if duration_s < 1:
        return f"{duration_s * 1000:.0f} ms"
    if duration_s < 60:
        return f"{duration_s:.1f} s"
    if duration_s < 3600:
        return f"{int(duration_s // 60)} min {int(duration_s % 60):02d} s"
    if duration_s < 48 * 3600:
        return f"{int(duration_s // 3600)} h {int(duration_s % 3600 // 60):02d} min"
    return f"{duration_s / 86400:.1f} days"
