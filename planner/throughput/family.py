"""`Family`: the layers' work of all setups that differ only in loss, optimizer, micro-batch and accumulation."""

from dataclasses import fields
from operator import attrgetter
from typing import NamedTuple

from planner.memory.dtypes import SIZE_BYTES, Flow, flow_of
from planner.memory.trained import frozen_below, trained_parameters
from planner.setup import SPREAD_FIELDS, TrainSetup
from planner.throughput.adapter_kinds import kind_work
from planner.throughput.counts import SINGLE_HOST, SINGLE_WEIGHT, Moved
from planner.throughput.model import SpeedModel
from planner.throughput.types import WITHOUT_GRADIENTS

_WEIGHT_CAST_BYTES = 6.0  # autocast reads a fp32 weight and writes it in 16 bit
SELECTIVE_HOST = 1.7
"""Further host time of an operation under selective checkpointing, in the forward and in the recomputation, as a
multiple of its own: torch calls Python for each. Timed on a CPU (docs/kernels.md)."""
EAGER_ATTENTION_KERNELS = (8, 10)
"""Kernels of attention in single operations beyond those of one fused kernel, forward and backward: copies of queries,
keys, values and output, two products, scaling, mask and softmax. Counted by running GPT-2's layer in PyTorch 2.13;
under autocast a cast more forward and three backward."""
COMPILED_ATTENTION_KERNELS = (2, 4)
"""The same under torch.compile, which makes one kernel of all between the two products."""
COMPILED_LAUNCH_S, COMPILED_LOOKUP_S = 9.0e-6, 5.5e-5
"""Host seconds to launch one kernel of a compiled graph, and to look a layer's graph up (guards) in every forward.

Source: github.com/meta-pytorch/tritonbench/pull/1017 and 1016 (6.8 to 9.1 us by the number of arguments, 9 us with the
generated wrapper around it, on a GB200's host); github.com/pytorch/pytorch/issues/191753 (2 ms per forward of the 36
layers of Qwen3-8B). Not fitted.
"""
_LOSS_KERNELS = 14
_EMBEDDING_KERNELS = 12


_NOT_THE_FAMILYS = {
    "optimizer",
    "loss",
    "micro_batch_seqs",
    "accumulation_steps",
    "num_gpus",
    "parallel",
    *SPREAD_FIELDS,
} - {"context_degree", "expert_degree"}  # whose attention is longer than its tokens; whose host waits
_SHARED = tuple(one.name for one in fields(TrainSetup) if one.name not in _NOT_THE_FAMILYS)
family_key = attrgetter(*_SHARED, "extra_forwards", "num_forwards")
"""What setups of one family share: every field that is not named here, so that a new one cannot be forgotten, and the
forwards without gradients, which for completions follow from the global batch, and those of a micro-batch's pieces."""


