"""The step time of one setup: operators by roofline, host time by kernel counts, both joined.

`SpeedModel` belongs to one (model, GPU) and remembers what setups share: matmul times per (data type, tokens), traffic
per data flow, optimizer cost per trained set. A whole space is ranked through `profile(setup).at(micro, accumulation)`.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from planner.hardware.gpu import GpuSpec
from planner.memory.attention_kernels import (
    attention_generation,
    attention_kernel,
    brings_xformers,
    handed_mask,
    takes_cudnn,
)
from planner.memory.dtypes import SIZE_BYTES, DtypePolicy
from planner.models.earlier import built_by_transformers_4
from planner.models.spec import AttentionSpec, LinearSpec, ModelSpec
from planner.options.losses import LOSSES
from planner.options.optimizers import OPTIMIZERS
from planner.setup import TrainSetup
from planner.setup.allowed import FLEX
from planner.speed.roofline.calibration import Calibration, Constants
from planner.speed.roofline.counts import (
    SINGLE_LOGIT,
    SINGLE_SCORES,
    Inventory,
    Mixer,
    Moved,
    adapted_linears,
    adapter_traffic,
    drag_of,
    eager_score_bytes,
    inventory,
    layer_traffic,
    mixer_of,
)
from planner.speed.roofline.rented import LISTED_TENSOR_S, LOOPED_TENSOR_S, UPDATE_S
from planner.speed.roofline.types import Conditions, Rates, matmul_s, rates_of

INT8_UNPACK_BYTES = 7.0  # bitsandbytes copies to 16 bit (read 1, write 2), then scales in place (read 2, write 2)
NF4_READ_BYTES = 0.53  # packed code and block scale of one weight
TORCH_NF4_BYTES, TORCH_NF4_KERNELS = 33.0, 18
"""Bytes moved for one weight of torchao's NF4Tensor, and kernels for a matrix: of each pair in a byte, two shifts or
masks (4), two copies in int64 (18), two look-ups by them (20), two repeated scales (4), two products (12) and their
interleaving (8).

Source: torchao `dtypes/nf4tensor.py` get_original_weight, dequantize_scalers (commit 05980129).
Measured: torchtune's Llama-3-8B QLoRA at 2 x 512 tokens on a 4090: 958 tokens/s (BenjaminBossan/peft-experiments).
"""
_FLASH_BACKWARD = 2.5  # five matmuls for the forward's two
EFFICIENT = 0.51
"""SDPA's memory-efficient kernel against its flash kernel, for the same products: `planner.speed.rates`
EFFICIENT_ELSEWHERE beside FLASH_ELSEWHERE, heads of 128."""
EFFICIENT_ON_TURING = 0.26
"""The same where it runs Turing's 16-bit instructions: `planner.speed.rates` EFFICIENT_ON_TURING beside this model's
shares of a T4's matrices (forward 0.27, backward 0.25)."""
CUDNN_WITH_MASK = 0.48
"""cuDNN's kernel on Hopper with a mask against itself without, for the same products: `planner.speed.rates` MASKED
beside CUDNN, heads of 128."""
CUDNN_ON_HOPPER, CUDNN_MAX_HEAD_DIM = 1.7, 128
"""How many times faster cuDNN's attention trains than flash-attention 2 on Hopper; the widest head it is counted for.

Source: "1.7-2.3x faster for training shapes", the least of it (github.com/huggingface/transformers/pull/48163; on
Ampere it is slower, on Ada alike). As fast as flash-attention 3: 631 and 632 TFLOP/s forward on an H100 (pytorch issue
142132).
"""
FLEX_SHARE = 0.87
"""FlexAttention's rate over flash attention 2's: 0.90 forward, 0.85 backward. No training of sinks was compared.

Source: "FlexAttention: The Flexibility of PyTorch with the Performance of FlashAttention", 2024,
pytorch.org/blog/flexattention.
"""
FLASH_2_ON_BLACKWELL = 0.35
"""Rate of flash-attention 2 on a B200, as a share of what attention reaches there otherwise: its kernels are Ampere's
(`mma.sync`), while SDPA has cuDNN's own.

Source: prime-rl benchmarks/baselines, 8 x B200 with flash_attention_2 (Qwen3-4B, 16,384 tokens, the half of its rows
that benchmarks/gathered.py does not keep out): about 300 TFLOP/s.
"""
EIGHT_BIT_STATE_S, H100_SMS = 16e-12, 132
"""Seconds of an H100 to find an 8-bit state's code: bitsandbytes' blockwise steps wait for that, not for memory.

Measured: AdamW8bit 31.6 ms a billion 16-bit weights, Lion8bit, with one state, 20 (benchmarks/data/h100/prices.jsonl).
"""
UNALIGNED_HEAD = 1 / 3
"""Rate of a head whose vocabulary is no multiple of 8 in 16 bits, as a share of an aligned one: rows do not begin on 16
bytes, so that wide loads and the fastest kernels are out.

Source: Netflix, Scaling LLM post-training (2026): the head takes three times as long where its vocabulary leaves
cuBLAS' fast path; NVIDIA, Matrix multiplication background, section 3, tensor core requirements. Likewise 3.5 times for
one matrix on an H100 whose rows begin on 8 bytes (github.com/m87-labs/kestrel/pull/143).
"""


