"""The stated policy (docs/choices.md) among setups of one method: what a small gain in speed is not worth, and what is
taken only where it pays (kernels, torch.compile, ranks, disk). Which method comes first: `decision.tree`."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from planner.core.errors import SetupError
from planner.core.notes import risk, usual
from planner.core.records import dataclass
from planner.core.units import gib, percent, seconds
from planner.frameworks.hyperparameters import choose as hyperparameters_of
from planner.memory.around import DEFAULT_EVAL_SEQS, evaluates_whole, evaluation_bytes, logits_bytes
from planner.memory.attention_kernels import missing_kernels, supported_attentions
from planner.memory.dtypes import SIZE_BYTES
from planner.memory.engines import engine_of
from planner.memory.states import paged_bytes, state_bytes
from planner.memory.trained import trained_parameters
from planner.memory.workload import Workload
from planner.models.spec import ModelSpec
from planner.models.targets import adapts_expert_stacks, scaling_targets
from planner.options.adapters import ADAPTERS, Adapter
from planner.options.kernels import KERNELS, PLANNED_KERNELS
from planner.options.losses import LOSSES
from planner.options.objectives import OBJECTIVES, packs
from planner.options.optimizers import OPTIMIZERS
from planner.options.precisions import PRECISIONS, precision_of
from planner.options.rollouts import GENERATORS
from planner.options.stacks import DEFAULT, STACKS, TARGET_ROWS
from planner.planning.decision.candidates import candidate
from planner.planning.decision.layouts import layout_order
from planner.planning.lora_rank import planned_ranks
from planner.samples.steps import PADDING_LIMIT, small_data_note, steps_of_run
from planner.setup import TrainSetup
from planner.setup.outcome import Candidate
from planner.speed import speed_profile

# The kinds of adapters side by side: each in the place of LoRA in one setup.


@dataclass(frozen=True, kw_only=True)
class KindChoice:
    """One kind of adapter: its setup with memory and speed and what had to differ from LoRA's beside kind and size, or
    why it was refused."""

    kind: Adapter
    num_trained: int = 0
    candidate: Candidate | None = None
    changed: tuple[str, ...] = ()
    refused: str = ""


def compare_kinds(workload: Workload, lora: TrainSetup) -> Iterator[KindChoice]:
    """Every kind in the place of LoRA: the same base, length, micro-batch and optimizer, so that what differs is the
    adapter's. A kind whose size is a rank takes LoRA's; any other its usual one.
    """
    for row in ADAPTERS.values():
        changes: dict[str, Any] = {"adapter": row.name}
        if row.form != "low-rank":
            changes["lora_rank"] = row.usual_size
        if row.form == "scales":
            changes["lora_targets"] = scaling_targets(workload.model)
        elif not row.adapts_matrices:
            changes["lora_targets"] = "all-linear"
        if row.name == "ln-tuning" and lora.quantized:
            changes["adapter_dtype"] = "auto"
        changed = ("checkpointing off",) if lora.checkpointing and not row.checkpointing else ()
        if changed:
            changes |= {"checkpointing": 0, "activation_offload": False, "selective_checkpointing": False}
        try:
            setup = lora.replace(**changes)
            num = trained_parameters(workload.model, setup).num
        except SetupError as error:
            yield KindChoice(kind=row, refused=error.message)
            continue
        yield KindChoice(kind=row, num_trained=num, candidate=candidate(workload, setup), changed=changed)


# The job around the step: optimizer steps and checkpoints on disk, what evaluating, saving and merging take.


FAR_RATE = 100
"""How many times the rule's learning rate, or how small a part of it, is taken for a slip. A judgement."""


