"""Facts stated by hand of what an audit's faults got past (docs/faults.md): one small product for each."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from planner.core.errors import NotPlanned
from planner.frameworks.readers import FileContext, evaluating, read_text, sharding
from planner.frameworks.readers.types import ReadConfig
from planner.frameworks.readers.values import Settings
from planner.hardware.gpus import find_gpu
from planner.memory.micro_batch import checkpointed_inputs_bytes, hooked_bytes
from planner.memory.states import weight_bytes
from planner.memory.step import loss_parts
from planner.options.stacks import STACKS
from planner.planning.predict import predict
from planner.samples.dataset import measure
from planner.setup import TrainSetup
from planner.setup.interchange import setup_from_request
from planner.speed.roofline import throughput_profile
from planner.speed.roofline.model import UNALIGNED_HEAD
from tests.planner.helpers import loaded

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
    assert read_text(text, "ds.json", base=base, around=FileContext(num_gpus=4)).setup.offload == offload


def test_liger_leaves_the_loss_alone_where_the_trainer_keeps_the_labels() -> None:
    """ms-swift 4.6 says so itself ("will not take effect"); transformers pops them for a loss function of its own."""
    swift = "swift sft --model Qwen/Qwen2.5-3B --max_length 512 --use_liger_kernel true"
    losses = {"": "liger", " --loss_scale hermes": "full", " --loss_scale last_round+ignore_empty_think": "liger"}
    losses |= {" --label_smoothing_factor 0.1": "full", " --enable_channel_loss true": "full"}
    for more, loss in losses.items():
        setup = read_text(swift + more, "run.sh").setup
        assert (setup.loss, setup.kernels) == (loss, "liger")
    script = (
        "from transformers import *\nmodel = AutoModelForCausalLM.from_pretrained('Qwen/Qwen2.5-3B')\n"
        "rows = tokenizer(texts, max_length=512, truncation=True, padding='max_length')\n"
        "Trainer(model, TrainingArguments(use_liger_kernel=True{}), train_dataset=rows).train()\n"
    )
    for more, loss in {"": "liger", ", label_smoothing_factor=0.1": "full"}.items():
        assert read_text(script.format(more), "t.py").setup.loss == loss


def test_deepspeeds_autotp_cuts_matrices_beside_zero_1_and_2() -> None:
    """LLaMA-Factory's pull request 9602: Qwen2-7B under ZeRO-2 takes about 7 GB less with autotp_size 2."""
    base = TrainSetup(num_gpus=8, parallel="ddp", method="full", lora_rank=0, loss="full", checkpointing=1)

    def read(stage: int, degree: int, num_gpus: int = 8) -> ReadConfig:
        text = {"zero_optimization": {"stage": stage}, "tensor_parallel": {"autotp_size": degree}}
        return read_text(json.dumps(text), "ds.json", base=base, around=FileContext(num_gpus=num_gpus))

    config, gpu = read(2, 2), find_gpu("a100-80gb")
    assert (config.setup.tensor_degree, config.setup.shardable_ranks, len(config.approximations)) == (2, 4, 1)
    peaks = [predict(loaded("Qwen/Qwen2-7B"), gpu, read(2, degree).setup).peak_reserved_bytes for degree in (1, 2)]
    assert (peaks[0] - peaks[1]) / 1e9 == pytest.approx(7, abs=1)
    swift = "NPROC_PER_NODE=8 swift sft --model Qwen/Qwen2-7B --max_length 512 --deepspeed zero2"
    setup = read_text(f"{swift} --deepspeed_autotp_size 2", "run.sh", around=FileContext(num_gpus=8)).setup
    assert (setup.parallel, setup.tensor_degree) == ("zero2", 2)
    for stage, num_gpus in ((3, 8), (1, 4)):
        with pytest.raises(NotPlanned, match="AutoTP over 4 GPUs"):
            read(stage, 4, num_gpus)


def test_litgpts_gelu_is_one_kernel() -> None:
    """LitGPT's tables of 2023, phi-1.5 on an A100: with transformers' single operations 17 to 32 % too high."""
    path = Path(__file__).parents[2] / "benchmarks/data/measured_single_gpu.jsonl"
    rows = [row for row in map(json.loads, path.read_text().splitlines()) if row.get("model") == "microsoft/phi-1_5"]
    assert len(rows) == 5
    for row in rows:
        setup = setup_from_request({**row["setup"], "stack": "litgpt"})
        prediction = predict(loaded("microsoft/phi-1_5"), find_gpu(row["gpu"]), setup)
        assert -0.15 < prediction.peak_allocated_bytes / row["allocated_bytes"] - 1 < 0


