"""A synthetic GPU: a documented machine for comparing search strategies where the true optimum is known.

Two instances of one mechanistic model of a training step. The prior is the nominal instance: datasheet roofline with
typical efficiencies, and textbook memory. The truth is an instance whose constants a seed has moved, and which has
mechanisms that the prior lacks. It is no draw from the sampler's own model (no Gaussian process, no additive effects):

    moved constants     matrix efficiency, bandwidth, speed of each attention kernel, dequantization, each loss and each
                        optimizer kernel, recomputation, saturation with tokens (log-normal, 10 to 50 %)
    launch overhead     2 to 14 microseconds per kernel: small micro-batches are slower; the prior has none
    math-kernel cliff   with probability 0.3 SDPA falls back under autocast and keeps heads x tokens x tokens matrices
    allocator           0 to 8 % fragmentation; above 95 % of the card, retries make a step 5 to 40 % slower
    context             0.3 to 1.2 GiB outside PyTorch's count (prior: 0.5)
    wave quantization   a ripple of up to 3 % over the micro-batch
    broken software     with probability 0.1 flash-attention-2 is not installed, with 0.1 torch.compile crashes on
                        quantized bases
    jitter              0.5 % from setup to setup, fixed by the setup; 0.3 % from run to run

Sizes of the deviations: judged by the repeats and reports in the project's data (tokens/s of one configuration between
software versions: 2.4 % median, 12 % 90th percentile; kernels 1.3 to 5 times in reports), November 2026.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import exp, pi, sin
from typing import Any

import numpy as np

from planner.core.errors import SetupError
from planner.core.units import GIB
from planner.setup import TrainSetup
from planner.setup.memory_terms import Category, MemoryTerm
from planner.setup.outcome import (
    Candidate,
    Environment,
    Evidence,
    FailureKind,
    Fidelity,
    Measurement,
    Prediction,
    ProbeFailure,
)
from search.dimensions import key_of

BYTES = {"none": 2.0, "int8": 1.06, "nf4": 0.563, "nf4-double": 0.516}


@dataclass(frozen=True, kw_only=True)
class SyntheticModel:
    """A decoder of `num_params` parameters."""

    num_params: float
    num_layers: int
    hidden: int
    num_heads: int
    vocab: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Constants of one GPU with its software; the defaults are the nominal instance that the prior uses."""

    flops_per_s: float
    bandwidth_bytes_per_s: float
    memory_bytes: int
    matmul_efficiency: float = 0.70
    half_rate_tokens: float = 600.0
    attention_efficiency: dict[str, float] = field(
        default_factory=lambda: {"eager": 0.10, "sdpa": 0.40, "flash-attention-2": 0.50}
    )
    dequantization: dict[str, float] = field(
        default_factory=lambda: {"none": 0.0, "int8": 3.0, "nf4": 3.0, "nf4-double": 3.3}
    )
    loss_passes: dict[str, float] = field(default_factory=lambda: {"full": 14.0, "chunked": 18.0, "liger": 12.0})
    optimizer_passes: dict[str, float] = field(
        default_factory=lambda: {"adamw": 34.0, "adamw-fused": 26.0, "adamw-8bit": 14.0, "paged-adamw-8bit": 18.0}
    )
    recompute: float = 1.0
    pointwise_passes: float = 45.0
    compile_gain: float = 0.75
    lora_pointwise: float = 8.0
    launch_s: float = 0.0
    activation_factor: dict[int, float] = field(default_factory=lambda: {0: 1.0, 1: 1.0, 2: 1.0})
    logits_factor: dict[str, float] = field(default_factory=lambda: {"full": 1.0, "chunked": 1.0, "liger": 1.0})
    math_kernel: bool = False
    fragmentation: float = 0.02
    context_bytes: float = 0.5 * GIB
    retry_slowdown: float = 0.0
    ripple: float = 0.0
    jitter: float = 0.0
    no_flash: bool = False
    compile_breaks_quantized: bool = False
    seed: int = 0


_MOVED = {
    "bandwidth_bytes_per_s": 0.12, "matmul_efficiency": 0.20, "half_rate_tokens": 0.5, "attention_efficiency": 0.35,
    "dequantization": 0.45, "loss_passes": 0.35, "optimizer_passes": 0.35, "recompute": 0.12, "pointwise_passes": 0.30,
    "compile_gain": 0.20, "lora_pointwise": 0.5,
}  # fmt: skip
_FACTORS = {"activation_factor": 0.06, "logits_factor": 0.10}
"""Constant -> standard deviation of its logarithm, in the order of the draws."""
_MOST = {"matmul_efficiency": 0.95, "compile_gain": 1.1}


