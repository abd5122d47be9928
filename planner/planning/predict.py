"""The formula level: one setup in, one `Prediction` out. Memory terms and step time from their own packages."""

from dataclasses import replace
from typing import TYPE_CHECKING

from planner.core.notes import measured, risk
from planner.core.units import gib, percent
from planner.hardware.gpu import GpuSpec
from planner.memory.attention_kernels import (
    AOTRITON_SWITCH,
    Kernel,
    attention_generation,
    attention_kernel,
    linear_attention_refusal,
    missing_kernels,
    packs_apart,
    padded,
    supported_attentions,
    untrained_sinks,
)
from planner.memory.dtypes import SIZE_BYTES, dtype_policy_of
from planner.memory.engines import engine_of
from planner.memory.model import memory_of
from planner.memory.rank_part import rank_parts
from planner.memory.states import (
    in_one_memory,
    linear_bytes,
    loading_refusal,
    paged_bytes,
    pinned_bytes,
    streamed_stacks,
)
from planner.models.earlier import with_one_kernel_gelu
from planner.models.spec import ModelSpec
from planner.models.stored import (
    dequantizing_class,
    kept_fraction,
    packed_as,
    stored_bits,
    stored_method,
    stored_refusal,
)
from planner.models.targets import dropout_refusal, head_refusal, unmatched_targets
from planner.options.optimizers import OPTIMIZERS
from planner.options.precisions import FP16_OVERFLOWS
from planner.planning.evidence.bands import (
    memory_band,
    of_a_plan,
    profile_band,
    time_sides,
    unknown_mixers,
    with_evidence,
)
from planner.setup import TrainSetup
from planner.setup.outcome import CANNOT_RUN, Fidelity, Prediction, speed_sides
from planner.setup.packages import CHUNKED_TYPES, DELTA, DELTA_TYPES
from planner.speed import cluster_of, speed_profile
from planner.speed.roofline.types import StepTime

if TYPE_CHECKING:
    from planner.hardware.cluster import Cluster  # late: one GPU needs none of it


def predict(
    model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, cluster: "Cluster | None" = None, *, planned: bool = False
) -> Prediction:
    """Memory peaks and step time of one setup without running anything, in well under a millisecond on one GPU: memory
    by its structure's step profile where there is one, speed by its step program, else by closed forms.

    Args:
        cluster: the GPUs and their links; None: one GPU, or the cluster that the setup's number of GPUs suggests. With
            several GPUs the memory is the worst rank's, and the tokens/s are those of all GPUs together.
        planned: the setup is a plan's own (`with_evidence`).

    Source: `planner.memory`, `planner.speed.roofline` and `planner.speed.several_gpus`, each term with its own source.
    Measured: docs/accuracy/formula.md, per source and per case.
    """
    return _of_run(*_as_run(model, gpu, setup), gpu, cluster, planned=planned)


def _of_run(
    model: ModelSpec, setup: TrainSetup, gpu: GpuSpec, cluster: "Cluster | None", *, planned: bool
) -> Prediction:
    """`predict`, of what `_as_run` gives."""
    ranks = memory_of(model, gpu, setup)
    memory = ranks[0].breakdown
    speed = _step_time(model, gpu, setup, cluster, memory.peak_device_bytes)
    notes = [*memory_notes(model, gpu, setup)]
    peaks = tuple((rank.name, rank.num_ranks, rank.breakdown.peak_device_bytes) for rank in ranks)
    time_fraction, sides = time_sides(speed.uncertainty, model, gpu)
    if len(ranks) > 1:
        notes.append(f"the memory is that of the fullest GPUs ({ranks[0].name}, {ranks[0].num_ranks} of them)")
    if setup.offload != "none":
        from planner.memory.engines.host import host_bytes_per_node  # one GPU never needs it

        host = host_bytes_per_node(model, setup, cluster_of(gpu, setup, cluster).num_nodes)
        notes.append(risk(f"{gib(host)} lie in the host's memory of every node, and must find room there"))
    prediction = Prediction(
        level=Fidelity.PROFILE if memory.profiled else Fidelity.FORMULA,
        peak_allocated_bytes=memory.peak_allocated_bytes,
        peak_reserved_bytes=memory.peak_reserved_bytes,
        peak_device_bytes=memory.peak_device_bytes,
        peak_phase=memory.peak_phase,
        phase_peaks_bytes=memory.phase_bytes,
        terms=memory.at_peak(),
        memory_band_fraction=profile_band(setup) if memory.profiled else memory_band(model, setup, gpu),
        step_time_s=speed.step_time_s,
        tokens_per_s=speed.tokens_per_s,
        time_band_fraction=time_fraction,
        mfu_fraction=speed.mfu_fraction,
        time_parts_s=speed.parts_s,
        notes=(*notes, *_loop_notes(model, gpu, setup, cluster, memory.peak_device_bytes, speed), *speed.notes),
        rank_peaks=peaks if setup.num_gpus > 1 else (),
        bands={"tokens_per_s": sides},
    )
    return with_evidence(prediction, gpu, setup, planned=planned)


