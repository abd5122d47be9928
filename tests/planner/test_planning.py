"""Planning at the formula level: the walk is complete, the tree explains itself, properties hold."""

from dataclasses import replace

import pytest

from finetune_planner.app.levels import SHORTER, answered
from planner.core.errors import UsageError
from planner.core.notes import Place, place_of
from planner.core.units import GIB
from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.memory.workload import Data, Workload
from planner.models import catalogue
from planner.options.rollouts import Rollout
from planner.planning.answer import plan_workload
from planner.planning.decision.layouts import ONE_GPU
from planner.planning.decision.node import Node
from planner.planning.decision.results import Limits, NodeResults, collect_into
from planner.planning.groups import WalkCache
from planner.planning.lora_rank import floor_of, planned_ranks
from planner.planning.plan import CorrectionKey, NoPlan, Plan, correction_key
from planner.planning.plan_request import PlanRequest
from planner.planning.predict import device_peak_bytes, predict
from planner.planning.refine import ANY_SETUP
from planner.planning.space import dimension_values
from planner.planning.walk import WalkedSetup, walk
from planner.setup import TrainSetup
from reports.command import default_next_command
from tests.planner.helpers import known_of, loaded, plan_request, planned, refusal_of
from tests.whole import some, these

AFFINE = 0.015  # the chunked loss tile stops growing at 4,096 tokens, the walk extends it: never below, 1 % above


def chosen_for(**options: object) -> Plan:
    workload = plan_request(**options)  # type: ignore[arg-type]
    return planned(workload, cache=known_of(workload))


def test_walk_predicts_what_predict_predicts() -> None:
    """The shared parts of the walk and the single prediction are one model."""
    workload = plan_request(global_batch=8)
    points = list(walk(workload))[::97]
    assert len(points) > 20
    for point in points:
        assert point.setup.global_batch_seqs == 8
        single = predict(workload.model, workload.gpu, point.setup)
        assert point.peak_device_bytes == pytest.approx(single.peak_device_bytes, rel=AFFINE), point.setup
        assert point.tokens_per_s == pytest.approx(single.tokens_per_s, rel=1e-6), point.setup


def test_walks_on_several_cards_share_their_memory_and_find_the_same() -> None:
    """What differs in memory is told apart (kernels, cuBLAS's workspaces), what differs in speed and size only is
    computed once."""
    lora = {"method": ("lora",)}
    cache, workload = WalkCache(), plan_request("Qwen/Qwen2.5-0.5B", global_batch=4, fixed=lora)
    runs = {}
    for card in ("rtx-4090", "rtx-3090", "l4", "h200", "t4"):
        mine = replace(plan_request("Qwen/Qwen2.5-0.5B", card, global_batch=4, fixed=lora), model=workload.model)
        assert list(walk(mine, cache=cache)) == list(walk(mine))
        runs[card] = cache.runs(mine, dimension_values(mine), ())
    assert runs["l4"] is runs["rtx-4090"]
    assert runs["l4"] is not runs["h200"]