class LayerMatmuls(NamedTuple):
    """Seconds of the layers' matrices for one micro-batch.

    Attributes:
        last_forward: of each layer's last; second_forward: of every second, `LayerSpec.every_second_product`;
        second_or_last: of those that are either.
    """

    forward: float
    input_gradient: float
    weight_gradient: float
    last_forward: float
    second_forward: float
    second_or_last: float

    def recomputed_s(self, *, saved: bool, stops: bool) -> float:
        """Seconds of those that a recomputation multiplies.

        Args:
            saved: the results of every second one were.
            stops: before each layer's last one, whose result nobody saved.
        """
        if saved:
            return self.forward - (self.second_or_last if stops else self.second_forward)
        return self.forward - stops * self.last_forward


def int8_bytes(linear: LinearSpec, dtype: str) -> float:
    """Bytes that LLM.int8() moves per token around one multiplication, forward.

    Inputs: the outlier search (absolute value 4, comparison 3, reduction 1) and the row-wise quantization (read twice,
    write once: 5), with the copy that zeroes outliers (4); outputs: int32 written and read (8), 16 bit written (2), the
    outliers' product added (4). bf16 is cast to fp16 and back, 4 bytes each way.

    Source: bitsandbytes 0.50 `autograd/_functions.py` MatMul8bitLt, `backends/cuda/ops.py` int8_vectorwise_quant.
    """
    cast = 4.0 if dtype == "bf16" else 0.0
    return (17.0 + cast) * linear.in_features + (14.0 + cast) * linear.out_features


def attended_pairs(spec: AttentionSpec, seq: int) -> float:
    """Pairs of a query and a key in one sequence, within the layer's window; half of all where it is causal."""
    if not spec.causal:
        return float(seq) * (spec.key_tokens or seq)
    window = spec.window_tokens
    return float(seq) * seq / 2 if window is None or window >= seq else seq * window - window * window / 2.0