def _as_run(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> tuple[ModelSpec, TrainSetup]:
    """The model as a setup's program builds it, and the setup as the card runs it."""
    if setup.builds_encoders:
        from planner.models.encoders import with_vision  # late: text alone needs none of it

        model = with_vision(model)
    if setup.trainer.one_kernel_gelu:
        model = with_one_kernel_gelu(model)
    return model, in_one_memory(gpu, setup)


def with_padding(
    prediction: Prediction,
    model: ModelSpec,
    gpu: GpuSpec,
    setup: TrainSetup,
    cluster: "Cluster | None" = None,
    *,
    of_formula: bool = False,
) -> Prediction:
    """A prediction, of any level, that counts full micro-batches, with the band and the speed of those whose samples
    differ in length: SDPA is handed a mask then, which costs its flash kernel, flash attention 2 copies
    (`TrainSetup.pads`).

    Args:
        of_formula: the prediction is what the formula says of this very model and setup.
    """
    uneven = padded(model, setup)
    if uneven is None:
        return prediction
    (full, full_s), (peak, step_s) = [
        (prediction.peak_device_bytes, prediction.step_time_s or 0.0)
        if of_formula and variant is setup
        else (
            peak := device_peak_bytes(model, gpu, variant),
            _step_time(model, gpu, variant, cluster, peak).step_time_s,
        )
        for variant in (setup, uneven)
    ]
    more, longer = peak / full - 1, step_s / full_s
    if max(more, longer - 1) < PADDING_MATTERS:
        return prediction
    below, above = prediction.memory_band
    bands = {**prediction.bands, "needed": (below, max(above, (1 + above) * (1 + more) - 1))}
    if sides := speed_sides(prediction.time_band_fraction, prediction.bands):
        bands["tokens_per_s"] = max(sides.below, 1 - (1 - sides.below) / longer), sides.above
    by_sdpa, packs = setup.attention == "sdpa", setup.objective_spec.packs and setup.images is None
    alone = uneven.replace_trusted(micro_batch_seqs=1)
    without = " or ".join(["--packing"] * packs + ["micro-batch 1"] * (not alone.pads))
    less = by_sdpa and "flash-attention-2" in supported_attentions(model, gpu)
    words = "; ".join([f"not with {without}"] * bool(without) + ["less with flash-attention-2"] * less)
    note = risk(
        f"samples of one length are counted: where those of a micro-batch differ {_PADDED[by_sdpa]}, "
        f"{f'{gib(peak - full)} more and ' * (more > 0)}{percent(max(0.0, 1 - 1 / longer))} slower"
        + f" ({words})"
        * bool(words)
    )
    widest = max(bands["needed"])
    return replace(prediction, memory_band_fraction=widest, bands=bands, notes=(*prediction.notes, note))


def predict_with_padding(
    model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, cluster: "Cluster | None" = None, *, planned: bool = False
) -> Prediction:
    """`predict`, as people are shown it: `with_padding`."""
    built, runs = _as_run(model, gpu, setup)
    prediction = _of_run(built, runs, gpu, cluster, planned=planned)
    return with_padding(prediction, model, gpu, setup, cluster, of_formula=built is model and runs is setup)


_PADDED = {True: "SDPA gets a mask", False: "flash attention keeps copies without padding"}
PADDING_MATTERS = 0.01
"""Share of a peak or of a step from which on a mask of padding is told."""


def _step_time(
    model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, cluster: "Cluster | None", peak_device_bytes: int
) -> StepTime:
    """The time of a step; a plan takes an optimizer's form without pages where its states fit."""
    speed = speed_profile(model, gpu, setup, cluster).step_time(setup)
    if "paging" not in speed.parts_s or of_a_plan(setup):
        return speed
    return speed if paged_overflow(model, gpu, setup, peak_device_bytes) else speed.without_paging()


def _loop_notes(
    model: ModelSpec,
    gpu: GpuSpec,
    setup: TrainSetup,
    cluster: "Cluster | None",
    peak_device_bytes: int,
    speed: StepTime,
) -> list[str]:
    if setup.linear_attention != "torch" or linear_attention_refusal(model, gpu):
        return []
    other = setup.replace_trusted(linear_attention="fla")
    peak = device_peak_bytes(model, gpu, other)
    faster = _step_time(model, gpu, other, cluster, peak)
    gain = f"{gib(peak_device_bytes - peak)} less, {faster.tokens_per_s:,.0f} tokens/s for {speed.tokens_per_s:,.0f}"
    packed = "; it refuses packed samples whose borders a trainer hands on, as TRL does" if setup.packing else ""
    loop = f"linear attention is counted as transformers' own loop in PyTorch{packed}"
    return [risk(f"{loop}: with {DELTA} installed {gain}")]


def paged_overflow(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, peak_device_bytes: int) -> bool:
    """Whether a paged optimizer's states do not all find room beside the peak on one GPU. Then all of them move in
    every step: it goes through them in one order, and the driver evicts what was used longest ago, which is next.

    Source: bitsandbytes 0.50 `optim/optimizer.py` step (prefetches tensor by tensor); docs, explanations/optimizers.mdx
    ("zero overhead if all the memory fits onto the device"); Park et al. 2020, Page reuse in cyclic thrashing of GPU
    under oversubscription, CASES. Nobody is known to have measured it.
    """
    return peak_device_bytes + _paged_bytes(model, setup) > gpu.memory_bytes


def _paged_bytes(model: ModelSpec, setup: TrainSetup) -> int:
    """Bytes of a paged optimizer's states in managed memory, of the rank that holds the most."""
    if not OPTIMIZERS[setup.optimizer].paged:
        return 0
    engine = engine_of(setup)
    shards = (engine.state(part, setup, accumulated=setup.adds_gradients).local for part in rank_parts(model, setup))
    return max(paged_bytes(shard.num, setup.optimizer, wide=shard.wide) for shard in shards)


def device_peak_bytes(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> int:
    """The device peak of `predict` alone: the fullest GPU's."""
    return memory_of(model, gpu, in_one_memory(gpu, setup))[0].breakdown.peak_device_bytes


def attention_kernels(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> frozenset[Kernel]:
    """The kernels that the model's layers run their attention with."""
    dtype = dtype_policy_of(setup).attention_input
    specs = (layer.attention for layer in model.layer_kinds if layer.attention is not None)
    return frozenset(attention_kernel(model, setup, gpu, spec, dtype) for spec in specs)


def cannot_run(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> tuple[str, ...]:
    """Why nothing runs this setup of the model on this card; empty where something does."""
    runs = setup.replace_trusted(attention="eager") if untrained_sinks(model, gpu, setup) else setup
    reasons = [missing_kernels(model, gpu, runs), stored_refusal(setup, model)]
    if not setup.single_gpu:
        from planner.memory.engines.fsdp2 import dtensor_refusal  # late: one GPU needs none of it

        reasons.append(dtensor_refusal(setup))
    reasons += [
        loading_refusal(model, setup, gpu.memory_bytes),
        dropout_refusal(model, setup),
        head_refusal(model, setup),
    ]
    if setup.objective_spec.rolls_out:
        from planner.planning.rollouts import rollout_refusals  # late: few objectives generate

        reasons += rollout_refusals(model, gpu, setup)
    reasons.append(model.unscored if setup.objective_spec.head == "score" else "")
    positions = model.max_position_embeddings
    if positions is not None and setup.seq_len_tokens > positions and model.front_end is not None:
        beyond = f"{setup.seq_len_tokens:,} tokens are beyond the model's {positions:,} positions"
        reasons.append(f"{beyond}, which {model.built_class} refuses")
    return tuple(filter(None, reasons))


def memory_notes(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> tuple[str, ...]:
    """What a person must know about this setup's memory, one sentence each."""
    notes = _unknown_notes(model, gpu, setup)
    unmatched = () if setup.method == "full" else unmatched_targets(model, setup.lora_targets)
    if unmatched:
        named = ", ".join(unmatched)[:200]
        notes.append(risk(f"LoRA targets {named} match no module: PEFT leaves them out without a word"))
    notes += _stored_notes(model, setup)
    positions = model.max_position_embeddings
    if positions is not None and setup.seq_len_tokens > positions and model.front_end is None:
        beyond = f"{setup.seq_len_tokens:,} tokens are beyond the model's {positions:,} positions"
        learned = model.learned_positions is not None
        what = "a longer sample stops the run" if learned else "rotary ones were not trained further"
        notes.append(risk(f"{beyond}: {what}"))
    if streamed := streamed_stacks(model, setup):
        pinned = pinned_bytes(model, setup)
        words = f"{gib(pinned)} of the host's memory, pinned, hold {gib(sum(streamed))} of experts in 4 bits"
        notes.append(risk(f"{words}; one layer's {gib(streamed[0])} are on the card"))
    if plain := unquantized_expert_bytes(model, setup):
        stacked = "transformers stacks them in bare parameters, which bitsandbytes does not quantize"
        bits = 8 * SIZE_BYTES[dtype_policy_of(setup).stacks]
        way = ", and peft's k-bit preparation casts to fp32 (quantize_moe_experts: true quantizes them)"
        notes.append(risk(f"{gib(plain)} of the experts stay {bits}-bit: {stacked}{way * setup.wide_stacks}"))
    if paged := _paged_bytes(model, setup):
        where = " on every GPU" if setup.num_gpus > 1 else ""
        notes.append(
            risk(f"{gib(paged)} of paged optimizer state lie in managed memory{where}, outside PyTorch's count")
        )
    return tuple(notes)


def _unknown_notes(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> list[str]:
    notes: list[str] = []
    if model.from_tree:
        notes.append(
            f"no adapter knows {model.model_type}: the formula stands on the module tree that transformers builds, and "
            "assumes that its layers keep what others' do"
        )
    if "encoder" in model.lacks:
        notes.append(risk(f"{model.built_class} is the decoder alone: the encoder is neither loaded nor trained"))
    if unknown_mixers(model):
        packages = "its packages (mamba-ssm and causal-conv1d, or flash-linear-attention), where they are installed"
        gain = f"{packages}, take less memory and far less time"
        notes.append(risk(f"{model.model_type} mixes tokens in plain PyTorch: {gain}"))
    if setup.linear_attention == "fla":
        hopper = "; on Hopper it refuses Triton 3.4 to 3.7.0" if gpu.arch == "Hopper" else ""
        compared = "its speed was compared with those kernels alone (docs/kernels.md)"
        kernels = f"{DELTA}'s kernels, which run.sh installs{hopper}"
        notes.append(risk(f"linear attention is counted as {kernels}; {compared}"))
    elif model.model_type in DELTA_TYPES - CHUNKED_TYPES:
        notes.append(risk(f"memory and speed are those of transformers' own loop: {DELTA} takes less of both"))
    if model.like:
        words = f"nobody here knows model_type {model.model_type}: its sizes are read as a {model.like}'s (--like)"
        notes.append(risk(f"{words}; files name it as it is, and load only where its own code is installed"))
    if model.front_end is not None:
        trained = "is trained" if setup.method == "full" else "is adapted as asked"
        encoder = (
            f"{model.encoder_tokens:,} tokens in the encoder, which {'is frozen' if setup.frozen_encoder else trained}"
        )
        text = f"{setup.seq_len_tokens} tokens of text (--seq-len; tokens/s are the text's)"
        clip = f"a clip of sound, padded or cut to {model.front_end.seconds:g} s"
        notes.append(risk(f"a sample is {clip} ({encoder}), with {text}"))
    if setup.images is not None or "vision_config" in model.config:
        notes += _image_notes(model, setup)
    if setup.packing and not packs_apart(model, setup.attention) and not setup.trainer.own_models:
        mask = f"{model.model_type} makes its mask without their positions, --no-packing keeps them apart"
        notes.append(risk(f"packed samples attend to each other: {mask}"))
    if model.traits.streams > 1:
        notes.append("the speed leaves out what several residual streams move (AltUp): it is an upper bound")
    if "math" in attention_kernels(model, gpu, setup):
        why = "no fused kernel takes this dtype, card and head layout"
        packed = setup.replace_trusted(packing=setup.objective_spec.packs)
        fused = "math" not in attention_kernels(model, gpu, packed) and packs_apart(model, setup.attention)
        way = "; of packed rows it gets a mask, which a fused one takes (--packing)" if fused else ""
        if attention_generation(gpu) == "experimental":
            way = f"; {AOTRITON_SWITCH} has PyTorch's fused ones, which it calls experimental on this card"
        notes.append(risk(f"SDPA falls back to its math kernel here ({why}): it keeps tokens x tokens matrices{way}"))
    if gpu.bf16_flops_per_s is None and setup.compute_dtype == "bf16":
        notes.append(risk(f"{gpu.name} has no bf16 units: torch emulates bf16 slowly, fp16 is the better choice"))
    notes += _overflow_notes(model, gpu, setup)
    notes += [measured(f"{CANNOT_RUN}{reason}") for reason in cannot_run(model, gpu, setup)]
    if wrong := untrained_sinks(model, gpu, setup):
        notes.append(measured(f"its gradients are wrong: {wrong}; eager attention and FlexAttention have them"))
    if gpu.vendor in ("Apple", "Intel"):
        notes.append(f"no run on an {gpu.vendor} GPU has been compared: the error bands are those of CUDA cards")
    return notes


def _overflow_notes(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> list[str]:
    if not (what := FP16_OVERFLOWS.get(model.model_type)) or (gpu.bf16 and setup.compute_dtype != "fp16"):
        return []
    if setup.stack == "unsloth":
        itself = "Unsloth computes such parts in fp32 by itself, slower and larger than predicted here"
        return [risk(f"fp16: {what}; {itself}")]
    if setup.compute_dtype == "fp16":
        return [measured(f"fp16: {what}; --precision fp32 is safe, and --target unsloth computes such parts in fp32")]
    return [f"fp32, as {gpu.name} has no bf16 and in fp16 {what}; --target unsloth mixes the two"]


def _image_notes(model: ModelSpec, setup: TrainSetup) -> list[str]:
    from planner.memory.modality_encoder import encoder_adapted  # late: a text model needs neither
    from planner.models.encoders import SEEING, encoder_of, image_tokens

    if setup.images is None:
        none = f"the encoders that {setup.trainer.title} builds are left out"
        none = none if setup.builds_encoders else f"{model.built_class} has no vision encoder"
        encoder = "its vision encoder is weights" if model.idle_layers else none
        more = " (--image-size plans samples with pictures)" if model.model_type in SEEING else ""
        return [f"counted on text alone: {encoder}{more}"]
    tokens = image_tokens(model, setup.images)
    adapts = encoder_adapted(model, setup) and not encoder_of(model, setup.images).convolves
    adapted = "gets adapters too" if adapts else "is frozen"
    encoder = "is trained" if setup.method == "full" else adapted
    return [
        f"{setup.images.words} are {tokens:,} of {setup.seq_len_tokens:,} tokens of every sequence; the vision encoder "
        f"{encoder}; the pixels of all micro-batches of a step are on the card at once"
    ]


def _stored_notes(model: ModelSpec, setup: TrainSetup) -> list[str]:
    if stored_refusal(setup, model):
        return []  # that it cannot run is said
    if dequantizing_class(model) and not setup.quantize_experts:
        return [f"the checkpoint is stored in {stored_method(model)}: its weights are loaded dequantized"]
    if bits := stored_bits(model):
        wide = f", {percent(fraction)} of its matrices in 16 bits" if (fraction := kept_fraction(model)) else ""
        return [f"the checkpoint is published in {bits}{wide}"]
    packed = setup.quantized and (packed_as(model) or setup.quantize_experts)
    if (method := stored_method(model)) and not packed:
        instead = "planned as if its weights were the original ones; name the original model, or load it dequantized"
        return [risk(f"the checkpoint is stored quantized ({method}): {instead}")]
    return []


def unquantized_expert_bytes(model: ModelSpec, setup: TrainSetup) -> int:
    """Bytes of matrices inside the layers that a quantized base leaves as they are (all GPUs together)."""
    if not setup.quantized or setup.quantize_experts:
        return 0
    stacks = ((linear, num) for layer, num in model.layer_counts for linear in layer.linears if linear.is_stack)
    return sum(linear_bytes(linear, setup) * num for linear, num in stacks)
