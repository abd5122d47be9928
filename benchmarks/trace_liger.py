"""Liger's kernels on a phantom GPU against the memory that others measured (Liger's own benchmark files).

    python -m benchmarks.trace_liger kernel_bench_liger.csv     # needs liger-kernel and triton; writes the table below
    git -C Liger-Kernel archive 6a2c4913 src | tar -x -C OLD
    python -m benchmarks.trace_liger kernel_bench_liger.csv --liger OLD/src --at 6a2c4913

Each row of the measurements is one call of a kernel's forward and backward; here the same shapes run through today's
liger-kernel and transformers (or the code that was measured: COMMITS), Triton launches as no-ops. cuBLAS's workspaces
and the buffers of PyTorch's sums are counted as the measurement does. Results: benchmarks/data/trace_liger.json.
"""

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from planner.core.units import MIB
from planner.hardware.gpus import find_gpu
from probes.phantom.card import TraceOptions, card_of
from probes.phantom.session import phantom_gpu

OUT = Path(__file__).parent / "data" / "trace_liger.json"
CARDS = {"NVIDIA A100-SXM4-80GB": "a100-80gb", "NVIDIA H100 80GB HBM3": "h100-sxm"}
LEFT_OUT = {
    "embedding": "the measured process held tensors of earlier benchmarks too (12 GB for 50 MB of output)",
    "fused_linear_orpo_loss": "the measured function was compiled, and no driver of ours runs it",
}
Full = Callable[[], Any]


def _random(*shape: int, dtype: torch.dtype, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, device="cuda", requires_grad=grad)


def cross_entropy(provider: str, x: int, extra: dict[str, Any]) -> Full:
    """Logits [8 x 2048, x] in fp32 and their loss."""
    from liger_kernel.transformers.cross_entropy import LigerCrossEntropyLoss

    loss = (LigerCrossEntropyLoss if provider == "liger" else nn.CrossEntropyLoss)()
    logits = _random(extra["B"] * extra["T"], x, dtype=torch.float32)
    target = torch.randint(x, (extra["B"] * extra["T"], 1), device="cuda").squeeze(1)

    def full() -> None:
        loss(logits, target).backward()

    return full


def _mlp(provider: str, name: str, rows: tuple[int, int], extra: dict[str, Any], mode: str) -> Full:
    from liger_kernel.transformers.geglu import LigerGEGLUMLP
    from liger_kernel.transformers.swiglu import LigerSwiGLUMLP
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    config = LlamaConfig(
        hidden_size=extra["hidden_size"],
        intermediate_size=extra["intermediate_size"],
        hidden_act=extra["hidden_act"],
    )
    liger = LigerGEGLUMLP if name == "geglu" else LigerSwiGLUMLP
    layer = (liger if provider == "liger" else LlamaMLP)(config).to("cuda").to(torch.bfloat16)
    inputs = _random(*rows, extra["hidden_size"], dtype=torch.bfloat16)

    if mode == "forward":
        return lambda: layer(inputs)
    out = layer(inputs) if mode == "backward" else None

    def full() -> None:
        y = out if out is not None else layer(inputs)
        y.backward(torch.randn_like(y), retain_graph=True)

    return full


def geglu(provider: str, x: int, extra: dict[str, Any], mode: str) -> Full:
    """A gated MLP."""
    return _mlp(provider, "geglu", (extra["bsz"], x), extra, mode)


def swiglu(provider: str, x: int, extra: dict[str, Any], mode: str) -> Full:
    """A gated MLP."""
    return _mlp(provider, "swiglu", (extra["B"], x), extra, mode)


def _norm(module: nn.Module, x: torch.Tensor) -> Full:
    dy = torch.randn_like(x)

    def full() -> None:
        module(x).backward(dy, retain_graph=True)

    return full


def layer_norm(provider: str, x: int, extra: dict[str, Any]) -> Full:
    """[4096, x] in fp32."""
    from liger_kernel.transformers.layer_norm import LigerLayerNorm

    module = (LigerLayerNorm if provider == "liger" else nn.LayerNorm)(x, eps=extra["eps"]).to("cuda")
    return _norm(module, _random(extra["M"], x, dtype=torch.float32))


class _LlamaNorm(nn.Module):  # type: ignore[misc]
    """Llama's norm as transformers computes it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalised in fp32."""
        dtype = hidden.dtype
        hidden = hidden.to(torch.float32)
        variance = hidden.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden * torch.rsqrt(variance + self.eps)).to(dtype)


