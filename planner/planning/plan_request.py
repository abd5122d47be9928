"""`PlanRequest`: what is asked of a plan, before a model and a GPU settle what it leaves open."""

import math
from collections.abc import Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from planner.core.errors import UsageError
from planner.core.records import dataclass
from planner.core.units import GIB
from planner.hardware.gpu import GpuSpec
from planner.memory.workload import MIN_RANK_GIVEN, NO_DATA, PRICE_GIVEN, Data, Workload, superchips_host_bytes
from planner.models.spec import ModelSpec
from planner.models.targets import scaling_targets
from planner.options.adapters import ADAPTERS
from planner.options.images import with_text
from planner.options.objectives import objective_spec_of, packs, seqs_per_sample
from planner.options.rollouts import Rollout
from planner.options.sound import TEXT_TOKENS
from planner.options.stacks import DEFAULT as DEFAULT_STACK
from planner.options.stacks import STACKS
from planner.planning.lora_rank import rank_floor
from planner.planning.option_values import between, choices, memory_and_headroom, positive
from planner.samples import steps
from planner.setup import allowed as fields

if TYPE_CHECKING:
    from planner.hardware.cluster import Cluster  # late: one GPU needs none of it

DEFAULT_SEQ_LEN = 2048


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a person asks for, the same for every model and GPU; None: planned, or a stated default.

    Attributes:
        fixed: setup fields that are decided, name -> allowed values.
        memory_gib, headroom_gib: usable memory of a GPU, and the reserve in it that no plan may touch.
        data: what is known of the data: its numbers, or what was read from a file.
        price: US dollars per GPU hour; spot: where none is given, of machines that may be taken back.
        goal: what a search maximizes.
    """

    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    seq_len: int | None = None
    global_batch: int | None = None
    memory_gib: float | None = None
    headroom_gib: float | None = None
    host_gib: float | None = None
    min_rank: int | None = None
    data: Data = NO_DATA
    price: float | None = None
    spot: bool = False
    goal: str = "tokens"
    targets: tuple[str, ...] = ()
    prefer: str = "quality"
    num_epochs: float | None = None
    learning_rate: float | None = None
    absent_packages: tuple[str, ...] = ()

    def _host_bytes(self, gpu: GpuSpec, cluster: "Cluster | None") -> int:
        """Memory of a machine: as said, else of the superchips in it; 0 where neither tells."""
        host_gib = between("host-memory", self.host_gib, 100_000, "64")
        return int(host_gib * GIB) if host_gib else superchips_host_bytes(gpu, cluster)

    def workload(self, model: ModelSpec, gpu: GpuSpec, cluster: "Cluster | None" = None) -> Workload:
        """The request for this model on this GPU, or on a cluster of them.

        Raises:
            UsageError: a value that makes no sense.
        """
        names = self.targets or (objective_spec_of(self.fixed).stack(DEFAULT_STACK),)
        targets = [STACKS[name] for name in names if name in STACKS]
        if "images" in self.fixed or (targets and all(target.builds_encoders for target in targets)):
            from planner.models.encoders import with_vision  # late: text alone needs none of it

            model = with_vision(model)
        memory, headroom = memory_and_headroom(gpu, self.memory_gib, self.headroom_gib)
        seq_len_tokens = positive("seq-len", self.seq_len) or self._length(model)
        data = self._data(seq_len_tokens)
        num = model.num_layers
        for trained_layers in self.fixed.get("trained_layers", ()):
            if trained_layers == 0:
                raise UsageError(
                    "--trained-layers 0 trains no layer: the head alone (linear probing) is not planned",
                    hint="leave --trained-layers out to train all layers, or give 1 for the last",
                )
            if isinstance(trained_layers, int) and abs(trained_layers) > num:
                raise UsageError(
                    f"--trained-layers {trained_layers}: {model.model_id} has {num} layers",
                    hint=f"give 1 to {num} for the last, -1 to -{num} for the first",
                )
        fixed = kind_fields(model, self.fixed, several=cluster is not None)
        floor, reason = self._floor(model, fixed, data.epoch_tokens)
        usd, source = self._price(gpu, cluster)
        batch = positive("global-batch", self.global_batch) or steps.global_batch(
            data.epoch_seqs,
            cluster.num_gpus if cluster is not None else 1,
            samples_per_seq=data.samples_per_seq,
            seq_len_tokens=seq_len_tokens,
        )
        return Workload(
            model=model,
            gpu=gpu,
            memory_bytes=memory,
            headroom_bytes=headroom,
            host_bytes=self._host_bytes(gpu, cluster),
            seq_len_tokens=seq_len_tokens,
            global_batch_seqs=batch,
            fixed=dict(fixed),
            min_rank=max(1, floor),
            min_rank_reason=reason,
            cluster=cluster,
            objective=self.goal,
            targets=self.targets,
            prefer=choices("prefer", (self.prefer,), ("quality", "speed"))[0],
            data=data,
            num_epochs=between("epochs", self.num_epochs, 10_000, "3"),
            learning_rate=between("lr", self.learning_rate, 10, "2e-4"),
            price_per_hour=usd,
            price_source=source,
            absent_packages=self.absent_packages,
            usual_length=self.seq_len is None and model.front_end is None and "images" not in fixed,
        )

    def probed(self, absent_packages: tuple[str, ...]) -> "PlanRequest":
        """The request where probes follow on this machine: without what it lacks, and without torch.compile, which no
        probe runs, unless it is asked for."""
        return replace(self, absent_packages=absent_packages, fixed={"compile": (False,), **self.fixed})

    def _length(self, model: ModelSpec) -> int:
        default = DEFAULT_SEQ_LEN if model.front_end is None else TEXT_TOKENS
        usual = min(default, model.max_position_embeddings or default)
        if (images := self.fixed.get("images", (None,))[0]) is None:
            return usual
        from planner.models.encoders import image_tokens  # late: text alone needs none of it

        return max(usual, with_text(image_tokens(model, images)))

    def _data(self, seq_len_tokens: int) -> Data:
        tokens, samples = positive("dataset-tokens", self.data.epoch_tokens, maximum=1 << 60), self.data.num_samples
        if self.data.epoch_seqs is not None:
            return self.data
        given = replace(self.data, epoch_tokens=tokens, num_samples=positive("samples", samples))
        return counted_data(given, self.fixed, seq_len_tokens)

    def _floor(
        self, model: ModelSpec, fixed: Mapping[str, tuple[Any, ...]], epoch_tokens: int | None
    ) -> tuple[int, str]:
        if ranks := fixed.get("lora_rank"):
            kind = ADAPTERS[self.fixed.get("adapter", ("lora",))[0]]
            return ranks[0], "given with --rank" if kind.like_lora else f"{kind.size or 'no size'} of {kind.name}"
        if self.min_rank is not None:
            return positive("min-rank", self.min_rank, maximum=4096) or 1, MIN_RANK_GIVEN
        return rank_floor(model, fixed.get("lora_targets", ("all-linear",))[0], epoch_tokens)

    def _price(self, gpu: GpuSpec, cluster: "Cluster | None") -> tuple[float | None, str]:
        """(US dollars per GPU hour, who says so): of several machines that of one offer whose network is at least as
        fast as theirs."""
        if self.price is not None:
            if not (math.isfinite(self.price) and self.price >= 0):
                raise UsageError(
                    f"--price must be US dollars per GPU hour, got {self.price}", hint="for example --price 1.89"
                )
            return self.price, PRICE_GIVEN
        from planner.hardware.prices import cluster_offer, price_per_hour

        if cluster is not None and cluster.between is not None:
            offer = cluster_offer(gpu.key, spot=self.spot, least_bytes_per_s=cluster.between.bytes_per_s)
            if offer is None:
                return None, ""
            planned = f" where {cluster.between.key} is planned" * (offer.network != cluster.between.key)
            joined_by = f"machines joined by {offer.network}{planned}"
            return offer.usd_per_h, f"{offer.provider}, {offer.kind}, {joined_by}, {offer.as_of}"
        usd, source, as_of = price_per_hour(gpu.key, spot=self.spot) or (None, "", "")
        return usd, f"{source}, {as_of}" if source else ""


def counted_data(data: Data, fixed: Mapping[str, tuple[Any, ...]], seq_len_tokens: int) -> Data:
    """One pass over data of which only numbers are known: samples of full length if their tokens are not given, else of
    their mean, and full rows if the samples are not, or rows are packed."""
    tokens, samples = data.epoch_tokens, data.num_samples
    if samples is None:
        return replace(data, epoch_seqs=None if tokens is None else math.ceil(tokens / seq_len_tokens))
    objective = objective_spec_of(fixed)
    if objective.rolls_out:
        samples *= fixed.get("rollout", (Rollout(),))[0].num_generations
    whole = samples * seq_len_tokens * seqs_per_sample(fixed)
    # continued pretraining splits longer texts in pieces, the others cut samples
    tokens = tokens if tokens and objective.packed else min(tokens or whole, whole)
    rows = math.ceil(tokens / seq_len_tokens) if packs(fixed) else samples
    # every row as long as the mean, as nobody knows which are longer: their padding is not counted
    short = rows == samples and tokens < (1 - steps.PADDING_LIMIT) * whole
    fractions = (1.0, 1.0) if short else ()
    return replace(data, epoch_tokens=tokens, epoch_seqs=rows, samples_per_seq=samples / rows, real_fractions=fractions)


def of_length(workload: Workload, seq_len_tokens: int) -> Workload:
    """A workload whose length nobody said, of shorter sequences: its data and the rank that they ask for follow."""
    data, targets = counted_data(workload.data, workload.fixed, seq_len_tokens), workload.fixed.get("lora_targets")
    before, after = (
        rank_floor(workload.model, (targets or ("all-linear",))[0], each.epoch_tokens) for each in (workload.data, data)
    )
    shorter = replace(workload, seq_len_tokens=seq_len_tokens, data=data)
    if (workload.min_rank, workload.min_rank_reason) != (max(1, before[0]), before[1]):
        return shorter  # asked for
    return replace(shorter, min_rank=max(1, after[0]), min_rank_reason=after[1])


def kind_fields(model: ModelSpec, fixed: Mapping[str, tuple[Any, ...]], *, several: bool) -> dict[str, tuple[Any, ...]]:
    """The fields that an adapter other than LoRA settles where the user did not: its usual size, IA3's targets (keys,
    values and the MLP's last matrix, as its paper has them), no checkpointing where peft refuses it, one way to share.

    Raises:
        UsageError: several GPUs shared in another way than ddp.
    """
    settled = dict(fixed)
    row = ADAPTERS[fixed.get("adapter", ("lora",))[0]]
    if row.quantizations != fields.QUANTIZATIONS:
        quantizations = settled.get("quantization", fields.QUANTIZATIONS)
        settled["quantization"] = tuple(each for each in quantizations if each in row.quantizations)
        if not settled["quantization"]:
            raise UsageError(
                f"--adapter {row.name} does not take --quantization {', '.join(quantizations)}",
                hint=f"it takes {', '.join(row.quantizations)}",
            )
    if row.like_lora:
        return settled
    if several:
        if set(settled.get("parallel", ("ddp",))) != {"ddp"}:
            raise UsageError(f"--adapter {row.name} is planned for one GPU or with --parallel ddp")
        settled["parallel"] = ("ddp",)
    settled.setdefault("lora_rank", (row.usual_size,))
    if not row.checkpointing:
        settled.setdefault("checkpointing", (0,))
    if row.form == "scales" and "lora_targets" not in settled:
        settled["lora_targets"] = (scaling_targets(model),)
    return settled
