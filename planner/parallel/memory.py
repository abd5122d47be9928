"""The memory of every distinct rank of a spread: one-GPU activations on the rank's part, and the rank's `Share`."""

from dataclasses import dataclass, replace

from planner.gpu import GpuSpec
from planner.memory.allocator import allocator_gap_bytes
from planner.memory.dtypes import SIZE_BYTES
from planner.memory.loss import LossChain
from planner.memory.micro_batch import ActivationParts, activation_parts, step_flow
from planner.memory.model import predict_memory
from planner.memory.moments import BackwardPeak, backward_moments, loss_parts, loss_parts_logits
from planner.memory.trained import Trained
from planner.memory.types import PHASES, MemoryBreakdown, MemoryTerm, Phase
from planner.memory.workspace import context_bytes, cublas_workspace_bytes
from planner.models.spec import ModelSpec
from planner.parallel.held import MOMENTS, Share, backward_moment
from planner.parallel.rank import RankPart, followers, rank_parts
from planner.parallel.share import engine_setup, share_of
from planner.parallel.types import RankMemory
from planner.setup import TrainSetup
from planner.units import MIB

NCCL_NVLINK_BYTES = 688 * MIB
NCCL_NVLINK_PAIR_BYTES = 544 * MIB
"""Device memory of one NCCL communicator over NVLink, of more than two GPUs and of a pair, outside PyTorch's count.
Source: measured by a user on 4 A100 after one all-reduce, NVIDIA/nccl issue 964."""
NCCL_PCIE_BYTES = 128 * MIB
"""The same without NVLink, where a ring has few channels: an assumption (buffers grow with the channels, NVIDIA/nccl
issue 986; 110 MB reported in issue 34)."""


