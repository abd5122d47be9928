"""Who generates the completions of a step, and how much of the card a vLLM beside the model takes: what a plan compares
where nobody said."""

from collections.abc import Iterator
from dataclasses import replace

from planner.core.errors import UsageError
from planner.core.units import gib
from planner.hardware.gpu import GpuSpec
from planner.memory.layers import mlp_width
from planner.memory.rollout import cache_bytes, vllm_bytes
from planner.memory.workload import Workload
from planner.models.spec import ModelSpec
from planner.options.rollouts import COLOCATED, GENERATORS, Rollout, open_rollouts
from planner.setup import TrainSetup
from planner.setup.packages import VLLM

VLLM_FROM = (7, 5)
"""Source: vLLM 0.21, docs/getting_started/installation/gpu.cuda.inc.md."""
SERVER_FRACTION = 0.9
"""Of its card that a server takes. Source: trl 1.16 scripts/vllm_serve.py, `gpu_memory_utilization`."""
PROFILED_TOKENS = 4096
"""Of vLLM's profiling forward. Source: trl 1.16 generation/vllm_generation.py, `max_num_batched_tokens`."""


def vllm_needs(model: ModelSpec, seqs: int, seq_len_tokens: int) -> tuple[int, int]:
    """Bytes that a GPU's vLLM needs to start, and to have all of its completions of a generation under way at once: its
    16-bit weights and its profiling forward, and their keys and values at full length.

    Source: vLLM v1 `gpu_worker.determine_available_memory`: what of the share weights and that forward leave is cache.
    Not counted: CUDA graphs, which lie beyond the share.
    """
    wide = max(4 * model.hidden_size + 3 * mlp_width(layer) for layer in model.layer_kinds)
    forward = 2 * PROFILED_TOKENS * wide + 4 * 3 * seqs * model.vocab_size
    start = 2 * model.num_params + forward
    return start, start + cache_bytes(model, TrainSetup(), seqs, seq_len_tokens)


def needs_of(workload: Workload, rollout: Rollout) -> tuple[int, int]:
    """`vllm_needs` of a rollout that a plan may choose."""
    seqs = -(-rollout.at_once(workload.global_batch_seqs) // workload.num_gpus)
    return vllm_needs(workload.model, seqs, workload.seq_len_tokens)


def rollout_refusals(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> tuple[str, ...]:
    """Why TRL does not generate a setup's completions, or the vLLM beside its model does not start: on several GPUs it
    may be cut over all of them. Empty where they may.

    Source: trl 1.16 trainer/grpo_config.py, rloo_config.py `__post_init__`.
    """
    rollout, made = setup.rollout_settings, setup.generation_seqs
    share_bytes, (start, _) = vllm_bytes(gpu, setup), vllm_needs(model, setup.local_generation_seqs, 0)
    rows = (
        (made % rollout.num_generations, f"{made} completions are no whole groups of {rollout.num_generations}"),
        (0 < share_bytes * setup.num_gpus < start, _too_small(rollout.vllm_fraction, share_bytes, start)),
    )
    return tuple(reason for holds, reason in rows if holds)


def _too_small(fraction: float, share_bytes: int, start_bytes: int) -> str:
    has = f"a vLLM on {fraction:.0%} of the card has {gib(share_bytes)}"
    return f"{has}, its weights and one forward take {gib(start_bytes)}"


def vllm_refusal(workload: Workload) -> str:
    """Why no plan takes vLLM unasked, "" where one may."""
    gpu, model = workload.gpu, workload.model
    if gpu.vendor != "NVIDIA" or (gpu.compute_capability or (0, 0)) < VLLM_FROM or not gpu.bf16:
        return "pip's vLLM runs bf16 weights on NVIDIA's cards from Ampere on"
    if model.from_tree or model.is_encoder_decoder or workload.images is not None:
        return "whether vLLM runs this model is not known here"
    if VLLM in workload.absent_packages:
        return "vllm is not installed here"
    return ""


def planned_rollouts(workload: Workload) -> tuple[Rollout, ...]:
    """The rollouts of a plan: of every generator that was not ruled out all completions of a step at once, as TRL has
    it, or half of them, a quarter, and so on in whole groups of a prompt's completions; of a vLLM on the same card with
    the least share that holds them.

    Raises:
        UsageError: an optimizer step does not hold whole groups, or a share that was asked for not vLLM's weights.
    """
    rollouts = workload.fixed.get("rollout") or open_rollouts(Rollout.usual(workload.seq_len_tokens))
    step, first = workload.global_batch_seqs, rollouts[0]
    group, made = first.num_generations, first.generation_batch_seqs
    if step % group or step % first.at_once(step):
        generations = f" and whole generations of {made}" if made else ""
        raise UsageError(
            f"a step of {step} completions is no whole groups of {group} (num_generations){generations}",
            hint=f"give --global-batch {-(-step // group) * group}, or --num-generations",
        )
    planned = tuple(rollout for name in GENERATORS for rollout in _of_generator(workload, name, rollouts))
    if not planned:
        need = gib(needs_of(workload, first)[1])
        raise UsageError(
            f"vLLM's weights, and keys and values of {first.at_once(step)} completions at once, take {need}: no "
            "share of the card holds them",
            hint="give a smaller --generation-batch, or --generator transformers",
        )
    return planned


def _of_generator(workload: Workload, name: str, rollouts: tuple[Rollout, ...]) -> Iterator[Rollout]:
    step, matching = workload.global_batch_seqs, [rollout for rollout in rollouts if rollout.generator == name]
    asked_for = len(matching) == len(rollouts)
    if not matching or (not asked_for and name in COLOCATED and vllm_refusal(workload)):
        return
    if len(matching) == 1 and matching[0].by_vllm:
        _check_share(workload, matching[0])
    taken, given = set(), matching[0].generation_batch_seqs
    for part in (given,) if given else _parts(matching[0], step):
        made = replace(matching[0], generation_batch_seqs=part if part < step else given)
        if name not in COLOCATED or len(matching) == 1:
            yield made
            continue
        whole = needs_of(workload, made)[1]  # more than the least share that holds everything would buy nothing
        shares = (rollout.vllm_fraction for rollout in matching)
        enough = (share for share in shares if share * workload.gpu.memory_bytes >= whole)
        if (share := next(enough, None)) is not None and share not in taken:
            taken.add(share)
            yield replace(made, vllm_fraction=share)


def _parts(rollout: Rollout, step_seqs: int) -> Iterator[int]:
    """Completions that may be made at once: those of a step, a half, a quarter, ..., in whole groups of a prompt's."""
    part = step_seqs
    while part >= rollout.num_generations:
        if step_seqs % part == 0 and part % rollout.num_generations == 0:
            yield part
        part //= 2


def _check_share(workload: Workload, rollout: Rollout) -> None:
    fraction = rollout.vllm_fraction if rollout.colocated else SERVER_FRACTION
    share, (start, _) = int(fraction * workload.gpu.memory_bytes), needs_of(workload, rollout)
    if share < start:
        larger = "give a larger --vllm-fraction, or leave it out: the plan then finds one"
        raise UsageError(
            _too_small(fraction, share, start),
            hint=larger if rollout.colocated else "a server has one card: name a larger one, or leave --generator out",
        )