def job_notes(workload: Workload, chosen: Candidate) -> Iterator[str]:
    """One sentence each: steps and disk where the data is known, small data, evaluation, merging."""
    weights, states = checkpoint_bytes(workload, chosen.setup)
    disk = f"a checkpoint takes {gib(weights + states)} on disk, {gib(states)} of it the optimizer's states"
    epoch_seqs, batch, epochs = workload.data.epoch_seqs, workload.global_batch_seqs, workload.epochs
    if epoch_seqs is not None:
        steps = steps_of_run(epoch_seqs, batch, epochs)
        job = f"{steps:,} optimizer step{'s' * (steps != 1)}, {epochs:g} epoch{'s' * (epochs != 1)}"
        disk = f"the job: {job}; {disk}"
    yield usual(disk)
    if note := small_data_note(epoch_seqs, batch, epochs):
        yield risk(note)
    # what is not known of samples that are given as numbers and do not fill their rows
    if workload.data.num_samples and not workload.data.file and workload.data.samples_per_seq == 1:
        mean = (workload.data.epoch_tokens or 0) / (epoch_seqs or 1)
        if mean < (1 - PADDING_LIMIT) * workload.seq_len_tokens * workload.seqs_per_sample:
            yield (
                f"samples of {mean:,.0f} tokens on average in rows of {workload.seq_len_tokens:,}: time and cost count "
                "no padding, whose share --dataset FILE measures; --packing takes it away"
            )
    if workload.learning_rate is not None:
        params, seqs = workload.model.num_params, workload.data.samples_per_seq
        usual_rate = hyperparameters_of(chosen.setup, num_params=params, samples_per_seq=seqs).learning_rate
        if not 1 / FAR_RATE <= workload.learning_rate / usual_rate <= FAR_RATE:
            yield risk(f"--lr {workload.learning_rate:g} is far from {usual_rate:.3g}, the rule's for this setup")
    if chosen.setup.num_gpus == 1:
        yield usual(evaluation_note(workload, chosen.setup))
    if chosen.setup.method != "full":
        whole = gib(SIZE_BYTES["bf16"] * workload.model.num_params)
        yield usual(f"merging the adapter needs the base in 16 bits, {whole}, on the GPU or in the host's memory")


def checkpoint_bytes(workload: Workload, setup: TrainSetup) -> tuple[int, int]:
    """Bytes on disk of (what is trained, its optimizer's states) in one checkpoint of transformers' Trainer.

    Source: transformers 5.23 `Trainer._save_checkpoint`: the model (peft: its adapters) and `optimizer.pt`.
    Not counted: tokenizer, random states and the scheduler, a few MB.
    """
    trained = trained_parameters(workload.model, setup)
    states = state_bytes(trained.num, trained.dtype, setup.optimizer, wide=trained.wide)
    states += paged_bytes(trained.num, setup.optimizer, wide=trained.wide)
    return trained.size_bytes, states


def evaluation_note(workload: Workload, setup: TrainSetup) -> str:
    """What evaluating takes, and the settings that keep it below the training peak."""
    model, gpu, micro = workload.model, workload.gpu, setup.micro_batch_seqs
    words = f"evaluation at {micro} at once (per_device_eval_batch_size, set in the launch files) stays below the peak"
    if evaluates_whole(setup):
        takes = gib(evaluation_bytes(model, gpu, setup, micro))
        words = f"evaluation at {micro} at once takes up to {takes}: Liger's loss makes no logits in training alone"
    usual = evaluation_bytes(model, gpu, setup, DEFAULT_EVAL_SEQS)
    if micro < DEFAULT_EVAL_SEQS and usual > workload.budget_bytes:
        words += f"; transformers' default of {DEFAULT_EVAL_SEQS} could take {gib(usual)}"
    return (
        f"{words}; with compute_metrics {gib(2 * logits_bytes(model, setup))} for every sequence evaluated, unless "
        "eval_accumulation_steps sends each batch's logits to the host, as the launch files do (--memory)"
    )


# Which of setups that are as fast is the simplest: what runs in more tools, needs fewer packages and loses less.


SIMPLE_FIRST = {
    "precision": ("bf16-autocast", "bf16-mixed", "fp16-autocast", "fp16-mixed", "fp32", "bf16-pure"),
    "attention": ("sdpa", "flash-attention-2", "xformers", "eager"),
    "quantization": ("none", "nf4-double", "nf4", "int8"),
}
"""Values in the order of what runs in more tools, needs fewer extra packages and loses less; values not listed come
last."""


def lossiness(setup: TrainSetup) -> int:
    """How much a setup gives up of what its class could train: its precision, the optimizer's states, the base."""
    return OPTIMIZERS[setup.optimizer].tie_break + _place(setup, "precision") + _place(setup, "quantization")


def tie_break(setup: TrainSetup) -> int:
    """How far a setup is from the simplest, summed over the dimensions; smaller is simpler."""
    return (
        layout_order(setup)
        + LOSSES[setup.loss].tie_break
        + KERNELS[setup.kernels].tie_break
        + (setup.stack != DEFAULT)  # another program than the plan's usual one
        + 5 * setup.compile  # which nothing here can prove before it runs
        + setup.activation_offload
        + (setup.checkpointing > 1)  # not every tool can, and a little memory alone is no reason
        + setup.selective_checkpointing
        + _place(setup, "attention")
        + (GENERATORS.index(setup.rollout_settings.generator) if setup.objective_spec.rolls_out else 0)
    )


