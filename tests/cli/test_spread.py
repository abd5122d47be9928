"""Flags for several GPUs: what they mean, what contradicts, and that nothing typed ends in a traceback."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from finetune_planner.app.machine import default_store_path, local_link
from finetune_planner.cli.app import run
from finetune_planner.cli.request_options import RequestOptions
from finetune_planner.cli.setup_flags import PARALLELS
from planner.core.errors import UsageError
from planner.core.units import gib
from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.planning.option_values import duration_s
from planner.planning.plan import Plan
from planner.planning.plan_request import PlanRequest
from planner.setup import TrainSetup
from probes.dryrun.cache import default_directory
from probes.gpu.topology import Topology
from reports.setup_text import adapters_note
from tests.whole import some

FAST = ["--no-dry-run", "--attention", "sdpa", "--loss", "chunked", "--optimizer", "adamw-fused"]
ONE = ["--no-dry-run", "--attention", "sdpa", "--loss", "chunked"]


@pytest.mark.parametrize("loss_on", ["answers", "all"])
def test_cut_sequences_of_chats_have_a_file(loss_on: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """torchtitan alone packs them, and has no loss on answers: where that is wanted they are planned for TRL."""
    data = tmp_path / "chats.jsonl"
    ask = {"role": "user", "content": "a " * 40}
    chats = [{"messages": [ask, {"role": "assistant", "content": "b " * 20 * num}]} for num in range(40)]
    data.write_text("\n".join(map(json.dumps, 10 * chats)))
    model = "meta-llama/Llama-3.1-8B"
    words = [model, "--gpu", "8xH100", "--seq-len", "8192", "--context-degree", "2", "--method", "full"]
    assert run([*words, "--dataset", str(data), "--loss-on", loss_on, "--json=full", *FAST[:3]]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["chosen"]["setup"]["packing"] == (loss_on == "all")
    assert ("torchtitan" in plan["workload"]["targets"]) == (loss_on == "all")


@pytest.mark.parametrize("parallel", some(PARALLELS, 4))
def test_a_wish_for_one_way_is_kept(parallel: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["Qwen/Qwen2.5-1.5B", "--gpu", "a100-80gb", "--gpus", "4", "--parallel", parallel, "--json=full", *FAST]
    assert run(arguments) == 0
    assert json.loads(capsys.readouterr().out)["chosen"]["setup"]["parallel"] == parallel


def test_estimate_of_one_spread(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["estimate", "Qwen/Qwen2.5-7B", "--gpu", "a100-80gb", "--gpus", "8", *ONE, "--json=full"]
    estimates = {}
    for name, flags in {
        "ddp": [],
        "fsdp2": ["--parallel", "fsdp2"],
        "kept": ["--no-reshard"],
        "hybrid": ["--shard-degree", "4"],
        "tensor": ["--tensor-degree", "4", "--method", "full"],
        "pipeline": ["--pipeline-degree", "4", "--accumulation", "4", "--method", "full", "--loss", "full"],
        "host": ["--offload", "parameters"],
    }.items():
        assert run([*arguments, *flags]) == 0, name
        estimates[name] = json.loads(capsys.readouterr().out)
    peaks = {name: estimate["formula"]["peak_device_bytes"] for name, estimate in estimates.items()}
    assert peaks["host"] < peaks["fsdp2"] < peaks["hybrid"] < peaks["ddp"]
    assert peaks["fsdp2"] < peaks["kept"]
    setups = {name: estimate["setup"] for name, estimate in estimates.items()}
    assert setups["ddp"]["parallel"] == "ddp"
    assert {setups[name]["parallel"] for name in ("fsdp2", "kept", "hybrid", "tensor", "host")} == {"fsdp2"}
    assert len(estimates["pipeline"]["formula"]["rank_peaks"]) > 1


def test_estimate_of_the_older_fsdp_keeps_what_its_hooks_keep(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["estimate", "Qwen/Qwen2.5-7B", "--gpu", "a100-80gb", "--gpus", "8", "--method", "lora", *ONE]
    peaks = {}
    for version in (1, 2):
        flags = ["--parallel", "fsdp2", "--fsdp-version", str(version)]
        assert run([*arguments, *flags, "--json=full"]) == 0
        peaks[version] = json.loads(capsys.readouterr().out)["formula"]["peak_device_bytes"]
        assert run([*arguments, *flags]) == 0
        assert f"(FSDP{version})" in capsys.readouterr().out
    assert peaks[1] > peaks[2]
    assert run([*arguments, "--parallel", "zero3", "--fsdp-version", "1"]) == 2


def test_estimate_says_over_which_links(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["estimate", "Qwen/Qwen2.5-7B", "--gpu", "a100-80gb", "--gpus", "16", "--parallel", "fsdp2", *ONE]
    speeds = []
    for link in ("ethernet-10", "ib-3200"):
        assert run([*arguments, "--interconnect", f"pcie+{link}", "--json=full"]) == 0
        estimate = json.loads(capsys.readouterr().out)
        assert estimate["cluster"] == {"num_nodes": 2, "within": "pcie-gen4-x16", "between": link}
        speeds.append(estimate["formula"]["tokens_per_s"])
    assert speeds[0] < speeds[1]
    assert run([*arguments, "--interconnect", "ib-400"]) == 0
    assert "2 nodes talk over InfiniBand 400 Gbit/s per node (1 x NDR)" in " ".join(capsys.readouterr().out.split())


def test_several_apple_gpus_are_no_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gpt2", "--gpu", "apple-m2-max", "--gpus", "2", *FAST]) == 2
    assert "no engine" in capsys.readouterr().err
    arguments = ["which-cluster", "gpt2", "--dataset-tokens", "1000000", "--gpu", "apple-m2-max", "--max-gpus", "2"]
    assert run([*arguments, "--json=full"]) == 0
    assert {option["num_gpus"] for option in json.loads(capsys.readouterr().out)["options"]} == {1}


def test_slices_of_one_machine_are_no_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    """Before: DDP on two, whose second process finds no cuda:1."""
    words = ["Qwen/Qwen2.5-0.5B", "--gpu", "A100 MIG 3g.40gb", "--gpus", "2", *FAST]
    assert run(words) == 2
    assert "MIG slices" in capsys.readouterr().err
    assert run([*words, "--nodes", "2"]) == 0


def test_check_names_another_way_of_spreading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Full fine-tuning of 7B under DDP does not fit on 80 GB; sharded it does, and nothing trained changes."""
    config = tmp_path / "sft.yaml"
    config.write_text(
        "model_name_or_path: Qwen/Qwen2.5-7B\nper_device_train_batch_size: 2\nbf16: true\ndtype: float32\n"
        "max_length: 2048\ngradient_checkpointing: true\n"
    )
    assert run(["check", str(config), "--gpu", "a100-80gb", "--gpus", "8", "--no-dry-run", "--json=full"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["setup"]["parallel"] == "ddp"
    fsdp2 = next(change for change in answer["changes"] if change["label"] == "FSDP2")
    assert fsdp2["verdict"] == "fits"
    assert not fsdp2["changes_training"]
    assert fsdp2["saves_bytes"] > 0
    assert run(["check", str(config), "--gpu", "a100-80gb", "--no-dry-run", "--json=full"]) in (1, 3)
    single = json.loads(capsys.readouterr().out)
    assert not any("FSDP2" in change["label"] for change in single["changes"])


def test_which_gpu_for_several_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["which-gpu", "Qwen/Qwen2.5-1.5B", "--vendor", "Intel", "--method", "lora", "--json=full"]
    assert run(arguments) == 0
    alone = {row["gpu"]: row for row in json.loads(capsys.readouterr().out)["cards"]}
    assert run([*arguments, "--gpus", "4"]) == 0
    together = {row["gpu"]: row for row in json.loads(capsys.readouterr().out)["cards"]}
    assert set(alone) == set(together)
    for key, row in together.items():
        assert row["candidate"]["setup"]["num_gpus"] == 4
        assert row["tokens_per_s"] > alone[key]["tokens_per_s"]
    plan = ["Qwen/Qwen2.5-1.5B", "--gpu", "arc-a580", "--gpus", "4", "--method", "lora", "--no-dry-run", "--json=full"]
    assert run(plan) == 0
    assert json.loads(capsys.readouterr().out)["chosen"]["setup"] == together["arc-a580"]["candidate"]["setup"]


def test_which_cluster_names_smallest_cheapest_and_fastest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cards = ["--gpu", "a100-80gb", "--max-gpus", "2"]
    arguments = ["which-cluster", "Qwen/Qwen2.5-7B", "--dataset-tokens", "20000000", *cards]
    limits = ["--deadline", "24h", "--budget", "100"]
    assert run([*arguments, *limits, "--json=full", "--out", str(tmp_path / "rent")]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["recommended_method"] == "full"
    for picks in answer["picks"].values():
        for pick in picks.values():
            assert pick["meets"]
            assert pick["duration_s"] <= 24 * 3600
            assert pick["cost_usd"] <= 100
            assert pick["peak_device_bytes"] <= pick["budget_bytes"]
    for node, picks in answer["picks"].items():
        matching = [option for option in answer["options"] if option["method"] == node and option["meets"]]
        if picks:
            assert picks["smallest"]["num_gpus"] == min(option["num_gpus"] for option in matching)
            assert picks["cheapest"]["cost_usd"] == min(option["cost_usd"] for option in matching)
            assert picks["fastest"]["duration_s"] == min(option["duration_s"] for option in matching)
    for option in answer["options"]:
        hours = 20e6 / option["tokens_per_s"] / 3600
        assert option["cost_usd"] == pytest.approx(hours * option["usd_per_gpu_hour"] * option["num_gpus"])
        assert option["setup"]["num_gpus"] == option["num_gpus"]
    report = (tmp_path / "rent" / "report.md").read_text()
    matching = [option for option in answer["options"] if option["method"] == "full" and option["meets"]]
    for option in matching:
        assert f"| {option['num_gpus']} × {option['gpu']} " in report


def test_which_cluster_takes_a_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own lengths decide the time, and the next command plans the same job."""
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(f'{{"question": "why", "answer": "{"so " * (9 + at)}"}}\n' for at in range(300)))
    words = ["which-cluster", "gpt2", "--gpu", "h100-sxm", "--max-gpus", "2", "--method", "lora"]
    assert run([*words, "--dataset", str(data), "--epochs", "2", "--json=full"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["job"].startswith("chats.jsonl, 2 epochs of ")
    option = answer["options"][0]
    assert option["setup"]["seq_len_tokens"] < 1024  # gpt2's own, where no data say less
    assert option["duration_s"] != pytest.approx(
        answer["tokens"] / option["tokens_per_s"]
    )  # what is padding trains nothing
    assert "2026-" in option["price_source"]
    assert run([*words, "--dataset", str(data)]) == 0
    assert f"--dataset {data}" in " ".join(capsys.readouterr().out.split())
    assert run(words) == 2
    assert "--dataset FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--budget", "0"], 2, "--budget must be US dollars"),
        (["--price", "-1"], 2, "--price must be US dollars"),
        (["--interconnect", "string"], 2, "unknown interconnect 'string'"),
        (["--targets", "q proj"], 2, "--targets must be attention, all-linear or module names"),
        (["--targets", "9"], 2, "left out t4 from here on: LoRA targets 9 match no module"),
        (["--interconnect", "nvlink", "--method", "lora"], 0, "left out t4 from here on: Tesla T4 has no NVLink"),
    ],
)
def test_which_cluster_says_what_it_cannot_plan(
    options: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["which-cluster", "gpt2", "--gpu", "t4", "--max-gpus", "2", "--dataset-tokens", "1M"]
    assert run([*command, *options]) == code
    assert words in capsys.readouterr().err


def test_which_cluster_says_when_nothing_keeps_the_limits(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpu", "l4", "--max-gpus", "2", "--method", "lora", "--dataset-tokens"]
    assert run(["which-cluster", "Qwen/Qwen2.5-7B", *options, "1000000000", "--deadline", "1m"]) == 1
    assert "The nearest" in capsys.readouterr().out
    assert run(["which-cluster", "meta-llama/Llama-3.1-70B", *options, "1000", "--max-gpus", "1"]) == 1
    assert "Nothing fits" in capsys.readouterr().out


def test_a_table_says_where_its_rows_train_other_adapters() -> None:
    linear, attention = TrainSetup(lora_rank=2), TrainSetup(lora_rank=16, lora_targets="attention")
    full = TrainSetup(method="full", lora_rank=0)
    assert not adapters_note([linear, linear, full])
    words = "rank 2 on all linear layers (2), rank 16 on the attention layers (1). --rank and --targets set it"
    assert words in adapters_note([linear, linear, attention, full])


def test_a_table_says_what_must_lie_in_the_hosts_memory(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["which-cluster", "Qwen/Qwen2.5-7B", "--gpu", "rtx-4090", "--method", "full"]
    words += ["--dataset-tokens", "10000000"]
    assert run([*words, "--max-gpus", "2", "--json=full"]) == 0
    (option,) = json.loads(capsys.readouterr().out)["options"]
    assert option["host_bytes"] > option["memory_bytes"]
    assert run([*words, "--max-gpus", "2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{gib(option['host_bytes'])} in every node's host), " in shown


@pytest.mark.parametrize(
    ("text", "hours"), [("24h", 24), ("90m", 1.5), ("2d", 48), ("1w", 168), ("7200s", 2), ("12", 12), (" 1.5h ", 1.5)]
)
def test_durations(text: str, hours: float) -> None:
    assert duration_s("deadline", text, unit="h") == hours * 3600


@pytest.mark.parametrize("text", ["", "soon", "-1h", "0", "nan", "inf", "1y", "h", "3 parsecs"])
def test_durations_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--deadline must be a time"):
        duration_s("deadline", text, unit="h")


@pytest.mark.parametrize(
    ("pairs", "link"),
    [
        (["NVLink"] * 3, "nvlink"),
        (["NVLink", "PCIe, one switch", "NVLink"], "pcie"),
        (["NVLink"], None),
        ([], None),
    ],
    ids=["all", "some", "not told of all", "not told"],
)
def test_this_machines_links_are_those_that_the_driver_tells(
    pairs: list[str], link: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = ("cuda:0", "cuda:1", "cuda:2")
    names = [(devices[0], devices[1]), (devices[0], devices[2]), (devices[1], devices[2])]
    topology = Topology(devices=devices, nvlinks=(None,) * 3, pairs=dict(zip(names, pairs, strict=False)))
    monkeypatch.setattr("probes.gpu.executors.local_devices", lambda: devices)
    monkeypatch.setattr("probes.gpu.topology.topology", lambda gpus: topology)
    assert local_link(3) == link
    assert local_link(4) is None
    plan_request = RequestOptions(gpus=3)
    assert plan_request.on_links_of("local", find_gpu("a100-80gb")).interconnect == link
    assert plan_request.on_links_of("a100-80gb", find_gpu("a100-80gb")) == plan_request
    assert (
        RequestOptions(gpus=3, interconnect="pcie").on_links_of("local", find_gpu("a100-80gb")).interconnect == "pcie"
    )
    assert plan_request.on_links_of("local", find_gpu("rtx-4090")).interconnect in (
        "pcie",
        None,
    )  # the table knows no NVLink


def test_plan_on_this_machines_gpus_climbs_to_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    refined: list[Plan] = []

    def refine(plan: Plan) -> Plan:
        refined.append(plan)
        return plan

    monkeypatch.setattr("finetune_planner.cli.answer.find_gpu", lambda name: find_gpu("rtx-4090"))
    monkeypatch.setattr("finetune_planner.app.machine.local_link", lambda num: "pcie")
    monkeypatch.setattr("finetune_planner.app.tuning.refine_by_probe", refine)
    words = ["Qwen/Qwen2.5-1.5B", "--gpu", "local", "--gpus", "2", "--method", "lora", *FAST]
    assert run(words) == 0
    assert [plan.workload.num_gpus for plan in refined] == [2]
    assert run([*words, "--no-probe"]) == 0
    assert len(refined) == 1


def test_a_machine_without_the_searchs_library_plans_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bare machine with a GPU: before, both died with a traceback from an import."""
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "optuna" else real(name, *rest))
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    monkeypatch.setattr("finetune_planner.cli.answer.find_gpu", lambda name: find_gpu("rtx-4090"))
    assert run(["Qwen/Qwen2.5-1.5B", "--gpu", "local", "--method", "lora", *FAST]) == 0
    assert "no probes: a search needs optuna" in capsys.readouterr().err
    assert run(["tune", "Qwen/Qwen2.5-1.5B", "--gpu", "rtx-4090"]) == 3
    errors = capsys.readouterr().err
    assert "optuna" in errors
    assert "-m pip install" in errors
    assert default_directory().name == "dry-run"
    monkeypatch.delenv("FINETUNE_PLANNER_STORE", raising=False)
    assert default_store_path().name == "measurements.jsonl"


@pytest.mark.parametrize(
    ("card", "interconnect", "spot", "expected"),
    [
        ("h100-sxm", None, False, (4.5, "Nebius, on-demand, machines joined by ib-3200, 2026-10-10")),
        (
            "h200",
            "efa-400",
            True,
            (2.6162, "CoreWeave, spot, machines joined by ib-3200 where efa-400 is planned, 2026-10-10"),
        ),
        ("a100-80gb", "ib-3200", False, (None, "")),
        ("rtx-pro-6000-blackwell", None, False, (None, "")),
    ],
)
def test_the_price_of_several_machines_is_of_an_offer_with_their_network(
    card: str, interconnect: str | None, spot: bool, expected: tuple[float | None, str]
) -> None:
    model, gpu = catalogue.load("meta-llama/Llama-3.1-8B"), find_gpu(card)
    cluster = make_cluster(gpu, 16, interconnect=interconnect)
    workload = PlanRequest(spot=spot).workload(model, gpu, cluster)
    assert (workload.price_per_hour, workload.price_source) == expected


def test_a_card_that_nobody_joins_over_a_network_is_taken_in_one_node(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["which-cluster", "HuggingFaceTB/SmolLM2-135M", "--dataset-tokens", "1M", "--max-gpus", "16"]
    words += ["--method", "lora", "--precision", "bf16-autocast", "--attention", "sdpa", "--loss", "liger"]
    counts = {}
    for card in ("rtx-pro-6000-blackwell", "h100-sxm"):
        assert run([*words, "--json=full", "--gpu", card]) == 0
        counts[card] = {option["num_gpus"] for option in json.loads(capsys.readouterr().out)["options"]}
    assert max(counts["rtx-pro-6000-blackwell"]) == 8
    assert max(counts["h100-sxm"]) == 16
