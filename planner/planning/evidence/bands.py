"""Error bands of the levels: fitted on comparisons, dated; docs/accuracy says on which.

Two kinds meet here: how far the formula is from the dry run by what a setup is (`memory_band`), and how far published
runs of a stack lie from either level (`evidence_bands`, docs/accuracy/bands.md).
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from planner.core.records import dataclass
from planner.core.shipped import DATA, model_types
from planner.core.units import percent
from planner.hardware.gpu import GpuSpec
from planner.models.spec import LayerSpec, ModelSpec
from planner.options.stacks import STACKS
from planner.setup import TrainSetup
from planner.setup.outcome import Band, Prediction
from planner.speed.roofline.bands import Uncertainty

DRY_RUN_BAND = 0.02
"""What the dry run errs by on a trainer's step with current versions (docs/accuracy)."""
PROFILE_BAND = 0.04
"""The dry run's, and what the rule of the allocator's gap adds: a profile's allocated peak is the dry run's within
0.45 %, what is reserved within 4 % in 198 of 228 random points, more than that below it in eight, and where all logits
lie under checkpoints up to 10 % off (docs/step-profiles.md)."""
RANK_PROFILE_BANDS = {"ddp": 0.0, "fsdp2": 0.02}
"""Added to it with several GPUs (`LAYOUT_BAND` under ZeRO): of 165 dry runs of FSDP2's ranks 95 % are within 0.7 % of
what a profile of ranks says beside the engine's closed forms, the worst 1.4 % (docs/step-profiles.md, 29 November
2026); 2 % are NCCL's buffers, as no card has confirmed it here."""
USUAL_BAND = 0.04
"""One fused attention kernel, experts, linear or eager attention alike: 90th percentile against the dry run 1 to 3 %,
and about 1 % between dry run and card."""
SMALL_MODEL_BAND = 0.09
"""Below a billion parameters little tensors and rounding weigh more: 90th percentile 9 %."""
WIDE_BAND = 0.10
"""Dropouts, int8 with checkpointing, the math kernel's scores: formula and dry run differ most there."""
ENCODER_DECODER_BAND = 0.15
"""T5, Whisper: both halves are counted as one stack of layers; 95th percentile of 86 dry runs 14.5 %, T5's position
biases at 4,096 tokens up to 19 % (November 2026)."""
ADAPTER_BAND = 0.07
"""Adapters whose step is not LoRA's: what they make for a moment is not counted; 95th percentile of 657 dry runs 3.6 %,
of the worst kind 9.9 % (a prefix behind a fused projection)."""
TREE_BAND = 0.45
"""Architectures without an adapter: their matrices are exact, what their layers keep is assumed to be as in others.
Holds 9 of 10 of the setups that plans chose for every type of transformers (docs/accuracy/any-model.md); a plan of
theirs stands on its dry run, this is what is said without one."""
TREE_MIXTURE_BAND = 0.50
"""Mixtures among them: how the experts are called decides what they keep."""
MIXER_BAND = 6.0
"""Those whose layers mix tokens by no softmax: written out in PyTorch a scan keeps what the formula knows nothing of,
up to six times as much as all that it counts (Mamba, on the same page). So is one whose matrices stand beside the list
of its layers (XLM, FlauBERT: lists of attentions, of MLPs and of norms): what those keep is not counted."""
LIKE_BANDS = {"llama": 0.30, "mixture": 0.20}
"""`--like`: 98 models whose types are known, read as if they were not, three setups each: 28.3 % less (models without a
gate) to 9.0 % more than their sizes alone say, mixtures up to 16.4 % more (test_like.py, November 2026)."""
LIKE_MIXTURE_ADAPTED_BAND = 1.0
"""Mixtures with adapters whose layers are not all checkpointed: up to 96.5 % more, where peft finds the experts of a
type."""
LIKE_TIME_BANDS = {"llama": 0.50, "mixture": 1.40}
"""The same of the time: worst 47.9 and 136.3 %."""
MIXER_TIME_BAND = 1.0
"""The same where a module tree shows layers that mix tokens by no softmax: nobody has timed one (November 2026)."""
ENCODER_TIME_BAND = 0.25
"""The same of encoders, of which no run was compared: formula and dry run lie up to 8 % apart of BERT and 24 of
ModernBERT, whose rotary embedding in fp32 only the dry run counts (30 November 2026; 36 on a card no run was on)."""
ENCODER_BAND = 0.06
"""Encoders of BERT's layer and ModernBERT, read off their trees too: 95th percentile of 114 dry runs of five models
2.9 %, worst 5.2 (DistilBERT, two forwards, all checkpointed; 30 November 2026)."""
RELATIVE_POSITIONS_BAND = 1.1
"""DeBERTa, whose scores with positions only a dry run counts: 39 of them lay 1 to 105 % above, least where
all layers are checkpointed, most in short sequences (30 November 2026)."""
ORPO_BAND = 0.30
"""ORPO keeps the logits of both halves: what is allocated is the dry run's within 0.3 %, but what fixed segments cache
between them is not followed: 80 dry runs of five models, 95th percentile +27 %, worst +34 % (30 November 2026). Of
expandable ones few long samples cache as much, which PyTorch gives back before it runs out."""
FIXED_SEGMENTS_BAND, FIXED_EAGER_BAND = 0.10, 0.26
"""Fixed segments, whose holes no rule follows and PyTorch cannot give back: of 179 dry runs drawn over all fields at
once 95 % reserved up to 9 % more than is said; eager attention, whose scores lie between smaller blocks, up to 26 (43
of them; 30 November 2026). No plan has them. Expandable ones need no wider band: of 1,265 dry runs 61 reserved more
than the bands say, and each of these, replayed under that limit, gave cached memory back and went through."""
SMALL_PARAMS = 1_000_000_000
LAYOUT_BAND = 0.10
"""Added with several GPUs where no dry run followed the engine often: ZeRO (253 setups in a model of its engine: worst
11 %; -7 % of two published ZeRO-2 runs), tensor and pipeline parallelism, offloading, one process for all GPUs. With
one GPU's band it makes 14 %, the 90th percentile against 106 published configurations, nearly all of them FSDP 1."""
LAYOUT_BANDS = {"ddp": 0.02, "fsdp2": 0.04}
"""The same for PyTorch's own data parallelism, from 236 dry runs of a rank: 95th percentile 0.4 % (DDP), 0.5 % (FSDP2,
kept gathered), 1.3 % (FSDP2), 1.0 % (in groups). No card has confirmed it here: DDP's 2 % are NCCL's buffers twice
over (0.13 to 0.69 GiB). What FSDP2's streams cache apart PyTorch gives back before it runs out of memory. The published
runs that miss more are of FSDP 1, which keeps inputs of frozen layers, or of one script whose DDP runs miss alike; full
fine-tuning under FSDP 1, which keeps none, misses by 1.5 % (docs/accuracy/multi-gpu.md, November 2026)."""

