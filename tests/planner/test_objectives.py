"""Training objectives: one table from which setups, plans, files and readings follow."""

from pathlib import Path

import pytest

from planner.choices.objectives import DEFAULT, OBJECTIVES
from planner.cli.wish import workload
from planner.errors import NotPlanned, SetupError, UsageError
from planner.exporters import TARGETS, ExportRequest
from planner.gpus import find_gpu
from planner.hyperparameters import choose
from planner.interchange import setup_from_dict, setup_to_dict
from planner.memory.model import predict_memory
from planner.memory.weights import weight_bytes
from planner.models.catalogue import load
from planner.plan import Plan
from planner.planning import plan_workload
from planner.readers.read import read_text
from planner.setup import TrainSetup
from planner.speed import speed_profile

OTHERS = [name for name in OBJECTIVES if name != DEFAULT]
CARD = find_gpu("rtx-4090")


def setup_of(objective: str, **changes: object) -> TrainSetup:
    return setup_from_dict({"objective": objective, "micro_batch_seqs": 2, **changes})


def text_of(setup: TrainSetup) -> str:
    """The one configuration file of TRL's launch."""
    emitted = TARGETS["trl"].export(ExportRequest(model_id="gpt2", setup=setup, hyper=choose(setup)))
    return next(file.text for file in emitted.files if file.path.endswith(".yaml"))


@pytest.mark.parametrize("objective", OTHERS)
def test_an_objective_goes_through_json_and_is_left_out_where_it_is_the_default(objective: str) -> None:
    setup = setup_of(objective)
    assert setup_from_dict(setup_to_dict(setup)) == setup
    assert "objective" not in setup_to_dict(TrainSetup())


@pytest.mark.parametrize("objective", OTHERS)
def test_a_loss_that_no_trainer_has_cannot_be_built(objective: str) -> None:
    with pytest.raises(SetupError, match=objective):
        setup_of(objective, loss="liger")


def test_several_gpus_are_refused_by_name() -> None:
    with pytest.raises(SetupError, match="dpo"):
        setup_of("dpo", num_gpus=2, parallel="ddp")


@pytest.mark.parametrize("objective", OTHERS)
def test_a_plan_for_an_objective_is_a_whole_setup_that_trl_runs(objective: str) -> None:
    wish = workload(
        load("meta-llama/Llama-3.2-1B"), CARD, fixed={"objective": (objective,)}, seq_len=1024, global_batch=8
    )
    found = plan_workload(wish)
    assert isinstance(found, Plan)
    assert found.chosen.setup.objective == objective
    assert found.chosen.setup.loss in OBJECTIVES[objective].losses
    assert not TARGETS["trl"].refusal(found.chosen.setup, wish.model)


def test_a_loss_that_contradicts_the_objective_is_a_usage_error() -> None:
    wish = workload(load("meta-llama/Llama-3.2-1B"), CARD, fixed={"objective": ("dpo",), "loss": ("liger",)})
    with pytest.raises(UsageError, match="--objective dpo"):
        plan_workload(wish)


@pytest.mark.parametrize("objective", OTHERS)
def test_targets_without_the_objective_are_refused_by_name(objective: str) -> None:
    setup = setup_of(objective)
    for name, target in TARGETS.items():
        refusal = target.refusal(setup)
        assert (name in OBJECTIVES[objective].targets) == (not refusal), (name, refusal)
        assert not refusal or objective in refusal


def test_a_pair_is_two_sequences_and_the_reference_a_second_copy_of_the_weights() -> None:
    """By hand: with adapters nothing but the sequences changes; full fine-tuning holds the weights twice."""
    model = load("meta-llama/Llama-3.2-1B")
    for method, rank in (("lora", 16), ("full", 0)):
        plain = TrainSetup(
            method=method, lora_rank=rank, loss="chunked", precision="bf16-pure", micro_batch_seqs=4, checkpointing=0
        )
        pairs = plain.with_(objective="dpo", micro_batch_seqs=2)
        more = predict_memory(model, CARD, pairs).peak_allocated_bytes
        more -= predict_memory(model, CARD, plain).peak_allocated_bytes
        copy = sum(weight_bytes(model, plain).values()) if method == "full" else 0
        assert more == copy


def test_a_forward_without_gradients_costs_less_than_a_third_of_the_step_and_counts_its_flops() -> None:
    model = load("meta-llama/Llama-3.2-1B")
    plain = TrainSetup(loss="chunked", micro_batch_seqs=4, checkpointing=0)
    pairs = plain.with_(objective="dpo", micro_batch_seqs=2)
    sft, dpo = (speed_profile(model, CARD, one).step_time(one) for one in (plain, pairs))
    assert plain.tokens_per_step == pairs.tokens_per_step
    # a LoRA step multiplies forward and for the inputs' gradient: one more forward is half as much again, adapters off
    assert dpo.flops == pytest.approx(1.5 * sft.flops, rel=0.02)
    assert 1.2 < dpo.step_time_s / sft.step_time_s < 1.5
    assert sum(dpo.parts_s.values()) == pytest.approx(dpo.step_time_s)


@pytest.mark.parametrize("objective", OTHERS)
@pytest.mark.parametrize("method", ["full", "qlora"])
def test_trl_files_are_read_back(objective: str, method: str) -> None:
    setup = setup_of(objective, method=method, accumulation_steps=4, seq_len_tokens=512).run_by("trl")
    if method == "qlora":
        setup = setup.with_(adapter_dtype="bf16")
    found = read_text(text_of(setup), f"{objective}.yaml")
    assert not found.missing
    assert not found.unknown_keys
    assert found.setup == setup.with_(adapter_dtype="auto")


def test_the_objective_of_a_config_is_asked_for_where_only_the_command_says_it() -> None:
    text = "model_name_or_path: gpt2\nuse_peft: true\nmax_length: 512\nbeta: 0.1\n"
    assert [one.field for one in read_text(text, "run.yaml").missing] == ["objective"]
    assert read_text(text, "run-dpo.yaml").setup.objective == "dpo"
    launch = "trl dpo --model_name_or_path gpt2 --use_peft --max_length 512 --beta 0.1\n"
    assert read_text(launch, "run.sh").setup.objective == "dpo"


def test_a_trl_that_makes_whole_logits_is_not_taken_for_todays(tmp_path: Path) -> None:
    from planner.readers.read import read_config

    (tmp_path / "dpo.yaml").write_text("model_name_or_path: gpt2\nuse_peft: true\nbeta: 0.1\n")
    with pytest.raises(NotPlanned, match=r"TRL 0\.29.*whole logits"):
        read_config(tmp_path / "dpo.yaml", versions={"trl": "0.29.0"})
