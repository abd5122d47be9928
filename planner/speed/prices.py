"""Device seconds of an operator, from the layouts of its arguments and the card's rates. One row per kind of kernel.

A row says how a kernel's time follows from its bytes or products; no row knows a model. An operator without a row is
priced by the bytes it reads and writes, which is what an elementwise kernel is. Shares of the copy rate were read off
PyTorch's profiler in training steps on an H100 (benchmarks/data/h100/profiles.jsonl.gz), matrices and attention off
rows of calls by themselves (benchmarks/data/h100/prices.jsonl); `python -m benchmarks.operator_speed` repeats the
comparison.
"""

from collections.abc import Callable
from typing import NamedTuple

from planner.speed.operators import WAIT, Layout, Operator
from planner.speed.rates import MATRIX_TILE, CardRates

PARTS = (
    "matrix", "adapters", "attention", "elementwise", "dequantization", "loss", "optimizer", "copies", "host",
    "trainer",
)  # fmt: skip
"""Where a step's time goes; copies: between host and device; host: what the device waits for it; trainer: what the
loop does between steps."""


class Price(NamedTuple):
    """What one call costs the device.

    Attributes:
        seconds: of all its kernels, of which `unpacking_s` dequantize a weight.
        part: of `PARTS`.
        kernels: how many it launches.
    """

    seconds: float
    part: str
    kernels: int = 1
    unpacking_s: float = 0.0


Row = Callable[[Operator, CardRates], Price]
FREE = Price(0.0, "elementwise", 0)
THIN = 128
"""A product with a dimension of no more is an adapter's: of 16-bit numbers bytes, not products, decide it."""
_WAVE_LOSS, _MATRIX_START_S = 0.1, 2.5e-6
_BEYOND_LARGE = 1.04
"""Fitted to 420 products of 16 x 896 x 256 to 16,384 x 12,288 x 4,096 on an H100: median 4.6 %, 90th 11.5 % of those
with no dimension below 512, mean -0.5 %. The rate of an infinite matrix lies this much above that of 4,096 cubed."""


def matrix_s(
    m: float,
    n: float,
    k: float,
    dtype: str,
    rates: CardRates,
    *,
    batch: float = 1.0,
    written: float = 2.0,
    aligned: bool = True,
) -> float:
    """Seconds of `batch` products [m, k] x [k, n] in one kernel, the result of `written` bytes an element.

    Args:
        aligned: every row of the three matrices begins on 16 bytes.
    """
    size = 4.0 if dtype == "float32" else 2.0
    moved = batch * ((m * k + k * n) * size + m * n * written)
    rate = rates.matrix.get(dtype, rates.matrix["float32"])
    if min(m, n, k) <= THIN:  # in fp32, and in bf16 where that is emulated, even such products are bound by arithmetic
        return max(moved / (0.93 * rates.copy), 2.0 * batch * m * n * k / rate) + _MATRIX_START_S
    tile = MATRIX_TILE if size == 2 else 128 * 32
    waves = batch * m * n / (tile * rates.sms)
    start = rates.start_up_columns * min(1.0, rate / rates.matrix["float16"])
    beyond = _BEYOND_LARGE if size == 2 else 1.0
    compute = 2.0 * batch * m * n * (k + start) * (1.0 + _WAVE_LOSS / waves) / (beyond * rate)
    if dtype != "float32" and not aligned:
        compute *= 3.0  # 116 to 250 of 790 TFLOP/s (4,096 x 12,2xx x 4,096, H100)
    return max(compute, moved / rates.copy) + _MATRIX_START_S


def moved_s(moved: float, rates: CardRates, share: float = 1.0) -> float:
    """Seconds of a kernel that reads and writes so many bytes; what is little is still in the L2 cache.

    Source: `add`, `pow`, `mul` of 10 to 600 MB, H100: 1.45 times the rate at 34 MB, 1.2 at 50, 1.03 at 67.
    """
    fill = moved / (0.8 * rates.l2_bytes)
    return rates.launch_s + moved / (rates.copy * share * (1.0 + 0.5 / (1.0 + fill**4)))