ENGINE_BANDS = {
    "unsloth": 0.20, "loggetta": 0.14, "loggetta-resident": 0.14, "torchtune-in-bwd": 0.10, "torchtitan": 0.15,
}  # fmt: skip
"""The least band of an engine of its own code. Unsloth: what its notebooks print of runs on text (unslothai/notebooks,
August 2026, `max_memory_reserved`, samples shorter than counted) lies -8 to +16 % from ours in nine of versions 2025.8
to 2026.4 (Gemma 3 27B +45), +17 to +24 of 14B on a T4 in 2025; three longest contexts that it published are 5 to 10 %
shorter (docs/kernels.md). Nine runs of experts4bit-qlora are -12 to +4 % of what is said, their device
memory on fixed segments up to 13 % above (test_streamed_experts.py); four published runs of torchtune with its
optimizer in the backward are -5 to +11 % (torchtune-001, 010 to 012), three traced ones +0.3 to +0.6 %; three of
torchtitan reserved 9 to 14 % more than is said (docs/accuracy/multi-gpu.md)."""

AMD_TIME_BAND = 2.0
"""The same on an AMD GPU. No run stands behind it: AMD's own blogs of 2024 (ROCm/rocm-blogs, llama2-lora, llama2-Qlora;
Llama-2-7B in fp32 and 4 bits on an MI300X and dies of an MI250) took 1.0 to 2.8 times as long as said, 4 bits on the
MI300X 4.5 times: four of five lie within."""

APPLE_BAND = 0.12
"""The least band on an Apple GPU, whose kernels and allocator no run here has shown: that of TRL's published runs on a
card that none of them was on (`UNSEEN_CARD` x 8 %)."""


