# mypy: ignore-errors
# (rows of lambdas over tensors: nothing here is called from elsewhere)
"""What single operators cost on this GPU: device seconds by shape, type and kernel, and host seconds by class of call.

    python -m benchmarks.contact.price_readings OUT.jsonl [DEVICE]

Device time is that of a CUDA graph of repeated calls over inputs that rotate through more than the L2 holds, so neither
the host nor the cache counts; where an operator cannot be captured, of a row of calls between two events ("row": the
host may limit short ones). Host time is what issuing costs while the device has nothing to wait for.
One JSON line a reading: {"op": ..., fields of its shape, "us": device microseconds of one call}.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.contact.staged import wait_for_turn

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = "cuda:0"
GRAPHS = True
"""A capture that fails leaves the random generator unusable: parts whose calls cannot be captured do without."""
ROTATED_BYTES = 256 << 20
"""Inputs are rotated through so many bytes at least: five times an H100's L2."""
Line = dict[str, Any]


def device_us(run: Callable[[int], Any], calls: int) -> tuple[float, str]:
    """Microseconds of one `run(index)` on the device, and how they were timed."""
    for index in range(min(calls, 3)):
        run(index)
    torch.cuda.synchronize()
    how = "graph"
    graph = torch.cuda.CUDAGraph()
    try:
        if not GRAPHS:
            raise RuntimeError("not captured")
        with torch.cuda.graph(graph):
            for index in range(calls):
                run(index)
        replay: Callable[[], Any] = graph.replay
    except Exception:
        torch.cuda.synchronize()
        how = "row"

        def replay() -> None:
            for index in range(calls):
                run(index)

    replay()
    best = float("inf")
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / calls)
    return best, how