class Family:
    """Seconds per token, per sequence and per micro-batch, summed up once; nothing here knows loss or optimizer.

    Attributes:
        flow: data types.
        trained_params, trained_tensors: what the optimizer updates.
        trained_bytes: size of one trained parameter.
        seqs_per_sample: sequences for each sample of the micro-batch.
        host_s: host time to issue one micro-batch's kernels; forward_host_s: those of one forward alone; step_s: host
            time of the adapter's own work after every optimizer step.
        unpacking_s: of every quantized matrix once, or of autocast's copies of all weights, in a forward.
        power: of the p-norm that joins GPU and host time.
        attention_flops: needed forward flops of attention, per sequence.
    """

    __slots__ = (
        "_attention", "_busy", "_cast", "_dequantization", "_elementwise", "_extra", "_lora", "_recompute", "_seq",
        "_setup", "_skip_first", "_skip_last", "_speed", "attention_flops", "flow", "forward_host_s", "host_s",
        "power", "seqs_per_sample", "step_s", "trained_bytes", "trained_params", "trained_tensors", "unpacking_s",
    )  # fmt: skip

    def __init__(self, speed: SpeedModel, setup: TrainSetup) -> None:
        constants, inv = speed.constants, speed.inv
        self._speed, self._setup = speed, setup
        self._seq = setup.layer_tokens
        self._busy: dict[int, float] = {}
        self.seqs_per_sample = setup.aim.seqs_per_sample
        self.flow = flow = flow_of(setup)
        full, every = setup.method == "full", setup.checkpointing
        again = -(-inv.num_layers // every) / inv.num_layers if every and inv.num_layers else 0.0
        self.power = constants.waiting_power if _waits(speed, setup) else constants.overlap_power

        moved = speed.traffic(flow, full, setup.kernels, setup.compiled)
        bytes_left = constants.compile_bytes if setup.compiled else 1.0
        gap = constants.kernel_gap_s * bytes_left
        per_byte = bytes_left * constants.elementwise_scale / speed.bandwidth
        self._elementwise = _token_and_micro(moved, per_byte, gap)
        alone = (moved.forward_bytes * per_byte, moved.forward_kernels * gap)

        trained = _trained(speed, setup, flow)
        self._lora = trained.token_s, trained.micro_s
        self.trained_params, self.trained_tensors = trained.params, trained.tensors
        self.trained_bytes, self.step_s = trained.size_bytes, trained.step_s * constants.host_scale
        unpacked = _unpacked(speed, setup, flow)
        self._dequantization, self._cast = unpacked.dequantization_s, unpacked.cast_s
        again_token = again * moved.forward_bytes * per_byte + again * trained.forward_token_s
        again_micro = again * alone[1] + again * trained.forward_micro_s + again * unpacked.again_s

        forward, backward, self.attention_flops = _attended(speed, setup, flow)
        self._attention = forward + backward
        attended = 0.0 if setup.selective_checkpointing and speed.attention_is_fused(setup, flow) else again * forward
        attended += self._offloaded_token_s(again) * self._seq
        self._recompute = (again_token, attended, again_micro, again)
        self._extra = (alone[0], forward, alone[1])  # a forward without gradients: adapters off, or a copy's
        self._skip_last = full and not speed.conditions.reentrant_checkpointing
        self._skip_first = not full and not every
        self._count_host(moved, trained, unpacked.calls, again)
        self.unpacking_s = (0.0 if setup.quantization == "int8" else self._dequantization / 2.0) + self._cast / (
            1 + full
        )

    def _offloaded_token_s(self, again: float) -> float:
        """Seconds per token in which checkpoints go to the host and back on the compute stream."""
        speed, setup = self._speed, self._setup
        if not setup.activation_offload or setup.by.overlaps_offload:
            return 0.0
        inputs = SIZE_BYTES[self.flow.residual] * speed.inv.hidden_size * again * speed.inv.num_layers
        return 2.0 * inputs / speed.host_rate

    def _count_host(self, moved: Moved, trained: "_Trained", quantized_calls: int, again: float) -> None:
        """Sets the host's time of a micro-batch and of a forward alone."""
        constants, setup = self._speed.constants, self._setup
        ahead, back = self._further_kernels()
        forward_kernels = moved.forward_kernels + trained.forward_kernels + ahead
        backward_kernels = moved.backward_kernels + trained.backward_kernels + back
        forward_s, backward_s, called = constants.host_forward_s, constants.host_backward_s, 1.0
        if self._speed.conditions.single_operations:
            forward_s, backward_s = forward_s * SINGLE_HOST[0], backward_s * SINGLE_HOST[1]
        if setup.compiled:
            forward_s, backward_s, called = COMPILED_LAUNCH_S, COMPILED_LAUNCH_S, constants.compile_host
        host = forward_kernels * (1 + again) * forward_s + backward_kernels * backward_s
        host += (_LOSS_KERNELS + _EMBEDDING_KERNELS) * (forward_s + backward_s)
        host += called * quantized_calls * (2 + again) * constants.host_quantized_s
        host += called * trained.calls * (1 + again) * constants.host_lora_s
        host += self._speed.inv.num_layers * COMPILED_LOOKUP_S if setup.compiled else 0.0
        forward_host = forward_kernels * constants.host_forward_s + quantized_calls * constants.host_quantized_s
        self.forward_host_s = (forward_host + trained.calls * constants.host_lora_s) * constants.host_scale
        if extra := setup.extra_forwards:
            host += extra * moved.forward_kernels * forward_s
            host += extra * called * quantized_calls * constants.host_quantized_s
        if setup.selective_checkpointing:
            host += 2.0 * again * forward_kernels * SELECTIVE_HOST * forward_s
        self.host_s = setup.aim.forwards * host * constants.host_scale

    def _further_kernels(self) -> tuple[int, int]:
        """Kernels of eager attention and of autocast's copies of fp32 weights, forward and backward."""
        setup, inv = self._setup, self._speed.inv
        forward = backward = 0
        if setup.attention == "eager":
            layers = sum(count for _, count in inv.attentions)
            single = COMPILED_ATTENTION_KERNELS if setup.compiled else EAGER_ATTENTION_KERNELS
            casts = self.flow.autocast is not None and not setup.compiled
            forward, backward = layers * (single[0] + casts), layers * (single[1] + 3 * casts)
        if self.flow.autocast and setup.weight_dtype == "fp32" and not setup.quantized:
            copies = inv.num_tensors - inv.num_rms - 2 * inv.num_layer_norms
            forward += copies
            backward += copies if setup.method == "full" else 0
        return forward, backward

    def busy_s(self, samples: int) -> float:
        """GPU seconds of the layers for one micro-batch."""
        found = self._busy.get(samples)
        if found is None:
            found = self._busy[samples] = sum(self.parts(samples).values())
        return found

    def unmeasured_s(self, samples: int) -> float:
        """Seconds of one micro-batch that an adapter costs which no measured run had; 0 for LoRA."""
        if self._setup.method == "full" or self._setup.kind.like_lora:
            return 0.0
        return self._lora[0] * samples * self.seqs_per_sample * self._seq + self._lora[1]

    def parts(self, samples: int) -> dict[str, float]:
        """GPU seconds of the layers for one micro-batch by part."""
        speed, setup = self._speed, self._setup
        forwards = setup.num_forwards
        seqs = max(1, samples * self.seqs_per_sample // forwards)
        tokens = seqs * self._seq
        cached = tokens / speed.cache_gain(tokens)
        layers = speed.matmuls(self.flow.compute, tokens, setup.quantization == "int8")
        again_token, again_seq, again_micro, again = self._recompute
        below = max(0, frozen_below(speed.model, setup) - speed.inv.num_apart)
        above = 1.0 - below / max(1, speed.inv.num_layers)
        again *= above
        matmul = layers.forward + above * layers.input_gradient
        if setup.method == "full":
            matmul += layers.weight_gradient * (setup.trained_layers / speed.inv.num_layers or 1.0)
        elif self._skip_first:
            matmul -= layers.first_input_gradient
        # early stop: a recomputed layer need not multiply its last matrix, whose output nobody saved
        recompute = again * (layers.forward - (layers.last_forward if self._skip_last else 0.0))
        parts = {
            "matmul": matmul,
            "recompute": recompute + again_token * cached + again_seq * seqs + again_micro,
            "attention": self._attention * seqs,
            "elementwise": self._elementwise[0] * cached + self._elementwise[1] + self._cast,
            "lora": self._lora[0] * cached + self._lora[1],
            "dequantization": self._dequantization,
        }
        if extra := setup.extra_forwards:
            parts[WITHOUT_GRADIENTS] = extra * self.forward_s(seqs, self._seq)
        return parts if forwards == 1 else {name: forwards * seconds for name, seconds in parts.items()}

    def forward_s(self, seqs: int, length: int) -> float:
        """GPU seconds of the layers in one forward without gradients, of the base alone."""
        tokens = seqs * length
        layers = self._speed.matmuls(self.flow.compute, tokens, self._setup.quantization == "int8")
        cached = tokens / self._speed.cache_gain(tokens)
        attention = self._extra[1] * seqs * (length / self._seq) ** 2
        return layers.forward + self._extra[0] * cached + attention + self._extra[2] + self.unpacking_s


def _token_and_micro(moved: Moved, per_byte: float, gap: float) -> tuple[float, float]:
    """Seconds per token and per micro-batch, forward and backward together."""
    return (
        (moved.forward_bytes + moved.backward_bytes) * per_byte,
        (moved.forward_kernels + moved.backward_kernels) * gap,
    )


def _attended(speed: SpeedModel, setup: TrainSetup, flow: Flow) -> tuple[float, float, float]:
    """Seconds of a rank's attention over one sequence, forward and backward, and needed flops: its share of the whole
    where the sequence is cut, which both ways deal out evenly (a ring's ranks have an early and a late piece)."""
    degree = setup.context_degree
    if degree == 1:
        return speed.attention(setup, flow)
    whole = setup.trusted_with(seq_len_tokens=setup.seq_len_tokens * degree)
    forward, backward, flops = speed.attention(whole, flow)
    return forward / degree, backward / degree, flops / degree


def _waits(speed: SpeedModel, setup: TrainSetup) -> bool:
    """Whether the host waits for the GPU in every layer: experts one by one, or dealt out over GPUs (how many tokens go
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


def _trained(speed: SpeedModel, setup: TrainSetup, flow: Flow) -> _Trained:
    if setup.method == "full":
        inv = speed.inv
        part = setup.trained_layers or setup.frozen_encoder
        num = trained_parameters(speed.model, setup).num if part else inv.num_params
        return _Trained(float(num), inv.num_tensors, SIZE_BYTES[flow.table])
    constants, apart = speed.constants, 0
    bytes_left = constants.compile_bytes if setup.compiled else 1.0
    per_byte, gap = bytes_left / speed.bandwidth, constants.kernel_gap_s * bytes_left
    thin_rate = speed.rates.matmul[flow.autocast or flow.adapter] * constants.lora_share
    if setup.adapter != "lora" and not setup.kind.like_lora:
        work = kind_work(speed.model, setup, flow)
        moved, thin, passes = work.moved, work.flops / thin_rate, work.passes
        constant, params, tensors, calls = work.constant_bytes * per_byte, work.params, work.tensors, work.calls
        step_s = work.step_s
    else:
        moved, edges, per_rank, calls, apart = speed.adapters(setup, flow)
        thin, passes, constant, step_s = 2.0 * setup.lora_rank * edges / thin_rate, 3.0, 0.0, 0.0
        params, tensors = per_rank * setup.lora_rank, 2 * calls
    token_s, micro_s = _token_and_micro(moved, per_byte, gap)
    return _Trained(
        params=params,
        tensors=tensors,
        size_bytes=SIZE_BYTES[flow.adapter],
        token_s=token_s + passes * thin,
        micro_s=micro_s + constant,
        forward_token_s=moved.forward_bytes * per_byte + thin,
        forward_micro_s=moved.forward_kernels * gap + constant,
        forward_kernels=moved.forward_kernels,
        backward_kernels=moved.backward_kernels,
        calls=calls - apart,
        step_s=step_s,
    )


class _Unpacked(NamedTuple):
    """Seconds of a micro-batch in which weights are unpacked or cast; of one recomputation; quantized modules."""

    dequantization_s: float
    cast_s: float
    again_s: float
    calls: int


def _unpacked(speed: SpeedModel, setup: TrainSetup, flow: Flow) -> _Unpacked:
    dequantization = cast = again = 0.0
    calls = 0
    if setup.quantized:
        once, calls = speed.dequantization_s(flow, setup.quantization)
        # LLM.int8() multiplies in int8 and unpacks for the backward only; NF4 unpacks every time it is used
        dequantization = once if setup.quantization == "int8" else 2.0 * once
        again += 0.0 if setup.quantization == "int8" else once
    if setup.quantize_experts:  # unpacked in each forward; the backward finds what its forward unpacked
        once = speed.experts_s(flow)
        dequantization += once
        again += once
    if flow.autocast and setup.weight_dtype == "fp32" and not setup.quantized:
        once = _WEIGHT_CAST_BYTES * sum(group.weights for group in speed.inv.groups) / speed.bandwidth
        cast = once * (2.0 if setup.method == "full" else 1.0)
        again += once
    if speed.conditions.single_operations and setup.method == "full":
        cast += SINGLE_WEIGHT * sum(group.weights for group in speed.inv.groups) / speed.bandwidth
    return _Unpacked(dequantization, cast, again, calls)