def memory_band(model: ModelSpec, setup: TrainSetup, gpu: GpuSpec | None = None) -> float:
    """Half-width of the closed forms' memory band for one setup, as a fraction: one GPU's, and more with several.
    What is printed is chosen in `planner.planning.predict` and, where runs of the stack are known, by `with_evidence`.

    Source: docs/accuracy/formula-vs-dry-run.md, 90th percentiles by kind of setup (November 2026); LAYOUT_BANDS.
    """
    fraction = _one_gpu_band(model, setup)
    if not setup.single_gpu:
        plain = not setup.is_split and setup.offload == "none"
        fraction += LAYOUT_BANDS.get(setup.parallel, LAYOUT_BAND) if plain else LAYOUT_BAND
    apple = gpu is not None and gpu.vendor == "Apple"
    return max(fraction, _least_band(setup), APPLE_BAND if apple else 0.0)


def _least_band(setup: TrainSetup) -> float:
    """Of closed forms and profiles, of an engine of its own code or of fixed segments."""
    fixed = FIXED_EAGER_BAND if setup.attention == "eager" else FIXED_SEGMENTS_BAND
    return max(ENGINE_BANDS.get(setup.stack, 0.0), 0.0 if setup.expandable_segments else fixed)


def unknown_mixers(model: ModelSpec) -> bool:
    """Whether a module tree shows layers that mix tokens by no softmax: state spaces, delta rules, recurrences; alone,
    or beside an attention (Falcon-H1)."""
    return model.from_tree and any(
        layer.attention is not None and (layer.attention.kind == "linear" or _mixes_beside(layer))
        for layer in model.layer_kinds
    )


def _mixes_beside(layer: LayerSpec) -> bool:
    """Whether matrices mix tokens that lie in no attention of the layer's."""
    attentions = tuple(linear.name.rpartition(".")[0] for linear in layer.linears if linear.role in ("q", "qkv"))
    return any(linear.role == "mixer" and not linear.name.startswith(attentions) for linear in layer.linears)


def time_band(model: ModelSpec, gpu: GpuSpec) -> float:
    """The least band of the time of a model that nobody here knows, or whose kind or cards nobody here timed."""
    least = AMD_TIME_BAND if gpu.vendor == "AMD" else 0.0
    if model.like:
        return max(least, LIKE_TIME_BANDS[model.like])
    kind = MIXER_TIME_BAND if unknown_mixers(model) else ENCODER_TIME_BAND if model.reads_both_ways else 0.0
    return max(least, kind)


def time_sides(uncertainty: Uncertainty, model: ModelSpec, gpu: GpuSpec) -> tuple[float, Band]:
    """(by how much longer a step may take, the band of its tokens/s)."""
    least = time_band(model, gpu)
    longer, faster = max(uncertainty.slower_fraction, least), max(uncertainty.faster_fraction, least)
    return longer, Band(1 - 1 / (1 + longer), faster)


def dry_run_band(setup: TrainSetup) -> float:
    """The same of a dry run."""
    return max(DRY_RUN_BAND, ENGINE_BANDS.get(setup.stack, 0.0))


def profile_band(setup: TrainSetup) -> float:
    """The same of a step profile."""
    more = 0.0 if setup.single_gpu else RANK_PROFILE_BANDS.get(setup.parallel, LAYOUT_BAND)
    return max(PROFILE_BAND + more, _least_band(setup))


def _one_gpu_band(model: ModelSpec, setup: TrainSetup) -> float:
    if model.like:
        adapted = model.like == "mixture" and setup.method != "full" and setup.checkpointing != 1
        return LIKE_MIXTURE_ADAPTED_BAND if adapted else LIKE_BANDS[model.like]
    if model.is_encoder_decoder:
        return ENCODER_DECODER_BAND
    if model.reads_both_ways:
        if model.config.get("relative_attention"):
            return RELATIVE_POSITIONS_BAND
        compared = not model.from_tree or model.model_type in model_types("bert_layers")
        return ENCODER_BAND if compared else TREE_BAND
    outside = sum(linear.num_weights for linear in model.outer_linears) if model.from_tree else 0
    if unknown_mixers(model) or outside > sum(layer.num_params * num for layer, num in model.layer_counts):
        return MIXER_BAND
    if model.from_tree:
        experts = any(layer.mlp is not None and layer.mlp.kind == "moe" for layer in model.layer_kinds)
        return TREE_MIXTURE_BAND if experts else TREE_BAND
    if setup.objective == "orpo" and not setup.expandable_segments:
        return ORPO_BAND
    traits = model.traits
    if setup.lora_dropout > 0 or traits.attention_dropout or traits.residual_dropout or setup.quantization == "int8":
        return WIDE_BAND
    if setup.attention == "sdpa" and setup.precision in ("fp32", "fp16-mixed", "fp16-autocast"):
        return WIDE_BAND  # older cards and fp32 may fall back to the math kernel
    if model.num_params < SMALL_PARAMS:
        return SMALL_MODEL_BAND
    return USUAL_BAND if setup.method == "full" or setup.adapter == "lora" or setup.kind.like_lora else ADAPTER_BAND


