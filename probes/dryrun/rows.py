"""Models that mix tokens one by one in Python: a dry run of short rows, carried to the row asked for.

A scan in plain PyTorch (Mamba, RWKV, RG-LRU without their packages) issues some fifty operators for every token of a
row and layer, whatever the number of rows: two thousand tokens are minutes of tracing. With as many tokens in all, in
shorter rows, everything that grows with tokens stays what it is: weights, activations, the logits, what each step of
the scan keeps. What is left grows with the number of rows (first states) or with the row (scores, masks: rows x tokens
x tokens), so of T tokens in rows of l a byte count is a + b / l + c l. Three short runs say a, b and c; the time is
such a sum too (operators issued grow with l).

Measured: tests/probes/test_rows.py; docs/accuracy/any-model.md.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from planner.setup.interchange import to_jsonable
from probes.dryrun.report import DryRunReport

SHORTEST = {"linear": 64, "softmax": 128}
"""Tokens of the shortest row that is run, by how the model mixes them: a chunk of xLSTM, within which it walks token by
token; flash attention's backward pads its rows to 128."""
TIMES = 4
"""How many times longer the row asked for is at least than the longest that is run."""
PER_TOKEN = 4
"""A class whose forward makes and releases so many tensors more for every further token of a row walks through them."""


def shorter(model: ModelSpec, setup: TrainSetup) -> tuple[TrainSetup, ...]:
    """Three setups of one with as many tokens in all, in shorter rows; none where it has no such, or where a window
    hides something of the row and nothing of a shorter one."""
    tokens, row = setup.micro_batch_seqs * setup.seq_len_tokens, setup.seq_len_tokens
    plain = setup.num_gpus == 1 and setup.objective_spec.supervised and not setup.packing and setup.images is None
    mixers = [layer.attention for layer in model.layer_kinds if layer.attention is not None]
    shortest = max(SHORTEST[mixer.kind] for mixer in mixers)
    hiding = any(mixer.window_tokens is not None and shortest < mixer.window_tokens <= row for mixer in mixers)
    if not plain or hiding or setup.kind.form in ("prompt", "prefix"):
        return ()
    lengths: list[int] = []
    for length in range(shortest, row // TIMES + 1):
        if len(lengths) < 3 and tokens % length == 0 and (not lengths or length >= 2 * lengths[-1]):
            lengths.append(length)
    if len(lengths) < 3:
        return ()
    padded = setup.replace(uneven=setup.pads)
    return tuple(padded.replace(seq_len_tokens=seq_len, micro_batch_seqs=tokens // seq_len) for seq_len in lengths)


def carried(reports: Sequence[DryRunReport], setups: Sequence[TrainSetup], setup: TrainSetup) -> DryRunReport:
    """The report of `setup` from those of its shorter rows, the longest last."""
    lengths = [shortened.seq_len_tokens for shortened in setups]
    row = setup.seq_len_tokens
    weights = [  # of any a + b / l + c l: Lagrange's, of the quadratic l f(l)
        prod(((row - other) / (node - other) for other in lengths if other != node), start=node / row)
        for node in lengths
    ]

    def together(values: Sequence[float]) -> float:
        return max(0.0, sum(weight * value for weight, value in zip(weights, values, strict=True)))

    def summed(tables: Sequence[Mapping[Any, float]]) -> dict[Any, int]:
        keys = dict.fromkeys(key for table in reversed(tables) for key in table)
        return {key: round(together([table.get(key, 0) for table in tables])) for key in keys}

    predictions = [report.prediction for report in reports]
    phases = summed([prediction.phase_peaks_bytes for prediction in predictions])
    groups = {name: summed([report.phase_groups.get(name, {}) for report in reports]) for name in phases}
    peak_phase = max(phases, key=lambda name: phases[name])
    last = predictions[-1]
    gap = last.peak_reserved_bytes / last.peak_allocated_bytes
    overhead_bytes = last.peak_device_bytes - last.peak_reserved_bytes
    peak = phases[peak_phase]
    terms = [
        replace(last.terms[0], category=category, name=name, size_bytes=size, phases=(peak_phase,))
        for (category, name), size in groups[peak_phase].items()
        if size
    ]
    note = (
        f"its token mixer runs token by token: the dry run took rows of {', '.join(map(str, lengths))} tokens, as many "
        f"in all, and carried them to {row:,}"
    )
    times = [prediction.step_time_s for prediction in predictions]
    time_s = together([step_s for step_s in times if step_s is not None]) if None not in times else None
    prediction = replace(
        last,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=round(peak * gap),
        peak_device_bytes=round(peak * gap) + overhead_bytes,
        peak_phase=peak_phase,
        phase_peaks_bytes=phases,
        terms=tuple(sorted(terms, key=lambda term: -term.size_bytes)),
        step_time_s=time_s,
        tokens_per_s=setup.tokens_per_step / time_s if time_s else None,
        time_parts_s={},
        notes=(*last.notes, note),
    )
    seconds = sum(report.elapsed_s for report in reports)
    return replace(reports[-1], prediction=prediction, phase_groups=groups, program=None, elapsed_s=seconds)


def walks_through_tokens(raw_config: Mapping[str, Any]) -> bool:
    """Whether a model's forward makes tensors for every single token of a row."""
    return _walks(json.dumps(to_jsonable(dict(raw_config)), sort_keys=True, default=str))


@lru_cache(maxsize=16)
def _walks(config_text: str) -> bool:
    """The same, of a configuration as text: by forwards of few layers on meta, with rows of two lengths."""
    import torch

    from probes.dryrun.depths import plan_depth
    from probes.dryrun.valued import ValuedTracker, selecting_all
    from probes.stack.build import bare_model
    from probes.stack.configs import load_config

    plan = plan_depth(load_config(json.loads(config_text)), checkpointing=1, full_depth=False)
    model = bare_model(copy.deepcopy(plan.config), torch.bfloat16, "eager").train()
    counts = []
    for tokens in (SHORTEST["linear"], 2 * SHORTEST["linear"]):
        tracker = ValuedTracker("meta")
        with torch.no_grad(), selecting_all(), tracker:
            try:
                model(input_ids=torch.zeros((1, tokens), dtype=torch.int64, device="meta"), use_cache=False)
            except (RuntimeError, ValueError, TypeError, LookupError, AttributeError):  # the dry run itself says why
                return False
        counts.append(len(tracker.events))
    return counts[1] - counts[0] >= PER_TOKEN * SHORTEST["linear"]
