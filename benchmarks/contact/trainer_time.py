"""The trainer's own host time: what `transformers.Trainer` does in every step beside forward, backward and optimizer.

    python -m benchmarks.contact.trainer_time        prints JSON; needs no GPU

A probe runs the step without the trainer around it. What the trainer adds (fetching and preparing the batch, looking at
the loss, callbacks, schedule, logging) is Python on the host, the same for any model: it is timed on a model of one
number, against the same forward, backward, clipping and optimizer in a bare loop, both in this process's CPU seconds: a
busy machine adds nothing. The trainer reads the loss in every micro-batch (`logging_nan_inf_filter`), so the GPU waits
meanwhile and the time is added to a step, not hidden by it.

Source: transformers 5.23 trainer.py `_inner_training_loop`, `_run_epoch`. Measured: docs/probes.md.
"""

import contextlib
import json
import logging
import os
import sys
import tempfile
import time
from itertools import pairwise
from statistics import median
from typing import Any

STEPS = 60
THROWN_AWAY = 10
ACCUMULATIONS = (1, 4)
SEQ_LEN_TOKENS = 2048


def trainer_host_times(steps: int = STEPS) -> dict[str, Any]:
    """Seconds that the trainer adds: `per_step_s` whatever the accumulation, `per_micro_batch_s` for each of its
    micro-batches, from steps of one and of four."""
    import transformers

    transformers.logging.set_verbosity_error()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    added = {
        accumulation: median(_trainer_s(steps, accumulation)[THROWN_AWAY:])
        - median(_bare_s(steps, accumulation)[THROWN_AWAY:])
        for accumulation in ACCUMULATIONS
    }
    few, more = ACCUMULATIONS
    per_micro_batch = max(0.0, (added[more] - added[few]) / (more - few))
    return {
        "transformers": transformers.__version__,
        "per_step_s": max(0.0, added[few] - per_micro_batch),
        "per_micro_batch_s": per_micro_batch,
        "added_s": {str(name): value for name, value in added.items()},
    }


def _number() -> Any:
    """A model of one number."""
    import torch

    class Number(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> dict[str, Any]:
            return {"loss": self.weight * 2.0}

    return Number()


def _row() -> dict[str, Any]:
    import torch

    return {"input_ids": torch.zeros(SEQ_LEN_TOKENS, dtype=torch.long), "labels": torch.zeros(SEQ_LEN_TOKENS)}


def _trainer_s(steps: int, accumulation: int) -> list[float]:
    """CPU seconds from step to step of `transformers.Trainer`."""
    import transformers

    begun: list[float] = []

    class Begun(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            begun.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=1, use_cpu=True, report_to="none",
            gradient_accumulation_steps=accumulation, logging_steps=10, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=_number(), args=arguments, train_dataset=[_row()] * (steps * accumulation), callbacks=[Begun()]
        )
        with contextlib.redirect_stdout(sys.stderr):
            trainer.train()
    return [after - before for before, after in pairwise(begun)]


def _bare_s(steps: int, accumulation: int) -> list[float]:
    """CPU seconds of each of the same steps in a bare loop."""
    import torch

    model, row = _number(), _row()
    optimizer = torch.optim.AdamW(model.parameters())
    spent = []
    for _ in range(steps):
        started = time.process_time()
        for _ in range(accumulation):
            (model(**row)["loss"] / accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        spent.append(time.process_time() - started)
    return spent


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    print(json.dumps(trainer_host_times()))