def rms_norm(provider: str, x: int, extra: dict[str, Any]) -> Full:
    """[2048, x] in bf16; the weight stays in fp32, as in the benchmark."""
    from liger_kernel.transformers.rms_norm import LigerRMSNorm

    module = (LigerRMSNorm if provider == "liger" else _LlamaNorm)(x, eps=extra["eps"]).to("cuda")
    return _norm(module, _random(extra["M"], x, dtype=torch.bfloat16))


def rope(provider: str, x: int, extra: dict[str, Any], x_name: str) -> Full:
    """Rotary embedding of one sequence."""
    from liger_kernel.transformers.rope import liger_rotary_pos_emb
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    hidden, tokens = (x, extra["seq_len"]) if x_name == "H" else (extra["hidden_size"], x)
    heads, kv_heads = extra["num_q_heads"], extra["num_kv_heads"]
    head = hidden // heads
    table = LlamaRotaryEmbedding(LlamaConfig(hidden_size=hidden, num_attention_heads=heads, head_dim=head)).to("cuda")
    query = _random(1, tokens, heads, head, dtype=torch.bfloat16).transpose(1, 2)
    key = _random(1, tokens, kv_heads, head, dtype=torch.bfloat16).transpose(1, 2)
    dq, dk = torch.randn_like(query), torch.randn_like(key)
    positions = torch.arange(tokens, device="cuda", dtype=torch.long).unsqueeze(0)
    cos, sin = table(key, positions)
    apply = liger_rotary_pos_emb if provider == "liger" else apply_rotary_pos_emb

    def full() -> None:
        q_out, k_out = apply(query, key, cos, sin, positions) if provider == "liger" else apply(query, key, cos, sin)
        torch.autograd.grad((q_out, k_out), (query, key), (dq, dk), allow_unused=True, retain_graph=True)

    return full


def fused_linear_cross_entropy(provider: str, x: int, extra: dict[str, Any]) -> Full:
    """Output head and loss of x tokens."""
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    head, _other = (
        nn.Linear(extra["H"], extra["V"], bias=False, dtype=torch.bfloat16, device="cuda") for _ in range(2)
    )  # the benchmark makes one for either provider
    loss: Any = LigerFusedLinearCrossEntropyLoss() if provider == "liger" else nn.CrossEntropyLoss()
    hidden = _random(x, extra["H"], dtype=torch.bfloat16)
    target = torch.randint(extra["V"], (x, 1), dtype=torch.long, device="cuda").squeeze(1)

    def full() -> None:
        assert _other is not None  # held as long as this function
        out = loss(head.weight, hidden, target) if provider == "liger" else loss(head(hidden), target)
        out.backward()

    return full


def fused_add_rms_norm(provider: str, x: int, extra: dict[str, Any]) -> Full:
    """Residual addition and norm of [2048, x] in fp32."""
    from liger_kernel.transformers.fused_add_rms_norm import LigerFusedAddRMSNorm
    from liger_kernel.transformers.rms_norm import LigerRMSNorm

    fused = provider == "liger_fused_add_rms_norm"
    weight = nn.Parameter(torch.ones(x, device="cuda")) if provider == "liger_rms_norm" else None
    options = {"in_place": False} if provider == "liger_rms_norm" else {}
    cls: Any = LigerFusedAddRMSNorm if fused else LigerRMSNorm if options else _LlamaNorm
    module = cls(x, eps=extra["eps"], **options).to("cuda")
    hidden = _random(extra["M"], x, dtype=torch.float32)
    residual = _random(extra["M"], x, dtype=torch.float32)
    dy, ds = torch.randn_like(hidden), torch.randn_like(residual)

    def full() -> None:
        if fused:
            y, s = module(hidden, residual)
        else:
            s = hidden.to(torch.float32) + residual.to(torch.float32)
            y = module(s)
            if weight is not None:
                y = weight * y
        torch.autograd.backward((y, s), (dy, ds))

    return full


WORKSPACES = {"geglu": 2, "swiglu": 2, "fused_linear_cross_entropy": 2, "rope": 1}
"""Kernels whose benchmark multiplied matrices, so that its process held cuBLAS's workspaces from its first points on:
the forward's thread has one, the backward's another. Rotary tables were matrix products in transformers of 2024."""


def _multiply(num_threads: int) -> None:
    one = torch.randn(64, 64, device="cuda", requires_grad=True)
    out = (one @ one).sum()
    if num_threads == 2:
        out.backward()


