"""Planning on several GPUs: requests are kept, the walk explains itself with bytes, more GPUs are never slower."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from planner.core.errors import UsageError
from planner.frameworks.hyperparameters import choose
from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.memory.engines import why_not
from planner.memory.engines.host import assumed_host_bytes, host_bytes_per_node
from planner.memory.workload import Workload
from planner.planning.answer import plan_workload
from planner.planning.decision.results import LAYOUT_GAIN_FRACTION
from planner.planning.groups import WalkCache
from planner.planning.plan import Answer, NoPlan, Plan
from planner.planning.predict import cannot_run, device_peak_bytes, predict, predict_with_padding
from planner.planning.refine import refine
from planner.planning.targets import with_one_node_note
from planner.setup import TrainSetup
from planner.setup.outcome import Candidate, Fidelity, Prediction
from reports.text import memory_sentence
from tests.planner.helpers import known_of, plan_request, planned, refusal_of
from tests.whole import paired, some

SMALL: dict[str, tuple[Any, ...]] = {
    "attention": ("sdpa",),
    "checkpointing": (0, 1),
    "loss": ("chunked",),
    "optimizer": ("adamw-fused",),
}
"""A space small enough to plan many times in a test."""


def job(
    model: str = "Qwen/Qwen2.5-7B",
    gpu: str = "a100-80gb",
    num_gpus: int = 8,
    *,
    nodes: int | None = None,
    interconnect: str | None = None,
    small: bool = True,
    **options: Any,
) -> Workload:
    card = find_gpu(gpu)
    cluster = make_cluster(card, num_gpus, num_nodes=nodes, interconnect=interconnect) if num_gpus > 1 else None
    options["fixed"] = {**(SMALL if small else {}), **options.get("fixed", {})}
    return plan_request(model, gpu, cluster=cluster, **options)


def chosen_for(*arguments: Any, **options: Any) -> Plan:
    workload = job(*arguments, **options)
    return planned(workload, cache=known_of(workload))


def answer(plan: Plan | NoPlan, words: str) -> Answer:
    return next(each for each in plan.tree if words in each.question)


JOBS: list[tuple[str, str, int, dict[str, Any]]] = [
    ("Qwen/Qwen2.5-7B", "a100-80gb", 8, {}),
    ("Qwen/Qwen2.5-1.5B", "rtx-4090", 2, {}),
    ("Qwen/Qwen2.5-7B", "rtx-4090", 4, {"fixed": {"parallel": ("fsdp2", "zero3")}}),
    ("meta-llama/Llama-3.1-70B", "h100-sxm", 8, {"fixed": {"method": ("lora",)}}),
    ("meta-llama/Llama-3.1-8B", "h100-sxm", 16, {"nodes": 2, "interconnect": "ib-400"}),
    ("meta-llama/Llama-3.1-8B", "a100-80gb", 4, {"fixed": {"tensor_degree": (2,)}}),
    ("meta-llama/Llama-3.1-8B", "l4", 8, {"fixed": {"offload": ("parameters",), "method": ("full",)}}),
    ("meta-llama/Llama-3.1-8B", "t4", 8, {"fixed": {"method": ("qlora",)}}),
]


@pytest.mark.parametrize(("model", "gpu", "num_gpus", "options"), JOBS, ids=str)
def test_the_recommendation_keeps_every_constraint_and_the_walk_explains_itself(
    model: str, gpu: str, num_gpus: int, options: dict[str, Any]
) -> None:
    plan = chosen_for(model, gpu, num_gpus, **options)
    workload = plan.workload
    for candidate in (plan.chosen, *plan.ranked):
        setup = candidate.setup
        assert candidate.fits
        assert setup.num_gpus == num_gpus
        assert setup.global_batch_seqs == workload.global_batch_seqs
        assert why_not(workload.model, setup) == ""
        assert device_peak_bytes(workload.model, workload.gpu, setup) <= workload.budget_bytes
        assert all(getattr(setup, name) in allowed for name, allowed in workload.fixed.items())
        assert setup.method == "full" or setup.lora_rank >= workload.min_rank
    questions = [each.question for each in plan.tree]
    for words in ("one GPU enough", "DDP", "sharded", "Tensor, pipeline or context", "host", "DataParallel"):
        assert any(words in question for question in questions), words
    assert all(each.reason for each in plan.tree)
    for cut in (cut for each in plan.tree for cut in each.cuts):
        assert cut.reason
        assert cut.needed_bytes is None or cut.budget_bytes == workload.budget_bytes
        assert "does not fit" not in cut.reason or (cut.needed_bytes or 0) > workload.budget_bytes
    alone = answer(plan, "one GPU").choice
    assert any(each.label == "one GPU" for each in plan.alternatives) == (alone != "no")


def test_the_walked_figures_are_those_of_the_prediction() -> None:
    plan = chosen_for()
    setup = plan.chosen.setup
    model, gpu, cluster = plan.workload.model, plan.workload.gpu, plan.workload.cluster
    formula = predict_with_padding(model, gpu, setup, cluster, planned=True)
    assert formula == plan.chosen.formula
    micro = answer(plan, "Which micro-batch").needed_bytes
    assert micro == pytest.approx(formula.peak_device_bytes, rel=0.015)


def test_a_prediction_is_the_worst_ranks() -> None:
    setup = TrainSetup(num_gpus=4, parallel="none", pipeline_degree=4, accumulation_steps=8, loss="chunked")
    workload = job()
    formula = predict(workload.model, workload.gpu, setup)
    assert len(formula.rank_peaks) > 1
    assert formula.peak_device_bytes == max(size for _, _, size in formula.rank_peaks)
    assert sum(number for _, number, _ in formula.rank_peaks) == 4
    assert any("fullest" in note for note in formula.notes)
    assert formula.memory_band_fraction > predict(workload.model, workload.gpu, TrainSetup()).memory_band_fraction


@pytest.mark.parametrize(("method", "gpu"), paired(["full", "lora", "qlora"], ["a100-80gb", "rtx-4090"], 1))
def test_more_gpus_are_never_slower(method: str, gpu: str) -> None:
    """Up to the margin by which a simpler spread may be slower; global batch constant, so up to where it lasts."""
    speeds = []
    for num_gpus in (1, 2, 4, 8):
        plan = plan_workload(job("Qwen/Qwen2.5-1.5B", gpu, num_gpus, fixed={"method": (method,)}), explained=False)
        if isinstance(plan, Plan):
            speeds.append(plan.chosen.tokens_per_s)
    assert len(speeds) >= 2
    for fewer, more in itertools.pairwise(speeds):
        assert more * (1 + LAYOUT_GAIN_FRACTION) >= fewer


def test_a_faster_link_is_never_slower() -> None:
    speeds = [
        chosen_for(num_gpus=16, nodes=2, interconnect=link, fixed={"method": ("full",)}).chosen.tokens_per_s
        for link in ("ethernet-10", "ethernet-100", "ib-400", "ib-3200")
    ]
    for slower, faster in itertools.pairwise(speeds):
        assert faster * (1 + LAYOUT_GAIN_FRACTION) >= slower


MIXED = {"method": ("full",), "precision": ("bf16-mixed",)}


def test_ddp_where_everything_fits_on_every_gpu() -> None:
    """Of equals, whose adapters make the optimizer's step cheap: FSDP2 is not 3 % faster."""
    plan = chosen_for("Qwen/Qwen2.5-1.5B", "rtx-4090", 2, fixed={"method": ("lora",)})
    assert plan.chosen.setup.parallel == "ddp"
    assert answer(plan, "DDP").choice == "yes, taken"
    assert answer(plan, "sharded").choice == "nothing"