def listing_all(workload: Workload, corrections: dict[CorrectionKey, float] | None = None) -> Plan | NoPlan:
    """The plan of a walk that lists every point."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("planner.planning.decision.results.walk", lambda *given: walk(*given[:4], None, given[5]))
        return plan_workload(workload, corrections)


def test_what_does_not_fit_is_left_out_and_changes_no_choice() -> None:
    memory, model = WalkCache(), plan_request("Qwen/Qwen2.5-1.5B").model
    cards = [("t4", 144), ("apple-m3-max", 60), ("h200", 60), ("rtx-4090", 60), ("mi300x", 60)]
    for card, batch in these(cards[:1], cards):
        workload = replace(plan_request("Qwen/Qwen2.5-1.5B", card, global_batch=batch), model=model)
        whole, taken = listing_all(workload), plan_workload(workload, cache=memory)
        assert taken.subject == whole.subject
        short = plan_workload(workload, cache=memory, num_ranked=1)
        if isinstance(taken, Plan):
            assert short == replace(taken, ranked=taken.ranked[:1])
        every = list(walk(workload, layouts=[ONE_GPU]))
        listed = list(walk(workload, None, [ONE_GPU], memory, lambda _, most=workload.budget_bytes: most))
        assert len(listed) < sum(1 + point.beyond for point in listed) <= len(every)
        fitting = [point for point in every if point.peak_device_bytes <= workload.budget_bytes]
        assert fitting == [
            point._replace(beyond=0) for point in listed if point.peak_device_bytes <= workload.budget_bytes
        ]


@pytest.mark.parametrize(
    ("name", "card", "num_gpus", "corrections"),
    some(
        [
            ("Qwen/Qwen2.5-0.5B", "t4", 2, None),
            ("Qwen/Qwen2.5-1.5B", "rtx-4090", 1, None),
            ("Qwen/Qwen2.5-7B", "h200", 1, {}),
        ],
        2,
    ),
)
def test_checkpoints_that_are_left_out_beside_none_change_no_choice(
    name: str, card: str, num_gpus: int, corrections: dict[CorrectionKey, float] | None
) -> None:
    workload = plan_request(name, card)
    if num_gpus > 1:
        workload = replace(workload, cluster=make_cluster(workload.gpu, num_gpus))
    taken = plan_workload(workload, corrections, explained=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("planner.planning.decision.results.walk", lambda *given: walk(*given[:5]))
        whole = plan_workload(workload, corrections, explained=False)
    assert taken.chosen == whole.chosen
    assert taken.space.walked < whole.space.walked


@pytest.mark.parametrize(
    ("name", "card", "num_gpus", "fewer"),
    [
        ("Qwen/Qwen2.5-0.5B", "t4", 2, True),
        ("Qwen/Qwen2.5-7B", "t4", 1, False),
    ],
)
def test_a_choice_alone_walks_a_quantized_base_only_where_lora_does_not_fit(
    name: str, card: str, num_gpus: int, fewer: bool
) -> None:
    workload = plan_request(name, card)
    if num_gpus > 1:
        workload = replace(workload, cluster=make_cluster(workload.gpu, num_gpus))
    alone, whole = planned(workload, explained=False), planned(workload)
    assert alone.chosen == whole.chosen
    assert (alone.space.walked < whole.space.walked) == fewer


def test_a_corrected_plan_takes_what_fits_when_it_is_corrected() -> None:
    workload, memory = plan_request("Qwen/Qwen2.5-7B", "rtx-4090"), WalkCache()
    first = planned(workload, {}, memory)
    assert first.chosen == listing_all(workload, {}).subject
    for ratio in (0.97, 1.04):
        corrections = {correction_key(first.chosen.setup): ratio, ANY_SETUP: 1.01}
        assert plan_workload(workload, corrections, memory).subject == listing_all(workload, corrections).subject


def test_what_stands_beside_a_plan_fits_where_it_can_though_no_dry_run_looks_at_it() -> None:
    """Where dry runs are to come, what may fit may be chosen: they look at it. An alternative has none."""
    plan = planned(plan_request("meta-llama/Llama-3.1-8B", "rtx-4090"), {})
    beside = {alternative.label: alternative.candidate.verdict for alternative in plan.alternatives}
    assert beside["by TRL"] == beside[Node.EIGHT_BIT.words] == "fits"


def test_a_class_that_padding_leaves_no_room_is_none_that_surely_fits() -> None:
    workload = PlanRequest(fixed={"objective": ("dpo",)}).workload(loaded("Qwen/Qwen2.5-0.5B"), find_gpu("arc-b570"))
    plan = planned(workload)
    assert (plan.chosen.setup.method, plan.chosen.verdict) == ("lora", "fits")


@pytest.mark.parametrize("ratio", [0.7, 0.999, 1.0, 1.0371, 1.3])
def test_the_largest_peak_that_fits_when_corrected_is_the_largest(ratio: float) -> None:
    workload = plan_request("Qwen/Qwen2.5-7B", "rtx-4090")
    limits = Limits(workload.model, workload.budget_bytes, {ANY_SETUP: ratio})
    largest = limits.fitting_bytes(TrainSetup())
    assert int(largest * ratio) <= workload.budget_bytes < int((largest + 1) * ratio) + (ratio < 1)


@pytest.mark.parametrize("card", some(["t4", "rtx-4090", "h200"], 2))
def test_plan_fits_and_names_its_reasons(card: str) -> None:
    plan = chosen_for(gpu=card)
    assert plan.chosen.fits
    assert plan.chosen.formula.peak_device_bytes <= plan.workload.budget_bytes
    assert len(plan.tree) >= 4
    for answer in plan.tree:
        assert answer.reason
        if "fit with one sequence" in answer.question:
            assert answer.needed_bytes
            assert answer.budget_bytes == plan.workload.budget_bytes
    for answer in plan.tree:
        for cut in answer.cuts:
            assert cut.needed_bytes is not None
            assert cut.needed_bytes > plan.workload.budget_bytes


def test_memory_to_spare_is_worth_a_little_speed() -> None:
    """What fits beyond the formula's error goes before what only just fits, at any speed; where nothing does, what
    comes nearest to it."""

    def chosen(*rivals: tuple[float, int]) -> int:
        results = NodeResults()
        model = plan_request().model
        points = [
            WalkedSetup(TrainSetup(), "sdpa", "full", "adamw-fused", 1, 32, peak, speed) for speed, peak in rivals
        ]
        collect_into(points, Limits(model, 1000), lambda shared: results)
        best = results.best()
        return best.peak_device_bytes

    assert chosen((100.0, 999), (97.5, 950)) == 950
    assert chosen((100.0, 999), (60.0, 950)) == 950
    assert chosen((100.0, 999), (98.0, 970)) == 970  # as unsure as the fastest, and smaller
    assert chosen((100.0, 999), (60.0, 970)) == 970
    assert chosen((100.0, 1001), (90.0, 960)) == 960


def test_plan_respects_every_wish() -> None:
    fixed = {
        "method": ("qlora",),
        "quantization": ("nf4",),
        "lora_rank": (64,),
        "lora_targets": ("attention",),
        "optimizer": ("lion-8bit",),
        "checkpointing": (1,),
        "loss": ("liger",),
        "attention": ("sdpa",),
    }
    setup = chosen_for(fixed=fixed, seq_len=1024, global_batch=12).chosen.setup
    for name, (value,) in fixed.items():
        assert getattr(setup, name) == value
    assert (setup.seq_len_tokens, setup.global_batch_seqs) == (1024, 12)


def test_rank_never_falls_below_its_floor() -> None:
    plan = chosen_for(min_rank=48, fixed={"method": ("lora",)})
    assert plan.chosen.setup.lora_rank >= 48
    assert all(each.setup.lora_rank >= 48 for each in plan.ranked)


def test_a_mixture_whose_attention_alone_is_adapted_has_the_rank_of_those_matrices() -> None:
    """Qwen3-30B-A3B by hand: q and o 2,048 x 4,096, k and v 2,048 x 512, 17,408 parameters a rank in each of 48 layers;
    100 M tokens want 50 M parameters, rank 64. Every expert's adapters, of which none is trained, would hold them at 2.
    """
    data = Data(epoch_tokens=100_000_000)
    workload = plan_request("Qwen/Qwen3-30B-A3B", "h100-sxm", fixed={"method": ("lora",)}, data=data)
    assert workload.min_rank == 2
    floor, reason = floor_of(workload, "attention")
    assert (floor, floor_of(workload, "all-linear")[0]) == (64, 2)
    assert f"{64 * 17_408 * 48:,}" in reason
    assert planned_ranks(workload, "attention") == (64, 128)
    assert floor_of(replace(workload, fixed={"lora_rank": (8,)}, min_rank=8), "attention")[0] == 8


def test_tree_notices_that_the_fp32_cast_can_cost_more_than_lora() -> None:
    """bitsandbytes issue 1569: QLoRA with the cast can need more than bf16 LoRA; the walk says what the cast costs."""
    plan = chosen_for(model="Qwen/Qwen2.5-7B", gpu="a100-80gb")
    answer = next(each for each in plan.tree if "4-bit QLoRA" in each.question)
    assert "fp32 cast" in answer.reason


@pytest.mark.parametrize(("model", "named"), [("Qwen/Qwen3.5-4B", True), ("Qwen/Qwen3-4B", False)])
def test_a_package_that_a_speed_stands_on_is_named(model: str, *, named: bool) -> None:
    workload = plan_request(model, "h100-sxm", fixed={"method": ("lora",)})
    plan = planned(workload)
    assert any("flash-linear-attention's kernels" in note for note in plan.chosen.formula.notes) == named
    assert (plan.chosen.setup.linear_attention == "fla") == named
    assert any(answer.choice == "flash-linear-attention" for answer in plan.tree) == named


def test_without_the_package_a_plan_counts_the_loop_and_says_what_it_would_give() -> None:
    workload = plan_request("Qwen/Qwen3.5-4B", "h100-sxm", fixed={"method": ("lora",)})
    plan = planned(replace(workload, absent_packages=("flash-linear-attention",)))
    assert plan.chosen.setup.linear_attention == "torch"
    note = next(note for note in plan.chosen.formula.notes if "transformers' own loop" in note)
    assert "with flash-linear-attention installed" in note
    assert "tokens/s for" in note


def test_a_program_that_no_plan_takes_unasked_is_a_suggestion_where_it_alone_fits() -> None:
    """Unsloth's xformers keeps no tokens x tokens matrix on a T4."""
    arguments = {"fixed": {"method": ("qlora",)}, "seq_len": 8192}
    refused = refusal_of(plan_request("meta-llama/Llama-3.1-8B", "t4", **arguments))
    action = refused.suggestions[0].action
    plan = planned(plan_request("meta-llama/Llama-3.1-8B", "t4", targets=("unsloth",), **arguments))
    assert action == f"--target unsloth: 4-bit QLoRA fits at {plan.chosen.tokens_per_s:,.0f} tokens/s"
    assert plan.chosen.formula.peak_device_bytes < 11 * 2**30


