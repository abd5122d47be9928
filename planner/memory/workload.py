"""`Workload`: a request for one model on its GPUs: what is fixed, what is left to plan, the memory there is for it."""

from collections.abc import Mapping
from dataclasses import field
from math import ceil
from typing import TYPE_CHECKING, Any

from planner.core.errors import UsageError
from planner.core.records import dataclass
from planner.hardware.gpu import GpuSpec
from planner.models.spec import ModelSpec
from planner.options.images import Images, with_text
from planner.options.objectives import Objective, objective_spec_of, seqs_per_sample
from planner.options.optimizers import OPTIMIZERS
from planner.samples import steps

if TYPE_CHECKING:
    from planner.hardware.cluster import Cluster  # late: one GPU needs none of it

MIN_RANK_GIVEN, PRICE_GIVEN = "given with --min-rank", "given with --price"


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is known of the data, in numbers of one epoch.

    Attributes:
        epoch_tokens: for time and cost; None when unknown.
        epoch_seqs: packed rows or samples; None when unknown.
        samples_per_seq: samples that lie in one of them: more than one where rows are packed.
        real_fractions: share of a micro-batch's tokens that is no padding, at 1, 2, 4, ... sequences padded to their
            longest, or one value for packed rows; empty where the samples' lengths are not known.
        file: the data set that they were read from; num_samples: what the user said of data without a file.
        names: known name -> the column of the file that has it, where the user said so.
        kind: of its samples (`planner.samples.rows.kinds_of`), "" where nobody has seen them.
        loss_on: "answers" or "all" tokens; "" where nobody knows whether anything is asked.
        answers_fraction: share of the tokens that answer, None where that is not known.
        held_out: samples that are evaluated and not trained on, which no other number here counts; None: not known.
    """

    epoch_tokens: int | None = None
    epoch_seqs: int | None = None
    samples_per_seq: float = 1.0
    real_fractions: tuple[float, ...] = ()
    file: str = ""
    num_samples: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""
    loss_on: str = ""
    answers_fraction: float | None = None
    held_out: int | None = None

    def real_fraction(self, num_seqs: int) -> float:
        """Share of the tokens of so many sequences at once that is no padding; 1 where nobody knows."""
        if not self.real_fractions:
            return 1.0
        return self.real_fractions[min((num_seqs - 1).bit_length(), len(self.real_fractions) - 1)]


NO_DATA = Data()


def superchips_host_bytes(gpu: GpuSpec, cluster: "Cluster | None") -> int:
    """The host's memory that the superchips of a node bring along; 0 of other cards."""
    return gpu.host_bytes * (cluster.gpus_per_node if cluster is not None else 1)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, a GPU and what a step must look like.

    Attributes:
        cluster: the GPUs and their links; None: one GPU.
        memory_bytes: usable memory of one GPU (the table's, or what the user said).
        headroom_bytes: reserve that no plan may touch.
        host_bytes: memory of a machine, 0 where nobody says.
        global_batch_seqs: sequences per optimizer step; constant while micro-batch and accumulation change.
        fixed: setup fields the user decided, name -> allowed values; fields not named are planned.
        min_rank: LoRA rank never falls below it; `min_rank_reason` says which rule gave it.
        data: what is known of the data.
        prefer: "quality" (the least approximate class that fits) or "speed" (a quantized base where it is faster).
        num_epochs, learning_rate: decided by the user; None: by the rules of `steps` and `hyperparameters`.
        targets: launch targets that the user named: the plan is what the first of them runs, and all of them can.
        price_per_hour: US dollars per GPU hour, None when unknown.
        absent_packages: what the machine that is planned for lacks: only who asks gets what needs it.
        usual_length: nobody said how long sequences are, and no data does.
    """

    model: ModelSpec
    gpu: GpuSpec
    memory_bytes: int
    headroom_bytes: int
    seq_len_tokens: int
    global_batch_seqs: int
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    min_rank: int = 16
    min_rank_reason: str = ""
    cluster: "Cluster | None" = None
    objective: str = "tokens"
    data: Data = NO_DATA
    price_per_hour: float | None = None
    price_source: str = ""
    targets: tuple[str, ...] = ()
    prefer: str = "quality"
    num_epochs: float | None = None
    learning_rate: float | None = None
    absent_packages: tuple[str, ...] = ()
    usual_length: bool = False
    host_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("seq_len_tokens", "global_batch_seqs", "memory_bytes", "min_rank"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if images := self.images:
            self._check_images(images)
        for micro_batch in self.fixed.get("micro_batch_seqs", ()):
            if self.global_batch_seqs % micro_batch:
                raise UsageError(
                    f"--micro-batch {micro_batch} does not divide the {self.global_batch_seqs} sequences of a step",
                    hint="--global-batch says how many there are",
                )
        if True in self.fixed.get("frozen_encoder", ()) and (
            self.model.front_end is None or self.fixed.get("method", ("full",)) != ("full",)
        ):
            raise UsageError(
                f"--frozen-encoder is for --method full of models that hear, got {self.model.model_id}",
                hint="leave --frozen-encoder out, or give --method full",
            )
        positions = self.model.learned_positions
        if positions is not None and self.seq_len_tokens > positions:
            of = " of a clip's text" if self.model.front_end is not None else ""
            raise UsageError(
                f"{self.model.model_id} has learned {positions} positions, got --seq-len {self.seq_len_tokens}{of}",
                hint=f"give --seq-len {positions} or less",
            )
        paged = [name for name, row in OPTIMIZERS.items() if row.paged and name in self.fixed.get("optimizer", ())]
        if paged and self.gpu.shares_host_memory:
            raise UsageError(
                f"{paged[0]} moves states to the host's memory, which is the card's own on {self.gpu.name}",
                hint=f"--optimizer {paged[0].removeprefix('paged-')}",
            )
        if not 0 <= self.headroom_bytes < self.memory_bytes:
            raise UsageError(
                f"headroom must be at least 0 and less than the memory ({self.memory_bytes} bytes), "
                f"got {self.headroom_bytes} bytes",
                hint="give --headroom in GiB, smaller than the card",
            )

    def _check_images(self, images: Images) -> None:
        """Refuses what cannot see, and sequences too short for what is seen."""
        from planner.models.encoders import image_tokens  # late: text alone needs none of it

        tokens = image_tokens(self.model, images)
        if "sdpa" not in self.model.attentions and any(
            layer.attention.sees_ahead for layer in self.model.layer_kinds if layer.attention
        ):
            raise UsageError(
                f"images are not planned for {self.model.model_id}: its text has no SDPA in transformers, "
                "flash-attention 2 takes no mask of pictures, and eager attention would keep patches x patches",
                hint="leave --images-per-sample and --image-size out: text alone is planned",
            )
        if tokens >= self.seq_len_tokens:
            raise UsageError(
                f"{images.words} are {tokens:,} tokens of {self.model.model_id}: no room for text in "
                f"--seq-len {self.seq_len_tokens}",
                hint=f"give --seq-len {with_text(tokens)}, or a smaller --image-size",
            )

    @property
    def images(self) -> Images | None:
        """The pictures of every sample, None where there are none."""
        images: Images | None = self.fixed.get("images", (None,))[0]
        return images

    @property
    def objective_spec(self) -> Objective:
        """What the step trains for."""
        return objective_spec_of(self.fixed)

    @property
    def uneven(self) -> bool:
        """Whether the sequences of samples may differ in length: unless those of a file are known not to (their mean
        rounds), of which one is a sample and is measured whole."""
        fractions = self.data.real_fractions
        several = self.seqs_per_sample > 1 or self.model.is_encoder_decoder
        return several or not fractions or min(fractions) < 1 - 1e-9

    @property
    def seqs_per_sample(self) -> int:
        """Sequences of one sample."""
        return seqs_per_sample(self.fixed)

    @property
    def offloads(self) -> bool:
        """Whether it was asked for that something lies in the host's memory."""
        return set(self.fixed.get("offload", ("none",))) != {"none"}

    @property
    def num_gpus(self) -> int:
        """GPUs of the job."""
        return self.cluster.num_gpus if self.cluster is not None else 1

    @property
    def num_paid_gpus(self) -> int:
        """The same with the card that a vLLM server has, which is taken on request alone."""
        return self.num_gpus + any(row.generator == "vllm-server" for row in self.fixed.get("rollout", ()))

    @property
    def epochs(self) -> float:
        """Passes over the data that the launch files train: the user's, or those that give enough optimizer steps."""
        return self.num_epochs or steps.num_epochs(self.data.epoch_seqs, self.global_batch_seqs)

    def row_tokens(self, num_seqs: int) -> int:
        """Mean tokens of a row of so many sequences at once, padding included; the whole length where nobody knows."""
        data = self.data
        if len(data.real_fractions) < 2 or not data.epoch_tokens or not data.epoch_seqs:
            return self.seq_len_tokens
        mean = data.epoch_tokens / (data.epoch_seqs * self.seqs_per_sample)
        return min(self.seq_len_tokens, ceil(mean / data.real_fraction(num_seqs)))

    @property
    def budget_bytes(self) -> int:
        """What a setup's device peak may reach on every GPU."""
        return self.memory_bytes - self.headroom_bytes
