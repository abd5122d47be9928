"""The command that makes a plan again."""

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import fields

from planner.core.redaction import without_secrets
from planner.core.units import GIB
from planner.memory.workload import MIN_RANK_GIVEN, PRICE_GIVEN, Workload, superchips_host_bytes
from planner.options.images import Images
from planner.options.rollouts import Rollout
from planner.planning.option_values import default_headroom_bytes
from planner.planning.plan import Plan
from planner.setup.packages import rules_packages_out, unpackaged
from reports.plain import clean


def default_next_command(answer: Plan, also: Sequence[str] = ()) -> str:
    """The command that makes this plan again and writes its launch files.

    Where a higher level refuted the choice, the reserve grows by what was missing.

    Args:
        also: what was asked for and no workload holds: a data set on the hub, a revision of the model.
    """
    grown = None
    if not answer.chosen.fits:
        excess = answer.chosen.memory_evidence.peak_device_bytes - answer.chosen.budget_bytes
        grown = math.ceil(10 * (answer.workload.headroom_bytes + max(0, excess)) / GIB) / 10
    return shlex.join(["plan", *request_words(answer.workload, headroom_gib=grown), *also, "--out", "my-plan"])


def request_words(workload: Workload, *, headroom_gib: float | None = None) -> list[str]:
    """Model, GPU and options of `plan` that make this workload; `headroom_gib`: another reserve than its own."""
    words = [clean(workload.model.model_id), "--gpu", workload.gpu.key, *cluster_flags(workload)]
    words += ["--seq-len", str(workload.seq_len_tokens)]
    words += ["--global-batch", str(workload.global_batch_seqs)]
    bare = rules_packages_out(workload.fixed)
    words += ["--no-extra-packages"] * bare
    implied = unpackaged() if bare else {}
    for name, values in workload.fixed.items():
        for value in values if name != "rollout" and values != implied.get(name) else ():
            words += _flag(name, value)
    rollouts = workload.fixed.get("rollout") or ()
    for field in fields(Rollout) if rollouts else ():  # what all of them share beyond the defaults
        first, *others = dict.fromkeys(getattr(rollout, field.name) for rollout in rollouts)
        named = field.name == "generator" and len(rollouts) == 1
        if not others and (first != field.default or named):
            words += _flag(field.name, first)
    if workload.memory_bytes != workload.gpu.memory_bytes:
        words += ["--memory-gib", _shortest(workload.memory_bytes / GIB, _bytes)]
    if headroom_gib is not None:
        words += ["--headroom", f"{headroom_gib:g}"]
    elif workload.headroom_bytes != default_headroom_bytes(workload.memory_bytes):
        words += ["--headroom", _shortest(workload.headroom_bytes / GIB, _bytes)]
    if workload.host_bytes != superchips_host_bytes(workload.gpu, workload.cluster):
        words += ["--host-memory", _shortest(workload.host_bytes / GIB, _bytes)]
    if workload.min_rank_reason == MIN_RANK_GIVEN:
        words += ["--min-rank", str(workload.min_rank)]
    data = workload.data
    if data.file:
        words += ["--dataset", clean(without_secrets(data.file))]
        if data.names:
            words += ["--columns", ",".join(f"{name}={clean(column)}" for name, column in data.names.items())]
    if data.epoch_tokens and not data.kind:
        words += ["--dataset-tokens", str(data.epoch_tokens)]
        if data.num_samples is not None:
            words += ["--samples", str(data.num_samples)]
    if data.loss_on == "all" and data.kind != "text":
        words += ["--loss-on", "all"]
    if workload.price_source == PRICE_GIVEN and workload.price_per_hour is not None:
        words += ["--price", _shortest(workload.price_per_hour)]
    if workload.prefer != "quality":
        words += ["--prefer", workload.prefer]
    for option, given in (("--epochs", workload.num_epochs), ("--lr", workload.learning_rate)):
        words += [option, _shortest(given)] if given else []
    for target in workload.targets:
        words += ["--target", target]
    return words


def _shortest(value: float, read: Callable[[float], float] = float) -> str:
    """The number in the fewest digits that the command line reads as the same."""
    texts = (f"{value:.{digits}g}" for digits in range(6, 18))
    return next(text for text in texts if read(float(text)) == read(value))


def _bytes(size_gib: float) -> int:
    return int(size_gib * GIB)


def cluster_flags(workload: Workload) -> list[str]:
    """The options that describe the workload's cluster, none on one GPU."""
    cluster = workload.cluster
    if cluster is None:
        return []
    from planner.hardware.cluster import make_cluster

    words = ["--gpus", str(cluster.num_gpus)]
    plain = make_cluster(cluster.gpu, cluster.num_gpus, num_nodes=cluster.num_nodes)
    if cluster.num_nodes > 1:
        words += ["--nodes", str(cluster.num_nodes)]
    links = [cluster.within.key] if cluster.within != plain.within else []
    if cluster.between is not None and cluster.between != plain.between:
        links.append(cluster.between.key)
    return [*words, "--interconnect", "+".join(links)] if links else words


def _flag(name: str, value: object) -> list[str]:
    if name == "checkpointing" and isinstance(value, int):
        if value > 1:
            return ["--checkpoint-every", str(value)]
        return ["--checkpointing" if value else "--no-checkpointing"]
    if isinstance(value, Images):
        return ["--images-per-sample", str(value.num), "--image-size", f"{value.width}x{value.height}"]
    if name == "lora_rank" and value == 0:
        return []  # of a kind of adapter that has none: nobody could ask for another
    option = _OPTIONS.get(name, name.replace("_", "-"))
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    return [f"--{option}", ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]


_OPTIONS = {
    "lora_rank": "rank",
    "lora_targets": "targets",
    "micro_batch_seqs": "micro-batch",
    "pipeline_schedule": "schedule",
    "reshard_after_forward": "reshard",
    "completion_tokens": "completion-len",
    "generation_batch_seqs": "generation-batch",
}
"""Fields whose option has another name."""