TRAINERS = ("trl", "hf", "sentence-transformers")
"""Stacks that are one Trainer: their published runs are one kind. sentence-transformers' is transformers' own around
another loss: traced, 0.3 to 0.5 % above the dry run (docs/objectives.md). Axolotl 0.21's and LLaMA-Factory 0.9.5's own
steps, traced (Qwen2.5-7B, LoRA and QLoRA, benchmarks/check_vs_trace.py of 00bc1b5f): bytes 0.0 to 0.2 % above
the formula, tokens/s -4.5 to +7.5 % beside it."""
MEMORY = ("allocated", "reserved", "device")
UNSEEN_CARD = 1.5
"""How much wider reserved and device memory are on a card that no published run of the stack was on: a
judgement, dated November 2026."""
OTHER_TRAINER = 2.5
"""The same of the memory of a stack on transformers' Trainer and the same libraries that has no runs of its own: of
TRL's device memory +8.8 (dry run) and +10.8 %, and Axolotl published fifteen runs of -2.1 to +9.6 % (PR 3800)."""
CACHED = "blocks that PyTorch caches, and gives back before it runs out"
CACHE_NOTE_FROM_FRACTION = 0.1
"""Where a device peak may lie so much further above than what the run needs, it is said."""
NO_COMPARED_RUN = "no run like this has been compared"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """The band of published runs of one kind: measured lies from predicted x (1 - below) to predicted x (1 + above);
    `cards`: keys of the GPUs that they were measured on, empty for a pool of stacks."""

    below: float
    above: float
    num_rows: int
    num_sources: int = 0
    cards: tuple[str, ...] = ()


def gpu_count_kind(setup: TrainSetup) -> str:
    """ "one", "one, eager" or "several" GPUs: bands of these are never shared. Eager attention's tokens x tokens scores
    are a risk of their own."""
    if not setup.single_gpu:
        return "several"
    return "one, eager" if setup.attention == "eager" else "one"


@lru_cache(maxsize=1)
def _cells() -> Mapping[tuple[str, str, str, str], Cell]:
    cells = {}
    for values in json.loads((DATA / "bands.json").read_text(encoding="utf-8")):
        key = tuple(values.pop(name) for name in ("level", "metric", "gpus", "stack"))
        cells[key] = Cell(**values | {"cards": tuple(values["cards"])})
    return cells


def evidence_bands(level: str, gpu: GpuSpec, setup: TrainSetup) -> tuple[dict[str, tuple[float, float]], str]:
    """({metric: (below, above)} of published runs of this stack, what a person must know or "").

    A stack without ten rows has the band of the others taken together, and it is said; so is a card on which none of
    its runs was. A memory figure that nobody compared, or one source alone, is as uncertain as the widest that somebody
    did, of the stack or else of all. Several GPUs have no compared dry runs: theirs are the formula's.
    """
    cells, gpus = _cells(), gpu_count_kind(setup)
    stack = TRAINERS[0] if setup.stack in TRAINERS else setup.stack
    libraries = STACKS[stack].runs_trainer and not STACKS[stack].fused
    on_trainer = libraries and stack not in TRAINERS and not any(name == stack for *_, name in cells)
    stack = TRAINERS[0] if on_trainer else stack
    level = "formula" if gpus == "several" else {"profile": "dry_run"}.get(level, level)
    owns = {metric: cells.get((level, metric, gpus, stack)) for metric in MEMORY}
    cards = {card for stack_cell in owns.values() if stack_cell is not None for card in stack_cell.cards}
    pools = {metric: cells.get((level, metric, gpus, "")) or cells.get((level, metric, "one", "")) for metric in owns}
    memory_cells = [*filter(None, map(owns.get, MEMORY))] or [*filter(None, map(pools.get, MEMORY))]
    bands = {}
    for metric, stack_cell in owns.items():
        wider = 1.0
        if stack_cell is not None and on_trainer:
            wider = OTHER_TRAINER
        elif stack_cell is not None and gpu.key not in cards and metric != "allocated":
            wider = UNSEEN_CARD
        alone = stack_cell is not None and stack_cell.num_sources > 1
        like = [stack_cell] if alone and stack_cell is not None else [*filter(None, (stack_cell, *memory_cells))]
        below, above = max(band.below for band in like), max(band.above for band in like)
        bands[metric] = (min(0.95, below * wider), above * wider)
    none_here = f"{setup.trainer.title} has no published run here"
    if not setup.objective_spec.supervised:
        why = f"published runs are of supervised training, this is {setup.objective_spec.title}"
    elif on_trainer:
        why = f"{none_here}, the band is its libraries' under TRL, wider"
    elif not any(owns.values()):
        why = f"{none_here}, the band is that of other stacks"
    elif gpu.key not in cards:
        why = f"none of {setup.trainer.title}'s published runs was on a {gpu.name}"
    else:
        return bands, ""
    return bands, f"{NO_COMPARED_RUN}: {why}"