def test_sharding_where_the_states_do_not_fit() -> None:
    plan = chosen_for("Qwen/Qwen2.5-7B", "a100-80gb", 8, fixed=MIXED)
    assert plan.chosen.setup.shards == 8
    ddp = answer(plan, "DDP")
    assert ddp.choice == "no"
    assert ddp.needed_bytes is not None
    assert ddp.needed_bytes > plan.workload.budget_bytes


def test_quantization_is_discussed_from_four_gpus_on() -> None:
    assert "rarely" in answer(chosen_for(num_gpus=4), "quantized base help on 4 GPUs").reason
    assert not any("quantized base help" in each.question for each in chosen_for(num_gpus=2).tree)


def test_offloading_only_where_nothing_else_fits() -> None:
    plan = chosen_for("Qwen/Qwen2.5-7B", "rtx-4090", 4, fixed={"method": ("full",), "precision": ("bf16-mixed",)})
    assert plan.chosen.setup.offload != "none"
    assert answer(plan, "host").reason == "nothing surely fits on the GPUs alone"
    assert chosen_for("Qwen/Qwen2.5-7B", "rtx-4090", 4).chosen.setup.offload == "none"


def test_offloading_where_slow_links_leave_room_for_no_larger_micro_batch() -> None:
    """Two RTX 4090 that offload were else planned 1.6 times as fast as four that do not (November 2026)."""
    fixed = {"method": ("full",), "precision": ("bf16-pure",), "loss": ("liger",)}
    plan = chosen_for("meta-llama/Llama-3.1-8B", "rtx-4090", 4, fixed=fixed)
    assert plan.chosen.setup.offload == "parameters"
    assert "waits longer for their links" in answer(plan, "host").reason


