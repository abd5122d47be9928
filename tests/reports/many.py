"""A plan with many candidates, for the size and speed of reports."""

import itertools

from planner.planning.plan import Plan
from tests.reports.factories import make_candidate, make_plan, make_setup, make_workload


def make_many(num_candidates: int) -> Plan:
    """A plan with `num_candidates` different ranked candidates, the chosen one and alternatives among them."""
    workload = make_workload(global_batch_seqs=64)
    plan = make_plan(workload)
    seen = {
        plan.chosen.setup: plan.chosen,
        **{alternative.candidate.setup: alternative.candidate for alternative in plan.alternatives},
    }
    grid = itertools.product(
        range(8, 8 * 40, 8),
        (1, 2, 4, 8, 16),
        ("paged-adamw-8bit", "adamw-fused", "adamw-8bit", "sgd"),
        (("qlora", "nf4-double"), ("qlora", "nf4"), ("lora", "none")),
        (1, 0),
    )
    for rank, micro_batch, optimizer, (method, quantization), checkpointing in grid:
        if len(seen) == num_candidates:
            break
        setup = make_setup(
            lora_rank=rank,
            micro_batch_seqs=micro_batch,
            accumulation_steps=64 // micro_batch,
            optimizer=optimizer,
            method=method,
            quantization=quantization,
            checkpointing=checkpointing,
        )
        if setup not in seen:
            seen[setup] = make_candidate(setup, workload)
    assert len(seen) == num_candidates
    return make_plan(workload, ranked=tuple(seen.values()))