def _bytes(layouts: tuple[Layout, ...]) -> int:
    return sum([layout.size_bytes for layout in layouts])


def _moved(share: float, part: str = "elementwise", kernels: int = 1) -> Row:
    """A kernel that reads its inputs and writes its outputs at a share of the copy rate."""

    def price(call: Operator, rates: CardRates) -> Price:
        return Price(moved_s(_bytes(call.inputs) + _bytes(call.outputs), rates, share), part, kernels)

    return price


def _elementwise(call: Operator, rates: CardRates) -> Price:
    """TensorIterator's kernels: wide loads where all operands are whole, lie alike and are of one type (or a cast makes
    them narrower), else element by element, at so many elements a second whatever their type.

    Measured (H100): 33.5 million elements in 91 to 115 microseconds, by a vector, a number a row, transposed, cut or
    cast to fp32; wide ones at the copy rate.
    """
    layouts = (*call.inputs, *call.outputs)
    moved = _bytes(layouts)
    if not moved:
        return Price(rates.launch_s, "elementwise")
    seconds, elements = moved_s(moved, rates), [layout.numel for layout in layouts]
    largest = max(elements)
    whole = [layout for layout, numel in zip(layouts, elements, strict=True) if numel == largest]
    types, strides = {layout.dtype for layout in whole}, {(each.shape, each.stride): each for each in whole}
    wide = (
        (len(types) == 1 or (len(whole) == 2 and whole[1].item_bytes < whole[0].item_bytes))
        and all(numel in (0, 1, largest) for numel in elements[: len(call.inputs)])
        and all(layout.dense and layout.order == whole[0].order for layout in strides.values())
    )
    if not wide:
        seconds = (seconds**4 + (rates.launch_s + largest / rates.single_elements) ** 4) ** 0.25
    return Price(seconds, "elementwise")


def _copied(call: Operator, rates: CardRates) -> Price:
    """A copy or cast: the source is read, the destination written."""
    source, destination = call.inputs[-1], (call.outputs or call.inputs)[0]
    return _elementwise(Operator(call.name, (source,), (destination,)), rates)


def _filled(call: Operator, rates: CardRates) -> Price:
    return Price(moved_s(_bytes(call.outputs[:1] or call.inputs[:1]), rates, 1.05), "elementwise")


def _picked(call: Operator, rates: CardRates) -> Price:
    """The loss of a token reads one of its vocabulary's values."""
    return Price(moved_s(_bytes(call.inputs[-1:]), rates), "elementwise")


def _placed(call: Operator, rates: CardRates) -> Price:
    """The gradient of a part: zeros for the whole, then what is known goes into its place, element by element.

    Source: PyTorch 2.13 `aten/src/ATen/native/TensorShape.cpp` slice_backward, `cuda/NLLLoss2d.cu`.
    """
    part, filled = call.inputs[0], _filled(call, rates).seconds
    copied = max(moved_s(2 * part.size_bytes, rates), rates.launch_s + part.numel / rates.single_elements)
    return Price(filled + copied, "elementwise", 2)


def _reduced(call: Operator, rates: CardRates) -> Price:
    """Sums and means (H100: 2.4 of 3.05 TB/s over 4,096 columns, 1.8 over 128)."""
    source = call.inputs[0]
    if call.name.startswith("aten.sum") and source.dtype in ("bool", "int32") and call.outputs[0].dtype == "int64":
        # cast as a whole first (PyTorch `ReduceOpsUtils.h` make_reduction; T4: 25 million bools 1,144 + 739 us)
        whole = Layout(source.shape, source.stride, "int64")
        cast = _elementwise(Operator("aten._to_copy", (source,), (whole,)), rates)
        summed = _reduced(call._replace(inputs=(whole,)), rates)
        return Price(cast.seconds + summed.seconds, "elementwise", 2)
    narrow = source.shape and source.shape[-1] <= 256
    by_column = bool(call.outputs) and call.outputs[0].shape[-1:] == source.shape[-1:] != (1,)
    seconds = moved_s(_bytes(call.inputs) + _bytes(call.outputs), rates, 0.6 if narrow else 0.8)
    return Price(seconds + (12e-6 if by_column and source.numel > 1 << 20 else 0.0), "elementwise")