def peak_mib(row: dict[str, str]) -> float | None:
    """The kernel's peak of allocated memory in MiB as `torch.cuda.max_memory_allocated` says it, None where no driver
    of ours runs it."""
    build = globals().get(row["kernel_name"])
    if build is None:
        return None
    extra = json.loads(row["extra_benchmark_config_str"])
    arguments: list[Any] = [row["kernel_provider"], int(float(row["x_value"])), extra]
    if row["kernel_name"] in ("geglu", "swiglu"):
        arguments.append(row["kernel_operation_mode"])
    if row["kernel_name"] == "rope":
        arguments.append(row["x_name"])
    with phantom_gpu(card_of(find_gpu(CARDS[row["gpu_name"]])), TraceOptions(limited=False)):
        if row["kernel_name"] in WORKSPACES:
            _multiply(WORKSPACES[row["kernel_name"]])
        full = build(*arguments)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            full()
        found: float = torch.cuda.max_memory_allocated() / MIB
    return found


COMMITS = {
    "rms_norm": ("0.2.1", "0.2.1"),
    "fused_linear_cross_entropy": ("0.4.2", "0.4.2"),  # as released
    "layer_norm": ("0.6.0", "6a2c4913"),
}
"""Kernels that today's version runs otherwise: the version that their rows name, and the commit (linkedin/Liger-Kernel)
whose code was measured. Rows are measured on the way to a commit and name the last release."""


def use(folder: Path) -> None:
    """Makes `liger_kernel` the one in `folder`, its kernels alone: what an old version patches of transformers is no
    longer there."""
    sys.path.insert(0, str(folder))
    package = ModuleType("liger_kernel.transformers")
    package.__path__ = [str(folder / "liger_kernel" / "transformers")]
    sys.modules[package.__name__] = package


def main() -> None:
    """Runs every memory row and prints the error of each kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", type=Path)
    parser.add_argument("--kernel", action="append")
    parser.add_argument("--liger", type=Path, help="a folder with the code of --at, whose measurements alone are run")
    parser.add_argument("--at", default="", help="a commit of COMMITS")
    arguments = parser.parse_args()
    if arguments.liger:
        use(arguments.liger)
    old = {name: release for name, (release, commit) in COMMITS.items() if commit == arguments.at}
    with arguments.measurements.open(newline="") as file:
        rows = [one for one in csv.DictReader(file) if one["metric_name"] == "memory"]
    table: dict[str, list[Any]] = {}
    left_out: dict[str, int] = {}
    for row in rows:
        if arguments.kernel and row["kernel_name"] not in arguments.kernel:
            continue
        if arguments.at and (row["kernel_provider"], row["liger_version"]) != ("liger", old.get(row["kernel_name"])):
            continue
        found = peak_mib(row)
        if found is None:
            left_out[row["kernel_name"]] = left_out.get(row["kernel_name"], 0) + 1
            continue
        measured = float(row["y_value_50"])
        key = " ".join((row["kernel_name"], row["kernel_provider"], row["kernel_operation_mode"], row["x_name"]))
        key += f" ({row['gpu_name'].split()[1][:4]}, liger {row['liger_version']})"
        table.setdefault(key, []).append([int(float(row["x_value"])), measured, round(found, 3)])
    print_errors(table, left_out)
    document = json.loads(OUT.read_text())
    if arguments.at:
        document["of_the_measured_code"][arguments.at] = table
    elif arguments.kernel:
        return
    else:
        document |= {
            "liger_kernel": version("liger-kernel"),
            "torch": torch.__version__,
            "rows": table,
            "left_out": {name: [number, LEFT_OUT.get(name, "")] for name, number in left_out.items()},
        }
    OUT.write_text(json.dumps(document, indent=1) + "\n")


def print_errors(table: dict[str, list[Any]], left_out: dict[str, int]) -> None:
    """One line for each kernel, then the whole."""
    errors: list[float] = []
    for key, points in table.items():
        each = [100 * (found - measured) / measured for _, measured, found in points]
        errors += each
        print(f"{key:75s} {len(each):3d} rows  {min(each):+7.2f} % .. {max(each):+7.2f} %  {points[0]} {points[-1]}")
    absolute = sorted(map(abs, errors))
    if absolute:
        within = sum(one <= 1 for one in absolute)
        median = statistics.median(absolute)
        print(f"{len(absolute)} rows: median {median:.2f} %, within 1 %: {within}; not run: {left_out}")


if __name__ == "__main__":
    main()
