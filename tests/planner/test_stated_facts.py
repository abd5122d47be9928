"""Facts stated by hand of what an audit's faults got past (docs/faults.md): one small product for each."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from planner.choices.stacks import STACKS
from planner.hardware.gpus import find_gpu
from planner.memory.loss import loss_parts
from planner.memory.micro_batch import checkpointed_inputs_bytes, hooked_bytes
from planner.memory.weights import weight_bytes
from planner.models import catalogue
from planner.models.spec import ModelSpec
from planner.readers import Surroundings, evaluating, read_text
from planner.samples.dataset import measure
from planner.setup import TrainSetup
from planner.throughput import throughput_profile
from planner.throughput.model import UNALIGNED_HEAD


def model(name: str = "meta-llama/Llama-3.2-1B") -> ModelSpec:
    found = catalogue.load(name)
    assert found is not None
    return found


STRATEGIES = {
    ("1", "FULL_SHARD"): True,
    ("2", "SHARD_GRAD_OP"): False,
    ("4", "HYBRID_SHARD"): True,
    ("5", "HYBRID_SHARD_ZERO2"): False,
}
"""(its number, its name) -> whether weights are freed after the forward.

Source: torch.distributed.fsdp.ShardingStrategy.
"""


@pytest.mark.parametrize(("names", "expected"), STRATEGIES.items(), ids=str)
@pytest.mark.parametrize("key", ["fsdp_sharding_strategy", "fsdp_reshard_after_forward"])
def test_fsdps_strategies(key: str, names: tuple[str, str], expected: bool) -> None:
    for name in names[key == "fsdp_reshard_after_forward" :]:
        for written in (name, name.lower()):
            text = f"distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  {key}: {written}\n"
            setup = read_text(text, "accelerate.yaml").setup
            assert setup.reshard_after_forward == expected, (key, written)


OFFLOADS = [
    ({"stage": stage, **block}, offload)
    for stage in (1, 2, 3)
    for block, offload in (
        ({}, "none"),
        ({"cpu_offload": False}, "none"),
        ({"cpu_offload": True}, "optimizer"),
        ({"offload_optimizer": {"device": "none"}}, "none"),
        ({"offload_optimizer": {"device": "cpu"}}, "optimizer"),
        ({"offload_optimizer": {"device": "nvme"}}, "optimizer"),
        ({"cpu_offload": True, "cpu_offload_params": True}, "parameters"),
        ({"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, "parameters"),
    )
    if stage == 3 or offload != "parameters"
]


@pytest.mark.parametrize(("zero", "offload"), OFFLOADS, ids=str)
def test_deepspeeds_ways_of_offloading(zero: dict[str, object], offload: str) -> None:
    """The flags of DeepSpeed before 0.3.16 (`cpu_offload`, `cpu_offload_params`) and the blocks since."""
    text = json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero})
    base = TrainSetup(num_gpus=4, parallel="ddp")
    assert read_text(text, "ds.json", base=base, around=Surroundings(num_gpus=4)).setup.offload == offload


EVALUATED = {
    "trl": ({"eval_strategy": "steps"}, 8),
    "llamafactory": ({"eval_strategy": "steps", "val_size": 0.1}, 8),
    "hf-script": ({"eval_strategy": "steps"}, 8),
    "unsloth-script": ({"eval_strategy": "steps"}, 8),
    "ms-swift": ({"eval_strategy": "steps"}, 1),
}
"""Format -> (settings under which it evaluates, sequences at once by default).

Source: transformers 5.23 TrainingArguments (8); ms-swift 4 `swift/trainers/arguments.py` (1).
"""


@pytest.mark.parametrize("form", EVALUATED)
def test_sequences_that_are_evaluated_at_once(form: str) -> None:
    settings, default = EVALUATED[form]
    assert evaluating.sequences(form, settings) == default
    assert evaluating.sequences(form, {**settings, "per_device_eval_batch_size": 3}) == 3
    assert evaluating.sequences(form, {**settings, "eval_strategy": "no"}) == 0


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("checkpointing", [0, 1])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("reentrant", [False, True])
def test_fsdp_1s_hooks_hold_inputs_once_or_twice(
    reentrant: bool, version: int, checkpointing: int, method: str
) -> None:
    """Under reentrant checkpointing the recomputed input's gradient is held beside each layer's input."""
    fields = {"method": method, "lora_rank": 16 * (method == "lora"), "checkpointing": checkpointing}
    fields["reentrant_checkpointing"] = reentrant
    setup = TrainSetup(num_gpus=4, parallel="fsdp2", fsdp_version=version, **fields)
    held = version == 1 and checkpointing == 1 and method == "lora"
    inputs = 16 * setup.tokens_per_micro_batch * 2048 * 2  # layers x tokens x hidden x bytes
    assert checkpointed_inputs_bytes(model(), setup) in (0, inputs)
    assert hooked_bytes(model(), setup) == ((2 if reentrant else 1) * inputs if held else 0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16-pure"])
def test_a_heads_bias_is_weight_tied_or_not(tied: bool, precision: str) -> None:
    plain = model("meta-llama/Llama-3.2-1B" if tied else "meta-llama/Llama-3.1-8B")
    assert plain.tied == tied
    assert plain.head is not None
    biased = replace(plain, head=replace(plain.head, bias=True))
    setup = TrainSetup(precision=precision)
    more = sum(weight_bytes(biased, setup).values()) - sum(weight_bytes(plain, setup).values())
    assert more == plain.vocab_size * (4 if precision == "fp32" else 2)


@pytest.mark.parametrize("vocab", [8, 50257, 50260, 50262, 50264, 128256, 151665, 151936])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_vocabulary_that_no_tensor_core_divides_is_slow(vocab: int, dtype: str) -> None:
    """Rows of 16-bit values start at multiples of 16 bytes: of 8 values."""
    speed = throughput_profile(model(), find_gpu("rtx-4090"), TrainSetup()).speed
    share = speed.head_rate(dtype, vocab) / speed.rates.matmul[dtype]
    assert share == (1.0 if dtype == "fp32" or vocab * 2 % 16 == 0 else UNALIGNED_HEAD)


@pytest.mark.parametrize("longer", ["chosen", "rejected"])
@pytest.mark.parametrize("prompt", [0, 100])
def test_a_pair_is_as_long_as_its_longer_half(longer: str, prompt: int, tmp_path: Path) -> None:
    """Both halves are padded to one length; four bytes a token, and one that ends it."""
    halves = {"chosen": "a" * 40, "rejected": "a" * 40, longer: "a" * 400}
    rows = [{"prompt": "p" * 4 * prompt, **halves}] * 3
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    assert measure(file, kinds=("preference",)).lengths_tokens == (prompt + 100 + 1,) * 3


def test_what_a_loop_keeps_of_its_outputs_are_all_logits() -> None:
    """A loop whose variable holds the model's outputs holds a full loss's logits into the next forward."""
    one, kept = model(), 0
    for stack in STACKS.values():
        setup = TrainSetup(loss="full", seq_len_tokens=512, micro_batch_seqs=2, stack=stack.name)
        logits = 2 * 512 * one.vocab_size
        found = loss_parts(one, setup).kept_bytes
        assert found in ((2 * logits, 4 * logits) if stack.keeps_outputs else (0,)), stack.name
        kept += stack.keeps_outputs
    assert kept >= 3
