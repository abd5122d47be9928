"""What a rank holds from step to step: weights, adapters, gradients, optimizer states; by parameter, in closed form."""

from collections.abc import Iterable, Iterator
from dataclasses import field
from operator import attrgetter
from typing import Any

from planner.core.errors import SetupError
from planner.core.records import dataclass
from planner.core.shipped import model_types
from planner.core.units import MIN_BLOCK_BYTES, gib
from planner.hardware.gpu import GpuSpec
from planner.memory.dtypes import SIZE_BYTES, dtype_policy_of
from planner.memory.rank_part import RankPart
from planner.memory.trained import Trained, layers_alone, trained_parameters
from planner.models.spec import LayerSpec, LinearSpec, ModelSpec
from planner.models.targets import lora_linears
from planner.options.adapters import block_size
from planner.options.optimizers import OPTIMIZERS
from planner.setup import TrainSetup
from planner.setup.memory_terms import Category, Term

# Weights: what the frozen or trained base model holds, after loading.


NF4_BLOCK = 64
DOUBLE_QUANT_BLOCK = 256


def nf4_bytes(num_weights: int, *, double: bool) -> int:
    """Bytes of one NF4 matrix: packed 4-bit codes and the scales of its 64-element blocks.

    Plain: one fp32 scale per block (4.5 bits per weight). Double quantization: one uint8 scale per block and one fp32
    per 256 blocks (4.127 bits per weight), with a 256-entry fp32 code table and one fp32 offset. Both hold a 16-entry
    fp32 code table.

    Source: Dettmers et al. 2023, QLoRA, section 3, https://arxiv.org/abs/2305.14314; bitsandbytes 0.50 `quantize_4bit`.
    Not counted: rounding to 512 bytes of the large tensors (below 0.01 %).
    """
    blocks = -(-num_weights // NF4_BLOCK)
    packed = -(-num_weights // 2)
    if not double:
        return packed + 4 * blocks + MIN_BLOCK_BYTES
    return packed + blocks + 4 * -(-blocks // DOUBLE_QUANT_BLOCK) + MIN_BLOCK_BYTES + 1024 + MIN_BLOCK_BYTES


def int8_bytes(num_weights: int, out_features: int) -> int:
    """Bytes of one LLM.int8() matrix: one byte per weight and one fp32 scale per output row.

    Source: Dettmers et al. 2022, LLM.int8(), section 3, https://arxiv.org/abs/2208.07339; bitsandbytes `Int8Params`.
    """
    return num_weights + 4 * out_features


def linear_bytes(linear: LinearSpec, setup: TrainSetup) -> int:
    """Bytes of one LinearSpec (all its copies, biases included) under the setup's quantization.

    bitsandbytes replaces nn.Linear and Conv1D; bare parameters (stacked experts) stay 16-bit unless the setup says
    otherwise (a stack is one tensor), and so does what a checkpoint published quantized keeps so.
    """
    widened = setup.kbit_fp32_cast or (setup.wide_stacks and linear.is_stack)
    plain = SIZE_BYTES["fp32" if widened else setup.weight_dtype]
    if setup.quantize_experts and linear.is_stack:
        rows = linear.num * linear.out_features
        eight, streams = setup.quantization == "int8", setup.trainer.streams_experts
        double = setup.quantization == "nf4-double" and not streams
        stack = int8_bytes(linear.num_weights, rows) if eight else nf4_bytes(linear.num_weights, double=double)
        return stack + linear.num_bias * plain
    if not setup.quantized or not linear.quantizes:
        return (linear.num_weights + linear.num_bias) * plain
    elements = linear.in_features * linear.out_features
    if setup.quantization == "int8":
        quantized = int8_bytes(elements, linear.out_features)
    else:
        quantized = nf4_bytes(elements, double=setup.quantization == "nf4-double")
    return linear.num * quantized + linear.num_bias * plain


def layer_weight_bytes(layer: LayerSpec, setup: TrainSetup) -> int:
    """Bytes of one layer's weights: matrices, norms and the rest."""
    plain = SIZE_BYTES["fp32" if setup.kbit_fp32_cast else setup.weight_dtype]
    rest = sum(norm.num_params for norm in layer.norms) + layer.num_other_params
    return sum(linear_bytes(linear, setup) for linear in layer.linears) + rest * plain


def streamed_stacks(model: ModelSpec, setup: TrainSetup) -> list[int]:
    """Bytes of every layer's stacks of experts that lie in the host's memory, the largest layer's first, which is what
    the card holds of them; empty where none are streamed.

    Source: experts4bit-qlora 0.58.1 `engines/offload.py` (one resident layer; blocks' fp32 scales are not quantized).
    """
    if not (setup.trainer.streams_experts and setup.quantize_experts):
        return []
    each = [
        sum(linear_bytes(linear, setup) for linear in layer.linears if linear.is_stack)
        for layer, num in model.layer_counts
        for _ in range(num)
    ]
    return sorted(each, reverse=True)


def pinned(size_bytes: int) -> int:
    """Bytes of the host's memory that one pinned tensor takes: PyTorch rounds up to a power of two.

    Source: PyTorch 2.13 `CachingHostAllocator.h` allocate (pinned_max_round_threshold: none).
    """
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0


def pinned_bytes(model: ModelSpec, setup: TrainSetup) -> int:
    """Bytes of the host's memory that streamed stacks take: codes and scales of each are pinned by themselves."""
    counts = model.layer_counts
    stacks = [linear for layer, num in counts for linear in layer.linears if linear.is_stack for _ in range(num)]
    sizes = [size for stack in stacks for size in (stack.num_weights // 2, 4 * -(-stack.num_weights // NF4_BLOCK))]
    return sum(map(pinned, sizes)) if streamed_stacks(model, setup) else 0


def loading_refusal(model: ModelSpec, setup: TrainSetup, memory_bytes: int) -> str:
    """Why a model cannot be loaded into ranks that then keep less of it; "" where it can.

    Source: transformers 5.23 `quantizers/quantizer_bnb_4bit.py` update_device_map: every process makes the whole of a
    quantized base on its own GPU, before FSDP2 or DeepSpeed cuts it (4.57 `modeling_utils.py` moves each matrix to the
    host as it is made). Axolotl 0.21 can stage it on the host (`TrainSetup.stages_nf4`). LLaMA-Factory 0.9.5
    `model/patcher.py` (device_map), `model/adapter.py` _setup_full_tuning: under ZeRO-1 and 2 every GPU holds all
    weights in fp32 before DeepSpeed has them in 16 bits.
    """
    kept = setup.trainer.own_models or setup.stages_nf4 or setup.before_transformers(5, 0)
    if setup.quantized and setup.parallel in ("fsdp2", "zero3"):
        if setup.sharded_at_loading or kept:
            return ""
        who, what = "transformers 5", "quantized model"
    elif setup.trainer.widens_loaded and setup.parallel in ("zero1", "zero2") and setup.method == "full":
        who, what = setup.trainer.title, f"model in {setup.weight_dtype}"
    else:
        return ""
    whole_bytes = sum(weight_bytes(model, setup).values())
    if whole_bytes <= memory_bytes:
        return ""
    then = {"fsdp2": "FSDP2 cuts it", "zero3": "ZeRO-3 cuts it"}.get(setup.parallel, "DeepSpeed casts it")
    return f"{who} makes the whole {what} ({gib(whole_bytes)}) on every GPU before {then}"


_OF_WEIGHTS = attrgetter("quantization", "weight_dtype", "kbit_fp32_cast", "quantize_experts", "wide_stacks")


def weight_bytes(model: ModelSpec, setup: TrainSetup) -> dict[str, int]:
    """Bytes of the base model by part: "layers", "embeddings", "head", "outer", "idle".

    The output head is never quantized (transformers keeps it in 16 bit); with `kbit_fp32_cast` everything that is not
    quantized is fp32, which makes embeddings and an untied head twice as large as in 16 bit.

    Source: transformers 5.23 `get_keys_to_not_convert`; peft 0.21 `prepare_model_for_kbit_training`.
    """
    streams = setup.trainer.streams_experts and setup.quantize_experts
    widened = setup.trained_layers if setup.widens_trained else 0
    key = ("weight bytes", streams, widened, *_OF_WEIGHTS(setup))
    return model.once(key, lambda spec: _weight_bytes(spec, setup))


def _weight_bytes(model: ModelSpec, setup: TrainSetup) -> dict[str, int]:
    plain = SIZE_BYTES["fp32" if setup.kbit_fp32_cast else setup.weight_dtype]
    outer = sum(linear_bytes(linear, setup) for linear in model.outer_linears)
    outer += (sum(norm.num_params for norm in model.outer_norms) + model.num_outer_other_params) * plain
    if model.tied and model.head is not None:
        outer += model.head.num_bias * plain
    idle = sum(layer_weight_bytes(layer, setup) * num for layer, num in model.idle_layers)
    return {
        "layers": sum(layer_weight_bytes(layer, setup) * num for layer, num in model.layer_counts)
        + ((4 - plain) * layers_alone(model, setup.trained_layers).num_params if setup.widens_trained else 0)
        - sum(streamed_stacks(model, setup)[1:]),
        "embeddings": model.num_embedding_params * plain,
        "head": model.num_head_params * plain,
        "outer": outer,
        "idle": idle + model.num_idle_other_params * plain,
    }


# Optimizer states, and what the optimizer step needs beyond them: what `planner.options.optimizers` says of each.


def state_bytes(
    num_trained: int, dtype: str, optimizer: str, *, matrix_edge_sum: int = 0, wide: int = 0, small: int = 0
) -> int:
    """Bytes of optimizer state on the GPU for `num_trained` parameters of `dtype`.

    Paged forms keep most of theirs in managed memory that PyTorch does not count: see `paged_bytes`.

    Args:
        matrix_edge_sum: rows + columns over the trained matrices.
        wide: those of them whose 8-bit states are kept in 32 bits.
        small: those of them in tensors below UNPAGED elements.
    """
    row = OPTIMIZERS[optimizer]
    if row.paged:
        return row.scale_bytes(num_trained - wide) + (row.states.eight_bit + 4 * row.states.fp32) * min(
            small, num_trained
        )
    states = row.all_state_bytes(num_trained, SIZE_BYTES[dtype], matrix_edge_sum=matrix_edge_sum)
    return states + row.wide_state_bytes(wide)


def paged_bytes(num_trained: int, optimizer: str, *, wide: int = 0) -> int:
    """Bytes in CUDA managed memory: outside PyTorch's count, evicted to the host under pressure."""
    row = OPTIMIZERS[optimizer]
    if not row.paged:
        return 0
    states = row.all_state_bytes(num_trained, SIZE_BYTES["fp32"], matrix_edge_sum=0) + row.wide_state_bytes(wide)
    return states - row.scale_bytes(num_trained - wide)


def in_one_memory(gpu: GpuSpec, setup: TrainSetup) -> TrainSetup:
    """The setup as a card takes it whose memory is the host's: a paged optimizer's states lie there as its plain
    form's do."""
    if not (gpu.shares_host_memory and OPTIMIZERS[setup.optimizer].paged):
        return setup
    return setup.replace_trusted(optimizer=setup.optimizer.removeprefix("paged-"))


def step_bytes(num_trained: int, dtype: str, optimizer: str, *, largest_tensor: int) -> int:
    """Temporary bytes of one optimizer step."""
    return OPTIMIZERS[optimizer].step_bytes(num_trained, SIZE_BYTES[dtype], largest_tensor=largest_tensor)


# `RankState`: what one rank holds beside its activations, moment by moment of a step; an engine builds it.


MOMENTS = ("start", "gather", "forward", "loss", "head", "first", "turn", "last", "end", "step")
"""The moments that can be the peak: the first weights arriving, before any activation; those for the last layer or the
head arriving; the last layer's forward; the loss; the head's gradient on its way (all activations still there); the
backward's first layer; those behind it (of an encoder-decoder its turn from decoder to encoder); its last layer; its
end (the embedding's gradient and what is still in buffers, all activations gone); and the optimizer step."""
COMPUTE = ("start", "gather", "forward", "loss", "head", "first", "turn", "last")
REFERENCE = "reference model (a frozen copy)"
ONE_GRADIENT = "one matrix's unsharded gradient"
"""What of a layer's gradients is there at its largest moment, where no profile of ranks says it."""
BACKWARD = ("head", "first", "turn", "last", "end")


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """Bytes of one kind that a rank holds at some moments (all of MOMENTS: resident)."""

    category: Category
    name: str
    size_bytes: int
    moments: tuple[str, ...] = MOMENTS

    @property
    def resident(self) -> bool:
        """Held all along."""
        return len(self.moments) == len(MOMENTS)


def weight_allocation(name: str, size_bytes: int, *moments: str) -> Allocation:
    """Weights at these moments; all along where none is named."""
    return Allocation(category="weights", name=name, size_bytes=size_bytes, moments=moments or MOMENTS)


def gradient_allocation(name: str, size_bytes: int, *moments: str) -> Allocation:
    """Gradients, and the buffers that they travel in, at these moments; all along where none is named."""
    return Allocation(category="gradients", name=name, size_bytes=size_bytes, moments=moments or MOMENTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
    """One rank's states and buffers.

    Attributes:
        setup: the one-GPU setup whose data types really run under the engine.
        trained: the part's trained parameters in the type of their unsharded gradients.
        local: what this rank's optimizer updates: its shard, in the type it keeps it in.
        optimizer_on_device: False where optimizer states lie in host memory.
        stepped: elements that its optimizer steps at once, None for all of `local`.
        gone_in_step_bytes: of what is held at "step", gone when the optimizer makes its temporaries.
        loss_forward_bytes: alive in the loss's forward only (not in its backward).
        loss_backward_bytes: alive in its backward only; regathered_bytes: arriving as the model's backward begins.
        reference_forward_bytes: alive while a reference's layers run, beyond what is held at "loss"; `arriving_bytes`:
        of the next
            layer's weights, before it runs.
        holes_bytes: what the allocator holds of weights that are gathered and freed again.
        host_bytes: states in this rank's host memory, optimizer states not counted (`host_state_bytes`).
        moment_bytes: what `allocations` add up to at each moment beyond what is "resident".
    """

    part: RankPart
    setup: TrainSetup
    trained: Trained
    local: Trained
    allocations: tuple[Allocation, ...]
    optimizer_on_device: bool = True
    stepped: int | None = None
    gone_in_step_bytes: int = 0
    loss_forward_bytes: int = 0
    loss_backward_bytes: int = 0
    regathered_bytes: int = 0
    reference_forward_bytes: int = 0
    arriving_bytes: int = 0
    holes_bytes: int = 0
    host_bytes: int = 0
    moment_bytes: dict[str, int] = field(init=False, default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        totals = dict.fromkeys((*MOMENTS, "resident"), 0)
        for allocation in self.allocations:
            for moment in ("resident",) if allocation.resident else allocation.moments:
                totals[moment] += allocation.size_bytes
        self.moment_bytes.update(totals)

    def terms_at(self, moment: str) -> list[Term]:
        """What is held at a moment beyond what is resident, or ("resident") all along."""
        resident = moment == "resident"
        return [
            (allocation.category, allocation.name, allocation.size_bytes)
            for allocation in self.allocations
            if (allocation.resident if resident else moment in allocation.moments and not allocation.resident)
        ]

    def optimizer_bytes(self, optimizer: str) -> tuple[int, int]:
        """Bytes on the device of (states, temporaries of the step beyond what is held at "step") for an optimizer on
        this rank's shard."""
        if not self.optimizer_on_device:
            return 0, 0
        local = self.local
        of_tensors = {"matrix_edge_sum": local.edge_sum, "wide": local.wide, "small": local.small}
        states = state_bytes(local.num, local.dtype, optimizer, **of_tensors)
        num = local.num if self.stepped is None else self.stepped
        temporary = step_bytes(num, local.dtype, optimizer, largest_tensor=min(num, local.largest))
        if (
            local.copies
        ):  # a group of their own in every multi-tensor step, made while the other's temporaries are there
            states += state_bytes(local.copies, local.copies_dtype, optimizer)
            largest = min(local.copies, local.largest)
            of_copies = step_bytes(local.copies, local.copies_dtype, optimizer, largest_tensor=largest)
            groups = OPTIMIZERS[optimizer].temporaries.copies > 0
            temporary = temporary + of_copies if groups else max(temporary, of_copies)
        return states, max(0, temporary - self.gone_in_step_bytes)

    def host_state_bytes(self, optimizer: str) -> int:
        """Bytes of optimizer states in host memory: of this rank's shard, where they are offloaded."""
        if self.optimizer_on_device:
            return 0
        return state_bytes(self.local.num, self.local.dtype, optimizer, matrix_edge_sum=self.local.edge_sum)


def rank_state(part: RankPart, setup: TrainSetup, allocations: Iterable[Allocation], **other: Any) -> RankState:
    """The state of a rank that shards: what holds nothing is left out."""
    some = tuple(allocation for allocation in allocations if allocation.size_bytes)
    return RankState(part=part, setup=setup, allocations=some, **other)


def part_trained(model: ModelSpec, setup: TrainSetup) -> Trained:
    """`trained_parameters` of a part; nothing where explicit targets match no module of it (a stage without head)."""
    try:
        return trained_parameters(model, setup)
    except SetupError:
        return Trained(num=0, dtype=setup.resolved_adapter_dtype, edge_sum=0, largest=0, head=0, embeddings=0)


def whole_weights(model: ModelSpec, setup: TrainSetup, trained: Trained) -> Iterator[Allocation]:
    """The weights, and what LoRA adds to them, as they are on one GPU."""
    for name, size in weight_bytes(model, setup).items():
        if size:
            yield Allocation(category="weights", name=f"weights: {name}", size_bytes=size)
    if model.model_type in model_types("mask_buffers"):
        size = model.num_layers * (model.max_position_embeddings or 0) ** 2
        yield Allocation(category="weights", name="masks of all positions in every layer", size_bytes=size)
    if setup.method != "full":
        yield Allocation(
            category="adapters",
            name=f"{'LoRA matrices' if setup.adapter == 'lora' else setup.kind.title.partition(' (')[0]}"
            f"{' and whole modules' if setup.modules_to_save else ''}",
            size_bytes=trained.size_bytes,
        )
        if setup.kind.form == "shared":
            # VeRA's two, wide enough for every adapted one, in fp32 (peft casts buffers as well)
            linears = [linear for _, _, group in lora_linears(model, setup.lora_targets) for linear in group]
            widest = max(linear.in_features for linear in linears) + max(linear.out_features for linear in linears)
            size = 4 * setup.lora_rank * widest
            yield Allocation(category="adapters", name="frozen matrices that all share", size_bytes=size)
        if (
            setup.kind.form == "rotations"
        ):  # two int64 indices of each matrix's triangle (peft 0.21 `OFTRotationModule`)
            groups = lora_linears(model, setup.lora_targets)
            blocks = [(block_size(matrix.in_features, setup.lora_rank), num * matrix.num)
                      for _, num, linears in groups for matrix in linears]  # fmt: skip
            size = sum(num * 8 * edge * (edge - 1) for edge, num in blocks)
            yield Allocation(category="adapters", name="indices of the rotations", size_bytes=size)
        if setup.kind.form == "rows":
            table = max(weights.num_params for weights in model.embeddings) * SIZE_BYTES[dtype_policy_of(setup).table]
            yield Allocation(
                category="gradients",
                name="gradient of the embedding with its rows",
                size_bytes=table,
                moments=("end",),
            )
            if model.tied and setup.loss == "full" and not setup.kbit_fp32_cast:
                name = "the tied head with its rows"  # multiplied from a copy of the table
                yield Allocation(category="weights", name=name, size_bytes=table, moments=("loss", "head"))
    elif setup.copies_reference:
        size = sum(weight_bytes(model, setup).values())
        yield Allocation(category="weights", name=REFERENCE, size_bytes=size)


def rotary_table_bytes(model: ModelSpec, setup: TrainSetup) -> int:
    """Cosines and sines of every position that the configuration names, which each layer kept before transformers 4.43.

    Source: transformers 4.41 `MistralRotaryEmbedding._set_cos_sin_cache`, in the type that the weights are loaded in.
    """
    if not setup.before_transformers(4, 43):
        return 0
    kinds = [(layer.attention, num) for layer, num in model.layer_counts]
    width = sum(int(spec.head_dim * spec.rotary_fraction) * num for spec, num in kinds if spec and spec.rotary)
    return 2 * (model.max_position_embeddings or 0) * width * SIZE_BYTES[setup.weight_dtype]


def heeds_loss(model: ModelSpec, setup: TrainSetup) -> bool:
    """Whether `whole_weights` and `whole_gradients` ask which loss it is: of a tied head, trained or with its rows."""
    return model.tied and (setup.method == "full" or setup.kind.form == "rows")


def halves_stay_apart(model: ModelSpec, setup: TrainSetup) -> bool:
    """Whether the two halves of a tied embedding's gradient make a third tensor instead of being added in place.

    The engine adds into the first one where nothing else holds its storage; the head's own matrix multiplication gives
    it transposed, which does. A cast (autocast of another type than the weights') or a fused loss gives a fresh tensor.

    Source: PyTorch `input_buffer.cpp` `can_accumulate_inplace`; tests/probes/test_dryrun_gradient_sums.py.
    """
    cast = setup.autocast_dtype not in (None, "fp32" if setup.widens_trained else setup.weight_dtype)
    return model.tied and setup.method == "full" and setup.loss == "full" and not cast


def backward_gradients(model: ModelSpec, setup: TrainSetup, trained: Trained, *, accumulated: bool) -> dict[str, int]:
    """Bytes of the gradients that are kept whole, at the backward's "first" layer, its "last" one (all there but the
    embedding's and this layer's), its "end" (the embedding's own, when all activations are gone) and the "turn" to an
    encoder-decoder's encoder (the decoder's).

    In between, activations fall and gradients rise linearly with the layers, so the maximum is at an end. With
    accumulation the gradients of earlier micro-batches are alive all along (not counted here), and a new one only until
    it is added: the head's half of a tied one when the embedding's has come.
    """
    size = trained.outer_bytes
    # of several forwards autograd adds up a weight's gradients before it gives them to the weight
    if setup.live_forwards > 1:
        whole = trained.size_bytes
        return {"first": 0, "turn": 0, "last": whole, "end": whole + trained.embeddings * size}
    head = trained.head * size
    largest = trained.embeddings * size
    if model.front_end is not None:
        return _of_a_decoders_table(model, setup, trained, accumulated=accumulated)
    # the head's, which waits for the embedding's; copies of a tied pair are two
    half = trained.head * size if model.tied and setup.method == "full" else 0
    first = turn = half if accumulated else head
    if accumulated:
        last = half
    else:
        turn += int(decoder_share(model) * max(0, trained.size_bytes - head))
        others = trained.size_bytes - (0 if half >= largest else largest)
        last = max(0, others - (others - head) // max(1, model.num_layers))
    # beside the gradients kept: the other half of a tied one, their sum, and a new one about to be accumulated, of the
    # tied table or, while the head's half still waits, of a larger one (Gemma 4's inputs of each layer)
    more = half * (1 + int(halves_stay_apart(model, setup)))
    if accumulated:
        more = max(more + half, half + largest)
    end = (0 if accumulated else trained.size_bytes) + more
    return {"first": first, "turn": turn, "last": last, "end": end}


def _of_a_decoders_table(model: ModelSpec, setup: TrainSetup, trained: Trained, *, accumulated: bool) -> dict[str, int]:
    """The same where the tied table is the decoder's alone: its gradient comes before the encoder's, at the "end" of
    the decoder's backward, and what comes last is a convolution's."""
    half = trained.head * trained.outer_bytes
    halves = half * (1 + int(halves_stay_apart(model, setup)))
    if accumulated:
        return {"first": half, "turn": 0, "last": 0, "end": halves + half}
    layers = trained.size_bytes - half
    decoders = int((1.0 if setup.frozen_encoder else decoder_share(model)) * layers)
    last = trained.size_bytes - int((1.0 - decoder_share(model)) * layers) // max(1, model.num_encoder_layers)
    return {"first": half, "turn": half + decoders, "last": last, "end": half + decoders + halves}


def decoder_share(model: ModelSpec) -> float:
    """Share of an encoder-decoder's layer parameters that is the decoder's; 0 of other models."""
    parts = [(layer.num_params * num, layer.cross_attention is not None) for layer, num in model.layer_counts]
    return sum(num for num, decoder in parts if decoder) / max(1, sum(num for num, _ in parts))


def whole_gradients(model: ModelSpec, setup: TrainSetup, trained: Trained, accumulated: bool) -> list[Allocation]:
    """Gradients that stay whole until the step, as on one GPU; where the optimizer steps in the backward each goes as
    it comes, as if it were added to others that take no room."""
    goes = setup.trainer.steps_in_backward
    at = backward_gradients(model, setup, trained, accumulated=accumulated or goes)
    allocations = [
        Allocation(category="gradients", name="gradients in the backward", size_bytes=size, moments=(moment,))
        for moment, size in at.items()
    ]
    if goes:
        return allocations
    size = trained.size_bytes
    allocations.append(Allocation(category="gradients", name="gradients", size_bytes=size, moments=("step",)))
    if setup.adapter == "adalora" and setup.loss == "full" and setup.objective_spec.supervised:
        # its orthogonality, part of the model's loss, has each matrix wait for its other gradient (peft 0.21
        # `AdaLoraModel.forward`)
        allocations.append(
            gradient_allocation("gradients of AdaLoRA's orthogonality", size, "loss", "head", "first", "turn")
        )
    if accumulated:
        name, moments = "accumulated gradients", (*COMPUTE, "end")
        allocations.append(Allocation(category="gradients", name=name, size_bytes=size, moments=moments))
    return allocations