def _softmaxed(speed: float, wide: float) -> Row:
    """Softmax over rows: so many times the elements a second of an elementwise kernel without wide loads, but of a
    vocabulary at a share of the copy rate.

    Measured (H100): 290 to 373e9 elements a second over 2,048 and 4,096 columns, 1.48 TB/s over 128,256; backward
    255e9. T4 (the trace of `planner.speed.rates.COPY_SHARE`): 187 of 242 GB/s backward over 50,304.
    """

    def price(call: Operator, rates: CardRates) -> Price:
        vocabulary = call.inputs[0].shape[-1:] > (16384,)
        seconds = moved_s(_bytes(call.inputs) + _bytes(call.outputs), rates, wide if vocabulary else 0.86)
        return Price(max(seconds, call.inputs[0].numel / (speed * rates.single_elements)), "elementwise")

    return price


def _safe_softmaxed(call: Operator, rates: CardRates) -> Price:
    """SDPA's math kernel: a softmax, then rows that are all minus infinity are looked for and emptied.

    Source: PyTorch 2.13 `torch/_decomp/decompositions.py` safe_softmax.
    """
    scores = call.inputs[0]
    matches = Layout(scores.shape, scores.stride, "bool")
    rows = Layout((*scores.shape[:-1], 1), (*scores.stride[:-1], 1), "bool")
    after = (
        _elementwise(Operator("aten.eq", (scores,), (matches,)), rates),
        _reduced(Operator("aten.all", (matches,), (rows,)), rates),
        _elementwise(Operator("aten.where", (rows, *call.outputs), call.outputs), rates),
    )
    seconds = _softmaxed(1.0, 0.48)(call, rates).seconds + sum(price.seconds for price in after)
    return Price(seconds, "elementwise", 1 + len(after))


def _product(call: Operator, rates: CardRates) -> Price:
    """mm, addmm and their likes over the last two tensors."""
    left, right = call.inputs[-2:] if len(call.inputs) != 3 or call.name.startswith("aten.addmm") else call.inputs[:2]
    if call.name.startswith(("aten.addmm", "aten.baddbmm")):
        left, right = call.inputs[1:3]
    m, k = left.shape[-2:]
    n = right.shape[-1]
    batch = left.shape[0] if len(left.shape) == 3 else 1
    out = call.outputs[0].item_bytes if call.outputs else left.item_bytes
    aligned = all(max(matrix.stride[-2:]) % 8 == 0 for matrix in (left, right)) and n % 8 == 0
    seconds = matrix_s(m, n, k, left.dtype, rates, batch=batch, written=float(out), aligned=aligned)
    if call.name.startswith(
        "aten.baddbmm"
    ):  # what is added to is copied first (H100: 537 MB copied, then 531 microseconds)
        seconds = seconds / 0.65 + moved_s(2 * call.inputs[0].size_bytes, rates)
    return Price(seconds, "adapters" if min(m, n, k) <= THIN and batch == 1 else "matrix")


def _grouped(call: Operator, rates: CardRates) -> Price:
    """The experts' matrices in one kernel (H100: 65,536 x 2,048 x 2,048 over 64 groups 860 microseconds)."""
    left, right = call.inputs[:2]
    rows, k = left.shape[-2:]
    groups = right.shape[0] if len(right.shape) == 3 else 1
    n = right.shape[-1]
    if groups == 1:  # the gradient of the weights: the inner dimension is cut into groups
        return Price(matrix_s(rows, n, k, left.dtype, rates) / 0.86, "matrix", 2)
    return Price(matrix_s(rows / groups, n, k, left.dtype, rates, batch=groups) / 0.86, "matrix", 2)


