"""A named launch target constrains the plan: what is planned is what that target runs, and it fits."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from planner.core.errors import UsageError
from planner.frameworks.exporters import EXPORTERS, TARGETS
from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.memory.workload import Workload
from planner.options.stacks import written_by
from planner.planning import answer
from planner.planning.answer import plan_workload
from planner.planning.decision.node import Node
from planner.planning.expressed import as_run, unwritten
from planner.planning.groups import WalkCache
from planner.planning.option_values import default_headroom_bytes
from planner.planning.plan import NoPlan
from planner.planning.predict import device_peak_bytes
from planner.planning.walk import walk
from planner.setup import TrainSetup
from planner.setup.allowed import ATTENTIONS, KERNEL_FAMILIES
from reports.rows import notes_of
from tests.planner.helpers import loaded, planned, refusal_of
from tests.planner.launch_sweep import request, setups
from tests.whole import paired

ONE_GPU_TARGETS = ("trl", "hf", "axolotl", "llamafactory", "unsloth")
LLAMA = "meta-llama/Llama-3.1-8B"


def plan_request(name: str, gpu: str, *targets: str, num_gpus: int = 1, **fixed: tuple[object, ...]) -> Workload:
    card, model = find_gpu(gpu), loaded(name)
    return Workload(
        model=model,
        gpu=card,
        memory_bytes=card.memory_bytes,
        headroom_bytes=default_headroom_bytes(card.memory_bytes),
        seq_len_tokens=min(2048, model.max_position_embeddings or 2048),
        global_batch_seqs=32,
        fixed=fixed,
        targets=targets,
        cluster=make_cluster(card, num_gpus) if num_gpus > 1 else None,
    )


NONE = {"torchtitan": 0, "loggetta": 0, "mlx": 50}
"""Targets of few models, or of mixtures alone -> setups that they run of no model in particular."""


@pytest.mark.parametrize("target", sorted(written_by("sft")))
def test_what_a_target_makes_of_a_setup_it_runs_as_it_is(target: str) -> None:
    made = 0
    for setup in setups():
        runs = TARGETS[target].as_run(setup)
        if isinstance(runs, TrainSetup):
            assert TARGETS[target].as_run(runs) == runs
            made += 1
    assert made >= NONE.get(target, 60)


@pytest.mark.parametrize("target", sorted(EXPORTERS))
def test_a_target_refuses_and_differs_as_its_files_say(target: str) -> None:
    model = loaded("Qwen/Qwen3-8B")
    for setup in setups()[::7]:
        launch, runs = EXPORTERS[target](request(setup, model=model)), TARGETS[target].as_run(setup, model)
        differing = {difference.field: difference.runs_as for difference in launch.differences}
        assert runs == (launch.refused or setup.replace(**differing).run_by(target))
        assert launch.runs == (None if launch.refused else runs)


JOBS = [(LLAMA, "rtx-4090"), ("Qwen/Qwen3-14B", "rtx-4090"), ("Qwen/Qwen2.5-1.5B", "t4")]


@pytest.mark.parametrize(("target", "job"), paired(ONE_GPU_TARGETS, JOBS, 1))
def test_the_plan_for_a_target_is_what_its_file_runs_and_it_fits(target: str, job: tuple[str, str]) -> None:
    name, gpu = job
    plan = plan_workload(plan_request(name, gpu, target))
    if isinstance(plan, NoPlan):  # TRL cannot train a quantized base in fp16
        assert (target, gpu) == ("trl", "t4")
        return
    setup, workload = plan.chosen.setup, plan.workload
    launch = EXPORTERS[target](request(setup, model=workload.model, gpu=workload.gpu))
    assert launch.files
    assert not launch.differences
    assert device_peak_bytes(workload.model, workload.gpu, setup) <= workload.budget_bytes
    for other in plan.alternatives:
        assert as_run(target, other.candidate.setup, workload) == other.candidate.setup, other.label
    assert any(f"planned as {target} runs it" in note for note in plan.notes)


def test_the_walk_for_a_target_holds_all_that_it_makes_of_the_whole_space() -> None:
    """Every setup of the unconstrained space, as Axolotl runs it, is walked with the peak of what really runs.

    Adapters only: full fine-tuning of 16-bit weights, which Axolotl makes of mixed precision, is planned when asked.
    """
    every = {"kernels": KERNEL_FAMILIES, "attention": ATTENTIONS, "checkpointing": (0, 1)}  # none is outrun
    free = plan_request(LLAMA, "rtx-4090", method=("qlora",), **every)
    families = {point.family for point in walk(free) if point.micro_batch_seqs == 1}  # a walk has each of them at 1
    images = {as_run("axolotl", family, free) for family in families}
    points = list(walk(replace(free, targets=("axolotl",))))
    assert {point.family for point in points} == {image for image in images if isinstance(image, TrainSetup)}
    for point in points[::97]:
        assert point.peak_device_bytes == device_peak_bytes(free.model, free.gpu, point.setup)


@pytest.mark.parametrize("target", ["axolotl", "llamafactory", "deepspeed", "torchtitan"])
def test_several_gpus_are_spread_only_as_the_target_can(target: str) -> None:
    plan = planned(plan_request(LLAMA, "a100-80gb", target, num_gpus=4, method=("full",), loss=("full", "liger")))
    assert as_run(target, plan.chosen.setup, plan.workload) == plan.chosen.setup


def test_the_second_target_has_to_fit_as_well() -> None:
    """Axolotl's fp32 adapters: a card on which the bf16 ones just fit is not enough for both."""
    fixed = {"method": ("qlora",), "micro_batch_seqs": (1,), "lora_rank": (256,), "kernels": ("eager",)}
    both = plan_request(LLAMA, "rtx-4090", "trl", "axolotl", **fixed)
    alone = planned(replace(both, targets=("trl",)))
    model, gpu = both.model, both.gpu
    runs = as_run("axolotl", alone.chosen.setup, alone.workload)
    assert isinstance(runs, TrainSetup)
    peaks = device_peak_bytes(model, gpu, alone.chosen.setup), device_peak_bytes(model, gpu, runs)
    tight = replace(both, headroom_bytes=both.memory_bytes - sum(peaks) // 2)
    taken = planned(tight)
    assert taken.chosen.setup != alone.chosen.setup
    runs = as_run("axolotl", taken.chosen.setup, taken.workload)
    assert isinstance(runs, TrainSetup)
    assert device_peak_bytes(model, gpu, runs) <= tight.budget_bytes


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        (plan_request(LLAMA, "rtx-4090", "torchtitan"), "written for several GPUs"),
        (plan_request(LLAMA, "rtx-4090", "deepspeed"), "over several GPUs"),
        (plan_request(LLAMA, "a100-80gb", "unsloth", num_gpus=2, parallel=("ddp",)), "written for one GPU"),
        (plan_request(LLAMA, "a100-80gb", "trl", "unsloth", num_gpus=2, parallel=("ddp",)), "written for one GPU"),
        (plan_request(LLAMA, "t4", "trl", method=("qlora",)), "loss scaler cannot unscale"),
        (plan_request(LLAMA, "rtx-4090", "trl", loss=("full",)), "TRL 1.16 always computes the loss in chunks"),
        (
            plan_request("bigcode/starcoder2-7b", "a100-80gb", "torchtitan", num_gpus=2, parallel=("ddp",)),
            "not this model",
        ),
    ],
    ids=lambda value: value.targets[-1] if isinstance(value, Workload) else "",
)
def test_a_target_that_can_express_nothing_says_why(workload: Workload, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        plan_workload(workload)
    assert "--target" in caught.value.message
    assert "--target" in caught.value.hint


def test_where_only_the_target_stands_in_the_way_the_suggestion_is_to_leave_it_out() -> None:
    answer = refusal_of(plan_request(LLAMA, "t4", "trl"))
    assert answer.suggestions[0].action.startswith("leave --target out")


@pytest.mark.parametrize(("name", "fixed", "note_start"), [
    ("google/flan-t5-base", {}, "no launch file can be written: launch files train causal language models"),
    ("facebook/opt-1.3b", {"packing": (True,)}, "packed samples attend to each other"),
    ("facebook/opt-1.3b", {"packing": (True,), "attention": ("flash-attention-2",)}, ""),
    ("meta-llama/Llama-3.2-1B", {"packing": (True,)}, ""),
])  # fmt: skip
def test_a_plan_says_what_no_file_can_and_no_mask_does(
    name: str, fixed: dict[str, tuple[object, ...]], note_start: str
) -> None:
    plan = planned(plan_request(name, "rtx-4090", **fixed))
    notes = [note for note in notes_of(plan) if note.startswith(("no launch file", "packed samples"))]
    assert [note.startswith(note_start) for note in notes] == ([True] if note_start else [])
    assert not plan.workload.targets or not note_start.startswith("no launch file")


@pytest.mark.parametrize(
    ("name", "gpu", "num_gpus", "seq_len", "fixed"),
    [  # what is fastest there and nobody's file: OFT, a hybrid with an encoder, each with a chunked loss
        ("bigcode/starcoder2-7b", "v100-32gb", 1, 512, {"adapter": ("oft",)}),
        ("Qwen/Qwen3.5-4B", "rtx-4090", 1, 2048, {}),  # the plain script alone, which has no chunked loss
    ],
)
def test_a_plan_for_no_target_in_particular_has_a_file(
    name: str, gpu: str, num_gpus: int, seq_len: int, fixed: dict[str, tuple[object, ...]]
) -> None:
    plan = planned(replace(plan_request(name, gpu, num_gpus=num_gpus, **fixed), seq_len_tokens=seq_len))
    assert not unwritten(plan.workload, plan.chosen.setup)
    (target,) = plan.workload.targets
    assert as_run(target, plan.chosen.setup, plan.workload) == plan.chosen.setup
    assert any(str(note).startswith("no tool has a file for the fastest setup") for note in plan.notes)


@pytest.mark.parametrize(
    ("name", "gpu", "num_gpus", "fixed", "targets"),
    [  # LLaMA-Factory adapts attention alone, 17 % faster; of DPO nothing is planned that TRL checkpoints otherwise
        ("Qwen/Qwen3-235B-A22B", "h200", 8, {"method": ("lora",)}, ("trl",)),
        ("meta-llama/Llama-3.1-8B", "a100-80gb", 2, {"method": ("full",), "objective": ("dpo",)}, ()),
    ],
)
def test_of_what_tools_have_a_file_for_the_one_that_loses_least_is_taken(
    name: str, gpu: str, num_gpus: int, fixed: dict[str, tuple[object, ...]], targets: tuple[str, ...]
) -> None:
    plan = planned(replace(plan_request(name, gpu, num_gpus=num_gpus, **fixed), global_batch_seqs=64))
    assert (plan.workload.targets, plan.chosen.setup.lora_targets) == (targets, "all-linear")
    assert (plan.chosen.setup.stack, unwritten(plan.workload, plan.chosen.setup)) == ("trl", "")


@pytest.mark.parametrize(("tokens_per_s", "said"), [(90.0, True), (110.0, False)])
def test_what_no_tool_has_a_file_for_is_said_where_it_is_faster(
    tokens_per_s: float, monkeypatch: pytest.MonkeyPatch, *, said: bool
) -> None:
    walked: Any = SimpleNamespace(node=Node.LORA, best=SimpleNamespace(tokens_per_s=tokens_per_s))
    monkeypatch.setattr(answer, "unwritten", lambda *_: "trl has another precision")
    monkeypatch.setattr(answer, "writers", lambda _: {"trl": ""})
    monkeypatch.setattr(answer._Planning, "walk", lambda *_: walked)
    monkeypatch.setattr(answer, "_least_lossy", lambda *_: walked)
    fastest: Any = SimpleNamespace(tokens_per_s=100.0, setup=None)
    planning = answer._Planning(None, WalkCache(), explained=False)
    written = answer._of_some_target(plan_request(LLAMA, "rtx-4090"), fastest, planning)
    assert (written[0], bool(written[1])) == (walked, said)


def test_an_adapter_that_a_targets_stack_computes_in_fewer_precisions_is_planned_in_those() -> None:
    """VeRA of the plain script under pure bf16 cannot be built; its other precisions were refused with it."""
    plan = planned(plan_request(LLAMA, "h200", "hf", adapter=("vera",), method=("lora",)))
    assert plan.chosen.setup.precision == "bf16-autocast"