_NOTHING_TRAINED = Trained(num=0, dtype="fp32", edge_sum=0, largest=0, head=0, embeddings=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    """Activation bytes of one rank and one micro-batch size, without the loss chain.

    Attributes:
        moments: (moment of `planner.parallel.share.MOMENTS`, bytes of a single micro-batch); several of the backward's
            can belong to one of those moments.
        peaks: the backward's moments in full, in the order of their entries behind those of the forward and the loss.
        more: what each further micro-batch in flight adds to all of them.
    """

    moments: tuple[tuple[str, int], ...]
    peaks: tuple[BackwardPeak, ...]
    more: int


def activation_lines(part: RankPart, parts: ActivationParts) -> Lines:
    """The activations of a rank at every moment: those of `planner.memory.micro_batch`, on the rank's own part.

    Source: `planner.memory.model.predict_memory`, `planner.memory.moments.backward_moments`.
    """
    stored, casts = parts.stored_total, parts.weight_casts
    peaks = backward_moments(part.model, parts, _NOTHING_TRAINED, accumulated=False)
    head = replace(peaks[0], where="head", stored=stored + casts[1], recomputed=0, transient=0, dequantized=0)
    return Lines(
        moments=(
            ("gather", stored + casts[0] + parts.adapter_casts),
            ("forward", stored + casts[0] + parts.adapter_casts + parts.forward_temp + parts.dequantized),
            ("loss", stored + casts[1] + parts.final_norm if part.last else 0),
            ("head", head.total),
            *((backward_moment(peak), peak.total) for peak in peaks),
        ),
        peaks=(head, *peaks),
        more=stored + casts[1],
    )


def in_loss_bytes(
    share: Share, chain: LossChain, parts: ActivationParts, logits_bytes: int, outputs_bytes: int = 0
) -> int:
    """The loss chain's largest moment, with what is alive beside it (`planner.memory.moments.loss_peak`)."""
    if not share.part.last:
        return 0
    cache = parts.weight_casts[0] - parts.weight_casts[1] + parts.adapter_casts
    head = share.trained.head * SIZE_BYTES[share.trained.dtype]
    forward = chain.loss_bytes + cache + share.loss_forward_bytes + outputs_bytes
    return max(forward, chain.backward_bytes + share.loss_backward_bytes, head + logits_bytes)


def rank_memories(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> tuple[RankMemory, ...]:
    """The memory of every distinct rank, the largest device peak first.

    Source: `planner.parallel.share` for what each engine holds, `planner.memory` for activations and the loss.
    Not counted: host memory (`host_bytes`), paged optimizer states, the data loader.
    """
    if setup.num_gpus == 1:
        return (RankMemory(name="every rank", num_ranks=1, breakdown=predict_memory(model, gpu, setup)),)
    found = [
        RankMemory(name=part.name, num_ranks=part.num_ranks, breakdown=_breakdown(part, gpu, setup))
        for part in (*rank_parts(model, setup), *followers(model, setup))
    ]
    return tuple(sorted(found, key=lambda one: -one.breakdown.peak_device_bytes))


def host_bytes(model: ModelSpec, setup: TrainSetup) -> int:
    """Host memory of one rank's offloaded weights, masters, gradients and states, the largest rank's; 0 without."""
    if setup.offload == "none":
        return 0
    shares = [share_of(part, setup, accumulated=False) for part in rank_parts(model, setup)]
    return max(one.host_bytes + one.host_state_bytes(setup.optimizer) for one in shares)


def _breakdown(part: RankPart, gpu: GpuSpec, setup: TrainSetup) -> MemoryBreakdown:
    """One rank's terms."""
    share = share_of(part, setup, accumulated=setup.accumulation_steps > 1)
    inner = share.setup
    parts = activation_parts(part.model, gpu, inner)
    chain = loss_parts(part.model, inner)
    lines = activation_lines(part, parts)
    logits = loss_parts_logits(part.model, inner)
    states, temporary = share.optimizer_bytes(setup.optimizer)
    in_loss = in_loss_bytes(share, chain, parts, logits, output_bytes(part, setup, inner))
    boundary = boundary_bytes(part, setup, micro_batches=setup.accumulation_steps, held=part.in_flight)
    flight = (part.in_flight - 1) * lines.more
    flight -= never_together_bytes(share, setup, lines.more, part.in_flight, setup.accumulation_steps)
    totals = [share.moment_bytes[moment] + size + flight for moment, size in lines.moments]
    losses = in_flight_losses_bytes(part, setup, logits, setup.tokens_per_micro_batch, part.in_flight)
    totals[2] += in_loss + losses
    # of the forward's and the backward's moments only the largest is shown
    computing = totals[1] >= totals[0]
    peak = max(zip(totals[3:], lines.peaks, strict=True), key=lambda one: one[0])[1]
    shown = {
        "forward": "forward" if computing else "gather",
        "loss": "loss",
        "backward": backward_moment(peak),
        "step": "step",
    }
    after_load: tuple[Phase, ...] = ("forward", "loss", "backward", "step")
    terms: list[MemoryTerm] = []

    def add(category: str, name: str, size_bytes: int, phases: tuple[Phase, ...] = PHASES) -> None:
        if size_bytes > 0:
            terms.append(MemoryTerm(category=category, name=name, size_bytes=size_bytes, phases=phases))  # type: ignore[arg-type]

    for held in share.held:
        if len(held.moments) == len(MOMENTS):
            add(held.category, held.name, held.size_bytes)
            continue
        phases = tuple(phase for phase in after_load if shown[phase] in held.moments)
        if phases:
            add(held.category, held.name, held.size_bytes, phases)
    add("optimizer", f"states of {setup.optimizer}", states, after_load)
    add("workspace", "cuBLAS workspaces", cublas_workspace_bytes(gpu))
    add("activations", "the stage's boundary buffers", boundary)
    compute: tuple[Phase, ...] = ("forward", "loss", "backward") if part.last else ("forward", "backward")
    add("activations", f"activations of {part.in_flight - 1} more micro-batches in flight", flight, compute)
    stored = parts.stored_total + parts.weight_casts[1]
    add("activations", "stored activations", stored, tuple(phase for phase in compute if phase != "backward"))
    cache = parts.weight_casts[0] - parts.weight_casts[1] + parts.adapter_casts
    add("activations", "autocast's cache", cache, ("forward",))
    if computing:
        add("activations", "one layer's forward temporaries", parts.forward_temp, ("forward",))
        add("dequantization", "one dequantized matrix in the forward", parts.dequantized, ("forward",))
    if part.last:
        add("activations", "final norm", parts.final_norm, ("loss",))
        add("loss", f"loss chain ({setup.loss})", in_loss, ("loss",))
    add("loss", "logits and losses of more micro-batches in flight", losses, ("loss",))
    left = "stored activations in the backward" if shown["backward"] == "first" else "what is left of the activations"
    add("activations", left, peak.stored, ("backward",))
    add("activations", "one recomputed layer", peak.recomputed, ("backward",))
    add("workspace", "one layer's gradients of activations", peak.transient, ("backward",))
    add("dequantization", "one dequantized matrix in the backward", peak.dequantized, ("backward",))
    add("optimizer", f"temporaries of {setup.optimizer}", temporary, ("step",))
    resident = share.moment_bytes["resident"] + states + boundary + cublas_workspace_bytes(gpu)
    return MemoryBreakdown(
        terms=tuple(terms),
        allocator_gap_bytes=allocator_gap_bytes(resident, max(*totals, share.moment_bytes["step"] + temporary)),
        context_bytes=context_bytes(gpu) + communicator_bytes(gpu, setup),
    )


def communicator_bytes(gpu: GpuSpec, setup: TrainSetup) -> int:
    """Device memory that the communication library holds for one rank: one communicator for every group it talks to.

    Nothing within one process by device map. A hybrid shard has two groups (its shard and its replicas).

    Source: NCCL_NVLINK_BYTES, NCCL_PCIE_BYTES.
    """
    if setup.num_gpus == 1 or setup.parallel == "device-map" or gpu.vendor == "Apple":
        return 0
    data = [setup.data_degree]
    if setup.shard_degree:
        data = [setup.shard_degree, setup.data_degree // setup.shard_degree]
    total = 0
    for ranks in (*data, setup.tensor_degree, setup.pipeline_degree):
        if ranks > 1 and gpu.nvlink_bytes_per_s:
            total += NCCL_NVLINK_BYTES if ranks > 2 else NCCL_NVLINK_PAIR_BYTES
        elif ranks > 1:
            total += NCCL_PCIE_BYTES
    return total


def boundary_bytes(part: RankPart, setup: TrainSetup, *, micro_batches: int, held: int) -> int:
    """What a pipeline stage holds at its boundaries all along: a receive buffer for every micro-batch's input
    and for every micro-batch's gradient, and the sent outputs of those in flight.

    A checkpointed first layer keeps its input, which is that very buffer: it is not counted twice.

    Source: PyTorch 2.13 `distributed/pipelining/stage.py` (_setup_forward_recv_info and _setup_backward_recv_info make
    one buffer per chunk, fwd_cache keeps outputs until their backward).
    Shapes: [seqs, tokens, hidden] in the residual's type.
    Not counted: the last stage's output chunks (`save_forward_output` off).
    """
    if setup.pipeline_degree == 1:
        return 0
    flow = step_flow(part.model, engine_setup(setup))
    one = SIZE_BYTES[flow.residual] * part.model.hidden_size * setup.tokens_per_micro_batch
    total = micro_batches * one * (int(not part.first) + int(not part.last))
    total += 0 if part.last else held * one
    if not part.first and setup.checkpointing:
        total -= held * one
    return total


def never_together_bytes(share: Share, setup: TrainSetup, more: int, flight: int, micro_batches: int) -> int:
    """What a pipeline stage's activations in flight never meet.

    Where every forward comes before the first backward (GPipe; 1F1B with no more micro-batches than in flight), whole
    gradients are there when one micro-batch's activations are gone. FSDP2's weights are all gathered at a backward's
    end, when its activations are gone, and freed by the next forward.

    Args:
        more: activation bytes of one micro-batch in flight.
    """
    if flight < 2:
        return 0
    apart = 0
    for one in share.held:
        if "gather" in one.moments and len(one.moments) < len(MOMENTS):
            gradients = one.category == "gradients" and micro_batches <= flight
            weights = one.category == "weights" and setup.reshard_after_forward
            apart += one.size_bytes * (gradients or weights)
    return min(more, apart)


def in_flight_losses_bytes(part: RankPart, setup: TrainSetup, logits: int, tokens: int, flight: int) -> int:
    """What a last pipeline stage holds beside one micro-batch's loss chain: this micro-batch's logits, which the stage
    keeps to its backward's end, and under GPipe those and the fp32 log-probabilities of the micro-batches in flight.

    The largest moment is the second backward, when gradients are there and one micro-batch is done.

    Args:
        logits: bytes of one micro-batch's logits; `tokens`: its tokens.

    Source: PyTorch 2.13 `distributed/pipelining/stage.py` (backward_one_chunk's stage_output), `schedules.py`
    ScheduleGPipe. Measured: docs/accuracy/spread-stages.md.
    """
    if setup.pipeline_degree == 1 or not part.last:
        return 0
    wide = SIZE_BYTES["fp32"] * tokens * part.model.vocab_size
    return logits + max(0, flight - 2) * (logits + wide)


def output_bytes(part: RankPart, setup: TrainSetup, inner: TrainSetup) -> int:
    """Logits of all GPUs that nn.DataParallel gathers on GPU 0 before the backward.

    Source: PyTorch 2.13 `nn/parallel/scatter_gather.py` gather; transformers' models return their logits.
    """
    if setup.parallel != "dp" or part.follower:
        return 0
    return setup.num_gpus * loss_parts_logits(part.model, inner)
