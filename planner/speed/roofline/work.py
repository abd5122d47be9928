"""`Work`: what the layers of a setup cost before it is said which of them are recomputed."""

from typing import NamedTuple

from planner.memory.attention_kernels import brings_xformers
from planner.memory.dtypes import SIZE_BYTES, DtypePolicy, dtype_policy_of
from planner.memory.states import streamed_stacks
from planner.memory.trained import kind_linears, layer_numbers, trained_parameters
from planner.setup import TrainSetup
from planner.speed.roofline.counts import SINGLE_WEIGHT, Moved
from planner.speed.roofline.model import LayerMatmuls, SpeedModel

_WEIGHT_CAST_BYTES = 6.0  # autocast reads a fp32 weight and writes it in 16 bit
EAGER_ATTENTION_KERNELS = (8, 10)
"""Kernels of attention in single operations beyond those of one fused kernel, forward and backward: copies of queries,
keys, values and output, two products, scaling, mask and softmax. Counted by running GPT-2's layer in PyTorch 2.13;
under autocast a cast more forward and three backward."""


TIMES_LORA = {"dora": (3.3, 1.9), "adalora": (1.5, 1.3), "vera": (1.8, 1.0), "oft": (1.4, 2.0), "ia3": (1.0, 0.35)}
"""What other adapters of matrices cost the card and the host, in multiples of LoRA's.

From 76 dry runs of four models on two cards, their operators priced (docs/adapters.md): the card's 3.0 to 3.9 (5.7
with 2,048 tokens of a 7B model, where DoRA's norms outweigh all), 1.4 to 1.6, 1.6 to 2.2, 1.1 to 1.9, 0.8 to 1.2.
"""
_ROWS = ("sdpa", "eager")
"""Attentions that are handed a mask of a packed row, or nothing; the others, Unsloth's own too, are told where its
samples end."""
ALLOCATOR_S = 5.5e-5
"""Host seconds of AdaLoRA's rank allocator per trained tensor and step, ten operations outside autograd (peft 0.21
`tuners/adalora/layer.py` update_ipt): 25 us on a CPU on which LoRA's call takes 0.45 of what the constants say."""


class MicroBatch(NamedTuple):
    """One forward's share of a micro-batch.

    Attributes:
        forwards: with gradients, that the micro-batch is cut into.
        seqs: sequences of each; the last piece of a gradient cache may have fewer, which is spread over all.
        cached: its tokens, less what the L2 cache saves.
        layers: seconds of its matrices.
    """

    forwards: int
    seqs: float
    cached: float
    layers: LayerMatmuls


