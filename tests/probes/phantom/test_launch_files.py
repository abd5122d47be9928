"""TRL's and transformers' own trainers on the phantom GPU, run from the launch files that `plan --out` writes, against
the dry run of the same setup."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.whole import some

ROOT = Path(__file__).parent.parent.parent.parent
POINTS = (
    "trl: lora bf16-autocast, chunked loss, checkpointing",
    "trl: full bf16-pure, chunked loss, no checkpointing",
    "hf: qlora bf16-autocast + fp32 cast, full loss, checkpointing",
    "hf: lora bf16-autocast, full loss, no checkpointing",
)
TOLERANCE = 0.002
"""Both count the same storages; what differs is a few small tensors that a trainer holds (labels, logged sums)."""


@pytest.mark.slow
def test_the_dry_run_is_what_the_tools_own_trainers_do(warm_programs: Path) -> None:
    points = some(POINTS, 3)
    words = [word for point in points for word in ("--point", point)]
    command = [str(warm_programs / "python"), "-m", "benchmarks.trace_vs_dryrun", "--layers", "2", "--json", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])  # trainers print too
    assert set(rows) == set(points)
    for point, row in rows.items():
        assert "not_run" not in row, (point, row)
        assert abs(row["error_fraction"]) < TOLERANCE, (point, row)
        assert row["dry_run_reserved_bytes"] == pytest.approx(row["traced_reserved_bytes"], rel=0.05), point


REPEATS = """
import json
import sys
from contextlib import suppress
from pathlib import Path

import trl
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaConfig

from planner.hardware.gpus import find_gpu
from probes.phantom.card import TraceOptions, card_of
from probes.phantom.session import phantom_gpu
from probes.phantom.steps import Done
from probes.phantom.summary import summary

folder = Path(sys.argv[1])
LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=512, architectures=["LlamaForCausalLM"], dtype="bfloat16",
).save_pretrained(folder / "model")


def traced(every, trainer, rows, adapters, **settings):
    with phantom_gpu(card_of(find_gpu("a100-80gb")), TraceOptions(num_steps=2, every_micro_batch=every)) as phantom:
        AcceleratorState._reset_state(True)
        arguments = getattr(trl, trainer.replace("Trainer", "Config"))(
            output_dir=str(folder / "out"), per_device_train_batch_size=2, gradient_accumulation_steps=5,
            report_to="none", disable_tqdm=True, **settings,
        )
        more = {"reward_funcs": lambda completions, **_: [1.0] * len(completions)} if "GRPO" in trainer else {}
        with suppress(Done):
            getattr(trl, trainer)(
                str(folder / "model"), args=arguments, train_dataset=Dataset.from_list(rows),
                peft_config=LoraConfig(r=4, task_type="CAUSAL_LM") if adapters else None, **more,
            ).train()
        found = summary(phantom, "done")
        figures = [found.peak_allocated_bytes, found.peak_reserved_bytes, phantom.memory.allocator.allocated_bytes]
        return [*figures, found.phase_peaks_bytes], phantom.num_repeated, found.notes


texts = [{"text": "a" * 300}] * 32
lengths = [{"text": "a" * (20 + 7 * index)} for index in range(32)]
prompts = [{"prompt": "a" * 9}] * 32
for name, *case, settings in (
    ("LoRA", "SFTTrainer", texts, True, {"max_length": 128}),
    ("other shapes", "SFTTrainer", lengths, True, {"max_length": 512}),
    ("GRPO", "GRPOTrainer", prompts, True, {"num_generations": 2, "max_completion_length": 8}),
):
    if name in sys.argv[2:]:
        print("CASE", json.dumps([name, *(traced(every, *case, **settings) for every in (True, False))]))
"""


def test_micro_batches_that_repeat_need_not_be_run(tmp_path: Path, warm_programs: Path) -> None:
    """Of five in each of two steps the fourth does what the two before it did: every figure is equal to the byte."""
    names = some(["LoRA", "GRPO", "other shapes"], 3)
    command = [str(warm_programs / "python"), "-c", REPEATS, str(tmp_path), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    cases = [json.loads(line.removeprefix("CASE ")) for line in done.stdout.splitlines() if line.startswith("CASE ")]
    assert [case[0] for case in cases] == sorted(names, key=["LoRA", "other shapes", "GRPO"].index)
    for name, (every, none, _), (fewer, num_repeated, notes) in cases:
        assert (every, none, num_repeated) == (fewer, 0, 0 if name == "other shapes" else 2), name
        counts = [note.partition(" micro-batches")[0] for note in notes if "repeat the one before" in note]
        assert counts == ["2 of 10"] * (num_repeated > 0), name