def _attended(backward: bool, kernel: str) -> Row:
    def price(call: Operator, rates: CardRates) -> Price:
        query, key = call.inputs[1:3] if backward else call.inputs[:2]
        seqs, heads, rows, head = query.shape
        columns = whole = key.shape[2]
        masked = any(layout.shape[-2:] == (rows, columns) for layout in call.inputs)
        unmasked, by = masked and rates.told_apart, kernel
        if unmasked:  # and by flash attention where the card has it
            masked, by = False, "flash" if (rates.gpu.compute_capability or (0, 0)) >= (8, 0) else kernel
        rate = rates.attention(by, head, masked=masked, dtype=query.dtype)
        causal = unmasked or (not masked and _is_causal(call, backward, kernel))
        if rates.sample_tokens and not masked:
            columns = min(columns, rates.sample_tokens)
        pairs = rows * columns * (0.5 if causal else 1.0)
        flops = (10.0 if backward else 4.0) * seqs * heads * pairs * max(64, -(-head // 64) * 64)
        peak = rates.matrix.get(query.dtype, rates.matrix["float32"])
        share, half = (rate.backward, rate.backward_half) if backward else (rate.forward, rate.forward_half)
        seconds = flops / (peak * share) * (1.0 + half / max(1, columns))
        tiles = seqs * heads * -(-rows // 128) / rates.sms  # a short row of tiles leaves multiprocessors idle
        seconds *= 1.0 + 0.3 / max(tiles, 0.1) if tiles < 16 else 1.0
        if backward and key.shape[1] != heads:  # the gradients of grouped keys and values are summed up
            seconds += 2 * moved_s(key.item_bytes * seqs * whole * head * (heads + key.shape[1]), rates)
        return Price(seconds + 3 * rates.launch_s, "attention", 3 if backward else 1)

    return price


def _is_causal(call: Operator, backward: bool, kernel: str) -> bool:
    """The only flag of these operators that is set where a causal mask is meant."""
    place, flags = _CAUSAL[kernel, backward], call.numbers
    return bool(flags[place]) if len(flags) > place else True


_CAUSAL = {("flash", False): 1, ("flash", True): 3, ("efficient", False): 2, ("efficient", True): 5}
"""Where `is_causal` stands among the plain numbers: flash: dropout, is_causal, debug mask; max_q, max_k, dropout,
is_causal; efficient: log-sum-exp wanted, dropout, is_causal; dropout, four gradients wanted, is_causal."""


def _embedded_backward(call: Operator, rates: CardRates) -> Price:
    """The table's gradient is filled with zeros, the tokens are sorted and every row that is met is summed.

    Measured (H100): 151,936 x 4,096 for 8,192 tokens 947 microseconds, 128,256 x 2,048 503, 151,936 x 896 for 16,384
    423.
    """
    summed = 130e-6 + 12e-12 * call.inputs[0].numel * 132 / rates.sms
    return Price(moved_s(_bytes(call.outputs), rates, 1.05) + summed, "elementwise", 10)


def _indexed(call: Operator, rates: CardRates) -> Price:
    """Rows by number go wide; several index tensors (a mask) element by element.

    Measured (H100): 33.5 million elements by a mask in 197 microseconds; 65,536 rows of 4 kB out of 8,192 in 167.
    """
    seconds = moved_s(2 * _bytes(call.outputs), rates, 0.95)
    if len(call.inputs) > 2:
        seconds = max(seconds, 2 * sum(layout.numel for layout in call.outputs) / rates.single_elements)
    return Price(seconds, "elementwise")


def _catenated(call: Operator, rates: CardRates) -> Price:
    """Measured (H100): 0.96 TB/s for halves of heads, 2.9 for whole rows of 1,024."""
    narrow = call.outputs and call.outputs[0].shape[-1] <= 256
    return Price(moved_s(2 * _bytes(call.outputs), rates, 0.32 if narrow else 0.95), "elementwise")


def _dequantized(call: Operator, rates: CardRates) -> Price:
    """NF4 to 16 bit: packed codes and scales read, weights written.

    Measured (H100): 12,288 x 4,096 in 58.4 microseconds, 4,096 x 4,096 in 20.6, 1,024 x 4,096 in 6.6; the nested scales
    2.1 to 3.5 more.
    """
    written = _bytes(call.outputs)
    return Price(moved_s(written + written * 0.27, rates, 0.72), "dequantization", 1)


def _gemm_4bit(call: Operator, rates: CardRates) -> Price:
    """The matrix is unpacked, then multiplied (above a few rows; bitsandbytes 0.50 backends/cuda/ops.py)."""
    hidden, out = call.inputs[0], call.outputs[0]
    k, n = hidden.shape[-1], out.shape[-1]
    rows = hidden.numel // k
    unpacked = moved_s(k * n * (hidden.item_bytes + 0.53), rates, 0.72) + 3.0e-6
    multiplied = matrix_s(rows, n, k, hidden.dtype, rates, aligned=not (n % 8 or k % 8))
    return Price(unpacked + multiplied, "matrix", 3, unpacked)


def _fused_optimizer(call: Operator, rates: CardRates) -> Price:
    """Weights, gradients and two states read, all but the gradients written; some 21 tensors a launch.

    Measured (H100): 1.24e9 fp32 parameters in 12.9 ms: 28 bytes each at 2.7 of 3.05 TB/s.
    """
    return Price(moved_s(7 * call.inputs[0].size_bytes, rates, 0.89), "optimizer", 1 + call.listed // 5 // 21)


def _foreach(call: Operator, rates: CardRates) -> Price:
    """Every list that is given is read, the first (or what comes out) written; some 30 tensors a launch."""
    read, written = _bytes(call.inputs), _bytes(call.outputs)
    if not written and "_." in call.name:
        written = call.inputs[0].size_bytes
    return Price(moved_s(read + written, rates, 0.9), "optimizer", 1 + call.listed // 30)


def _optimizer_8bit(call: Operator, rates: CardRates) -> Price:
    """bitsandbytes' blockwise step of one tensor: multiprocessors look for each state's code, memory is idle.

    Measured (H100): AdamW8bit 31.6 ms a billion 16-bit weights, 33.0 a billion in fp32; Lion8bit, with one state, 20.
    """
    two_states = sum(layout.dtype == "uint8" for layout in call.inputs) > 1
    return Price(
        call.inputs[0].numel * (32e-12 if two_states else 20e-12) * 132 / rates.sms + rates.launch_s, "optimizer"
    )


def _int8_matrix(call: Operator, rates: CardRates) -> Price:
    """Measured (H100): 4,096 x 12,288 x 4,096 in 472 microseconds, 4,096 cubed in 165 (an Ampere kernel: 0.85 to 1.05
    of the 16-bit rate)."""
    codes, weight = call.inputs[:2]
    k, n = codes.shape[-1], weight.shape[0]
    m = codes.numel // k
    return Price(2.0 * m * n * k / (1.1 * rates.matrix["float16"]) + _MATRIX_START_S, "matrix")


def _norm_backward(call: Operator, rates: CardRates) -> Price:
    """A program a multiprocessor walks over its rows; rows of a head go by blocks.

    Measured (H100): [8192, 4096] 16 bit 100 microseconds, [16384, 896] 105, [16384, 2048] fp32 193, [262144, 128] 179.
    """
    rows, moved = call.inputs[0], _bytes(call.inputs) + _bytes(call.outputs)
    if rows.shape[-1] <= 256:
        return Price(moved_s(moved, rates, 0.37), "elementwise")
    walked = rows.numel / rows.shape[-1] * 4.5e-9 * 132 / rates.sms
    return Price(walked + moved / rates.copy + 3 * rates.launch_s, "elementwise", 3)


VIEWS = frozenset(
    {
        "empty",
        "new_empty",
        "empty_like",
        "empty_strided",
        "new_empty_strided",
        "empty_permuted",
        "lift_fresh",
        "_unsafe_view",
        "resize_",
        "set_",
        "to_host_pinned_aside",
        "to_device_pinned_aside",
    }
)
"""Operators that run nothing on the device; those that only give another view of a tensor are told apart by the run."""


def _chunked(per_sm: float, chunk_s: float = 0.0) -> Row:
    """A kernel of flash-linear-attention: its bytes at the copy rate, or at so many bytes a second on each
    multiprocessor; one that goes along a sequence's chunks takes `chunk_s` for each at least.

    Source: QwenLM/FlashQLA `benchmark/benchmark_results_H200.txt`, `..._GB200.txt` (fla 0.5.1 as CUDA graphs, heads of
    128, 2,048 to 32,768 tokens; 1.7 times the bandwidth changes little). Shares of the parts of a forward and of a
    backward by the slopes over heads and over sequences: no kernel was timed by itself.
    Measured: tests/probes/test_linear_attention.py, the whole forward and the whole backward.
    """

    def price(call: Operator, rates: CardRates) -> Price:
        moved = _bytes(call.inputs) + _bytes(call.outputs)
        walked = chunk_s * call.outputs[0].shape[1]
        seconds = max(moved / (0.9 * rates.copy), moved / (per_sm * rates.sms), walked)
        return Price(rates.launch_s + seconds, "attention")

    return price


_FLA_BYTES_PER_SM = 16e9


def _over_pcie(pageable_bytes_per_s: float = 0.0) -> Row:
    """A copy between host and device; what is not pinned goes through a buffer that the host's CPU fills.

    Measured (H100, benchmarks/data/h100/prices.jsonl): pinned 54.7 GB/s of 64 either way and 10 microseconds more;
    pageable 16.9 GB/s to the device, 13.5 to the host.
    """

    def price(call: Operator, rates: CardRates) -> Price:
        rate = min(rates.pcie, pageable_bytes_per_s or rates.pcie)
        return Price(10e-6 + _bytes(call.inputs) / rate, "copies")

    return price


ROWS: dict[str, Row] = {
    **dict.fromkeys(("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.addmv", "aten.mv"), _product),
    "aten._grouped_mm": _grouped,
    "aten._scaled_dot_product_flash_attention": _attended(False, "flash"),
    "aten._scaled_dot_product_flash_attention_backward": _attended(True, "flash"),
    "aten._scaled_dot_product_cudnn_attention": _attended(False, "flash"),
    "aten._scaled_dot_product_efficient_attention": _attended(False, "efficient"),
    "aten._scaled_dot_product_efficient_attention_backward": _attended(True, "efficient"),
    **dict.fromkeys(("aten._to_copy", "aten.clone", "aten.copy_", "aten.contiguous"), _copied),
    **dict.fromkeys(
        (
            "aten.zeros",
            "aten.zeros_like",
            "aten.fill_",
            "aten.zero_",
            "aten.full",
            "aten.full_like",
            "aten.new_zeros",
            "aten.ones",
            "aten.ones_like",
            "aten.new_full",
            "aten.new_ones",
            "aten.arange",
        ),
        _filled,
    ),
    **dict.fromkeys(
        (
            "aten.sum",
            "aten.mean",
            "aten.amax",
            "aten.logsumexp",
            "aten.linalg_vector_norm",
            "aten.argmax",
            "aten.max",
            "aten.any",
            "aten.all",
            "aten.var_mean",
        ),
        _reduced,
    ),
    "aten._softmax": _softmaxed(1.0, 0.48),
    "aten._safe_softmax": _safe_softmaxed,
    "aten._softmax_backward_data": _softmaxed(0.75, 0.78),
    "aten._log_softmax": _softmaxed(1.0, 0.48),
    "aten._log_softmax_backward_data": _softmaxed(0.75, 0.78),
    "aten.native_layer_norm": _moved(0.7),
    "aten.native_layer_norm_backward": _moved(0.5),
    "aten.native_dropout": _moved(0.75),
    "aten.native_dropout_backward": _moved(0.8),
    "aten.nll_loss_forward": _picked,
    **dict.fromkeys(("aten.nll_loss_backward", "aten.slice_backward", "aten.select_backward"), _placed),
    "aten.linalg_solve_triangular": _moved(0.155),
    "aten.convolution": _moved(0.28),
    "aten.convolution_backward": _moved(0.34),
    "aten.embedding": _indexed,
    "aten.index_select": _indexed,
    "aten.index": _indexed,
    "aten.gather": _indexed,
    "aten.embedding_dense_backward": _embedded_backward,
    "aten.cat": _catenated,
    "aten._fused_adamw_": _fused_optimizer,
    "bitsandbytes.dequantize_4bit": _dequantized,
    "bitsandbytes.dequantize_blockwise": _dequantized,
    "bitsandbytes.gemm_4bit": _gemm_4bit,
    "bitsandbytes.int8_linear_matmul": _int8_matrix,
    "bitsandbytes.int8_vectorwise_quant": _moved(0.37),
    "bitsandbytes.int8_mm_dequant": _moved(0.9),
    "bitsandbytes.optimizer_update_8bit_blockwise": _optimizer_8bit,
    "bitsandbytes.optimizer_update_32bit": _moved(0.37, "optimizer"),
    **dict.fromkeys(("pcie.to_device_pinned", "pcie.to_host_pinned"), _over_pcie()),
    **dict.fromkeys(("pcie.to_device", "pcie.to_device_aside"), _over_pcie(16.9e9)),
    **dict.fromkeys(("pcie.to_host", "pcie.to_host_aside"), _over_pcie(13.5e9)),
    # kernels that are launched from Python, by the names of their functions
    "fla.l2norm_fwd": _moved(0.9, "attention"),
    "fla.l2norm_bwd": _moved(0.9, "attention"),
    "fla.chunk_gated_delta_rule_fwd_h": _chunked(22e9, 1.1e-6),
    "fla.chunk_gated_delta_rule_bwd_dhu": _chunked(9e9, 2.6e-6),
    "liger.rms_norm": _moved(0.97),
    "liger.rms_norm_backward": _norm_backward,
    "liger.rope": _moved(0.95),
    "liger.swiglu": _moved(1.0),
    "liger.swiglu_backward": _moved(1.0),
    "trl.logprob_tile": _moved(0.44, "loss"),
    "trl.logprob_tile_backward": _moved(0.95, "loss"),
    "liger.cross_entropy": _moved(0.6, "loss"),
    "unsloth.cross_entropy": _moved(0.5, "loss"),
    "unsloth.cross_entropy_backward": _moved(0.6, "loss"),
    "triton._rms_norm_backward_kernel": _norm_backward,
    "triton._block_rms_norm_backward_kernel": _norm_backward,
    # a launch names its tensors, not which of them it writes: these write theirs where they read them
    "triton._triton_rope": _moved(0.95 / 2),
    "triton._swiglu_backward_kernel": _moved(3 / 5),
    "triton._geglu_tanh_backward_kernel": _moved(3 / 5),
    "triton._forward_kernel": _moved(0.44, "loss"),
    "triton._backward_kernel": _moved(0.95 / 2, "loss"),
}
"""By operator without its overload."""


def launches(name: str, *, sized: bool) -> bool:
    """Whether a call runs anything on the device.

    Args:
        sized: whether the run noted its tensors; it does not of views.
    """
    return sized and name != WAIT and name.partition(".")[2].partition(".")[0] not in VIEWS


def price(call: Operator, rates: CardRates) -> Price:
    """What one call costs."""
    space, _, rest = call.name.partition(".")
    name = rest.partition(".")[0]
    if not launches(call.name, sized=bool(call.inputs or call.outputs)):
        return FREE
    row = ROWS.get(f"{space}.{name}") or (
        _foreach if name.startswith(("_foreach", "_amp_foreach")) else _LAUNCHED.get(space)
    )
    return (row or _elementwise)(call, rates)


_LAUNCHED = {"triton": _moved(0.9), "fla": _chunked(_FLA_BYTES_PER_SM)}
"""What is launched from Python and has no row: every tensor that it is given is read or written once."""


def needed_flops(call: Operator) -> float:
    """Floating-point operations of a product or an attention, 0 of all else."""
    name = call.name.split(".")[1] if "." in call.name else ""
    if name in ("mm", "addmm", "bmm", "baddbmm", "gemm_4bit", "_grouped_mm", "int8_linear_matmul") and call.outputs:
        return 2.0 * call.outputs[0].numel * call.inputs[1 if name.endswith("addmm") else 0].shape[-1]
    if name.startswith("_scaled_dot_product"):
        backward = name.endswith("backward")
        query, key = call.inputs[1:3] if backward else call.inputs[:2]
        pairs = query.shape[-2] * key.shape[-2] * 0.5
        return (10.0 if backward else 4.0) * query.numel / query.shape[-2] * pairs
    return 0.0