class Work:
    """Seconds per token, per sequence and per micro-batch of setups that differ only in what they recompute, and in
    loss, optimizer, micro-batch and accumulation.

    Attributes:
        dtypes: data types.
        length: tokens of a sequence that pass through the layers.
        forwards_of: forwards with gradients of a micro-batch of so many samples; seqs_per_sample: sequences for each.
        moved: elementwise traffic; per_byte: seconds of one of its bytes.
        alone: seconds of it in one forward, (per token, per micro-batch); elementwise: in forward and backward.
        attention, attention_flops: seconds forward and backward, and needed forward flops, per sequence.
        trained: what trains and what its adapters cost; unpacked: what is unpacked and cast.
        unpacking_s: of every quantized matrix once, or of autocast's copies of all weights, in a forward.
        power: of the p-norm that joins GPU and host time.
        further_kernels: of eager attention and of autocast's copies of fp32 weights, forward and backward.
        stacked: the type in which stacked experts multiply.
    """

    __slots__ = (
        "_compiled",
        "_extra",
        "_flattened",
        "_full",
        "_int8",
        "_losses",
        "_micro",
        "_scored",
        "alone",
        "attention",
        "attention_flops",
        "dtypes",
        "elementwise",
        "forwards_of",
        "further_kernels",
        "length",
        "moved",
        "per_byte",
        "power",
        "seqs_per_sample",
        "speed",
        "stacked",
        "trained",
        "unpacked",
        "unpacking_s",
    )  # fmt: skip

    def __init__(self, speed: SpeedModel, setup: TrainSetup) -> None:
        constants = speed.constants
        self.speed, self._int8, self._compiled = speed, setup.quantization == "int8", setup.compiled
        self.length, self.forwards_of = setup.layer_tokens, setup.forwards_of
        self.seqs_per_sample, self._extra = setup.seqs_per_sample, setup.extra_forwards
        self._scored = (
            setup.rollout_settings.completion_tokens if setup.objective_spec.rolls_out else setup.seq_len_tokens
        )
        self._scored *= 1 if setup.objective_spec.rolls_out else self.seqs_per_sample
        self._micro: dict[int, MicroBatch] = {}
        self._losses: dict[tuple[str, int], float] = {}
        self.dtypes = dtypes = dtype_policy_of(setup)
        self._full = full = setup.method == "full"
        self.stacked = dtypes.compute if setup.quantize_experts or speed.conditions.loop_experts else dtypes.stacks
        row = setup.attention in _ROWS and not brings_xformers(speed.model.model_type, setup)
        self._flattened = setup.packing and not setup.trainer.packs_rows and row
        self.power = constants.waiting_power if _waits(speed, setup) else constants.overlap_power
        self.moved = moved = speed.traffic(dtypes, full, setup)
        bytes_left = constants.compile_bytes if setup.compiled else 1.0
        gap = constants.kernel_gap_s * bytes_left
        self.per_byte = per_byte = bytes_left * constants.elementwise_scale / speed.bandwidth
        self.elementwise = _token_and_micro(moved, per_byte, gap)
        self.alone = (moved.forward_bytes * per_byte, moved.forward_kernels * gap)
        self.trained, self.unpacked = _trained(speed, setup, dtypes), _unpacked(speed, setup, dtypes)
        forward, backward, self.attention_flops = _attended(speed, setup, dtypes)
        self.attention = forward, backward
        self.further_kernels = _further_kernels(speed, setup, dtypes)
        self.unpacking_s = (0.0 if self._int8 else self.unpacked.dequantization_s / 2.0) + (
            self.unpacked.cast_s / (1 + full)
        )

    def micro(self, samples: int) -> MicroBatch:
        """A micro-batch of so many samples."""
        micro_batch = self._micro.get(samples)
        if micro_batch is None:
            forwards = self.forwards_of(samples)
            seqs = samples * self.seqs_per_sample / forwards
            tokens = round(seqs * self.length)
            layers = self.speed.matmuls(self.dtypes.compute, self.stacked, tokens, self._int8)
            micro_batch = self._micro[samples] = MicroBatch(
                forwards, seqs, tokens / self.speed.cache_gain(tokens), layers
            )
        return micro_batch

    def attending(self, seqs: float) -> float:
        """How many times one sequence's attention so many take: packed, they are one row, of which a kernel that is not
        told where a sample ends multiplies all pairs."""
        return seqs * seqs if self._flattened else seqs

    @property
    def head_dtype(self) -> str:
        """Type in which the head multiplies."""
        return self.dtypes.autocast or self.dtypes.table

    def loss_s(self, loss: str, samples: int) -> float:
        """GPU seconds of the head and the loss for one micro-batch, its forwards without gradients included."""
        seconds = self._losses.get((loss, samples))
        if seconds is None:
            tokens, dtype = samples * self._scored, self.head_dtype
            seconds = self.speed.loss_s(loss, dtype, tokens, self._full)
            if self._extra:
                seconds += self._extra * self.speed.head_forward_s(dtype, tokens)
            self._losses[loss, samples] = seconds
        return seconds

    def forward_s(self, seqs: float, length: int) -> float:
        """GPU seconds of the layers in one forward without gradients, of the base alone."""
        tokens = round(seqs * length)
        layers = self.speed.matmuls(self.dtypes.compute, self.stacked, tokens, self._int8)
        cached = tokens / self.speed.cache_gain(tokens)
        attention = self.attention[0] * self.attending(seqs) * (length / self.length) ** 2
        return layers.forward + self.alone[0] * cached + attention + self.alone[1] + self.unpacking_s


def _further_kernels(speed: SpeedModel, setup: TrainSetup, dtypes: DtypePolicy) -> tuple[int, int]:
    """Kernels of eager attention and of autocast's copies of fp32 weights, forward and backward."""
    inv = speed.inv
    forward = backward = 0
    if setup.attention == "eager":
        layers = sum(count for _, count in inv.attentions)
        casts = dtypes.autocast is not None
        forward, backward = (layers * kernels for kernels in EAGER_ATTENTION_KERNELS)
        forward, backward = forward + layers * casts, backward + 3 * layers * casts
    if dtypes.autocast and setup.weight_dtype == "fp32" and not setup.quantized:
        copies = inv.num_tensors - inv.num_rms - 2 * inv.num_layer_norms
        forward += copies
        backward += copies if setup.method == "full" else 0
    return forward, backward


def _token_and_micro(moved: Moved, per_byte: float, gap: float) -> tuple[float, float]:
    """Seconds per token and per micro-batch, forward and backward together."""
    return (
        (moved.forward_bytes + moved.backward_bytes) * per_byte,
        (moved.forward_kernels + moved.backward_kernels) * gap,
    )


def _attended(speed: SpeedModel, setup: TrainSetup, dtypes: DtypePolicy) -> tuple[float, float, float]:
    """Seconds of a rank's attention over one sequence, forward and backward, and needed flops: its share of the whole
    where the sequence is cut, which both ways deal out evenly (a ring's ranks have an early and a late piece)."""
    degree = setup.context_degree
    if degree == 1:
        return speed.attention(setup, dtypes)
    whole = setup.replace_trusted(seq_len_tokens=setup.seq_len_tokens * degree)
    forward, backward, flops = speed.attention(whole, dtypes)
    return forward / degree, backward / degree, flops / degree