EVALUATED = {
    "trl": ({"eval_strategy": "steps"}, 8),
    "llamafactory": ({"eval_strategy": "steps", "val_size": 0.1}, 8),
    "hf-script": ({"eval_strategy": "steps"}, 8),
    "unsloth-script": ({"eval_strategy": "steps"}, 8),
    "ms-swift": ({"split_dataset_ratio": 0.01}, 1),
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


def test_ms_swift_evaluates_when_it_saves_where_there_is_data_for_it() -> None:
    """ms-swift 4.6 `_init_eval_strategy`: eval_strategy is save_strategy where nothing says it, "no" without data."""
    text = "swift sft --model Qwen/Qwen2.5-3B --tuner_type full --max_length 8192 --eval_steps 100"
    expected = {"": 0, " --split_dataset_ratio 0.01": 1, " --split_dataset_ratio 0": 0, " --val_dataset a.jsonl": 1}
    for more, seqs in expected.items():
        assert read_text(text + more, "run.sh").eval_seqs == seqs
        assert read_text(f"{text}{more} --save_strategy no", "run.sh").eval_seqs == 0


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
    hooked = version == 1 and checkpointing == 1 and method == "lora"
    inputs = 16 * setup.tokens_per_micro_batch * 2048 * 2  # layers x tokens x hidden x bytes
    assert checkpointed_inputs_bytes(loaded("meta-llama/Llama-3.2-1B"), setup) in (0, inputs)
    assert hooked_bytes(loaded("meta-llama/Llama-3.2-1B"), setup) == ((2 if reentrant else 1) * inputs if hooked else 0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16-pure"])
def test_a_heads_bias_is_weight_tied_or_not(tied: bool, precision: str) -> None:
    plain = loaded("meta-llama/Llama-3.2-1B" if tied else "meta-llama/Llama-3.1-8B")
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
    speed = throughput_profile(loaded("meta-llama/Llama-3.2-1B"), find_gpu("rtx-4090"), TrainSetup()).speed
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
    spec, num_keeping = loaded("meta-llama/Llama-3.2-1B"), 0
    for stack in STACKS.values():
        whole = {"method": "full", "lora_rank": 0} if stack.steps_in_backward else {}
        setup = TrainSetup(loss="full", seq_len_tokens=512, micro_batch_seqs=2, stack=stack.name, **whole)
        logits = 2 * 512 * spec.vocab_size
        kept_bytes = loss_parts(spec, setup).kept_bytes
        assert kept_bytes in ((2 * logits, 4 * logits) if stack.keeps_outputs else (0,)), stack.name
        num_keeping += stack.keeps_outputs
    assert num_keeping >= 3


MESHES = [
    (shard, copies, tensor, stages)
    for shard in (1, 2, 4)
    for copies in (1, 2)
    for tensor in (1, 2)
    for stages in (1, 2)
    if shard * copies * tensor * stages > 1
]


@pytest.mark.parametrize(("shard", "copies", "tensor", "stages"), MESHES)
@pytest.mark.parametrize("key", ["tp_size", "tp_plan"])
def test_transformers_mesh(key: str, shard: int, copies: int, tensor: int, stages: int) -> None:
    """`DistributedConfig`: each size by its name; a plan for tensor parallelism without a size takes the GPUs left."""
    block = {"fsdp_size": shard, "dp_replicate_size": copies, "pp_size": stages}
    block |= {"tp_size": tensor} if key == "tp_size" else {"tp_plan": "auto"} if tensor > 1 else {}
    settings = Settings({}, "train.py", FileContext(num_gpus=shard * copies * tensor * stages))
    fields = sharding.distributed(settings, block)
    expected: dict[str, object] = {"parallel": "fsdp2"} if shard * copies > 1 else {}
    expected |= {"tensor_degree": tensor} if tensor > 1 else {}
    expected |= {"pipeline_degree": stages} if stages > 1 else {}
    expected |= {"shard_degree": shard} if stages == 1 and shard > 1 and copies > 1 else {}
    assert {name: value for name, value in fields.items() if stages == 1 or name != "shard_degree"} == expected


@pytest.mark.parametrize(("key", "degree"), [("cp_size", 2), ("cp_size", 4), ("sp_size", 2), ("sp_size", 8)])
def test_sequences_that_are_cut(key: str, degree: int) -> None:
    """`ParallelismConfig`: by PyTorch's ring under FSDP2, or by DeepSpeed's Ulysses under ZeRO."""
    settings, mesh = Settings({}, "train.py"), Settings({key: degree}, "mesh")
    engine = {"parallel": "fsdp2" if key == "cp_size" else "zero3"}
    assert sharding.cut_sequences(settings, mesh, {}) == {"context_degree": degree, **engine}
    assert sharding.cut_sequences(settings, mesh, engine) == {"context_degree": degree}
    assert sharding.cut_sequences(settings, Settings({}, "mesh"), engine) == {}


@pytest.mark.parametrize("context", [1, 2])
def test_shards_go_over_the_gpus_of_one_sequence_too(context: int) -> None:
    settings = Settings({}, "train.py", FileContext(num_gpus=8 * context))
    degrees = sharding.hybrid(settings, 8 * context, shard=4, copies=2, tensor=1, context=context)
    assert degrees == {"shard_degree": 4 * context, **({"context_degree": context} if context > 1 else {})}


WORDS = {
    "full_shard": (True, "none"),
    "shard_grad_op": (False, "none"),
    "hybrid_shard_zero2": (False, "none"),
    "full_shard offload": (True, "parameters"),
    "offload,shard_grad_op": (False, "parameters"),
}
"""TrainingArguments' `fsdp` (beside auto_wrap) -> whether weights are freed after the forward, and what leaves."""


@pytest.mark.parametrize("words", WORDS)
def test_fsdps_words(words: str) -> None:
    settings = Settings({}, "train.py", FileContext(num_gpus=8))
    fields = sharding.fsdp_words(settings, f"{words} auto_wrap", {})
    options = fields.get("reshard_after_forward", True), fields.get("offload", "none")
    assert (fields["parallel"], *options) == ("fsdp2", *WORDS[words])
