"""Flags to a `Workload`: names resolved, values checked, defaults stated."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from planner import setup_fields as fields
from planner import steps
from planner.choices.adapters import ADAPTERS, Adapter
from planner.choices.objectives import aim_of
from planner.choices.rollouts import Rollout
from planner.errors import UsageError
from planner.gpu import GpuSpec
from planner.lora_rank import rank_floor
from planner.models.spec import ModelSpec
from planner.models.targets import scaling_targets
from planner.units import GIB, gib
from planner.workload import MIN_RANK_GIVEN, PRICE_GIVEN, Workload, default_headroom_bytes

if TYPE_CHECKING:
    from planner.cluster import Cluster  # late: one GPU needs none of it

DEFAULT_SEQ_LEN = 2048


def choices(name: str, values: Sequence[str], allowed: Sequence[str]) -> tuple[str, ...]:
    """Values of a repeatable option, each one of `allowed`; comma-separated lists are taken apart.

    Raises:
        UsageError: a value that is not allowed.
    """
    found = tuple(dict.fromkeys(part.strip() for value in values for part in value.split(",") if part.strip()))
    if not found:
        raise UsageError(f"--{name} is empty", hint=f"for example --{name} {allowed[0]}")
    for value in found:
        if value not in allowed:
            raise UsageError(
                f"--{name} must be one of {', '.join(allowed)}; got {value!r}",
                hint=f"for example --{name} {allowed[0]}",
            )
    return found


def parse_targets(value: str) -> str | tuple[str, ...]:
    """`attention`, `all-linear`, or a comma-separated list of module names."""
    if value in fields.TARGET_SETS:
        return value
    names = tuple(part.strip() for part in value.split(",") if part.strip())
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_.]+", name):
            raise UsageError(
                f"--targets must be attention, all-linear or module names; got {name!r}",
                hint="for example q_proj,v_proj",
            )
    if not names:
        raise UsageError("--targets is empty", hint="attention, all-linear, or names such as q_proj,v_proj")
    return names


def positive(name: str, value: int | None, *, maximum: int = 1 << 40) -> int | None:
    """A count from the command line, at least 1.

    Raises:
        UsageError: zero, negative, or beyond any sense.
    """
    if value is not None and not 1 <= value <= maximum:
        raise UsageError(
            f"--{name} must be at least 1 and at most {maximum}, got {value}",
            hint=f"give --{name} a positive whole number",
        )
    return value


def _between(name: str, value: float | None, most: float, usual: str) -> float | None:
    """A positive number from the command line.

    Raises:
        UsageError: not finite, not positive, or beyond any sense.
    """
    if value is not None and not (math.isfinite(value) and 0 < value <= most):
        raise UsageError(
            f"--{name} must be above 0 and at most {most:g}, got {value}", hint=f"for example --{name} {usual}"
        )
    return value


def memory_and_headroom(gpu: GpuSpec, memory_gib: float | None, headroom_gib: float | None) -> tuple[int, int]:
    """(usable memory, reserve) in bytes from the flags or the defaults.

    Raises:
        UsageError: not finite, negative, or a reserve as large as the memory.
    """
    for name, value, usual in (("memory-gib", memory_gib, 20), ("headroom", headroom_gib, 1)):
        if value is not None and not (math.isfinite(value) and 0 <= value <= 1e6):
            raise UsageError(
                f"--{name} must be a size in GiB from 0 to 1,000,000, got {value}", hint=f"for example --{name} {usual}"
            )
    memory = gpu.memory_bytes if memory_gib is None else int(memory_gib * GIB)
    if memory < GIB // 4:
        raise UsageError(
            f"--memory-gib must be at least 0.25, got {memory_gib}", hint="usable memory in GiB, for example 23.5"
        )
    headroom = default_headroom_bytes(memory) if headroom_gib is None else int(headroom_gib * GIB)
    if headroom >= memory:
        raise UsageError(
            f"--headroom {headroom_gib} leaves nothing of {gib(memory)}", hint="give a reserve smaller than the card"
        )
    return memory, headroom


def resolve_gpu(name: str) -> GpuSpec:
    """The GPU that `--gpu` names: a row of the table, or this machine's own for "local"."""
    from planner.gpus import find_gpu, local_gpu

    return local_gpu() if name.lower() == "local" else find_gpu(name)


