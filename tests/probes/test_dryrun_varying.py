"""Memory over varying lengths: a dry run's where they do not vary, exact between the lengths that were run."""

import dataclasses
import json
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from finetune_planner.cli.app import run
from planner.core.errors import UsageError
from planner.hardware.gpus import find_gpu
from planner.models.families import spec_from_config
from planner.samples.lengths import OverLengths, micro_batches, stated_lengths
from planner.setup import TrainSetup
from probes.allocator.events import Alloc
from probes.dryrun.trace import Trace, trace_run
from probes.dryrun.varying import Part, Steps, _by_length, _Epoch, over_lengths, steps_of
from probes.stack.configs import load_config
from tests.probes.dryrun_small import reported, small_config
from tests.whole import some

GPU = find_gpu("a100-80gb")
CONFIG = small_config("llama", num_hidden_layers=3)
MODEL = spec_from_config(CONFIG, model_id="small", source="here")
FIXED = TrainSetup(seq_len_tokens=512, micro_batch_seqs=2, lora_rank=4, accumulation_steps=3, expandable_segments=False)


def over(batches: tuple[int, ...], **changes: Any) -> OverLengths:
    return over_lengths(MODEL, GPU, FIXED.replace(**changes), batches, source="here", seed=0)


def test_constant_lengths_are_the_dry_run() -> None:
    replay = over((512,) * 9)
    report = reported(CONFIG, (8, 0), FIXED)
    assert replay.peak_allocated_bytes >= report.prediction.peak_allocated_bytes  # blocks of fixed segments hold more
    assert replay.peak_reserved_bytes == replay.constant_reserved_bytes == report.prediction.peak_reserved_bytes


def test_longer_micro_batches_after_shorter_ones_reserve_more_on_fixed_segments_only() -> None:
    rising = tuple(range(128, 4097, 128))
    fixed = over(rising)
    assert fixed.peak_reserved_bytes > 1.02 * fixed.constant_reserved_bytes
    assert fixed.num_lengths == len(rising)
    assert not fixed.rounded
    growing = over(rising, expandable_segments=True)
    assert growing.fragmentation_fraction < fixed.fragmentation_fraction / 2


@pytest.mark.parametrize("attention", some(["eager", "sdpa"], 2))
def test_sizes_between_the_lengths_that_were_run_are_exact(attention: str) -> None:
    """Attention's scores grow with the square of the length."""

    def traced(length: int) -> Trace:
        setup = FIXED.replace(seq_len_tokens=length, attention=attention)
        return trace_run(load_config(CONFIG), setup, capability=(8, 0))

    at, rounded = _by_length([128, 384, 776, 1024], traced)
    assert not rounded
    for length in (256, 640):
        steps, sizes = at(length)
        there = traced(length)
        assert sizes == [there.origins[number].size_bytes for number in range(len(there.origins))]
        assert steps.crossing == steps_of(there).crossing


def test_a_loss_in_chunks_is_run_at_several_lengths_and_rounded_up() -> None:
    replay = over((64, 2048, 512, 4096), loss="chunked", micro_batch_seqs=8)
    assert replay.rounded
    assert replay.num_retries == 0


def test_what_the_card_cannot_hold_is_said() -> None:
    small = dataclasses.replace(GPU, memory_bytes=2**20)
    assert over_lengths(MODEL, small, FIXED, (64, 512), source="here", seed=0).num_retries is None


def test_a_step_that_leaves_more_behind_is_refused() -> None:
    key = ("micro-batch", "aten.mm", 0)
    parts = [("load", []), ("micro-batch", [Alloc(0, 8)]), ("step", []), ("micro-batch", [Alloc(1, 8)]), ("step", [])]
    steps = Steps(parts=tuple(Part(kind=kind, events=[*events]) for kind, events in parts), crossing={0: key, 1: key})
    with pytest.raises(ValueError, match="does not end as it began"):
        [*_Epoch(lambda _: (steps, [8, 8])).events((8, 8, 8), 1)]
    with pytest.raises(ValueError, match="padded supervised training"):
        over((512,), packing=True)


def test_stated_lengths_have_the_mean_and_the_deviation() -> None:
    lengths = stated_lengths("3234:2547")
    mean = sum(lengths) / len(lengths)
    assert mean == pytest.approx(3234, rel=0.01)
    assert (sum((length - mean) ** 2 for length in lengths) / len(lengths)) ** 0.5 == pytest.approx(2547, rel=0.06)
    assert {min(stated_lengths("900:400:800:1000")) >= 800, max(stated_lengths("900:400:800:1000")) <= 1000} == {True}
    for wrong in ("900", "900:0", "a:b", "900:400:5000:5001", "nan:1"):
        with pytest.raises(UsageError):
            stated_lengths(wrong)


def test_micro_batches_hold_the_longest_of_the_epoch_and_the_same_seed_the_same() -> None:
    lengths = (*range(1, 400), 3000)
    for seed in range(5):
        batches = micro_batches(lengths, micro_batch_seqs=2, seq_len_tokens=2048, num=10, seed=seed)
        assert (len(batches), max(batches)) == (10, 2048)
        assert batches == micro_batches(lengths, micro_batch_seqs=2, seq_len_tokens=2048, num=10, seed=seed)
    assert micro_batches([5], micro_batch_seqs=4, seq_len_tokens=2048, num=10, seed=0) == (8,)


def test_estimate_says_it_beside_constant_lengths(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune_planner.app.levels.OVER_MICRO_BATCHES", 8)
    words = ["estimate", "gpt2", "--gpu", "t4", "--seq-len", "128", "--micro-batch", "2", "--lengths", "60:30"]
    assert run([*words, "--no-expandable-segments"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Over 8 shuffled micro-batches of" in text
    assert "all of them at 128:" in text
    assert run([*words, "--json=full"]) == 0
    document = json.loads(capsys.readouterr().out)["over_lengths"]
    assert document["peak_reserved_bytes"] >= document["peak_allocated_bytes"]
    assert (document["seed"], document["longest_tokens"]) == (0, 128)
    assert run([*words, "--no-dry-run"]) == 2