def test_nothing_fits_names_bytes_and_suggestions_smallest_first() -> None:
    no_plan = refusal_of(plan_request("meta-llama/Llama-3.1-70B", "t4"))
    assert no_plan.missing_bytes > GIB
    assert no_plan.nearest.formula.peak_device_bytes - no_plan.workload.budget_bytes == no_plan.missing_bytes
    actions = [suggestion.action for suggestion in no_plan.suggestions]
    assert any(action.startswith("--gpu") for action in actions)
    smaller, saved = next(
        (suggestion.action.partition(": ")[2], suggestion.saves_bytes)
        for suggestion in no_plan.suggestions
        if "smaller model" in suggestion.action
    )
    assert smaller == "meta-llama/Llama-3.1-8B"  # and not Llama 2's larger 13B
    model = loaded(smaller)
    peak = device_peak_bytes(model, no_plan.workload.gpu, no_plan.nearest.setup)
    assert saved == no_plan.nearest.formula.peak_device_bytes - peak > no_plan.missing_bytes


def test_nothing_fits_offers_a_sequence_length_that_does() -> None:
    no_plan = refusal_of(plan_request("meta-llama/Llama-3.1-8B", "t4", seq_len=131_072))
    action = next(suggestion.action for suggestion in no_plan.suggestions if suggestion.action.startswith("--seq-len"))
    shorter = no_plan.nearest.setup.replace(seq_len_tokens=int(action.split()[1]))
    workload = no_plan.workload
    assert predict(workload.model, workload.gpu, shorter).peak_device_bytes <= workload.budget_bytes


