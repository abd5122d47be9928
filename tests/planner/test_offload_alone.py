"""One GPU whose host holds what does not fit: an engine's rank of one."""

import json
from itertools import product
from pathlib import Path

import pytest

from finetune_planner.cli.app import run
from planner.core.errors import SetupError
from planner.core.units import GIB
from planner.hardware.gpus import find_gpu
from planner.memory.engines.host import host_bytes_per_node
from planner.planning.predict import predict
from planner.setup import TrainSetup
from tests.planner.helpers import loaded

FULL = TrainSetup(
    method="full", lora_rank=0, precision="bf16-autocast", checkpointing=1, loss="chunked", micro_batch_seqs=4,
    accumulation_steps=4,
)  # fmt: skip
WAYS = (("fsdp2", "parameters"), ("zero3", "parameters"), ("zero3", "optimizer"), ("zero2", "optimizer"))


@pytest.mark.parametrize(("parallel", "offload"), WAYS)
def test_a_rank_of_one_holds_what_two_hold_together(parallel: str, offload: str) -> None:
    """The states on the host are all of them; on the card are fewer bytes than without, and PCIe costs time."""
    llama, card = loaded("meta-llama/Llama-3.1-8B"), find_gpu("rtx-4090")
    single = FULL.replace(parallel=parallel, offload=offload)
    two = FULL.replace(parallel=parallel, offload=offload, num_gpus=2)
    assert host_bytes_per_node(llama, single, 1) == pytest.approx(host_bytes_per_node(llama, two, 1), rel=0.001)
    alone, offloaded = predict(llama, card, FULL), predict(llama, card, single)
    assert offloaded.peak_allocated_bytes < alone.peak_allocated_bytes - 20 * GIB
    assert offloaded.time_parts_s["offload"] > 0
    assert offloaded.tokens_per_s < alone.tokens_per_s
    more_often = predict(llama, card, single.replace(micro_batch_seqs=1, accumulation_steps=16))
    assert more_often.time_parts_s["offload"] > offloaded.time_parts_s["offload"]  # weights pass once a micro-batch


@pytest.mark.parametrize(("parallel", "offload"), [*product(("none", "ddp", "dp"), ("optimizer", "parameters"))])
def test_an_engine_is_needed_for_it(parallel: str, offload: str) -> None:
    with pytest.raises(SetupError):
        FULL.replace(parallel=parallel, offload=offload)


def test_several_gpus_without_copies_have_nothing_to_shard() -> None:
    with pytest.raises(SetupError, match="does not suit 1 data-parallel copies"):
        FULL.replace(num_gpus=2, tensor_degree=2, parallel="fsdp2", offload="parameters")


def test_one_gpu_shards_nothing_else() -> None:
    for fields in ({"parallel": "fsdp2"}, {"tensor_degree": 2}, {"shard_degree": 2}):
        with pytest.raises(SetupError, match="more than one GPU"):
            FULL.replace(**fields)


def test_where_nothing_fits_the_host_is_named_and_asked_for_it_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "meta-llama/Llama-3.1-8B",
        "--gpu",
        "rtx-4090",
        "--method",
        "full",
        "--no-dry-run",
        "--no-history",
        "--json=full",
    ]
    assert run(words) == 1
    actions = [suggestion["action"] for suggestion in json.loads(capsys.readouterr().out)["suggestions"]]
    (suggestion,) = [action for action in actions if action.startswith("--offload")]
    options, _, words_of_it = suggestion.partition(": ")
    assert words_of_it.startswith("full fine-tuning fits at ")
    assert run([*words, *options.split(), "--out", str(tmp_path / "out")]) == 0
    document = json.loads(capsys.readouterr().out)
    setup = document["chosen"]["setup"]
    assert (setup["num_gpus"], setup["offload"]) == (1, "parameters")
    speed = f"{document['chosen']['formula']['tokens_per_s']:,.0f} tokens/s"
    assert speed in suggestion
    launch = tmp_path / "out" / "launch"
    accelerate = (launch / "trl" / "accelerate.yaml").read_text()
    assert "num_processes: 1" in accelerate
    assert "fsdp_offload_params: true" in accelerate
    run_sh = (launch / "run.sh").read_text()
    assert "--accelerate_config" in run_sh
    # `accelerate launch` of one process without a config file names no rank, and Accelerate wraps nothing then
    assert "--launcher torchrun -- --standalone --nproc-per-node 1" in run_sh


