"""How long the sequences of a method can be on one GPU, micro-batch 1, by the formula."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from planner.decision.policy import fewer_matrices, further
from planner.errors import SetupError, UsageError
from planner.planning.expressed import variants_as_run
from planner.planning.runs import UNFUSED, same_kernels
from planner.planning.space import branches, dimension_values, offloading_matters, own_layers
from planner.predict import device_peak_bytes
from planner.setup import TrainSetup
from planner.setup_fields import METHODS
from planner.workload import Workload

STEP_TOKENS = 256
UNKNOWN_CONTEXT_TOKENS = 131_072
"""Looked at where a model states no limit."""


def longest_tokens(workload: Workload) -> dict[str, int]:
    """Method -> the longest sequence (a multiple of STEP_TOKENS, at most what the model takes) of which one at a time
    fits with every layer checkpointed; 0 where none does. A method that the options rule out is left out."""
    most = _most_steps(workload)
    found = {}
    for method in METHODS:
        if "method" in workload.fixed and method not in workload.fixed["method"]:
            continue
        steps = 0
        for setup in _min_memory_setups(workload, method):
            steps = _reached(workload, setup, steps, most)
        found[method] = steps * STEP_TOKENS
    return found


def _most_steps(workload: Workload) -> int:
    return max(1, (workload.model.max_position_embeddings or UNKNOWN_CONTEXT_TOKENS) // STEP_TOKENS)


def _reached(workload: Workload, setup: TrainSetup, reached: int, most: int) -> int:
    """The most steps of a setup's sequence, where it goes beyond what others `reached`: most setups end with one look
    at the next step, so that the search is one setup's."""

    def too_long(steps: int) -> bool:
        return not _fits(workload, setup, steps * STEP_TOKENS)

    first = reached + 1
    if setup.activation_offload and "activation_offload" not in workload.fixed:
        lengths = (replace(workload, seq_len_tokens=steps * STEP_TOKENS) for steps in range(first, most + 1))
        first += next((more for more, one in enumerate(lengths) if offloading_matters(one)), most)
    if first > most or too_long(first):
        return reached
    return first + bisect_left(range(first + 1, most + 1), True, key=too_long)


def _min_memory_setups(workload: Workload, method: str) -> Iterator[TrainSetup]:
    """Setups of a method, the smallest among them: every layer checkpointed, one attention of those that run the same
    kernels (those that keep no tokens x tokens where there are such), any optimizer and loss."""
    fixed = {"kbit_fp32_cast": (False,), **workload.fixed, "method": (method,)}
    try:
        values = dimension_values(replace(workload, fixed=fixed))
    except UsageError:
        return
    fewer = fewer_matrices(workload, values, ())
    for given in (values, {**values, **fewer}) if fewer else (values,):
        yield from _min_memory_setups_of(workload, given, method, fixed)
        for request in further(replace(workload, fixed=fixed), given):
            with suppress(UsageError):  # nothing of it has kernels here
                yield from _min_memory_setups_of(request, dimension_values(request), method, fixed)


def _min_memory_setups_of(
    workload: Workload, given: Mapping[str, tuple[Any, ...]], method: str, fixed: Mapping[str, tuple[Any, ...]]
) -> Iterator[TrainSetup]:
    """Those of one program."""
    values = dict(given)
    values["lora_rank"] = values["lora_rank"][:1]
    if "nf4-double" in values["quantization"]:  # never larger than with plain scales
        values["quantization"] = tuple(one for one in values["quantization"] if one != "nf4")
    if "activation_offload" not in fixed:
        values["activation_offload"] = (False, True)  # where a sequence is long enough for it: `_reached`
    if "kernels" not in fixed and not workload.targets:
        values["kernels"] = values["kernels"][:1]  # a later family is not smaller
    open_method = dict(workload.fixed)  # the branches of a plan that leaves the method open: no 16-bit masters
    for branch in branches(replace(workload, fixed=open_method), {**values, "method": (method,)}):
        layers = own_layers(branch, {**values, "checkpointing": (1,)})
        longest = branch.of_length(_most_steps(workload) * STEP_TOKENS)  # longer than a window, other kernels may run
        by_kernels = same_kernels(workload.model, workload.gpu, longest, values["attention"])
        fused = [names[0] for kernels, names in by_kernels.items() if not UNFUSED & set(kernels)]
        attentions = fused or [names[0] for names in by_kernels.values()]
        for own, attention, optimizer, loss in product(layers, attentions, values["optimizer"], values["loss"]):
            try:
                setup = branch.replace(**own, attention=attention, optimizer=optimizer, loss=loss)
            except SetupError:
                continue
            if setup.compile and not setup.compiled:
                continue
            if not workload.targets or variants_as_run(setup, workload) is not None:
                yield setup


def _fits(workload: Workload, setup: TrainSetup, tokens: int) -> bool:
    group = setup.rolls.num_generations if setup.aim.rolls_out else 1  # generated at once, trained one by one
    lone = setup.of_length(tokens).replace(
        micro_batch_seqs=setup.aim.least(workload.global_batch_seqs), accumulation_steps=group
    )
    return device_peak_bytes(workload.model, workload.gpu, lone) <= workload.budget_bytes