def test_offloaded_a_quantized_base_stays_unless_clearly_slower() -> None:
    """32B on two cards of 24 GB: a quarter of the host's memory at the same speed."""
    plan = chosen_for("Qwen/Qwen2.5-32B", "rtx-4090", 2, fixed={"offload": ("parameters",)})
    assert (plan.chosen.setup.method, plan.chosen.setup.offload) == ("qlora", "parameters")
    assert "quarter of its base in the host's memory" in answer(plan, "LoRA (16-bit base)").reason


def test_a_quantized_base_that_no_card_loads_whole_is_dealt_out_by_layers() -> None:
    """transformers 5 makes all 4-bit weights on every GPU before FSDP2 or ZeRO-3 cuts them: 37 GiB of a 70B."""
    fixed = {"method": ("qlora",)}
    layer_by_layer = chosen_for("meta-llama/Llama-3.1-70B", "rtx-4090", 4, fixed=fixed, targets=("trl",))
    assert layer_by_layer.chosen.setup.parallel == "device-map"
    staged = chosen_for("meta-llama/Llama-3.1-70B", "rtx-4090", 4, fixed=fixed).chosen  # in the host, by Axolotl
    assert (staged.setup.stack, staged.setup.parallel, staged.setup.offload) == ("axolotl", "fsdp2", "parameters")
    assert staged.tokens_per_s > 2 * layer_by_layer.chosen.tokens_per_s
    assert "makes the whole quantized model (36.80 GiB) on every GPU" in layer_by_layer.notes[0]
    cut = chosen_for("meta-llama/Llama-3.1-70B", "a6000", 2, interconnect="nvlink", fixed=fixed)
    assert cut.chosen.setup.parallel == "fsdp2"
    card, model, setup = find_gpu("rtx-4090"), cut.workload.model, cut.chosen.setup
    assert any("before FSDP2 cuts it" in reason for reason in cannot_run(model, card, setup))
    unloaded = Candidate(setup=setup, budget_bytes=card.memory_bytes, formula=predict(model, card, setup))
    assert not unloaded.fits
    assert memory_sentence(unloaded).startswith("It cannot run (see Notes)")
    assert not cannot_run(model, card, setup.replace_trusted(transformers_version="4.57"))