def _draw(random: np.random.Generator, nominal: Machine, deviations: Mapping[str, float]) -> dict[str, Any]:
    """The constants moved, each entry of a table by itself."""
    drawn: dict[str, Any] = {}
    for name, sd in deviations.items():
        value, most = getattr(nominal, name), _MOST.get(name, float("inf"))
        table = value if isinstance(value, dict) else {"": value}
        moved = {key: min(number * exp(random.normal(0.0, sd)), most) for key, number in table.items()}
        drawn[name] = moved if isinstance(value, dict) else moved[""]
    return drawn


def perturbed(nominal: Machine, seed: int) -> Machine:
    """The truth that a seed stands for."""
    random = np.random.default_rng([seed, 7])
    moved = _draw(random, nominal, _MOVED) | {"launch_s": float(random.uniform(2e-6, 14e-6))}
    moved |= _draw(random, nominal, _FACTORS) | {
        "math_kernel": bool(random.random() < 0.3),
        "fragmentation": float(random.uniform(0.0, 0.08)),
        "context_bytes": float(random.uniform(0.3, 1.2)) * GIB,
        "retry_slowdown": float(random.uniform(0.05, 0.40)),
        "ripple": float(random.uniform(0.0, 0.03)),
        "no_flash": bool(random.random() < 0.1),
        "compile_breaks_quantized": bool(random.random() < 0.1),
    }
    return replace(nominal, jitter=0.005, seed=seed, **moved)


def time_parts_s(model: SyntheticModel, machine: Machine, setup: TrainSetup) -> dict[str, float]:
    """Seconds of one optimizer step by operator class: a roofline for each."""
    tokens = setup.tokens_per_micro_batch
    bandwidth = machine.bandwidth_bytes_per_s
    full = setup.method == "full"
    recomputed = {0: 0.0, 1: 1.0, 2: 0.5}[setup.checkpointing] * machine.recompute
    wide = 2.0 if setup.kbit_fp32_cast else 1.0
    rate = machine.flops_per_s * machine.matmul_efficiency * tokens / (tokens + machine.half_rate_tokens)
    matmul = 2.0 * model.num_params * tokens * (2.0 + (1.0 if full else 0.0) + recomputed) / rate
    attention_flops = 4.0 * setup.seq_len_tokens * model.hidden * model.num_layers * tokens * (3.5 + recomputed)
    kernel = "eager" if _falls_back(machine, setup) else setup.attention
    attention = attention_flops / (machine.flops_per_s * machine.attention_efficiency[kernel])
    passes = machine.pointwise_passes * wide * (3.0 + recomputed) / 3.0
    if not full:
        passes += machine.lora_pointwise * (1.0 if setup.lora_targets == "attention" else 2.2)
    compiled = machine.compile_gain if setup.compile else 1.0
    pointwise = 2.0 * passes * model.hidden * tokens * model.num_layers * compiled / bandwidth
    traffic = machine.dequantization[setup.quantization] * model.num_params * (2.0 + recomputed) / bandwidth
    loss = machine.loss_passes[setup.loss] * model.vocab * tokens / bandwidth
    launches = model.num_layers * (60 + (0 if full else 40)) * (0.35 if setup.compile else 1.0)
    micro = {
        "matmul": matmul,
        "attention": attention,
        "pointwise": pointwise,
        "dequantization": traffic,
        "loss": loss,
        "launch": launches * machine.launch_s,
    }
    parts = {name: part_s * setup.accumulation_steps for name, part_s in micro.items()}
    parts["optimizer"] = machine.optimizer_passes[setup.optimizer] * _trained(model, setup) / bandwidth
    return parts


def step_time_s(model: SyntheticModel, machine: Machine, setup: TrainSetup) -> float:
    ripple = 1.0 + machine.ripple * sin(2.0 * pi * setup.micro_batch_seqs / 7.0 + machine.seed)
    jitter = exp(machine.jitter * _noise(machine, setup)) if machine.jitter else 1.0
    return sum(time_parts_s(model, machine, setup).values()) * ripple * jitter