def _place(setup: TrainSetup, name: str) -> int:
    values = SIMPLE_FIRST[name]
    return values.index(getattr(setup, name)) if getattr(setup, name) in values else len(values)


@lru_cache(maxsize=1 << 14)
def point_tie_break(shared: TrainSetup, attention: str, loss: str, optimizer: str) -> tuple[int, int]:
    """(lossiness, tie_break) of a walked point, which are asked for again and again."""
    setup = shared.replace_trusted(attention=attention, loss=loss, optimizer=optimizer)
    return lossiness(setup), tie_break(setup)


# The policy of every choice (docs/choices.md), in one place: what is open beside the plain walk, what is better in
# quality and how much speed that is worth, what may be preferred for being simpler, what is left out and why.


MASTERS_WORTH = 0.10
"""Of the speed that fp32 master weights may cost before full fine-tuning is planned without: 16-bit weights take small
updates as nothing."""
COMPILE_WORTH = 0.28
"""What torch.compile must be predicted to gain in a step of one sequence before it is open to a plan: the most that
such gains were off by in 6 pairs (4 on a B200, "torch.compile on / off" of docs/speed-accuracy.md, median 9 %;
torchtune's on an A100, 7 % too little; torchtitan's on H100s of another memory, 8 to 16 % too much). Of one sequence,
so that it is the same whatever fits. Of the measured pairs an 8B at 8,192 tokens ran at 0.94 times the speed, a 1B at
512, whose pace the host sets, at 3.1 to 3.9 times (B200)."""
COMPILE_S_PER_LAYER = 4.2
"""Seconds that torch.compile takes of a whole model, per layer: (198 - 48) / 36 of Qwen3-8B's full fine-tuning, of
which a run took 198 s compiled and 48 s not (35 s layer by layer, which transformers' Trainer does not).

Source: https://github.com/meta-pytorch/torchtune/pull/2831, one run."""
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

    What counts is whether it was compared with runs, memory and speed: a prediction of which nobody knows by how much
    it errs does not replace one of which it is known. Of Unsloth 48 published speeds were (benchmarks.gathered, group
    surogate), hardly a peak: its loss takes a share of what is free.
    """
    if setup.stack not in workload.targets and not _compared(setup.stack):
        return f"{STACKS[setup.stack].title} is planned when asked for: too few published runs say what memory it takes"
    if setup.compile and True not in workload.fixed.get("compile", ()):
        return compile_left_out(workload, setup)
    return ""


def _compared(stack: str) -> bool:
    return STACKS[stack].runs_trainer


def taken_when_asked(target: str) -> bool:
    """Whether a launch target is a program of its own that no plan takes unasked."""
    return target in STACKS and not _compared(target)


def compile_left_out(workload: Workload, setup: TrainSetup) -> str:
    """Why torch.compile is not taken unasked, "" where its band is known: where compiled runs were compared, and of
    mixtures where dynamo makes one graph of the whole model.

    Source: 53 compiled runs of six programs (benchmarks/stack_bands.py, docs/kernels.md): dense models, bf16, full
    fine-tuning and LoRA, one GPU, NVIDIA's cards from Ampere on. benchmarks/compiled_layers.py at e34acc15: gpt-oss and
    Qwen3's mixture compile whole; with adapters on stacked experts peft's parametrizations end every graph.
    """
    model, gpu = workload.model, workload.gpu
    if setup.method != "full" and adapts_expert_stacks(model, setup.lora_targets):
        return "peft's adapters of stacked experts end dynamo's graphs: next to nothing would be compiled"
    what = ""
    if setup.num_gpus > 1:
        what = " on several GPUs"
    elif not setup.objective_spec.supervised:
        what = f" of {setup.objective_spec.title}"
    elif setup.images is not None or model.is_encoder_decoder or model.from_tree:
        what = " of such a model"
    elif any(layer.attention is not None and layer.attention.kind == "linear" for layer in model.layer_kinds):
        what = " with linear attention"
    elif gpu.vendor != "NVIDIA" or (gpu.compute_capability or (0, 0)) < _COMPILED_FROM:
        what = f" on a card like {gpu.name}"
    elif setup.quantized:
        what = " on bitsandbytes' weights"
    elif setup.method != "full" and setup.adapter != "lora":
        what = f" with {setup.kind.title}"
    if what:
        return f"no compiled run{what} was compared"
    compiled, eager = compiled_and_not(workload, setup)
    gain = compiled / eager - 1
    if gain <= COMPILE_WORTH:
        off = percent(COMPILE_WORTH)
        return f"it gains {percent(max(0.0, gain))} in a step of one sequence, such gains are off by {off}"
    job_tokens = workload.epochs * (workload.data.epoch_tokens or 0)
    saved = job_tokens / eager - job_tokens / compiled
    if job_tokens and saved < compile_s(model):
        return f"it saves this job {seconds(saved)}, compiling takes about {seconds(compile_s(model))}"
    return ""


def compile_s(model: ModelSpec) -> float:
    """Seconds before the first step of a compiled run that a plain one does not take."""
    return COMPILE_S_PER_LAYER * model.num_layers


def compiled_and_not(workload: Workload, setup: TrainSetup) -> tuple[float, float]:
    """Predicted tokens/s in steps of one sequence of a method: with torch.compile, and by the fastest kernels of the
    plain stack."""
    model, gpu, full = workload.model, workload.gpu, setup.method == "full"
    half = "bf16" if gpu.bf16 else "fp16"
    plain = TrainSetup(
        method=setup.method,
        precision=precision_of("fp32" if full else half, half),
        lora_rank=0 if full else workload.min_rank,
        lora_targets="all-linear" if full else setup.lora_targets,
        attention=supported_attentions(model, gpu)[0],
        objective=workload.objective_spec.name,
        seq_len_tokens=workload.seq_len_tokens,
        packing=packs(workload.fixed),
        checkpointing=0,
    )
    there = (name for name in PLANNED_KERNELS if not missing_kernels(model, gpu, plain.replace(kernels=name)))
    both = plain.replace(compile=True), plain.replace(kernels=next(there, "eager"))
    compiled, eager = (speed_profile(model, gpu, variant).at(1, workload.global_batch_seqs)[1] for variant in both)
    return compiled, eager


def fewer_matrices(
    workload: Workload, values: Mapping[str, tuple[Any, ...]], sure: Collection[object]
) -> dict[str, tuple[Any, ...]]:
    """What is walked before a base is quantized, where no LoRA on all matrices surely fits in 16 bits: attention's
    alone; nothing for who named the matrices, the bits or another adapter."""
    fixed = {"lora_targets", "quantization", "adapter"} & set(workload.fixed)
    if sure or fixed or "lora" not in values["method"] or tuple(values["lora_targets"]) != ("all-linear",):
        return {}
    if not any(layer.attention is not None for layer in workload.model.layer_kinds):
        return {}
    ranks = planned_ranks(workload, "attention")
    return {**values, "method": ("lora",), "lora_targets": ("attention",), "lora_rank": ranks}


def opened_workloads(workload: Workload, values: Mapping[str, tuple[Any, ...]]) -> Iterator[Workload]:
    """What is walked beside the plain space of a workload: the engines with kernels of their own, and torch.compile; a
    person who named a target, kernels or --compile gets just that."""
    fixed, open_kernels = workload.fixed, "kernels" not in workload.fixed
    dense = [method for method in values["method"] if method != "qlora"]
    if "compile" not in fixed and open_kernels and dense:
        compiled = {"compile": (True,), "kernels": ("eager",), "activation_offload": (False,)}
        compiled["lora_targets"] = values["lora_targets"]
        usual = TrainSetup().replace_trusted(
            objective=workload.objective_spec.name, num_gpus=workload.num_gpus, images=workload.images,
            adapter=fixed.get("adapter", ("lora",))[0], lora_targets=values["lora_targets"][0],
        )  # fmt: skip
        if open_to := [each for each in dense if not compile_left_out(workload, usual.replace_trusted(method=each))]:
            yield replace(workload, fixed={**fixed, "method": tuple(open_to), **compiled})
    if workload.targets or not open_kernels or True in fixed.get("compile", ()):
        return
    adapted = tuple(method for method in values["method"] if method != "full")
    for name in OBJECTIVES[workload.objective_spec.name].targets:
        exclusive = [family for family in TARGET_ROWS[name].kernels if name in KERNELS[family].only]
        if not exclusive or not adapted or name in workload.absent_packages or not _compared(name):
            continue
        theirs = {"kernels": tuple(exclusive), "method": adapted, "kbit_fp32_cast": (False,), "compile": (False,)}
        theirs["lora_targets"] = values["lora_targets"]
        yield replace(workload, targets=(name,), fixed={**fixed, **theirs})