class SpeedModel:
    """Times of one model on one GPU under one calibration and one software stack.

    Attributes:
        works, families, profiles: what `planner.speed.roofline` made of it, by what each depends on.
    """

    def __init__(self, model: ModelSpec, gpu: GpuSpec, calibration: Calibration, conditions: Conditions) -> None:
        self.model = model
        self.gpu = gpu
        self.calibration = calibration
        self.conditions = conditions
        if built_by_transformers_4(model):
            self.conditions = replace(conditions, loop_experts=True)
        self.inv: Inventory = inventory(model)
        self.constants: Constants = calibration.constants_for(gpu)
        self.rates: Rates = rates_of(gpu, calibration, self.constants)
        self.drag = drag_of(self.rates.bandwidth)
        self.bandwidth = self.rates.bandwidth * self.constants.bandwidth_share
        self.works: dict[tuple[object, ...], Any] = {}
        self.families: dict[tuple[int, int, bool, bool], Any] = {}
        self.profiles: dict[tuple[object, ...], dict[str, Any]] = {}
        self._matmuls: dict[tuple[str, str, int, bool], LayerMatmuls] = {}
        self._losses: dict[tuple[str, str, int, bool], float] = {}
        self._optimizers: dict[tuple[str, float, int, int, bool], tuple[float, float]] = {}
        self._traffic: dict[tuple[DtypePolicy, bool, frozenset[str], Mixer, int], Moved] = {}
        self._adapters: dict[tuple[object, ...], tuple[Moved, int, float, int, int]] = {}
        self._attention: dict[tuple[object, ...], tuple[float, float, float]] = {}

    @property
    def host_scale(self) -> float:
        """How many times longer the host takes than the rented machine's that was measured."""
        return self.constants.host_scale * (1.0 if self.conditions.rented_host else self.constants.published_host)

    @property
    def host_rate(self) -> float:
        """Bytes per second of pinned copies between the GPU and its host, one direction."""
        from planner.hardware.cluster import host_link  # late: only offloading needs it

        return host_link(self.gpu).bytes_per_s * self.calibration.layout_constants.host_copy_share

    def cache_gain(self, tokens: int) -> float:
        """How many times faster elementwise kernels run because the previous kernel's result is still in the L2 cache.

        A kernel reads what the one before wrote; when both tensors fit, little goes to memory and back.
        """
        if not self.rates.l2:
            return 1.0
        fill = 12.0 * tokens * self.inv.hidden_size / self.rates.l2
        return 1.0 + self.constants.l2_gain / (1.0 + fill * fill)

    def matmuls(self, dtype: str, stacked: str, tokens: int, int8: bool) -> LayerMatmuls:
        """Forward, input-gradient and weight-gradient seconds of all layers' matrices at `tokens` tokens.

        Args:
            stacked: the type in which stacked experts multiply, which is their weights': autocast leaves it.
                Source: transformers 5.23 `integrations/moe.py` `_grouped_mm` (grouped_mm is not autocast-enabled).
        """
        key = (dtype, stacked, tokens, int8)
        cached = self._matmuls.get(key)
        if cached is not None:
            return cached
        forward = inputs = weights = last = second = either = 0.0
        for group in self.inv.groups:
            linear, num = group.linear, max(1, group.linear.num)
            compute_dtype = stacked if linear.is_stack else dtype
            size, rate = SIZE_BYTES[compute_dtype], self.rates.matmul[compute_dtype]
            rows = tokens * linear.num_active / num
            product = self._equal_matmuls_s(rows, linear.out_features, linear.in_features, num, rate, size)
            back = self._equal_matmuls_s(rows, linear.in_features, linear.out_features, num, rate, size)
            grad = self._equal_matmuls_s(linear.out_features, linear.in_features, rows, num, rate, size)
            if int8 and linear.module != "parameter":
                product = product / self.constants.int8_rate + rows * num * int8_bytes(linear, dtype) / self.bandwidth
            forward += group.count * product
            inputs += group.count * back
            weights += group.count * grad
            second += group.second * product
            either += (group.count if linear.role == "down" else group.second) * product
            if linear.role == "down":
                last += group.count * product
        size, rate = SIZE_BYTES[dtype], self.rates.matmul[dtype]
        for linear in self.inv.outer:
            forward += self._equal_matmuls_s(tokens, linear.out_features, linear.in_features, 1, rate, size)
            inputs += self._equal_matmuls_s(tokens, linear.in_features, linear.out_features, 1, rate, size)
            weights += self._equal_matmuls_s(linear.out_features, linear.in_features, tokens, 1, rate, size)
        made = LayerMatmuls(forward, inputs, weights, last, second, either)
        self._matmuls[key] = made
        return made

    def _equal_matmuls_s(self, m: float, n: float, k: float, num: int, rate: float, size: int) -> float:
        """`num` equal matmuls: one after another, or grouped (they fill the waves together)."""
        if num == 1:
            return matmul_s(m, n, k, rate, size, self.rates, self.constants)
        if self.conditions.loop_experts:
            return num * matmul_s(m, n, k, rate, size, self.rates, self.constants)
        together = matmul_s(m * num, n, k, rate, size, self.rates, self.constants)
        return together + (num - 1) * n * k * size / self.bandwidth * (1.0 if m * num < k * num else 0.0)

    def loss_s(self, loss: str, dtype: str, tokens: int, trained: bool) -> float:
        """Seconds of the head and the loss chain, forward and backward, for one micro-batch."""
        key = (loss, dtype, tokens, trained)
        cached = self._losses.get(key)
        if cached is not None:
            return cached
        head = self.inv.head
        if head is None:
            return 0.0
        vocab, hidden = head.out_features, head.in_features
        size = SIZE_BYTES[dtype]
        rate = self.head_rate(dtype, vocab)
        tiling = LOSSES[loss].tiling(tokens, vocab, hidden)
        chunk = tiling.tokens
        chunks = -(-tokens // chunk)
        seconds = tiling.forwards * matmul_s(chunk, vocab, hidden, rate, size, self.rates, self.constants)
        seconds += matmul_s(chunk, hidden, vocab, rate, size, self.rates, self.constants)
        if trained:
            seconds += matmul_s(vocab, hidden, chunk, rate, size, self.rates, self.constants)
            if chunks > 1:
                seconds += tiling.head_traffic_bytes * vocab * hidden / self.bandwidth
        made = chunks * seconds + self.loss_chain_s(loss, dtype, tokens, vocab)
        self._losses[key] = made
        return made

    def head_rate(self, dtype: str, vocab: int) -> float:
        """Flops per second of the head's matrices; torch.compile pads them (PyTorch 2.13 `_inductor/config.py`
        shape_padding)."""
        aligned = dtype == "fp32" or vocab % 8 == 0 or vocab < 8 or self.conditions.padded_head
        return self.rates.matmul[dtype] * (1.0 if aligned else UNALIGNED_HEAD)

    def head_forward_s(self, dtype: str, tokens: int) -> float:
        """Seconds of the head alone over so many tokens, without gradients."""
        head = self.inv.head
        if head is None:
            return 0.0
        size, rate = SIZE_BYTES[dtype], self.head_rate(dtype, head.out_features)
        return matmul_s(tokens, head.out_features, head.in_features, rate, size, self.rates, self.constants)

    def loss_chain_s(self, loss: str, dtype: str, tokens: int, vocab: int) -> float:
        """Seconds of the loss chain over so many logits, without the head's matmuls."""
        fused, softcap = self.conditions.fused_loss, self.inv.softcap
        moved = LOSSES[loss].moved_per_logit(SIZE_BYTES[dtype], fused=fused, softcap=softcap, drag=self.drag)
        if self.conditions.single_operations and loss == "full":
            moved = SINGLE_LOGIT[SIZE_BYTES[dtype] == 2]
        return moved * tokens * vocab / (self.rates.bandwidth * self.constants.loss_bandwidth_share)

    def traffic(self, dtypes: DtypePolicy, trained: bool, setup: TrainSetup) -> Moved:
        """Elementwise traffic of the layers for one data flow and a setup's kernels."""
        fused, mixer, cut = self.fused_parts(setup), self.mixer(setup), setup.stream_degree
        key = (dtypes, trained, fused, mixer, cut)
        traffic = self._traffic.get(key)
        if traffic is None:
            inv = self.inv
            if cut > 1:  # norms, residual sums and dropouts run on this rank's rows of the stream
                names = ("rms_width", "layer_norm_width", "residual_width", "dropout_width")
                inv = replace(inv, **{name: getattr(inv, name) // cut for name in names})
            traffic = self._traffic[key] = layer_traffic(
                inv, dtypes, self.conditions, trained=trained, drag=self.drag, fused=fused, mixer=mixer
            )
        return traffic

    def mixer(self, setup: TrainSetup) -> Mixer:
        """What a linear-attention layer does."""
        looped = setup.before_transformers(5, 17)
        return mixer_of(self.model.model_type, setup.linear_attention, looped=looped)

    def fused_parts(self, setup: TrainSetup) -> frozenset[str]:
        """What of a layer runs as kernels of its own, by the setup or by its stack. "lora": adapters in one function
        with what they adapt, which multiplies in the activations' type (unsloth 2026.1 `kernels/utils.py` matmul_lora).
        """
        return setup.fused_parts(self.model.model_type) | self.conditions.fused_parts

    def adapters(self, setup: TrainSetup, dtypes: DtypePolicy) -> tuple[Moved, int, float, int, int]:
        """LoRA's traffic, its sum of edges (in + out) per rank and token, parameters per rank, modules, and those of
        them that run at another length than the text."""
        fused = "lora" in self.fused_parts(setup)
        key = (setup.lora_targets, dtypes, setup.lora_dropout > 0, fused)
        cached = self._adapters.get(key)
        if cached is None:
            linears, params, modules, apart = adapted_linears(self.model, setup.lora_targets)
            moved = adapter_traffic(linears, dtypes, dropout=setup.lora_dropout > 0, fused=fused)
            edges = sum(
                count * linear.num_active * (linear.in_features + linear.out_features) for linear, count in linears
            )
            cached = self._adapters[key] = (moved, edges, float(params), modules, apart)
        return cached

    def attention(self, setup: TrainSetup, dtypes: DtypePolicy) -> tuple[float, float, float]:
        """Seconds per sequence of attention forward and backward, and needed forward flops per sequence."""
        traced = setup.compiled and setup.trainer.traces_masks
        masks = (setup.packing, setup.pads, traced, setup.images is None, setup.adapter == "prefix")
        key = (setup.attention, dtypes, setup.seq_len_tokens, setup.compiled, masks)
        cached = self._attention.get(key)
        if cached is not None:
            return cached
        forward = backward = flops = 0.0
        for spec, count in self.inv.attentions:
            costs = self._attention_one(spec, setup, dtypes)
            forward += count * costs[0]
            backward += count * costs[1]
            flops += count * costs[2]
        self._attention[key] = (forward, backward, flops)
        return forward, backward, flops

    def attention_is_fused(self, setup: TrainSetup, dtypes: DtypePolicy) -> bool:
        """Whether one kernel computes the attention of every layer that has one."""
        dtype = dtypes.attention_input
        kernels = {attention_kernel(self.model, setup, self.gpu, spec, dtype) for spec, _ in self.inv.attentions}
        return kernels <= {"flash", "efficient"}

    def _attention_one(self, spec: AttentionSpec, setup: TrainSetup, dtypes: DtypePolicy) -> tuple[float, float, float]:
        """Seconds per sequence forward and backward, and needed forward flops.

        A kernel of SDPA that is handed a mask skips neither the causal half nor what lies outside a window (PyTorch
        2.13 `transformers/cuda/attention.cu`: custom_mask_type of is_causal alone; cuDNN takes it as a bias). Unsloth's
        own attention is told where samples end (unsloth 2026.1 `utils/attention_dispatch.py`: flash-attention with
        their lengths, else xformers with a block-diagonal bias).
        """
        constants, dtype = self.constants, dtypes.attention_input
        kernel = attention_kernel(self.model, setup, self.gpu, spec, dtype)
        if kernel == "flash" and dtype == "fp32":  # flash-attention-2 alone, whose inputs transformers casts
            dtype = dtypes.compute
        pairs = attended_pairs(spec, setup.seq_len_tokens)
        each = 2.0 * spec.num_heads * (spec.head_dim + spec.value_head_dim)
        full = float(setup.seq_len_tokens) * (spec.key_tokens or setup.seq_len_tokens)
        if kernel not in ("flash", "efficient"):
            product_s = each * full / (0.7 * self.rates.matmul[dtype])
            ahead, back = self._score_bytes(setup, dtypes, kernel)
            scores_s = spec.num_heads * full / self.bandwidth
            return product_s + ahead * scores_s, 2 * product_s + back * scores_s, each * pairs
        apart = brings_xformers(self.model.model_type, setup)
        if apart and kernel == "efficient" and dtype != "fp32" and attention_generation(self.gpu) != "before 8.0":
            kernel = "flash"
        masked = self.conditions.masked_attention or setup.pads or handed_mask(self.model, setup, spec)
        masked = masked and not apart
        done = each * (full if masked and kernel == "efficient" else pairs)
        rate = self.rates.matmul[dtype] * self._fused_share(spec, setup, kernel, dtype)
        forward = done / (rate * constants.attention_forward_share)
        backward = _FLASH_BACKWARD * done / (rate * constants.attention_backward_share)
        if kernel == "flash" and setup.pads:  # rows without padding: read and written, the output over zeros; and back
            heads, groups = spec.num_heads, spec.num_kv_heads
            inputs = heads * spec.head_dim + groups * (spec.head_dim + spec.value_head_dim)
            pass_s = SIZE_BYTES[dtype] * setup.seq_len_tokens / self.bandwidth
            forward += pass_s * (2 * inputs + 3 * heads * spec.value_head_dim)
            backward += pass_s * (4 * inputs + 2 * heads * spec.value_head_dim)
        return forward, backward, each * pairs

    def _score_bytes(self, setup: TrainSetup, dtypes: DtypePolicy, kernel: str) -> tuple[float, float]:
        """Bytes per score, forward and backward, of attention that writes them: single operations, or the math
        kernel."""
        dtype = dtypes.attention_input
        if kernel != "eager":
            moved = self.constants.attention_math_passes * SIZE_BYTES[dtype]
            return 0.45 * moved, 0.55 * moved
        if self.conditions.single_operations:
            ahead, back = SINGLE_SCORES[dtypes.autocast is not None]
            narrow = 0.5 if SIZE_BYTES[dtype] == 2 and dtypes.autocast is None else 1.0
            return narrow * ahead, narrow * back
        traits = self.model.traits
        upcast = not traits.plain_softmax or dtypes.autocast is not None  # autocast computes a softmax in fp32
        return eager_score_bytes(
            dtype, upcast=upcast, dropout=traits.attention_dropout, drag=self.drag, compiled=setup.compiled
        )

    def _fused_share(self, spec: AttentionSpec, setup: TrainSetup, kernel: str, dtype: str) -> float:
        """How fast a fused attention is beside SDPA's flash kernel."""
        cudnn = self.conditions.cudnn_attention and takes_cudnn(self.gpu, setup.attention) and dtype != "fp32"
        on_turing = self.gpu.arch == "Turing" and dtype != "fp32"
        share = 1.0 if kernel == "flash" else EFFICIENT_ON_TURING if on_turing else EFFICIENT
        if cudnn and max(spec.head_dim, spec.value_head_dim) <= CUDNN_MAX_HEAD_DIM:
            hopper = CUDNN_ON_HOPPER * (CUDNN_WITH_MASK if kernel == "efficient" else 1.0)
            share = hopper if self.gpu.arch == "Hopper" else 1.0
        if setup.attention == FLEX:
            share = FLEX_SHARE
        if setup.attention == "flash-attention-2" and (self.gpu.compute_capability or (0, 0))[0] == 10:
            share = FLASH_2_ON_BLACKWELL
        return share * (self.constants.flash_1_share if self.conditions.flash_1 else 1.0)

    def dequantization_s(self, dtypes: DtypePolicy, quantization: str) -> tuple[float, int]:
        """Seconds of unpacking every quantized matrix once, and how many modules there are."""
        weights = modules = 0
        for group in self.inv.groups:
            if group.linear.module != "parameter":
                weights += group.weights
                modules += group.count * group.linear.num
        each = INT8_UNPACK_BYTES if quantization == "int8" else NF4_READ_BYTES + SIZE_BYTES[dtypes.compute]
        if self.conditions.torch_nf4 and quantization != "int8":
            return weights * TORCH_NF4_BYTES / self.bandwidth + modules * TORCH_NF4_KERNELS * (
                self.constants.kernel_gap_s
            ), modules
        moved = weights * each
        extra = 2 if quantization == "nf4-double" else 0
        seconds = moved / (self.rates.bandwidth * self.constants.dequantize_share)
        return seconds + modules * (1 + extra) * self.constants.kernel_gap_s, modules

    def experts_s(self, dtypes: DtypePolicy) -> float:
        """Seconds of unpacking every stack of 4-bit experts once. Nobody measured them: taken at the rate of other
        matrices (`dequantization_s`)."""
        weights = sum(group.weights for group in self.inv.groups if group.linear.is_stack)
        each = NF4_READ_BYTES + SIZE_BYTES[dtypes.table]
        return weights * each / (self.rates.bandwidth * self.constants.dequantize_share)

    def optimizer_s(
        self, optimizer: str, num: float, size: int, tensors: int, *, scaled: bool = False
    ) -> tuple[float, float]:
        """Seconds on the GPU and on the host of one optimizer step over `num` parameters in `tensors` tensors.

        `scaled`: a loss scaler looks over all gradients and divides them before (PyTorch `torch/amp/grad_scaler.py`
        _unscale_grads_): read and written once.

        Paged states are fetched from the host and evicted again (`paging_s`): memory was planned without room for them.
        """
        key = (optimizer, num, size, tensors, scaled)
        cached = self._optimizers.get(key)
        if cached is not None:
            return cached
        row = OPTIMIZERS[optimizer]
        constants = self.constants
        moved = num * (row.passes * size + row.extra_bytes)
        looked_over = num * size * (3 * self.conditions.gradient_clipping + 2 * scaled)
        bandwidth = self.rates.bandwidth * constants.optimizer_share
        update = moved / bandwidth
        if row.bitsandbytes and row.states.eight_bit:
            update = max(update, num * row.states.eight_bit * EIGHT_BIT_STATE_S * H100_SMS / self.rates.sms)
        gpu = update + looked_over / bandwidth + tensors * row.kernels_per_tensor * constants.kernel_gap_s
        host = tensors * ((LOOPED_TENSOR_S if row.looped else LISTED_TENSOR_S) + row.kernels_per_tensor * UPDATE_S)
        part = self.conditions.optimizer_part
        paging = self.paging_s(optimizer, num, size)
        cached = self._optimizers[key] = (gpu * part + paging, host * self.host_scale * part)
        return cached

    def paging_s(self, optimizer: str, num: float, size: int) -> float:
        """Seconds in which all states of a paged optimizer come from the host and go back; 0 for others.

        Source: bitsandbytes 0.50 `optim/optimizer.py` prefetch_state; CUDA's managed memory moves over the link to the
        host, taken at the rate of pinned copies (page faults are slower: this is the least that it takes).
        """
        row = OPTIMIZERS[optimizer]
        if not row.paged:
            return 0.0
        moved = 2.0 * row.all_state_bytes(int(num), size, matrix_edge_sum=0)
        return moved / self.host_rate * self.conditions.optimizer_part