def _waits(speed: SpeedModel, setup: TrainSetup) -> bool:
    """Whether the host waits for the GPU in every layer: experts one by one or over several GPUs (how many tokens go
    where), unpadding, the outlier search of LLM.int8(), which asks for its columns, per matrix."""
    conditions = speed.conditions
    loops = conditions.loop_experts and speed.inv.num_experts_run > 0
    unpads = conditions.masked_attention and setup.attention == "flash-attention-2"
    return loops or unpads or setup.expert_degree > 1 or setup.quantization == "int8"


class _Trained(NamedTuple):
    """What trains, and what its adapters cost: seconds of a forward with its backward, per token and per micro-batch;
    of the forward alone; kernels; modules that Python calls; host seconds after a step."""

    params: float
    tensors: int
    size_bytes: int
    token_s: float = 0.0
    micro_s: float = 0.0
    forward_token_s: float = 0.0
    forward_micro_s: float = 0.0
    forward_kernels: float = 0.0
    backward_kernels: float = 0.0
    calls: float = 0.0
    step_s: float = 0.0


def _trained(speed: SpeedModel, setup: TrainSetup, dtypes: DtypePolicy) -> _Trained:
    if setup.method == "full":
        inv = speed.inv
        part = setup.trained_layers or setup.frozen_encoder
        num = trained_parameters(speed.model, setup).num if part else inv.num_params
        return _Trained(float(num), inv.num_tensors, SIZE_BYTES[dtypes.table])
    share = trained_share(speed, setup)
    if not setup.kind.adapts_matrices:
        tensors = 2 * speed.model.num_layers if setup.kind.form == "norms" else 1
        return _Trained(float(trained_parameters(speed.model, setup).num), tensors, SIZE_BYTES[dtypes.adapter])
    card, host = TIMES_LORA.get(setup.adapter, (1.0, 1.0))
    moved, edges, per_rank, calls, apart = speed.adapters(setup, dtypes)
    params = per_rank * setup.lora_rank
    if not setup.kind.like_lora:
        kind_linears(speed.model, setup.adapter, setup.lora_targets)  # refuses stacked experts
        params = float(trained_parameters(speed.model, setup).num)
    bytes_left = speed.constants.compile_bytes if setup.compiled else 1.0
    per_byte, gap = card * bytes_left / speed.bandwidth, host * speed.constants.kernel_gap_s * bytes_left
    thin_dtype = dtypes.autocast or (dtypes.compute if "lora" in speed.fused_parts(setup) else dtypes.adapter)
    thin_rate = speed.rates.matmul[thin_dtype] * speed.constants.lora_share
    token_s, micro_s = _token_and_micro(moved, per_byte, gap)
    thin = card * 2.0 * setup.lora_rank * edges / thin_rate
    return _Trained(
        params=share * params,
        tensors=round(share * 2 * calls),
        size_bytes=SIZE_BYTES[dtypes.adapter],
        token_s=share * (token_s + 3.0 * thin),
        micro_s=share * micro_s,
        forward_token_s=share * (moved.forward_bytes * per_byte + thin),
        forward_micro_s=share * moved.forward_kernels * gap,
        forward_kernels=host * share * moved.forward_kernels,
        backward_kernels=host * share * moved.backward_kernels,
        calls=host * share * (calls - apart),
        step_s=ALLOCATOR_S * 3 * calls if setup.adapter == "adalora" else 0.0,
    )


def trained_share(speed: SpeedModel, setup: TrainSetup) -> float:
    """Of the layers, those that train or carry the adapters."""
    num = speed.model.num_layers
    return len(layer_numbers(setup.trained_layers, num)) / num if setup.trained_layers else 1.0


class _Unpacked(NamedTuple):
    """Seconds of a micro-batch in which weights are unpacked or cast; of one recomputation; quantized modules."""

    dequantization_s: float
    cast_s: float
    recomputed_s: float
    calls: int


def _unpacked(speed: SpeedModel, setup: TrainSetup, dtypes: DtypePolicy) -> _Unpacked:
    dequantization = cast = recompute = 0.0
    calls = 0
    if setup.quantized:
        once, calls = speed.dequantization_s(dtypes, setup.quantization)
        # LLM.int8() multiplies in int8 and unpacks for the backward only; NF4 unpacks every time it is used
        dequantization = once if setup.quantization == "int8" else 2.0 * once
        recompute += 0.0 if setup.quantization == "int8" else once
    if setup.quantize_experts:  # unpacked in each forward; the backward finds what its forward unpacked
        once = speed.experts_s(dtypes)
        once += sum(streamed_stacks(speed.model, setup)) / speed.host_rate  # copied to the card, on its own stream
        dequantization += once
        recompute += once
    if dtypes.autocast and setup.weight_dtype == "fp32" and not setup.quantized:
        once = _WEIGHT_CAST_BYTES * sum(group.weights for group in speed.inv.groups) / speed.bandwidth
        cast = once * (2.0 if setup.method == "full" else 1.0)
        recompute += once
    if speed.conditions.single_operations and setup.method == "full":
        cast += SINGLE_WEIGHT * sum(group.weights for group in speed.inv.groups) / speed.bandwidth
    return _Unpacked(dequantization, cast, recompute, calls)