def copies_of(size_bytes: int, most: int = 8) -> int:
    return int(max(1, min(most, -(-ROTATED_BYTES // max(1, size_bytes)))))


def timed(
    op: str, make: Callable[[], Any], run: Callable[[Any], Any], size_bytes: int, calls: int = 12, **shape: Any
) -> Line:
    """One reading: `make` gives an input set, `run` the call on one."""
    try:
        inputs = [make() for _ in range(copies_of(size_bytes))]
        micros, how = device_us(lambda index: run(inputs[index % len(inputs)]), calls)
        return {"op": op, **shape, "us": round(micros, 3), "how": how}
    except Exception as error:
        torch.cuda.synchronize()
        return {"op": op, **shape, "problem": f"{type(error).__name__}: {str(error)[:200]}"}


def rand(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


MATRICES = (
    (4096, 4096), (1024, 4096), (12288, 4096), (4096, 12288), (2048, 2048), (512, 2048), (8192, 2048), (2048, 8192),
    (896, 896), (128, 896), (4864, 896), (896, 4864), (16, 4096), (4096, 16), (16, 12288), (12288, 16), (64, 4096),
    (4096, 64), (128256, 2048), (151936, 4096),
)  # fmt: skip
"""[out, in] of layers of Qwen3-8B, Llama-3.2-1B, Qwen2.5-0.5B, of adapters and of heads."""
TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384)


def matrices() -> Iterator[Line]:
    """x W^T, g W and g^T x of each matrix over numbers of tokens."""
    for out, into in MATRICES:
        for tokens in TOKENS:
            if out > 100_000 and tokens > 2048:
                continue
            size = 2 * (tokens * (out + into) + out * into)

            def make(tokens: int = tokens, out: int = out, into: int = into) -> Any:
                return rand(tokens, into), rand(out, into), rand(tokens, out)

            shape = {"tokens": tokens, "out": out, "in": into, "dtype": "bfloat16"}
            yield timed("mm_forward", make, lambda args: args[0] @ args[1].t(), size, **shape)
            yield timed("mm_input_grad", make, lambda args: args[2] @ args[1], size, **shape)
            yield timed("mm_weight_grad", make, lambda args: args[2].t() @ args[0], size, **shape)
    for dtype in (FP16, FP32):
        for out, into in ((4096, 4096), (8192, 2048), (896, 4864)):
            for tokens in (1024, 8192):
                size = 4 * (tokens * (out + into) + out * into)
                made = lambda t=tokens, o=out, i=into, d=dtype: (rand(t, i, dtype=d), rand(o, i, dtype=d))  # noqa: E731
                shape = {"tokens": tokens, "out": out, "in": into, "dtype": name(dtype)}
                yield timed("mm_forward", made, lambda args: args[0] @ args[1].t(), size, **shape)
    for groups, tokens, out, into in ((64, 8192, 2048, 2048), (64, 32768, 1024, 2048), (8, 8192, 14336, 4096)):
        made = lambda g=groups, t=tokens, o=out, i=into: (  # noqa: E731
            rand(t, i), rand(g, i, o), torch.arange(t // g, t + 1, t // g, device=DEVICE, dtype=torch.int32)
        )  # fmt: skip
        yield timed(
            "grouped_mm", made, lambda args: torch._grouped_mm(args[0], args[1], offs=args[2]), 1 << 30, calls=6,
            groups=groups, tokens=tokens, out=out, **{"in": into},
        )  # fmt: skip


def elementwise() -> Iterator[Line]:
    """Reads and writes of plain operators over sizes, for the curve from the launch floor to the copy rate."""
    ops: dict[str, tuple[Callable[..., Any], int]] = {
        "copy": (lambda x, y: x.clone(), 1), "add": (lambda x, y: x + y, 2), "mul": (lambda x, y: x * y, 2),
        "silu": (lambda x, y: torch.nn.functional.silu(x), 1), "add_": (lambda x, y: x.add_(y), 2),
        "pow2": (lambda x, y: x.pow(2), 1), "neg": (lambda x, y: -x, 1), "zeros": (lambda x, y: torch.zeros_like(x), 1),
    }  # fmt: skip
    for label, (run, inputs) in ops.items():
        for dtype in (BF16, FP32):
            for exponent in (10, 14, 18, 20, 22, 24, 26, 28):
                num = 1 << exponent
                size = num * dtype.itemsize * (1 + inputs)
                if size > 3 << 30:
                    continue
                made = lambda n=num, d=dtype: (rand(n, dtype=d), rand(n, dtype=d))  # noqa: E731
                yield timed(label, made, lambda args, run=run: run(*args), size, numel=num, dtype=name(dtype))
    for exponent in (14, 20, 24, 27):
        num = 1 << exponent
        yield timed("to_fp32", lambda n=num: rand(n), lambda x: x.float(), num * 6, numel=num)
        yield timed("to_bf16", lambda n=num: rand(n, dtype=FP32), lambda x: x.bfloat16(), num * 6, numel=num)
    for rows, columns in ((8192, 4096), (8192, 896), (2048, 128256), (8192, 2048)):
        shape = {"rows": rows, "columns": columns}
        size = rows * columns * 6
        for dtype in (BF16, FP32):
            made = lambda r=rows, c=columns, d=dtype: rand(r, c, dtype=d)  # noqa: E731
            yield timed("mean_last", made, lambda x: x.mean(-1, keepdim=True), size, dtype=name(dtype), **shape)
            yield timed("sum_first", made, lambda x: x.sum(0), size, dtype=name(dtype), **shape)
            yield timed("log_softmax", made, lambda x: torch.log_softmax(x, -1), size, dtype=name(dtype), **shape)
            yield timed("softmax", made, lambda x: torch.softmax(x, -1), size, dtype=name(dtype), **shape)
            yield timed("transpose_copy", made, lambda x: x.t().contiguous(), size, dtype=name(dtype), **shape)
            yield timed("argmax", made, lambda x: x.argmax(-1), size, dtype=name(dtype), **shape)
    for vocabulary, hidden, tokens in ((151936, 4096, 8192), (128256, 2048, 8192), (151936, 896, 16384)):
        made = lambda v=vocabulary, h=hidden, t=tokens: (  # noqa: E731
            rand(v, h), torch.randint(0, v, (t,), device=DEVICE), rand(t, h)
        )  # fmt: skip
        shape = {"vocabulary": vocabulary, "hidden": hidden, "tokens": tokens}
        yield timed("embedding", made, lambda args: torch.nn.functional.embedding(args[1], args[0]), 1 << 30, **shape)
        yield timed(
            "embedding_backward", made,
            lambda args: torch.ops.aten.embedding_dense_backward(args[2], args[1], args[0].shape[0], -1, False),
            1 << 30, calls=4, **shape,
        )  # fmt: skip
    heads = rand(4, 2048, 32, 128)
    yield timed("rotate_half", lambda: heads, lambda x: torch.cat((-x[..., 64:], x[..., :64]), -1), heads.numel() * 4)
    yield timed("transpose_heads", lambda: heads, lambda x: x.transpose(1, 2).contiguous(), heads.numel() * 4)
    kv = rand(4, 8, 2048, 128)
    yield timed(
        "repeat_kv", lambda: kv,
        lambda x: x[:, :, None].expand(4, 8, 4, 2048, 128).reshape(4, 32, 2048, 128), kv.numel() * 10,
    )  # fmt: skip


def attention() -> Iterator[Line]:
    """Each backend forward, and forward with backward, over lengths and head sizes."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shapes = [(4, 32, 8, 2048, 128), (1, 32, 8, 512, 128), (1, 32, 8, 2048, 128), (1, 32, 8, 8192, 128)]
    shapes += [(1, 32, 8, 16384, 128), (1, 32, 8, 32768, 128), (8, 32, 8, 2048, 64), (1, 32, 8, 8192, 64)]
    shapes += [(16, 14, 2, 2048, 64), (4, 4, 1, 2048, 256), (1, 8, 4, 8192, 256), (4, 32, 32, 2048, 96)]
    shapes += [(8, 16, 16, 4096, 128)]
    backends = {name: getattr(SDPBackend, f"{name.upper()}_ATTENTION") for name in ("cudnn", "flash", "efficient")}
    for seqs, heads, kv_heads, tokens, size in shapes:
        shape = {"seqs": seqs, "heads": heads, "kv_heads": kv_heads, "tokens": tokens, "head_size": size}
        for label, backend in backends.items():
            q, k, v = (
                torch.randn(seqs, heads, tokens, size, device=DEVICE, dtype=BF16, requires_grad=True) for _ in range(3)
            )
            grad = torch.randn_like(q)

            def forward(_: Any, q: Any = q, k: Any = k, v: Any = v, backend: Any = backend) -> Any:
                with sdpa_kernel(backend):
                    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

            with torch.no_grad():
                yield timed("sdpa_forward", lambda: None, forward, 1 << 30, calls=4, backend=label, **shape)
            both = lambda _, f=forward, g=grad, a=(q, k, v): torch.autograd.grad(f(None), a, g)  # noqa: E731
            yield timed("sdpa_both", lambda: None, both, 1 << 30, calls=4, backend=label, **shape)
    for seqs, heads, tokens, size in ((1, 32, 2048, 128), (1, 32, 8192, 64), (4, 16, 2048, 64)):  # with a mask
        q, k, v = (
            torch.randn(seqs, heads, tokens, size, device=DEVICE, dtype=BF16, requires_grad=True) for _ in range(3)
        )
        mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=DEVICE).tril()
        grad = torch.randn_like(q)
        masked = lambda _, q=q, k=k, v=v, m=mask: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=m)  # noqa: E731
        shape = {"seqs": seqs, "heads": heads, "tokens": tokens, "head_size": size, "backend": "masked"}
        with torch.no_grad():
            yield timed("sdpa_forward", lambda: None, masked, 1 << 30, calls=4, **shape)
        both = lambda _, f=masked, g=grad, a=(q, k, v): torch.autograd.grad(f(None), a, g)  # noqa: E731
        yield timed("sdpa_both", lambda: None, both, 1 << 30, calls=4, **shape)


def quantized() -> Iterator[Line]:
    """bitsandbytes' kernels: NF4 and LLM.int8, by matrix."""
    import bitsandbytes as bnb
    from bitsandbytes import functional

    for out, into in ((4096, 4096), (1024, 4096), (12288, 4096), (8192, 2048), (17408, 5120)):
        shape = {"out": out, "in": into}
        for nested in (False, True):
            packed, state = functional.quantize_4bit(rand(out, into), quant_type="nf4", compress_statistics=nested)
            yield timed(
                "dequantize_4bit", lambda: None, lambda _, p=packed, s=state: functional.dequantize_4bit(p, s), 1 << 30,
                nested=nested, **shape,
            )  # fmt: skip
        yield timed(
            "quantize_4bit",
            lambda o=out, i=into: rand(o, i),
            lambda x: functional.quantize_4bit(x, quant_type="nf4"),
            out * into * 2,
            **shape,
        )
        layer = bnb.nn.Linear8bitLt(into, out, bias=False, has_fp16_weights=False, threshold=6.0)
        layer.weight = bnb.nn.Int8Params(
            torch.randn(out, into, dtype=FP16), requires_grad=False, has_fp16_weights=False
        )
        layer = layer.to(DEVICE)
        for tokens in (2048, 8192):
            x = rand(tokens, into, dtype=FP16).requires_grad_()
            grad = rand(tokens, out, dtype=FP16)
            yield timed(
                "int8_forward", lambda: None, lambda _, m=layer, x=x: m(x), 1 << 30, calls=6, tokens=tokens, **shape
            )
            yield timed(
                "int8_both", lambda: None, lambda _, m=layer, x=x, g=grad: torch.autograd.grad(m(x), x, g), 1 << 30,
                calls=6, tokens=tokens, **shape,
            )  # fmt: skip


def optimizers() -> Iterator[Line]:
    """A step of each optimizer over few large and many small parameters: device and host."""
    import bitsandbytes as bnb

    groups = {"large": [(4096, 4096)] * 12, "adapters": [(16, 4096), (4096, 16)] * 252}
    kinds: dict[str, Callable[[Any], Any]] = {
        "adamw-fused": lambda p: torch.optim.AdamW(p, fused=True),
        "adamw": lambda p: torch.optim.AdamW(p, foreach=True),
        "adamw-8bit": lambda p: bnb.optim.AdamW8bit(p), "paged-adamw-8bit": lambda p: bnb.optim.PagedAdamW8bit(p),
        "sgd": lambda p: torch.optim.SGD(p), "lion-8bit": lambda p: bnb.optim.Lion8bit(p),
    }  # fmt: skip
    for dtype in (FP32, BF16):
        for label, shapes in groups.items():
            parameters = [torch.nn.Parameter(rand(*shape, dtype=dtype)) for shape in shapes]
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            shape = {"parameters": label, "numel": sum(p.numel() for p in parameters)}
            shape |= {"tensors": len(parameters), "dtype": name(dtype)}
            yield both_times("clip", lambda p=parameters: torch.nn.utils.clip_grad_norm_(p, 1.0), **shape)
            for kind, make in kinds.items():
                optimizer = make(parameters)
                yield both_times(f"optimizer:{kind}", optimizer.step, **shape)
                del optimizer


def both_times(op: str, run: Callable[[], Any], **shape: Any) -> Line:
    """Host seconds until a call returns, and until the device has done it."""
    try:
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        issued, done = [], []
        for _ in range(4):
            began = time.perf_counter()
            run()
            issued.append(time.perf_counter() - began)
            torch.cuda.synchronize()
            done.append(time.perf_counter() - began)
        return {"op": op, **shape, "issued_us": round(min(issued) * 1e6, 2), "done_us": round(min(done) * 1e6, 2)}
    except Exception as error:
        return {"op": op, **shape, "problem": f"{type(error).__name__}: {str(error)[:200]}"}


def host() -> Iterator[Line]:
    """Host microseconds of one call of each class, issued in rows that the device does not hold up."""

    def issue(op: str, run: Callable[[], Any], calls: int = 300, **fields: Any) -> Line:
        try:
            for _ in range(5):
                run()
            best = float("inf")
            for _ in range(4):
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(calls):
                    run()
                best = min(best, (time.perf_counter() - began) / calls)
            torch.cuda.synchronize()
            return {"op": f"host:{op}", **fields, "issued_us": round(best * 1e6, 3)}
        except Exception as error:
            return {"op": f"host:{op}", **fields, "problem": f"{type(error).__name__}: {str(error)[:200]}"}

    import peft
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    x, w = rand(16, 64), rand(64, 64)
    x32 = rand(16, 64, dtype=FP32)
    leaf = rand(16, 64).requires_grad_()
    linear, linear32 = nn.Linear(64, 64, bias=False).to(DEVICE, BF16), nn.Linear(64, 64, bias=False).to(DEVICE)
    yield issue("python_pass", lambda: None)
    yield issue("add_", lambda: x.add_(1.0))
    yield issue("add", lambda: x + x)
    yield issue("view", lambda: x.view(-1))
    yield issue("transpose", lambda: x.t())
    yield issue("empty", lambda: torch.empty(16, device=DEVICE))
    yield issue("mm", lambda: x @ w)
    yield issue("to_fp32", lambda: x.float())
    identity = nn.Identity()
    yield issue("module_identity", lambda: identity(x))
    yield issue("linear_no_grad", torch.no_grad()(lambda: linear(x)))
    yield issue("linear", lambda: linear(x))
    with torch.autocast("cuda", dtype=BF16):
        yield issue("autocast_linear_bf16", lambda: linear(x))
        yield issue("autocast_linear_fp32_weight", lambda: linear32(x32))
    yield issue("item", lambda: x[0, 0].item(), calls=100)

    def chain(num: int) -> torch.Tensor:
        y = leaf
        for _ in range(num):
            y = y * 1.5
        return y.sum()

    for num in (10, 110):
        yield issue("mul_chain_forward", lambda n=num: chain(n), calls=30, num=num)
        yield issue("mul_chain_both", lambda n=num: torch.autograd.grad(chain(n), leaf), calls=30, num=num)
    block = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(20))).to(DEVICE, BF16)
    yield issue("linears20_both", lambda: torch.autograd.grad(block(leaf).sum(), leaf), calls=20)
    yield issue(
        "linears20_checkpointed", lambda: torch.autograd.grad(checkpoint(block, leaf, use_reentrant=False).sum(), leaf),
        calls=20,
    )  # fmt: skip

    class Host(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = {"model_type": "custom"}
            self.layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(20)))

        def forward(self, x: Any) -> Any:
            return self.layers(x)

    for dtype in (BF16, FP32):
        plain = Host().to(DEVICE, dtype)
        adapted = peft.get_peft_model(plain, peft.LoraConfig(r=8, target_modules=[str(i) for i in range(20)]))
        adapted.train()
        with torch.autocast("cuda", dtype=BF16):
            yield issue("lora20_forward", lambda m=adapted: m(leaf), calls=20, dtype=name(dtype))
            yield issue("lora20_both", lambda m=adapted: m(leaf).sum().backward(), calls=20, dtype=name(dtype))
    import bitsandbytes as bnb

    four = nn.Sequential(
        *(bnb.nn.Linear4bit(64, 64, bias=False, compute_dtype=BF16, quant_type="nf4") for _ in range(20))
    ).to(DEVICE)
    yield issue("linear4bit20_forward", lambda: four(leaf), calls=20)
    yield issue("linear4bit20_both", lambda: torch.autograd.grad(four(leaf).sum(), leaf), calls=20)
    eight = nn.Sequential(
        *(bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False, threshold=6.0) for _ in range(20))
    ).to(DEVICE)
    half = leaf.detach().half().requires_grad_()
    yield issue("linear8bit20_forward", lambda: eight(half), calls=20)
    yield issue("linear8bit20_both", lambda: torch.autograd.grad(eight(half).sum(), half), calls=20)
    try:
        from liger_kernel.transformers import LigerRMSNorm

        norm = LigerRMSNorm(64).to(DEVICE, BF16)
        yield issue("liger_rms_norm_forward", lambda: norm(leaf), calls=100)
        yield issue("liger_rms_norm_both", lambda: torch.autograd.grad(norm(leaf).sum(), leaf), calls=50)
    except Exception as error:
        yield {"op": "host:liger", "problem": str(error)[:200]}


def links() -> Iterator[Line]:
    """Copies over the bus and the launch floor."""
    for size in (1 << 20, 1 << 26, 1 << 28):
        on_host, pinned = torch.empty(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8, pin_memory=True)
        on_gpu = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        for op, to, source in (("h2d", on_gpu, on_host), ("d2h", on_host, on_gpu)):
            yield both_times(op, lambda to=to, source=source: to.copy_(source), bytes=size)
        for op, to, source in (("h2d_pinned", on_gpu, pinned), ("d2h_pinned", pinned, on_gpu)):
            yield both_times(op, lambda to=to, source=source: to.copy_(source, non_blocking=True), bytes=size)
    small = torch.zeros(16, device=DEVICE)
    yield timed("launch_floor", lambda: small, lambda x: x.add_(1.0), 1 << 30, calls=400)


PARTS = (links, host, matrices, attention, quantized, optimizers, elementwise)


def main(arguments: list[str]) -> int:
    """Writes the lines of the parts named (OUT [PART,PART]), of all; what was written stays where the time ends."""
    global GRAPHS
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401

    wait_for_turn()
    properties = torch.cuda.get_device_properties(DEVICE)
    torch.backends.cuda.matmul.allow_tf32 = False
    wanted = arguments[1].split(",") if len(arguments) > 1 else [part.__name__ for part in PARTS]
    with open(Path(arguments[0]), "a", encoding="utf-8") as out:

        def say(**line: Any) -> None:
            out.write(json.dumps(line) + "\n")
            out.flush()

        say(
            op="device", name=properties.name, sm=properties.multi_processor_count, torch=torch.__version__,
            memory_bytes=properties.total_memory, l2_bytes=properties.L2_cache_size,
        )  # fmt: skip
        for part in PARTS:
            if part.__name__ not in wanted:
                continue
            GRAPHS = part not in (quantized, optimizers)
            began = time.perf_counter()
            try:
                for line in part():
                    say(**line)
            except Exception as error:
                say(op=part.__name__, problem=f"{type(error).__name__}: {str(error)[:300]}")
            say(op="part", part=part.__name__, seconds=round(time.perf_counter() - began, 2))
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