def workload(
    model: ModelSpec,
    gpu: GpuSpec,
    *,
    fixed: Mapping[str, tuple[Any, ...]],
    seq_len: int | None = None,
    global_batch: int | None = None,
    memory_gib: float | None = None,
    headroom_gib: float | None = None,
    min_rank: int | None = None,
    dataset_tokens: int | None = None,
    samples: int | None = None,
    price: float | None = None,
    cluster: "Cluster | None" = None,
    objective: str = "tokens",
    targets: Sequence[str] = (),
    prefer: str = "quality",
    epoch_seqs: int | None = None,
    samples_per_seq: float = 1.0,
    num_epochs: float | None = None,
    learning_rate: float | None = None,
) -> Workload:
    """A workload from resolved names and checked flags; what is not given is planned or takes a stated default."""
    memory, headroom = memory_and_headroom(gpu, memory_gib, headroom_gib)
    seq_len_tokens = positive("seq-len", seq_len) or min(
        DEFAULT_SEQ_LEN, model.max_position_embeddings or DEFAULT_SEQ_LEN
    )
    dataset_tokens = positive("dataset-tokens", dataset_tokens, maximum=1 << 60)
    if epoch_seqs is None:
        samples = positive("samples", samples)
        dataset_tokens, epoch_seqs, samples_per_seq = _epoch(fixed, samples, dataset_tokens, seq_len_tokens)
    fixed, kind = kind_fields(model, fixed, several=cluster is not None), fixed.get("adapter", ("lora",))[0]
    floor, reason = _floor(model, fixed, ADAPTERS[kind], min_rank, dataset_tokens)
    usd, source = _price(gpu, price)
    return Workload(
        model=model,
        gpu=gpu,
        memory_bytes=memory,
        headroom_bytes=headroom,
        seq_len_tokens=seq_len_tokens,
        global_batch_seqs=positive("global-batch", global_batch)
        or steps.global_batch(
            epoch_seqs, cluster.num_gpus if cluster is not None else 1, samples_per_seq=samples_per_seq
        ),
        fixed=dict(fixed),
        min_rank=max(1, floor),
        min_rank_reason=reason,
        cluster=cluster,
        objective=objective,
        targets=tuple(targets),
        prefer=choices("prefer", (prefer,), ("quality", "speed"))[0],
        dataset_tokens=dataset_tokens,
        epoch_seqs=epoch_seqs,
        samples_per_seq=samples_per_seq,
        num_samples=samples,
        num_epochs=_between("epochs", num_epochs, 10_000, "3"),
        learning_rate=_between("lr", learning_rate, 10, "2e-4"),
        price_per_hour=usd,
        price_source=source,
    )


def _epoch(
    fixed: Mapping[str, tuple[Any, ...]], samples: int | None, tokens: int | None, seq_len_tokens: int
) -> tuple[int | None, int | None, float]:
    """(tokens, sequences, samples in each) of one pass over data of which only numbers are known: samples of full
    length where their tokens are not given, and full rows where the samples are not, or rows are packed."""
    if samples is None:
        return tokens, None if tokens is None else math.ceil(tokens / seq_len_tokens), 1.0
    aim = aim_of(fixed)
    if aim.rolls_out:
        samples *= fixed.get("rollout", (Rollout(),))[0].num_generations
    whole = samples * seq_len_tokens * aim.seqs_per_sample
    tokens = min(tokens or whole, whole)
    if fixed.get("packing") != (True,):
        return tokens, samples, 1.0
    rows = math.ceil(tokens / seq_len_tokens)
    return tokens, rows, samples / rows


def _floor(
    model: ModelSpec, fixed: Mapping[str, tuple[Any, ...]], kind: Adapter, min_rank: int | None, tokens: int | None
) -> tuple[int, str]:
    """The least rank that is planned, and why."""
    if ranks := fixed.get("lora_rank"):
        return ranks[0], "given with --rank" if kind.like_lora else f"{kind.size or 'no size'} of {kind.name}"
    if min_rank is not None:
        return positive("min-rank", min_rank, maximum=4096) or 1, MIN_RANK_GIVEN
    return rank_floor(model, fixed.get("lora_targets", ("all-linear",))[0], tokens)


def kind_fields(model: ModelSpec, fixed: Mapping[str, tuple[Any, ...]], *, several: bool) -> dict[str, tuple[Any, ...]]:
    """The fields that an adapter other than LoRA settles where the user did not: its usual size, IA3's targets (keys,
    values and the MLP's last matrix, as its paper has them), no checkpointing where peft refuses it, one way to share.

    Raises:
        UsageError: several GPUs shared in another way than ddp.
    """
    found = dict(fixed)
    row = ADAPTERS[fixed.get("adapter", ("lora",))[0]]
    if row.quantizations != fields.QUANTIZATIONS:
        asked = found.get("quantization", fields.QUANTIZATIONS)
        found["quantization"] = tuple(one for one in asked if one in row.quantizations)
        if not found["quantization"]:
            raise UsageError(
                f"--adapter {row.name} does not take --quantization {', '.join(asked)}",
                hint=f"it takes {', '.join(row.quantizations)}",
            )
    if row.like_lora:
        return found
    if several:
        if set(found.get("parallel", ("ddp",))) != {"ddp"}:
            raise UsageError(f"--adapter {row.name} is planned for one GPU or with --parallel ddp")
        found["parallel"] = ("ddp",)
    found.setdefault("lora_rank", (row.usual_size,))
    if not row.checkpointing:
        found.setdefault("checkpointing", (0,))
    if row.form == "scales" and "lora_targets" not in found:
        found["lora_targets"] = (scaling_targets(model),)
    return found


def _price(gpu: GpuSpec, price: float | None) -> tuple[float | None, str]:
    if price is not None:
        if not (math.isfinite(price) and price >= 0):
            raise UsageError(f"--price must be US dollars per GPU hour, got {price}", hint="for example --price 1.89")
        return price, PRICE_GIVEN
    from planner.prices import price_per_hour

    known = price_per_hour(gpu.key)
    if known is None:
        return None, ""
    usd, source, as_of = known
    return usd, f"{source}, {as_of}"