def test_what_one_card_loads_is_not_what_another_of_its_kind_does() -> None:
    """One cache serves cards that run the same kernels; of 24 GB none loads the 4-bit 70B that one of 48 GB does."""
    cache, small = WalkCache(), job("meta-llama/Llama-3.1-70B", "rtx-4090", 4)
    twice = 2 * small.gpu.memory_bytes
    large = replace(small, gpu=replace(small.gpu, memory_bytes=twice), memory_bytes=twice)
    alone = plan_workload(small, explained=False)
    plan_workload(large, cache=cache, explained=False)
    after = plan_workload(small, cache=cache, explained=False)
    assert isinstance(alone, Plan)
    assert isinstance(after, Plan)
    assert after.chosen.setup == alone.chosen.setup


def test_offloading_beyond_a_usual_host_is_refused_with_its_bytes() -> None:
    """70B with 12 bytes and more per parameter do not fit beside two consumer cards; who asks for it is believed."""
    fixed = {"method": ("full",)}
    workload = job("meta-llama/Llama-3.1-70B", "rtx-4090", 2, fixed=fixed)
    plan = refusal_of(workload)
    assert "host memory" in answer(plan, "host's memory").reason
    setup = TrainSetup(
        method="full", lora_rank=0, precision="bf16-mixed", num_gpus=2, parallel="fsdp2", offload="parameters"
    )
    assert host_bytes_per_node(workload.model, setup, 1) > assumed_host_bytes(workload)
    offloaded_plan = planned(
        job("meta-llama/Llama-3.1-70B", "rtx-4090", 2, fixed={**fixed, "offload": ("parameters",)})
    )
    assert any("host's memory" in note for note in offloaded_plan.chosen.formula.notes)


@pytest.mark.parametrize("gpu", some(["rtx-4090", "l4", "a100-40gb"], 3))
def test_16_bit_master_weights_only_when_asked_for(gpu: str) -> None:
    """Whatever stages are walked: full fine-tuning keeps fp32 master weights, as on one GPU."""
    plan = chosen_for("meta-llama/Llama-3.1-8B", gpu, 4, fixed={"loss": ("chunked", "full")})
    for candidate in (plan.chosen, *plan.ranked, *(each.candidate for each in plan.alternatives)):
        assert candidate.setup.method != "full" or candidate.setup.precision == "bf16-mixed"


def test_tensor_and_pipeline_are_compared_where_communication_is_slow() -> None:
    plan = chosen_for(
        "meta-llama/Llama-3.1-8B", "a100-80gb", 16, nodes=2, interconnect="ethernet-10", fixed={"method": ("full",)}
    )
    cuts = [cut.branch for cut in answer(plan, "Tensor, pipeline or context").cuts]
    assert any(branch.startswith("pipeline") for branch in cuts)
    assert "tensor parallelism across nodes" in cuts


def test_nothing_fits_says_what_every_kind_of_spread_needs() -> None:
    no_plan = refusal_of(
        job("meta-llama/Llama-3.1-70B", "rtx-4090", 2, fixed={"method": ("lora",), "offload": ("none",)})
    )
    assert no_plan.missing_bytes > 0
    assert any(suggestion.action.startswith("--gpus") for suggestion in no_plan.suggestions)
    assert answer(no_plan, "sharded over the GPUs").choice == "no"


def test_a_global_batch_that_cannot_be_dealt_out_is_an_error_with_a_hint() -> None:
    with pytest.raises(UsageError) as error:
        plan_workload(job(num_gpus=8, global_batch=3, fixed={"parallel": ("ddp",)}))
    assert "3 sequences" in error.value.message
    assert "--global-batch 8" in error.value.hint


def test_a_small_global_batch_is_spread_by_splitting() -> None:
    plan = chosen_for("meta-llama/Llama-3.1-8B", num_gpus=8, global_batch=4, fixed={"method": ("full",)})
    assert plan.chosen.setup.data_degree == 4
    assert plan.chosen.setup.tensor_degree * plan.chosen.setup.pipeline_degree == 2
    assert "4 sequences" in answer(plan, "sharded").reason


