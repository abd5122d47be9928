"""`Family`: the layers' work of all setups that differ only in loss, optimizer, micro-batch and accumulation."""

from dataclasses import fields
from operator import attrgetter

from planner.memory.dtypes import SIZE_BYTES, DtypePolicy
from planner.memory.trained import frozen_below
from planner.setup import LAYOUT_FIELDS, TrainSetup
from planner.speed.roofline.counts import CHUNK, SINGLE_HOST
from planner.speed.roofline.model import SpeedModel
from planner.speed.roofline.rented import (
    ALONE_S,
    AROUND_S,
    FORWARD_S,
    Issued,
    launches,
    micro_batch_s,
    num_modules,
    step_s,
)
from planner.speed.roofline.types import WITHOUT_GRADIENTS
from planner.speed.roofline.work import Work, trained_share

GRADIENT_ADD_PASSES = 3.0
"""Accumulation reads both gradients and writes one."""
SELECTIVE_HOST = 1.7
"""Further host time of an operation under selective checkpointing, in the forward and in the recomputation, as a
multiple of its own: torch calls Python for each. Timed on a CPU (docs/kernels.md)."""
COMPILED_LAUNCH_S, COMPILED_LOOKUP_S = 9.0e-6, 5.5e-5
"""Host seconds to launch one kernel of a compiled graph, and to look a layer's graph up (guards) in every forward.

Source: github.com/meta-pytorch/tritonbench/pull/1017 and 1016 (6.8 to 9.1 us by the number of arguments, 9 us with the
generated wrapper around it, on a GB200's host); github.com/pytorch/pytorch/issues/191753 (2 ms per forward of the 36
layers of Qwen3-8B). Not fitted.
"""
_OUTER_KERNELS = 26
"""Of loss and embedding."""

_RECOMPUTED = ("checkpointing", "activation_offload", "selective_checkpointing")
_NOT_THE_WORKS = {
    *_RECOMPUTED,
    "optimizer",
    "loss",
    "micro_batch_seqs",
    "accumulation_steps",
    "num_gpus",
    "parallel",
    *LAYOUT_FIELDS,
} - {"context_degree", "expert_degree"}  # whose attention is longer than its tokens; whose host waits
_SHARED = tuple(attribute.name for attribute in fields(TrainSetup) if attribute.name not in _NOT_THE_WORKS)
work_key = attrgetter(*_SHARED, "extra_forwards", "compiled", "pads")
"""What setups of one `Work` share: every field that is not named here, so that a new one cannot be forgotten, the
forwards without gradients, which for completions follow from the global batch, whether the layers are compiled, which
checkpointing decides too, and whether there is padding, which a micro-batch of one sequence has not."""


def family_of(speed: SpeedModel, setup: TrainSetup, work: Work | None = None) -> "Family":
    """The (remembered) family of a setup; `work`: its own, where that is known."""
    if work is None:
        key = work_key(setup)
        work = speed.works.get(key) or speed.works.setdefault(key, Work(speed, setup))
    family_key = (id(work), setup.checkpointing, setup.activation_offload, setup.selective_checkpointing)
    family: Family | None = speed.families.get(family_key)
    if family is None:
        family = speed.families[family_key] = Family(work, setup)
    return family