def test_a_mixture_on_a_small_card_under_trl_names_the_hosts_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """In 16 bits: transformers 5 makes all of a quantized base on the card before FSDP2 cuts it."""
    words = ["Qwen/Qwen3-30B-A3B", "--gpu", "rtx-3060-12gb", "--no-dry-run", "--no-history", "--json=full"]
    assert run([*words, "--target", "trl"]) == 1
    actions = [suggestion["action"] for suggestion in json.loads(capsys.readouterr().out)["suggestions"]]
    assert any(
        action.startswith("--offload parameters --host-memory ") and ": LoRA (16-bit base) fits" in action
        for action in actions
    )


def test_a_4_bit_base_that_no_card_loads_stays_in_the_host_under_axolotl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """70B on 24 GB and a host of 64: transformers makes the whole of it on the card, Axolotl on the host."""
    words = ["meta-llama/Llama-3.1-70B", "--gpu", "rtx-4090", "--no-dry-run", "--no-history", "--json=full"]
    assert run(words) == 1
    actions = [suggestion["action"] for suggestion in json.loads(capsys.readouterr().out)["suggestions"]]
    assert actions[0].startswith("--target axolotl --method qlora --offload parameters --host-memory 48: 4-bit QLoRA")
    assert run([*words, "--host-memory", "64", "--out", str(tmp_path / "out")]) == 0
    setup = json.loads(capsys.readouterr().out)["chosen"]["setup"]
    assert (setup["stack"], setup["offload"], setup["quantization"]) == ("axolotl", "parameters", "nf4-double")
    launch = tmp_path / "out" / "launch"
    assert "cpu_ram_efficient_loading: true" in (launch / "axolotl" / "axolotl.yaml").read_text()
    assert not (launch / "trl").exists()  # which could not load it
    assert run([*words, "--method", "qlora", "--offload", "parameters"]) == 0


@pytest.mark.parametrize("words", [["--parallel", "ddp"], ["--parallel", "zero3"], ["--tensor-degree", "2"]])
def test_what_one_gpu_cannot_do_is_still_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gpt2", "--gpu", "t4", "--no-dry-run", *words]) == 2
    assert "needs more than one GPU" in capsys.readouterr().err


@pytest.mark.parametrize(("host", "optimizer"), [("64", "sgd"), ("128", "adamw-fused")])
def test_a_host_of_known_size_takes_what_the_card_does_not(
    host: str, optimizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """8B whole on 24 GB: AdamW's 16-bit states and weights are 59.8 GiB, of which 90 % of 64 do not hold."""
    words = ["meta-llama/Llama-3.1-8B", "--gpu", "rtx-4090", "--method", "full", "--no-dry-run", "--no-history"]
    assert run([*words, "--host-memory", host, "--json=full"]) == 0
    setup = json.loads(capsys.readouterr().out)["chosen"]["setup"]
    assert (setup["offload"], setup["optimizer"]) == ("parameters", optimizer)


def test_a_refusal_ends_with_a_larger_host_and_a_rented_card(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["Qwen/Qwen3-235B-A22B", "--gpu", "rtx-4090", "--samples", "5000", "--no-dry-run", "--no-history"]
    assert run([*words, "--json=full"]) == 1
    actions = [suggestion["action"] for suggestion in json.loads(capsys.readouterr().out)["suggestions"]]
    assert any(action.startswith("--host-memory 177: ") for action in actions)
    assert run(["deepseek-ai/DeepSeek-V3", *words[1:], "--json=full"]) == 1
    actions = [suggestion["action"] for suggestion in json.loads(capsys.readouterr().out)["suggestions"]]
    assert actions == ["--gpu gb300 --gpus 8"]  # no one card holds it, and no usual host
    assert run(["meta-llama/Llama-3.1-8B", *words[1:], "--method", "full", "--json=full"]) == 1
    actions = [suggestion["action"] for suggestion in json.loads(capsys.readouterr().out)["suggestions"]]
    assert any("rented at $" in action and "for the job" in action for action in actions)