def memory_parts_bytes(model: SyntheticModel, machine: Machine, setup: TrainSetup) -> dict[Category, float]:
    """What is alive at the peak: resident parts and the larger of backward and optimizer step."""
    tokens = setup.tokens_per_micro_batch
    wide = 2.0 if setup.kbit_fp32_cast else 1.0
    trained = _trained(model, setup)
    embeddings = 2.0 * model.vocab * model.hidden
    weights = BYTES[setup.quantization] * (model.num_params - embeddings) + 2.0 * wide * embeddings
    state_bytes = 2.0 if "8bit" in setup.optimizer else 8.0
    temporary = 4.0 * trained if setup.optimizer == "adamw" else 0.0
    layer = 2.0 * model.hidden * tokens * (34.0 if setup.method == "full" else 40.0) * wide
    if setup.attention == "eager" or _falls_back(machine, setup):
        layer += 5.0 * model.num_heads * setup.seq_len_tokens * tokens
    saved_bytes = {0: layer * model.num_layers, 1: 2.0 * model.hidden * tokens * model.num_layers + layer}
    saved_bytes[2] = 0.5 * (saved_bytes[0] + saved_bytes[1])
    activations = saved_bytes[setup.checkpointing] * machine.activation_factor[setup.checkpointing]
    share = {"full": 12.0, "chunked": 1.5, "liger": 0.8}[setup.loss]
    logits = share * model.vocab * tokens * machine.logits_factor[setup.loss]
    parts: dict[Category, float] = {
        "weights": weights,
        "adapters" if setup.method != "full" else "other": 2.0 * trained,
        "gradients": 4.0 * trained,
        "optimizer": state_bytes * trained,
    }
    if temporary > activations + logits:
        return {**parts, "workspace": temporary}
    return {**parts, "activations": activations, "loss": logits}


def peak_bytes(model: SyntheticModel, machine: Machine, setup: TrainSetup) -> tuple[float, float]:
    """(allocated, device) peak."""
    peak = sum(memory_parts_bytes(model, machine, setup).values())
    return peak, peak * (1.0 + machine.fragmentation) + machine.context_bytes


def _trained(model: SyntheticModel, setup: TrainSetup) -> float:
    if setup.method == "full":
        return model.num_params
    return setup.lora_rank * model.hidden * model.num_layers * (8.0 if setup.lora_targets == "attention" else 22.0)


def _falls_back(machine: Machine, setup: TrainSetup) -> bool:
    return machine.math_kernel and setup.attention == "sdpa" and setup.precision == "bf16-autocast"


def _noise(machine: Machine, setup: TrainSetup) -> float:
    """A standard normal that the seed and the setup fix."""
    digest = hashlib.blake2b(f"{machine.seed}|{key_of(setup)}".encode(), digest_size=8).digest()
    return float(np.random.default_rng(int.from_bytes(digest)).standard_normal())


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A model on a nominal GPU with a global batch: where the candidates come from."""

    name: str
    model: SyntheticModel
    nominal: Machine
    seq_len_tokens: int
    global_batch_seqs: int
    large: bool = False

    @property
    def budget_bytes(self) -> int:
        """Memory less 3 % headroom."""
        return int(0.97 * self.nominal.memory_bytes)

    def candidates(self) -> tuple[Candidate, ...]:
        """Every possible setup of the space with the prior's prediction."""
        return tuple(
            Candidate(setup=setup, budget_bytes=self.budget_bytes, formula=self.predict(setup))
            for setup in self.setups()
        )

    def setups(self) -> Iterator[TrainSetup]:
        """The space: about 2,000 setups, about 20,000 when `large`; about 2,000 on several GPUs."""
        methods = [("full", "none", 0), ("lora", "none", 16), ("qlora", "nf4-double", 16), ("qlora", "nf4", 16)]
        batches = [2**power for power in range(8) if self.global_batch_seqs % 2**power == 0]
        optimizers = ("adamw", "adamw-fused", "adamw-8bit", "paged-adamw-8bit") if self.large else ("adamw-fused",)
        targets: Sequence[str] = ("attention", "all-linear") if self.large else ("all-linear",)
        precisions = ("bf16-autocast", "bf16-pure")
        attentions = ("eager", "sdpa", "flash-attention-2")
        losses, booleans = ("full", "chunked", "liger"), (False, True)
        space = product(methods, precisions, optimizers, targets, attentions, (0, 1, 2), losses, booleans, batches)
        for recipe, precision, optimizer, target, attention, every, loss, compile_, batch in space:
            method, quantization, rank = recipe
            if method == "full" and target != targets[0]:
                continue
            try:
                yield TrainSetup(
                    method=method, quantization=quantization, lora_rank=rank, precision=precision, optimizer=optimizer,
                    lora_targets=target, attention=attention, checkpointing=every, loss=loss, compile=compile_,
                    micro_batch_seqs=batch, accumulation_steps=self.global_batch_seqs // batch,
                    seq_len_tokens=self.seq_len_tokens, packing=True,
                )  # fmt: skip
            except SetupError:
                continue

    def predict(self, setup: TrainSetup, machine: Machine | None = None) -> Prediction:
        """The prior's (or another machine's) figures as a formula prediction."""
        machine = machine or self.nominal
        allocated, device = peak_bytes(self.model, machine, setup)
        time_s = step_time_s(self.model, machine, setup)
        return Prediction(
            level=Fidelity.FORMULA,
            peak_allocated_bytes=int(allocated),
            peak_reserved_bytes=int(device - machine.context_bytes),
            peak_device_bytes=int(device),
            peak_phase="backward",
            phase_peaks_bytes={"backward": int(allocated)},
            terms=tuple(
                MemoryTerm(category=category, name=category, size_bytes=int(size))
                for category, size in memory_parts_bytes(self.model, machine, setup).items()
            ),
            time_parts_s=time_parts_s(self.model, machine, setup),
            memory_band_fraction=0.10,
            step_time_s=time_s,
            tokens_per_s=setup.tokens_per_step / time_s,
            time_band_fraction=0.35,
        )