class Family:
    """The work with what is recomputed of it; nothing here knows loss or optimizer.

    Attributes:
        trained_params, trained_tensors: what the optimizer updates.
        above: of the layers, those that the backward reaches: from the first that trains on.
        trained_bytes: size of one trained parameter.
        add_s: adding one micro-batch's gradients to the sum.
        host_s: host time to issue the kernels of one of a micro-batch's forwards with gradients, its backward, and its
            share of those without; forward_host_s: those of one forward alone; trainer_s: host time after every
            optimizer step, the trainer's and the adapter's own work; trainer_micro_s: the trainer's around every
            micro-batch.
        modules: of the model's tree.
    """

    __slots__ = (
        "_busy", "_kept", "_recompute", "_setup", "_stops", "above", "add_s", "forward_host_s", "host_s",
        "modules", "trained_bytes", "trained_params", "trained_tensors", "trainer_micro_s", "trainer_s",
        "work",
    )  # fmt: skip

    def __init__(self, work: Work, setup: TrainSetup) -> None:
        speed, trained, inv = work.speed, work.trained, work.speed.inv
        self.work, self._setup = work, setup
        self._busy: dict[int, float] = {}
        self.trained_params, self.trained_tensors = trained.params, trained.tensors
        self.trained_bytes = trained.size_bytes
        self.add_s = GRADIENT_ADD_PASSES * (trained.params * trained.size_bytes) / speed.bandwidth
        self.modules = num_modules(inv, trained.calls)
        self.trainer_s = self.trainer_micro_s = 0.0
        if speed.conditions.trainer_overhead:
            self.trainer_s = speed.host_scale * step_s(self.modules)
            self.trainer_micro_s = speed.host_scale * micro_batch_s(self.modules)
        self.trainer_s += trained.step_s * speed.host_scale
        every = setup.checkpointing
        recomputed = -(-inv.num_layers // every) / inv.num_layers if every and inv.num_layers else 0.0
        below = max(0, frozen_below(speed.model, setup) - inv.num_apart)
        self.above = 1.0 - below / max(1, inv.num_layers)
        recomputed_token = recomputed * work.moved.forward_bytes * work.per_byte + recomputed * trained.forward_token_s
        recomputed_micro = (
            recomputed * work.alone[1] + recomputed * trained.forward_micro_s + recomputed * work.unpacked.recomputed_s
        )
        keeps_attention = setup.selective_checkpointing and speed.attention_is_fused(setup, work.dtypes)
        attended = 0.0 if keeps_attention else recomputed * work.attention[0]
        offloaded = self._offloaded_token_s(recomputed) * work.length
        self._recompute = (recomputed_token, attended, offloaded, recomputed_micro, recomputed * self.above)
        self._stops = setup.method == "full" and not speed.conditions.reentrant_checkpointing
        self._kept = setup.selective_checkpointing and setup.trainer.selects_products
        self._count_host(recomputed)

    @property
    def dtypes(self) -> DtypePolicy:
        """Data types."""
        return self.work.dtypes

    def _offloaded_token_s(self, recomputed: float) -> float:
        """Seconds per token in which checkpoints go to the host and back on the compute stream."""
        speed, setup = self.work.speed, self._setup
        if not setup.activation_offload or setup.trainer.overlaps_offload:
            return 0.0
        inputs = SIZE_BYTES[self.dtypes.residual] * speed.inv.hidden_size * recomputed * speed.inv.num_layers
        return 2.0 * inputs / speed.host_rate

    def _count_host(self, recomputed: float) -> None:
        """Sets the host's time of a forward with its backward and of a forward alone."""
        work, setup, speed = self.work, self._setup, self.work.speed
        moved, trained, calls = work.moved, work.trained, work.unpacked.calls
        ahead, back = work.further_kernels
        mixers, mixer = speed.inv.num_mixers, speed.mixer(setup)
        single = SINGLE_HOST if speed.conditions.single_operations else (1.0, 1.0)
        forward = single[0] * (moved.forward_kernels + ahead)
        fused = speed.conditions.fused_lora
        adapter_s, quantized_s = AROUND_S[fused]
        self.forward_host_s = forward * ALONE_S + calls * quantized_s + trained.calls * adapter_s
        self.forward_host_s *= speed.host_scale
        if setup.compiled:
            forward, backward = forward + trained.forward_kernels, moved.backward_kernels + trained.backward_kernels
            host = (forward * (1 + recomputed) + backward + 2 * _OUTER_KERNELS) * COMPILED_LAUNCH_S
            called = calls * (2 + recomputed) * quantized_s + trained.calls * (1 + recomputed) * adapter_s
            host += speed.constants.compile_host * called + speed.inv.num_layers * COMPILED_LOOKUP_S
        else:
            host = Issued(
                recomputed=recomputed,
                forward=forward,
                backward=single[1] * (moved.backward_kernels + back),
                adapter_backward=trained.backward_kernels,
                adapted=trained.calls,
                quantized=calls,
                launches=launches(speed.inv, setup.fused_parts(speed.model.model_type)) + mixers * mixer.launches,
                fused=fused,
            ).host_s(speed.inv.num_layers)
            chunks = mixers * -(-work.length // CHUNK)
            host += chunks * (mixer.chunk_s + recomputed * mixer.recomputed_chunk_s)
            host += mixers * (mixer.layer_s + recomputed * mixer.recomputed_layer_s)
        host += setup.extra_forwards * host / (2.0 + recomputed)
        if setup.selective_checkpointing:
            host += 2.0 * recomputed * forward * SELECTIVE_HOST * FORWARD_S
        self.host_s = host * speed.host_scale

    def busy_s(self, samples: int) -> float:
        """GPU seconds of the layers for one micro-batch."""
        seconds = self._busy.get(samples)
        if seconds is None:
            seconds = self._busy[samples] = sum(self.parts(samples).values())
        return seconds

    def unmeasured_s(self, samples: int) -> float:
        """Seconds of one micro-batch that an adapter costs which no measured run had; 0 for LoRA."""
        if self._setup.method == "full" or self._setup.kind.like_lora:
            return 0.0
        work = self.work
        tokens = samples * work.seqs_per_sample * work.length
        return work.trained.token_s * tokens + work.forwards_of(samples) * work.trained.micro_s

    def parts(self, samples: int) -> dict[str, float]:
        """GPU seconds of the layers for one micro-batch by part."""
        work, setup = self.work, self._setup
        forwards, seqs, cached, layers = work.micro(samples)
        recomputed_token, attended, offloaded, recomputed_micro, recomputed = self._recompute
        matmul = layers.forward + self.above * layers.input_gradient
        if setup.method == "full":
            matmul += layers.weight_gradient * trained_share(work.speed, setup)
        forward, backward = work.attention
        rows = work.attending(seqs)
        recompute = recomputed * layers.recomputed_s(saved=self._kept, stops=self._stops)
        parts = {
            "matmul": matmul,
            "recompute": recompute + recomputed_token * cached + attended * rows + offloaded * seqs + recomputed_micro,
            "attention": (forward + backward) * rows,
            "elementwise": work.elementwise[0] * cached + work.elementwise[1] + work.unpacked.cast_s,
            "lora": work.trained.token_s * cached + work.trained.micro_s,
            "dequantization": work.unpacked.dequantization_s,
        }
        if extra := setup.extra_forwards:
            parts[WITHOUT_GRADIENTS] = extra * work.forward_s(seqs, work.length)
        if forwards > 1:
            parts = {name: forwards * seconds for name, seconds in parts.items()}
            parts["elementwise"] += (forwards - 1) * self.add_s
        return parts