AMD_NOTE = (
    f"{NO_COMPARED_RUN}: none was on an AMD GPU; AMD's own five of 2024 took 1.0 to 4.5 times as long as predicted"
)


def with_evidence(prediction: Prediction, gpu: GpuSpec, setup: TrainSetup, *, planned: bool = False) -> Prediction:
    """The prediction with the bands of published runs like it. Upwards its memory band is that of what a run needs:
    as far as runs allocated more, for what a device holds beyond it PyTorch caches, and gives back. Judged so, of 179
    published runs that went out of memory none fits, as when judged by what devices held; of 963 that went through 96
    are uncertain (`benchmarks.verdicts`, 30 November 2026; of 768 57, not 109).

    Args:
        planned: the setup is a plan's own, which keeps the memory band that it was chosen by: current versions, the
            allocator as launch files set it, and transformers' Trainer or an engine of `ENGINE_BANDS`.
    """
    if planned and setup.trainer.runs_trainer:
        apple = f"{NO_COMPARED_RUN}: none was on an Apple GPU, the band is that of TRL's on a card that none was on"
        title = setup.trainer.title
        same = f"{NO_COMPARED_RUN}: {title} has no published run here, the band is that of its libraries under TRL"
        if setup.stack in TRAINERS:
            same = {"Apple": apple, "AMD": AMD_NOTE}.get(gpu.vendor, "")
        return _noted(prediction, same)
    bands, note = evidence_bands(prediction.level.value, gpu, setup)
    note = AMD_NOTE if gpu.vendor == "AMD" else note
    annotated = _noted(prediction, note)
    fraction = annotated.memory_band_fraction
    if planned and setup.stack in ENGINE_BANDS:
        return replace(annotated, memory_band_fraction=max(fraction, ENGINE_BANDS[setup.stack]))
    below, above = (max(fraction, side) for side in bands.get("device") or bands["reserved"])
    allocated_share = annotated.peak_allocated_bytes / max(1, annotated.peak_device_bytes)
    needed = max(fraction, bands["allocated"][1] * allocated_share)
    if above - needed > CACHE_NOTE_FROM_FRACTION:
        annotated = _noted(annotated, f"nvidia-smi may show up to {percent(above)} more than this peak: {CACHED}")
    bands |= {**prediction.bands, "device": (below, above), "needed": (below, needed)}
    return replace(annotated, memory_band_fraction=max(below, needed), bands=bands)


def _noted(prediction: Prediction, note: str) -> Prediction:
    return replace(prediction, notes=(*prediction.notes, note)) if note else prediction


def of_a_plan(setup: TrainSetup) -> bool:
    """Whether a setup is one that a plan makes and starts: current versions, the allocator as launch files set it."""
    return setup.expandable_segments and setup.stack in TRAINERS


class TrainerShare(NamedTuple):
    """By how much a trainer's step (metrics, callbacks, its way to the data) is longer than a probe's of the same
    setup, and half of what the measured pairs are apart, as fractions of that."""

    fraction: float = 0.0
    band_fraction: float = 0.0


NO_SHARE = TrainerShare()
TRL_SHARE = TrainerShare(0.049, 0.019)
"""Two setups of Qwen3-8B on one H200, 26 November 2026, probed and then trained by TRL 1.16: QLoRA 1.136 and 1.213 s
(its step and what lies between two), LoRA 1.321 and 1.360 s. Of other trainers no such pair is known."""


def trainer_share(setup: TrainSetup) -> TrainerShare:
    """The share of the trainer that runs a setup; none where none was measured."""
    return TRL_SHARE if setup.stack == "trl" else NO_SHARE
