"""The policy of every choice (docs/choices.md), in one place: what is open beside the plain walk, what is better in
quality and how much speed that is worth, what may be preferred for being simpler, what is left out and why.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from planner.choices.kernels import COMPILE_BAND, KERNELS, PLANNED_KERNELS
from planner.choices.objectives import OBJECTIVES
from planner.choices.optimizers import OPTIMIZERS
from planner.choices.precisions import PRECISIONS, precision_of
from planner.choices.stacks import STACKS, TARGET_ROWS
from planner.engines import engine_of
from planner.evidence.bands import ON_THE_TRAINER
from planner.hardware.kernels import missing_kernels, supported_attentions
from planner.models.targets import adapts_expert_stacks
from planner.setup import TrainSetup
from planner.speed import speed_profile
from planner.units import percent
from planner.workload import Workload

MASTERS_WORTH = 0.10
"""Of the speed that fp32 master weights may cost before full fine-tuning is planned without: 16-bit weights take small
updates as nothing."""
COMPILE_WORTH = COMPILE_BAND
"""What torch.compile must be predicted to gain in a step of one sequence before it is open to a plan: what such gains
are off by. Of one sequence, so that it is the same whatever fits. Of the measured pairs an 8B at 8,192 tokens ran at
0.94 times the speed, a 1B at 512, whose pace the host sets, at 3.1 to 3.9 times (B200)."""
_COMPILED_FROM = (8, 0)
"""Compute capability of the oldest cards on which compiled runs were compared."""


def full_quality(setup: TrainSetup) -> int:
    """0 where what trains has fp32 master weights, or trains beside frozen ones; 1 where 16-bit weights take the
    updates themselves."""
    if setup.method != "full" or PRECISIONS[setup.precision].weights == "fp32":
        return 0
    return 0 if engine_of(setup).keeps_fp32_masters else 1


def worst_quality(fitting: Iterable[tuple[TrainSetup, float]]) -> int:
    """The worst `full_quality` that is taken among setups with their tokens/s: without fp32 master weights only where
    nothing else fits, or all else is slower by more than they are worth."""
    fastest = [0.0, 0.0]
    for setup, tokens_per_s in fitting:
        quality = full_quality(setup)
        fastest[quality] = max(fastest[quality], tokens_per_s)
    return int(fastest[0] < (1 - MASTERS_WORTH) * fastest[1] or not fastest[0])


def equals(first: TrainSetup, second: TrainSetup) -> bool:
    """Whether two setups lose the same, so that the simpler may be preferred: one precision, one kind of optimizer."""
    same_states = OPTIMIZERS[first.optimizer].states == OPTIMIZERS[second.optimizer].states
    return same_states and PRECISIONS[first.precision] == PRECISIONS[second.precision]


def left_out(workload: Workload, setup: TrainSetup) -> str:
    """Why no plan takes an engine, its kernels or torch.compile unasked; "" where it is open to every plan.

    What counts is whether its speed was compared with runs: a prediction of which nobody knows by how much it errs does
    not replace one of which it is known.
    """
    if setup.stack not in workload.targets and not _compared(setup.stack):
        return f"no published run of {STACKS[setup.stack].title} was compared: its speed is a guess"
    if setup.compile and True not in workload.fixed.get("compile", ()):
        return compile_left_out(workload, setup)
    return ""


def _compared(stack: str) -> bool:
    return stack in ON_THE_TRAINER


def taken_when_asked(target: str) -> bool:
    """Whether a launch target is a program of its own that no plan takes unasked."""
    return target in STACKS and not _compared(target)


def compile_left_out(workload: Workload, setup: TrainSetup) -> str:
    """Why torch.compile is not taken unasked, "" where its band is known: where compiled runs were compared, and of
    mixtures where dynamo makes one graph of the whole model.

    Source: 53 compiled runs of six programs (benchmarks/stack_bands.py, docs/kernels.md): dense models, bf16, full
    fine-tuning and LoRA, one GPU, NVIDIA's cards from Ampere on. benchmarks/compiled_layers.py: gpt-oss and Qwen3's
    mixture compile whole; with adapters on stacked experts peft's parametrizations end every graph.
    """
    model, gpu = workload.model, workload.gpu
    if setup.method != "full" and adapts_expert_stacks(model, setup.lora_targets):
        return "peft's adapters of stacked experts end dynamo's graphs: next to nothing would be compiled"
    what = ""
    if setup.num_gpus > 1:
        what = " on several GPUs"
    elif not setup.aim.supervised:
        what = f" of {setup.aim.title}"
    elif setup.images is not None or model.is_encoder_decoder or model.from_tree:
        what = " of such a model"
    elif any(one.attention is not None and one.attention.kind == "linear" for one in model.layer_kinds):
        what = " with linear attention"
    elif gpu.vendor != "NVIDIA" or (gpu.compute_capability or (0, 0)) < _COMPILED_FROM:
        what = f" on a card like {gpu.name}"
    elif setup.quantized:
        what = " on bitsandbytes' weights"
    elif setup.method != "full" and setup.adapter != "lora":
        what = f" with {setup.kind.title}"
    if what:
        return f"no compiled run{what} was compared"
    gain = compile_gain(workload, setup)
    words = (
        f"it gains {percent(max(0.0, gain))} in a step of one sequence, such gains are off by {percent(COMPILE_WORTH)}"
    )
    return "" if gain > COMPILE_WORTH else words


def compile_gain(workload: Workload, setup: TrainSetup) -> float:
    """What torch.compile is predicted to gain in steps of one sequence of a method, over the fastest kernels of the
    plain stack, as a fraction."""
    model, gpu = workload.model, workload.gpu
    half = precision_of(*(("bf16", "bf16") if gpu.bf16 else ("fp16", "fp16")))
    if setup.method == "full":
        half = precision_of("fp32", PRECISIONS[half].autocast)
    plain = TrainSetup(
        method=setup.method,
        precision=half,
        lora_rank=0 if setup.method == "full" else workload.min_rank,
        lora_targets="all-linear" if setup.method == "full" else setup.lora_targets,
        attention=supported_attentions(model, gpu)[0],
        objective=workload.aim.name,
        seq_len_tokens=workload.seq_len_tokens,
        packing=True in workload.fixed.get("packing", (workload.aim.packed,)),
        checkpointing=0,
    )
    kernels = next(
        (one for one in PLANNED_KERNELS if not missing_kernels(model, gpu, plain.replace(kernels=one))), "eager"
    )
    both = plain.replace(compile=True), plain.replace(kernels=kernels)
    compiled, eager = (speed_profile(model, gpu, one).at(1, workload.global_batch_seqs)[1] for one in both)
    return compiled / eager - 1


def fewer_matrices(
    workload: Workload, values: Mapping[str, tuple[Any, ...]], sure: Collection[object]
) -> dict[str, tuple[Any, ...]]:
    """What is walked before a base is quantized, where no LoRA on all matrices surely fits in 16 bits: attention's
    alone; nothing for who named the matrices, the bits or another adapter."""
    told = {"lora_targets", "quantization", "adapter"} & set(workload.fixed)
    if sure or told or "lora" not in values["method"] or tuple(values["lora_targets"]) != ("all-linear",):
        return {}
    if not any(layer.attention is not None for layer in workload.model.layer_kinds):
        return {}
    return {**values, "method": ("lora",), "lora_targets": ("attention",)}


def further(workload: Workload, values: Mapping[str, tuple[Any, ...]]) -> Iterator[Workload]:
    """What is walked beside the plain space of a workload: the engines with kernels of their own, and torch.compile; a
    person who named a target, kernels or --compile gets just that."""
    fixed, open_kernels = workload.fixed, "kernels" not in workload.fixed
    dense = [method for method in values["method"] if method != "qlora"]
    if "compile" not in fixed and open_kernels and dense:
        compiled = {"compile": (True,), "kernels": ("eager",), "activation_offload": (False,)}
        compiled["lora_targets"] = values["lora_targets"]
        usual = TrainSetup().replace_trusted(
            objective=workload.aim.name, num_gpus=workload.num_gpus, images=workload.images,
            adapter=fixed.get("adapter", ("lora",))[0], lora_targets=values["lora_targets"][0],
        )  # fmt: skip
        open_to = [
            method for method in dense
            if not compile_left_out(workload, usual.replace_trusted(method=method))
        ]  # fmt: skip
        if open_to:
            yield replace(workload, fixed={**fixed, "method": tuple(open_to), **compiled})
    if workload.targets or not open_kernels or True in fixed.get("compile", ()):
        return
    adapted = tuple(method for method in values["method"] if method != "full")
    for name in OBJECTIVES[workload.aim.name].targets:
        own = [one for one in TARGET_ROWS[name].kernels if name in KERNELS[one].only]
        if not own or not adapted or name in workload.absent_packages or not _compared(name):
            continue
        theirs = {"kernels": tuple(own), "method": adapted, "kbit_fp32_cast": (False,), "compile": (False,)}
        theirs["lora_targets"] = values["lora_targets"]
        yield replace(workload, targets=(name,), fixed={**fixed, **theirs})