def test_a_micro_batch_that_is_asked_for_is_planned_and_said() -> None:
    plan = planned(plan_request("meta-llama/Llama-3.1-8B", "rtx-4090", fixed={"micro_batch_seqs": (4,)}))
    assert (plan.chosen.setup.micro_batch_seqs, plan.chosen.setup.accumulation_steps) == (4, 8)
    assert "fit with 4 sequences?" in plan.tree[0].question
    assert plan.tree[-1].reason.startswith("asked for; ")
    assert "--micro-batch 4 --out" in default_next_command(plan)
    fixed = {"micro_batch_seqs": (16,), "checkpointing": (0,)}
    refused = refusal_of(plan_request("meta-llama/Llama-3.1-8B", "rtx-4090", fixed=fixed))
    assert refused.nearest.setup.micro_batch_seqs == 16
    assert refused.suggestions[0].action.startswith("leave --micro-batch out: ")
    with pytest.raises(UsageError, match="--micro-batch 3 does not divide the 32 sequences"):
        plan_request("meta-llama/Llama-3.1-8B", "rtx-4090", fixed={"micro_batch_seqs": (3,)})


def test_nothing_fits_offers_to_drop_the_users_own_restriction() -> None:
    no_plan = refusal_of(plan_request("meta-llama/Llama-3.1-8B", "rtx-4090", fixed={"method": ("full",)}))
    assert no_plan.suggestions[0].action.startswith("leave --method out: ")