@dataclass(frozen=True, kw_only=True)
class SyntheticGpu:
    """The evaluator of one seed: what a probe of the true machine would measure.

    Attributes:
        noise: relative standard deviation from run to run (0: every run of a setup measures the same).
    """

    scenario: Scenario
    machine: Machine
    noise: float = 0.003

    @classmethod
    def of(cls, scenario: Scenario, seed: int, *, noise: float = 0.003) -> "SyntheticGpu":
        """The truth behind a scenario for one seed."""
        return cls(scenario=scenario, machine=perturbed(scenario.nominal, seed), noise=noise)

    def __call__(self, setup: TrainSetup) -> Evidence:
        machine, scenario = self.machine, self.scenario
        if machine.no_flash and setup.attention == "flash-attention-2":
            return _failure(FailureKind.UNSUPPORTED, "flash-attention-2 is not installed")
        if machine.compile_breaks_quantized and setup.compile and setup.quantization != "none":
            return _failure(FailureKind.CRASHED, "torch.compile crashed in a quantized matrix multiplication")
        allocated, device = peak_bytes(scenario.model, machine, setup)
        if device > machine.memory_bytes:
            return _failure(FailureKind.OUT_OF_MEMORY, "out of memory")
        time_s = self.time_s(setup)
        run = _noise(replace(machine, seed=machine.seed + 1_000_003), setup) if self.noise else 0.0
        return Measurement(
            level=Fidelity.PROBE,
            peak_allocated_bytes=int(allocated),
            peak_reserved_bytes=int(device - machine.context_bytes),
            peak_device_bytes=int(device),
            phase_peaks_bytes={"backward": int(allocated)},
            step_times_s=(time_s * exp(self.noise * run),),
            tokens_per_step=setup.tokens_per_step,
            layers_measured=(2, 4),
            environment=_NOWHERE,
        )

    def time_s(self, setup: TrainSetup) -> float:
        """True step time, allocator retries included."""
        _, device = peak_bytes(self.scenario.model, self.machine, setup)
        time_s = step_time_s(self.scenario.model, self.machine, setup)
        fullness = device / self.machine.memory_bytes
        if fullness > 0.95:
            time_s *= 1.0 + self.machine.retry_slowdown * min((fullness - 0.95) / 0.03, 1.0)
        return time_s


_NOWHERE = Environment(
    gpu_name="synthetic", gpu_key="synthetic", driver="0", cuda="0", python="3", platform="none", libraries={}
)


def _failure(kind: FailureKind, message: str) -> ProbeFailure:
    return ProbeFailure(level=Fidelity.PROBE, kind=kind, message=message)


def _machine(tflops: float, bandwidth_gb_s: float, memory_gib: float) -> Machine:
    return Machine(
        flops_per_s=tflops * 1e12, bandwidth_bytes_per_s=bandwidth_gb_s * 1e9, memory_bytes=int(memory_gib * GIB)
    )


M1B = SyntheticModel(num_params=1.24e9, num_layers=16, hidden=2048, num_heads=32, vocab=128256)
M8B = SyntheticModel(num_params=8.03e9, num_layers=32, hidden=4096, num_heads=32, vocab=128256)
M32B = SyntheticModel(num_params=32.8e9, num_layers=64, hidden=5120, num_heads=40, vocab=151936)


SCENARIOS = tuple(
    Scenario(name=name, model=model, nominal=_machine(*machine), seq_len_tokens=tokens, global_batch_seqs=batch)
    for name, model, machine, tokens, batch in (
        ("1b-24g", M1B, (165.0, 1008.0, 23.5), 2048, 64),
        ("8b-24g", M8B, (165.0, 1008.0, 23.5), 2048, 64),
        ("8b-80g", M8B, (312.0, 2039.0, 79.1), 4096, 32),
        ("32b-80g", M32B, (312.0, 2039.0, 79.1), 2048, 64),
    )
)
"""Models of 1, 8 and 32 billion parameters on cards of 24 and 80 GiB; rates are datasheet figures."""
