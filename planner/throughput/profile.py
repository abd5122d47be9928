"""`ThroughputProfile`: one family of setups (all but micro-batch and accumulation), asked thousands of times."""

from planner.memory.dtypes import SIZE_BYTES, flow_of
from planner.setup import TrainSetup
from planner.throughput.model import SpeedModel
from planner.throughput.types import StepTime

_WEIGHT_CAST_BYTES = 6.0  # autocast reads a fp32 weight and writes it in 16 bit
_GRADIENT_ADD_PASSES = 3.0
_LOSS_KERNELS = 14
_EMBEDDING_KERNELS = 12


class ThroughputProfile:
    """Step times of one family. Everything that does not depend on the micro-batch is summed up when it is made."""

    __slots__ = (
        "_add",
        "_attention",
        "_bound",
        "_cast",
        "_dequantization",
        "_elementwise",
        "_flow",
        "_full",
        "_head_dtype",
        "_host",
        "_lora",
        "_optimizer",
        "_power",
        "_recompute",
        "_seq",
        "_setup",
        "_skip_first",
        "_skip_last",
        "_speed",
        "_step",
        "_times",
        "_trainer_micro",
        "_trainer_step",
    )  # fmt: skip

    def __init__(self, speed: SpeedModel, setup: TrainSetup) -> None:
        constants, conditions, inv = speed.constants, speed.conditions, speed.inv
        flow = flow_of(setup)
        full = setup.method == "full"
        every = setup.checkpointing
        again = -(-inv.num_layers // every) / inv.num_layers if every and inv.num_layers else 0.0
        bytes_left = constants.compile_bytes if setup.compile else 1.0
        host_left = (constants.compile_host if setup.compile else 1.0) * constants.host_scale
        gap = constants.kernel_gap_s * bytes_left
        self._speed, self._setup, self._flow, self._full = speed, setup, flow, full
        self._seq = setup.seq_len_tokens
        self._head_dtype = flow.autocast or flow.table
        waits = conditions.loop_experts and inv.num_experts_run
        waits = waits or (conditions.masked_attention and setup.attention == "flash-attention-2")
        self._power = constants.waiting_power if waits else constants.overlap_power
        self._times: dict[int, float] = {}

        moved = speed.traffic(flow, full)
        per_byte = bytes_left * constants.elementwise_scale / speed.bandwidth
        self._elementwise = (
            (moved.forward_bytes + moved.backward_bytes) * per_byte,
            (moved.forward_kernels + moved.backward_kernels) * gap,
        )
        again_token = again * moved.forward_bytes * per_byte
        again_micro = again * moved.forward_kernels * gap
        forward_kernels, backward_kernels = moved.forward_kernels, moved.backward_kernels

        self._lora = (0.0, 0.0)
        lora_calls = trained = tensors = 0.0
        if full:
            trained, tensors = float(inv.num_params), float(inv.num_tensors)
        else:
            around, edges, params, modules = speed.adapters(setup, flow)
            thin = setup.lora_rank * edges * 2.0
            rate = speed.rates.matmul[flow.autocast or flow.adapter] * constants.lora_share
            forward = around.forward_bytes * bytes_left / speed.bandwidth + thin / rate
            backward = around.backward_bytes * bytes_left / speed.bandwidth + 2.0 * thin / rate
            self._lora = (forward + backward, (around.forward_kernels + around.backward_kernels) * gap)
            again_token += again * forward
            again_micro += again * around.forward_kernels * gap
            forward_kernels += around.forward_kernels
            backward_kernels += around.backward_kernels
            lora_calls = modules
            trained, tensors = params * setup.lora_rank, 2.0 * modules

        attention_forward, attention_backward, attention_flops = speed.attention(setup, flow)
        self._attention = attention_forward + attention_backward
        self._dequantization = 0.0
        quantized_calls = 0
        if setup.quantized:
            once, quantized_calls = speed.dequantization_s(flow, setup.quantization)
            self._dequantization = once * (1.0 if setup.quantization == "int8" else 2.0)
            if setup.quantization != "int8":
                again_micro += again * once
        self._cast = 0.0
        if flow.autocast and setup.weight_dtype == "fp32" and not setup.quantized:
            weights = sum(group.weights for group in inv.groups)
            once = _WEIGHT_CAST_BYTES * weights / speed.bandwidth
            self._cast = once * (2.0 if full else 1.0)
            again_micro += again * once
        self._recompute = (again_token, again * attention_forward, again_micro, again)
        self._skip_last = not conditions.reentrant_checkpointing and full
        self._skip_first = not full and not every

        host = forward_kernels * (1 + again) * constants.host_forward_s + backward_kernels * constants.host_backward_s
        host += (_LOSS_KERNELS + _EMBEDDING_KERNELS) * (constants.host_forward_s + constants.host_backward_s)
        host += quantized_calls * (2 + again) * constants.host_quantized_s
        host += lora_calls * (1 + again) * constants.host_lora_s
        self._host = host * host_left
        size = SIZE_BYTES[flow.table if full else flow.adapter]
        self._optimizer = speed.optimizer_s(setup.optimizer, trained, size, int(tensors))
        self._add = _GRADIENT_ADD_PASSES * trained * size / speed.bandwidth
        self._trainer_step = constants.step_overhead_s if conditions.trainer_overhead else 0.0
        self._trainer_micro = constants.micro_overhead_s if conditions.trainer_overhead else 0.0
        self._step = max(self._optimizer) + self._trainer_step
        self._bound = attention_flops

    def at(self, micro_batch_seqs: int, accumulation_steps: int) -> tuple[float, float]:
        """Step time in seconds and tokens/s of one GPU."""
        micro = self._times.get(micro_batch_seqs)
        if micro is None:
            parts = self._micro(micro_batch_seqs)
            micro = self._times[micro_batch_seqs] = sum(parts.values())
        step = accumulation_steps * micro + (accumulation_steps - 1) * self._add + self._step
        return step, micro_batch_seqs * self._seq * accumulation_steps / step

    def _micro(self, seqs: int) -> dict[str, float]:
        """Seconds of one micro-batch by part."""
        speed, setup = self._speed, self._setup
        tokens = seqs * self._seq
        cached = speed.cache_gain(tokens)
        layers = speed.matmuls(self._flow.compute, tokens, setup.quantization == "int8")
        again_token, again_seq, again_micro, again = self._recompute
        matmul = layers.forward + layers.input_gradient
        if self._full:
            matmul += layers.weight_gradient
        elif self._skip_first:
            matmul -= layers.first_input_gradient
        recompute = again * (layers.forward - (layers.last_forward if self._skip_last else 0.0))
        parts = {
            "matmul": matmul,
            "recompute": recompute + again_token * tokens / cached + again_seq * seqs + again_micro,
            "attention": self._attention * seqs,
            "elementwise": self._elementwise[0] * tokens / cached + self._elementwise[1] + self._cast,
            "lora": self._lora[0] * tokens / cached + self._lora[1],
            "dequantization": self._dequantization,
            "loss": speed.loss_s(setup.loss, self._head_dtype, tokens, self._full),
        }
        busy = sum(parts.values())
        power = self._power
        together = (busy**power + self._host**power) ** (1.0 / power)
        parts["host"] = together - busy
        parts["trainer"] = self._trainer_micro
        return parts

    def flops(self, micro_batch_seqs: int, accumulation_steps: int) -> float:
        """Floating-point operations that the step needs on one GPU: recomputation and unpacking not counted."""
        inv, setup = self._speed.inv, self._setup
        tokens = micro_batch_seqs * self._seq
        weights = sum(g.count * g.linear.num_active * g.linear.in_features * g.linear.out_features for g in inv.groups)
        weights += sum(one.num_weights for one in inv.outer)
        weights += inv.head.num_weights if inv.head is not None else 0
        needed = (6.0 if self._full else 4.0) * weights * tokens + 3.0 * self._bound * micro_batch_seqs
        if not self._full:
            needed += 6.0 * setup.lora_rank * self._speed.adapters(setup, self._flow)[1] * tokens
        return needed * accumulation_steps

    def step_time(self, setup: TrainSetup) -> StepTime:
        """The full answer for one setup of this family."""
        steps = setup.accumulation_steps
        parts = {name: seconds * steps for name, seconds in self._micro(setup.micro_batch_seqs).items()}
        gpu, host = self._optimizer
        parts["optimizer"] = gpu + (steps - 1) * self._add
        parts["host"] += max(host - gpu, 0.0)
        parts["trainer"] += self._trainer_step
        total = sum(parts.values())
        flops = self.flops(setup.micro_batch_seqs, steps)
        nominal = self._speed.rates.nominal.get(self._flow.compute, 0.0)
        return StepTime(
            step_time_s=total,
            parts_s=parts,
            flops=flops,
            mfu_fraction=flops / total / nominal if nominal else 0.0,
            tokens_per_s=setup.tokens_per_step / total,
            band_fraction=self._speed.calibration.band_for(self._speed.gpu),
            notes=tuple(self._notes()),
        )

    def _notes(self) -> list[str]:
        speed, setup = self._speed, self._setup
        notes = []
        if self._flow.compute in speed.rates.emulated:
            notes.append(f"{speed.gpu.name} has no {self._flow.compute} units: it is emulated at fp32 speed; use fp16.")
        if speed.rates.share_source != "gpu":
            notes.append(
                f"No measured matmul rate for {speed.gpu.name}: its share of peak is its {speed.rates.share_source}'s."
            )
        if setup.num_gpus > 1:
            notes.append("Communication between GPUs is not counted.")
        if speed.inv.mixer_width:
            notes.append("Linear-attention layers are approximated by the bytes they move.")
        return notes