def test_a_restriction_left_out_is_told_as_what_its_plan_takes() -> None:
    """Not as 8-bit QLoRA, which fits too and which no plan takes unasked."""
    no_plan = refusal_of(plan_request("google/gemma-3-4b-it", "t4", fixed={"method": ("full",)}))
    assert no_plan.suggestions[0].action == "leave --method out: 4-bit QLoRA fits"


def test_old_cards_get_fp16() -> None:
    values = dimension_values(plan_request(gpu="t4"))
    assert not any(precision.startswith("bf16") for precision in values["precision"])


def test_headroom_shrinks_the_budget() -> None:
    workload = plan_request(headroom_gib=3.0)
    assert workload.budget_bytes == workload.memory_bytes - 3 * GIB
    assert replace(workload, headroom_bytes=0).budget_bytes == workload.memory_bytes


def test_apple_gpus_get_only_what_runs_on_them() -> None:
    workload = plan_request("meta-llama/Llama-3.2-3B", "apple-m3-max")
    values = dimension_values(workload)
    assert values["optimizer"] == ("adamw-fused",)
    assert "liger" not in values["loss"]
    with pytest.raises(UsageError, match="flash-attention 2"):
        dimension_values(plan_request(gpu="t4", fixed={"attention": ("flash-attention-2",)}))
    with pytest.raises(UsageError, match="Apple"):
        dimension_values(
            plan_request("meta-llama/Llama-3.2-3B", "apple-m3-max", fixed={"optimizer": ("paged-adamw-8bit",)})
        )


