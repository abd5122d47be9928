"""The host of a rented machine: what a dry run's prices of it say, compiled into a closed form of what a model is.

`planner.speed.host` has host seconds by class of call; a dry run has the calls. Fitted to the dry runs of 140 setups
of 14 models (full, LoRA, QLoRA; eager and Liger; checkpointing; three losses; three attentions): median 2.6 %, 90th
8.7 %, worst 17.2 % (benchmarks/host_form.py of commit eee725f4).
"""

from typing import NamedTuple

from planner.speed.roofline.counts import Inventory

FORWARD_S, BACKWARD_S = 29.3e-6, 18.4e-6
"""A kernel of the layers, with the views and the module around it."""
ADAPTER_BACKWARD_S, ADAPTER_S, FUSED_ADAPTER_S = 19.4e-6, 242e-6, 79e-6
"""A kernel of an adapter's backward; an adapted matrix's forward; the same inside one autograd function of several
matrices: four launches and two products without a graph, seven views, a module's Python, by `planner.speed.host`'s
classes of call (unsloth 2026.1 `kernels/utils.py` matmul_lora)."""
QUANTIZED_S, FUSED_QUANTIZED_S, LAUNCH_S = 151e-6, 43e-6, 181e-6
"""A quantized matrix, forward or backward; the same there, without bitsandbytes' module and function: three launches
and a module's Python (fast_dequantize; 47 in Qwen3-0.6B on an H100, surogate_unsloth of benchmarks/gathered.py); a
Triton launch."""
AROUND_S = {False: (ADAPTER_S, QUANTIZED_S), True: (FUSED_ADAPTER_S, FUSED_QUANTIZED_S)}
"""Whether adapters run fused -> seconds of an adapted and of a quantized matrix."""
RECOMPUTED_LAYER_S, CONSTANT_S = 1024e-6, 0.6e-3
"""A checkpointed layer's hooks; what no layer has."""
ALONE_S = 22e-6
"""A kernel of a forward that records no graph: 7.3 microseconds less than one that does."""
LOOPED_TENSOR_S, LISTED_TENSOR_S, UPDATE_S = 60e-6, 4.0e-6, 7.6e-6
"""An optimizer's step by trained tensor: in a loop (AdamW8bit 67 a tensor, of which one kernel), in a list of many
(fused AdamW 5.3); and by kernel without a graph (host: lines of benchmarks/data/h100/prices.jsonl)."""
_LAYER_MODULES, _OTHER_MODULES, _ADAPTER_MODULES = 4, 7, 10


WALK_S = {"micro-batch": 11e-6, "step": 5e-6}
"""Per module of the model: `model.train()` and `num_parameters()` around every micro-batch; `parameters()` for
clipping and `zero_grad()` in every step (6.2 and 3.0 microseconds in a row on a CPU at 2.2 GHz, 3,069 modules)."""
MICRO_BATCH_S, METRICS_S, STEP_S = 6.0e-3, 3.0e-3, 4.0e-3
"""Inputs, masks and contexts of a micro-batch; its metrics; clipping, schedulers and callbacks inside a step.

Both: what six of TRL's device-bound runs on an H100 leave of a step beside the device's own time
(benchmarks/data/h100): 13 ms and 18.8 microseconds a module, 1.8 of it the optimizer's calls; parted by the walks' own
times and by judgement."""
BETWEEN_S, COLLATED_TOKEN_S = 2.5e-3, 3.0e-7
"""Between two steps: callbacks, and the next batch by its tokens (`between_s` of 26 TRL runs: 2 ms for 1,024 tokens, 5
for 8,192, 8 for 16,384, 12 for 32,768)."""

HOST_SPREAD = 2.0
"""How many times slower or faster a machine's may be than the one that is counted. Faster: a bare server's, by the
published runs of ml_engineering on a B200, at 512 tokens. Slower: Colab's virtual CPUs took 1.6 to 1.8 times as long in
steps that wait for them (lab21 on T4s, llama3_lora_bench on an A100: benchmarks/gathered.py)."""


class Issued(NamedTuple):
    """What a micro-batch issues.

    Attributes:
        recomputed: share of the layers that are computed twice.
        forward, backward: kernels of the layers; adapter_backward: of adapters.
        adapted, quantized: matrices; launches: Triton kernels of one forward.
        fused: whether adapters with what they adapt, and checkpoints, are autograd functions of the trainer's own.
    """

    recomputed: float
    forward: float
    backward: float
    adapter_backward: float
    adapted: float
    quantized: float
    launches: float
    fused: bool = False

    def host_s(self, num_layers: int) -> float:
        """Host seconds of the layers."""
        forwards, around_s = 1.0 + self.recomputed, AROUND_S[self.fused]
        return (
            CONSTANT_S
            + forwards * (self.forward * FORWARD_S + self.adapted * around_s[0])
            + self.backward * BACKWARD_S
            + self.adapter_backward * ADAPTER_BACKWARD_S
            + (forwards + 1.0) * (self.quantized * around_s[1] + self.launches * LAUNCH_S)
            + (not self.fused) * self.recomputed * num_layers * RECOMPUTED_LAYER_S
        )


def launches(inv: Inventory, parts: frozenset[str]) -> int:
    """Triton kernels of one forward of the layers, by the fused parts of a kernel family."""
    kernels = inv.num_rms if "norm" in parts else 0
    kernels += inv.num_layers if "rotary" in parts else 0
    return kernels + (inv.num_layers if "gated" in parts else 0)


def num_modules(inv: Inventory, adapted: float) -> float:
    """Modules of the model's tree."""
    matrices = sum(group.count * group.linear.num for group in inv.groups if group.linear.module != "parameter")
    norms = inv.num_rms + inv.num_layer_norms
    return matrices + norms + _LAYER_MODULES * inv.num_layers + _OTHER_MODULES + _ADAPTER_MODULES * adapted


def micro_batch_s(modules: float) -> float:
    """Host seconds of transformers' Trainer around a micro-batch, while the device waits."""
    return MICRO_BATCH_S + METRICS_S + modules * WALK_S["micro-batch"]


def step_s(modules: float) -> float:
    """The same around a step, the next batch's tokens apart."""
    return STEP_S + BETWEEN_S + modules * WALK_S["step"]


def collated_s(tokens: int) -> float:
    """Making the next step's batch."""
    return tokens * COLLATED_TOKEN_S