@pytest.mark.parametrize(
    ("fixed", "word"),
    [
        ({"quantization": ("int8",), "method": ("qlora",)}, "int8"),
        ({"loss": ("liger",), "method": ("lora",)}, "Liger's fused loss"),
        ({"optimizer": ("adamw-8bit",)}, "issue 1633"),
    ],
)
def test_what_no_engine_runs_is_an_error_with_its_reason(fixed: dict[str, tuple[str, ...]], word: str) -> None:
    with pytest.raises(UsageError) as error:
        plan_workload(job(num_gpus=8, fixed={"parallel": ("fsdp2",), **fixed}))
    assert word in error.value.message


def test_the_default_global_batch_can_be_dealt_out() -> None:
    for num_gpus in (2, 3, 8, 64):
        workload = job(num_gpus=num_gpus, nodes=num_gpus // 8 or None)
        assert workload.global_batch_seqs % num_gpus == 0
        assert workload.global_batch_seqs >= 32
    assert job(num_gpus=1).global_batch_seqs == 32


def test_dry_runs_correct_spreads_one_by_one() -> None:
    """A dry run that finds FSDP2 far too large sends the plan to another layout, and nothing is run twice."""
    workload = job("Qwen/Qwen2.5-7B", "a100-80gb", 8, fixed={"method": ("full",)})
    log: list[TrainSetup] = []

    def run(setup: TrainSetup) -> Prediction:
        log.append(setup)
        formula = predict(workload.model, workload.gpu, setup, workload.cluster)
        ratio = 5.0 if setup.parallel == "fsdp2" else 1.0
        return replace(
            formula, level=Fidelity.DRY_RUN, peak_device_bytes=int(formula.peak_device_bytes * ratio), tokens_per_s=None
        )

    plan = refine(lambda corrections: plan_workload(workload, corrections), run)
    assert isinstance(plan, Plan)
    assert plan.chosen.fits
    assert plan.chosen.setup.parallel != "fsdp2"
    assert len(set(log)) == len(log)


def test_hyperparameters_follow_the_global_batch_not_the_number_of_gpus() -> None:
    fixed = {"method": ("full",)}
    single_gpu_plan = planned(job("Qwen/Qwen2.5-1.5B", "a100-80gb", 1, global_batch=32, fixed=fixed))
    for num_gpus in (2, 8):
        many = chosen_for("Qwen/Qwen2.5-1.5B", "a100-80gb", num_gpus, global_batch=32, fixed=fixed)
        assert choose(many.chosen.setup) == choose(single_gpu_plan.chosen.setup)


def test_what_only_may_fit_gives_way_to_the_hosts_memory() -> None:
    """Full fine-tuning of 70B on 8 x H100: 16-bit weights without masters were taken with "it may run out"."""
    plan = chosen_for("meta-llama/Llama-3.1-70B", "h100-sxm", 8, small=False, fixed={"method": ("full",)})
    assert (plan.chosen.verdict, plan.chosen.setup.offload != "none") == ("fits", True)
    assert any(
        alternative.candidate.verdict == "tight" and alternative.candidate.tokens_per_s > plan.chosen.tokens_per_s
        for alternative in plan.alternatives
    )
    assert answer(plan, "host").reason == "nothing surely fits on the GPUs alone"


def test_a_plan_over_a_slow_network_says_that_one_node_is_faster() -> None:
    """10 Gbit/s Ethernet between two nodes of eight H100: one node alone is more than twice as fast."""
    slow = make_cluster(find_gpu("h100-sxm"), 16, num_nodes=2, interconnect="ethernet-10")
    plan = planned(replace(job("meta-llama/Llama-3.1-8B", "h100-sxm", 16, fixed={"method": ("full",)}), cluster=slow))
    noted = with_one_node_note(plan, WalkCache())
    assert noted.notes[0].startswith("one of these nodes alone is faster: 8 GPUs ")
    alone = replace(plan, workload=replace(plan.workload, cluster=None))
    assert with_one_node_note(alone, WalkCache()).notes == plan.notes
