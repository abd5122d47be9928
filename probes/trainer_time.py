"""The trainer's own host time: what `transformers.Trainer` does in every step beside forward, backward and optimizer.

    python -m probes.trainer_time        prints JSON; needs no GPU

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
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    logging.getLogger("transformers").setLevel(logging.ERROR)

    class Number(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> dict[str, Any]:
            return {"loss": self.weight * 2.0}

    row = {"input_ids": torch.zeros(SEQ_LEN_TOKENS, dtype=torch.long), "labels": torch.zeros(SEQ_LEN_TOKENS)}
    added = {}
    for accumulation in ACCUMULATIONS:
        begun: list[float] = []
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                output_dir=folder, max_steps=steps, per_device_train_batch_size=1, use_cpu=True, report_to="none",
                gradient_accumulation_steps=accumulation, logging_steps=10, save_strategy="no", disable_tqdm=True,
            )  # fmt: skip

            class Begun(transformers.TrainerCallback):  # type: ignore[misc]
                def on_step_begin(self, *args: Any, began: list[float] = begun, **kwargs: Any) -> None:
                    began.append(time.process_time())

            trainer = transformers.Trainer(
                model=Number(), args=arguments, train_dataset=[row] * (steps * accumulation), callbacks=[Begun()]
            )
            with contextlib.redirect_stdout(sys.stderr):
                trainer.train()
        model = Number()
        optimizer = torch.optim.AdamW(model.parameters())
        bare = []
        for _ in range(steps):
            started = time.process_time()
            for _ in range(accumulation):
                (model(**row)["loss"] / accumulation).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            bare.append(time.process_time() - started)
        whole = [after - before for before, after in pairwise(begun)]
        added[accumulation] = median(whole[THROWN_AWAY:]) - median(bare[THROWN_AWAY:])
    few, more = ACCUMULATIONS
    per_micro_batch = max(0.0, (added[more] - added[few]) / (more - few))
    return {
        "transformers": transformers.__version__,
        "per_step_s": max(0.0, added[few] - per_micro_batch),
        "per_micro_batch_s": per_micro_batch,
        "added_s": {str(name): value for name, value in added.items()},
    }


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    print(json.dumps(trainer_host_times()))