@pytest.mark.parametrize(
    ("fixed", "word"),
    [
        ({"method": ("full",), "quantization": ("nf4",)}, "cannot train nf4"),
        ({"method": ("lora",), "quantization": ("nf4",)}, "unquantized"),
        ({"method": ("qlora",), "quantization": ("none",)}, "quantization"),
        ({"precision": ("fp32",), "attention": ("flash-attention-2",)}, "fp32 kernel"),
        ({"method": ("qlora",), "precision": ("fp32",), "attention": ("flash-attention-2",)}, "fp32 kernel"),
        ({"objective": ("orpo",), "adapter": ("prefix",), "method": ("lora",)}, "not planned for objective 'orpo'"),
        ({"objective": ("pretrain",), "adapter": ("ln-tuning",), "method": ("lora",), "lora_rank": (0,)}, "no packing"),
    ],
)
def test_a_contradiction_is_named(fixed: dict[str, tuple[str, ...]], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        plan_workload(plan_request("Qwen/Qwen2.5-0.5B", "rtx-3060", fixed=fixed))


@pytest.mark.parametrize(("gpu", "fused"), [("a100-80gb", True), ("t4", False), ("apple-m3-max", False)])
def test_the_walk_and_the_notes_agree_on_the_attention_kernel(gpu: str, fused: bool) -> None:
    plan = chosen_for(model="meta-llama/Llama-3.2-1B", gpu=gpu, fixed={"attention": ("sdpa",)})
    answer = next(each for each in plan.tree if "attention kernel" in each.question)
    assert answer.reason.startswith("fused kernels keep no") == fused
    assert any("math kernel" in note for note in plan.chosen.formula.notes) != fused


def test_what_a_person_would_trip_over_is_noted() -> None:
    mixtral, gpt2 = loaded("mistralai/mixtral-8x7b-v0.1"), catalogue.load("gpt2")
    card = find_gpu("h100-sxm")
    notes = predict(mixtral, card, TrainSetup(method="qlora", quantization="nf4", lora_rank=8)).notes
    assert any("experts stay 16-bit" in note for note in notes)
    assert not any("experts" in note for note in predict(mixtral, card, TrainSetup(lora_rank=8)).notes)
    assert any("1,024 positions" in note for note in predict(gpt2, card, TrainSetup(seq_len_tokens=1025)).notes)
    assert not any("positions" in note for note in predict(gpt2, card, TrainSetup(seq_len_tokens=1024)).notes)
    typed = predict(mixtral, card, TrainSetup(lora_rank=8, lora_targets=("q_proj", "q_porj"))).notes
    assert any("q_porj match no module" in note for note in typed)
    gptq = replace(gpt2, config={**gpt2.config, "quantization_config": {"quant_method": "gptq"}})
    assert any("stored quantized (gptq)" in note for note in predict(gptq, card, TrainSetup()).notes)
    full = chosen_for(model="meta-llama/Llama-3.1-8B", gpu="a100-80gb", fixed={"method": ("full",)})
    assert full.chosen.setup.weight_dtype == "bf16"
    assert any("bf16 weights take the updates" in note for note in full.notes)


def test_contradictions_on_several_gpus_are_named_too() -> None:
    model, card = "Qwen/Qwen2.5-0.5B", "a100-80gb"
    cluster = make_cluster(find_gpu(card), 4)
    with pytest.raises(UsageError, match="unquantized"):
        plan_workload(plan_request(model, card, cluster=cluster, fixed={"method": ("lora",), "quantization": ("nf4",)}))
    with pytest.raises(UsageError, match="global batch") as caught:
        plan_workload(plan_request(model, card, cluster=cluster, global_batch=3))
    assert "--global-batch 4" in caught.value.hint


@pytest.mark.parametrize("layers", [29, -29, 400])
def test_more_trained_layers_than_the_model_has_are_refused(layers: int) -> None:
    with pytest.raises(UsageError, match="has 28 layers"):
        plan_request(fixed={"trained_layers": (layers,)})


def test_what_would_help_is_said_by_the_level_that_refused() -> None:
    """A dry run that shows a tenth more: missing bytes and the length that fits follow it, not the formula."""
    workload = plan_request("meta-llama/Llama-3.1-8B", "rtx-4090", memory_gib=17, fixed={"method": ("lora",)})
    plain, corrected = (plan_workload(workload, learned) for learned in (None, {ANY_SETUP: 1.1}))
    peak = corrected.nearest.formula.peak_device_bytes
    assert corrected.missing_bytes == pytest.approx(1.1 * peak - workload.budget_bytes, rel=0.01)
    assert any(suggestion.action.startswith("--seq-len") for suggestion in plain.suggestions)
    assert not any(suggestion.action.startswith("--seq-len") for suggestion in corrected.suggestions)


def test_the_usual_length_gives_way_where_nobody_asked_for_it() -> None:
    """A 20B on a T4 at 2,048 tokens lacks a few MiB: planned for less, it trains."""
    neox, t4 = loaded("EleutherAI/gpt-neox-20b"), find_gpu("t4")
    asked = PlanRequest(data=Data(num_samples=1000))
    plan = answered(asked.workload(neox, t4), dry_run=False, history=False)
    assert plan.workload.seq_len_tokens in SHORTER
    same = replace(asked, seq_len=plan.workload.seq_len_tokens).workload(neox, t4)
    assert plan.workload.data == same.data  # samples as long as the rows are now
    assert plan.workload.data.epoch_tokens == 1000 * plan.workload.seq_len_tokens
    assert (plan.workload.min_rank, plan.workload.min_rank_reason) == (same.min_rank, same.min_rank_reason)
    assert plan.chosen.setup.seq_len_tokens == plan.workload.seq_len_tokens
    assert place_of(plan.notes[0]) is Place.RISK
    assert "2,048 tokens, planned where no length is said" in plan.notes[0]
    assert isinstance(answered(PlanRequest(seq_len=2048).workload(neox, t4), dry_run=False, history=False), NoPlan)


def test_what_one_gpu_lacks_beside_several_is_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for several says that one does not do; what would help there costs several plans and is shown nowhere."""
    monkeypatch.setattr("planner.planning.decision.alternatives._suggestions", None)
    cluster, fixed = make_cluster(find_gpu("h100-sxm"), 8), {"method": ("full",), "offload": ("none",)}
    workload = plan_request("Qwen/Qwen2.5-32B", "h100-sxm", cluster=cluster, fixed=fixed)
    plan = planned(workload)
    assert any("the smallest setup of any method needs" in answer.reason for answer in plan.tree)


def test_a_shorter_length_that_the_options_rule_out_leaves_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions of 1,024 tokens fit in no 512: the answer is still by how much nothing fits."""
    llama, card = loaded("meta-llama/Llama-3.1-70B"), find_gpu("rtx-4090")
    monkeypatch.setattr("planner.planning.decision.alternatives._suggestions", lambda *_: ())
    rollout = replace(Rollout.usual(2048), completion_tokens=1024)
    few = {"attention": ("sdpa",), "optimizer": ("adamw-fused",), "lora_targets": ("all-linear",)}
    workload = PlanRequest(fixed={"objective": ("grpo",), "rollout": (rollout,), **few}).workload(llama, card)
    assert isinstance(answered(workload, dry_run=False, history=False), NoPlan)
