"""Training objectives: one table from which setups, plans, files and readings follow."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune_planner.cli.answer import workload_for
from finetune_planner.cli.request_options import DataOptions, RequestOptions
from planner.core.errors import NotPlanned, SetupError, UsageError
from planner.frameworks.exporters import TARGETS, ExportRequest
from planner.frameworks.exporters.folder import folder_files
from planner.frameworks.hyperparameters import choose
from planner.frameworks.readers import FileContext
from planner.frameworks.readers.read import read_config, read_text
from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.memory.model import predict_memory
from planner.memory.states import weight_bytes
from planner.models.catalogue import load
from planner.options.objectives import DEFAULT, OBJECTIVES
from planner.options.rollouts import COLOCATED, Rollout, open_rollouts
from planner.planning.answer import plan_workload
from planner.planning.plan import NoPlan
from planner.planning.plan_request import PlanRequest
from planner.planning.predict import cannot_run, predict
from planner.planning.space import PREFERENCE_FRACTION
from planner.planning.useful import cost_usd
from planner.setup import TrainSetup
from planner.setup.interchange import setup_from_dict, setup_to_dict
from planner.setup.packages import packages_of
from planner.speed import speed_profile
from planner.speed.roofline.types import WITHOUT_GRADIENTS
from planner.speed.several_gpus.speed import layout_step_time
from reports.check import value_words
from reports.setup_text import batch_words
from tests.planner.helpers import loaded, plan_request, planned, refusal_of
from tests.whole import some, these

OTHERS = [name for name in OBJECTIVES if name != DEFAULT]
UNLIKE = [name for name in OTHERS if not OBJECTIVES[name].supervised]
"""Objectives whose step is another."""
BY_TRL = [name for name in UNLIKE if "trl" in OBJECTIVES[name].targets]
CARD = find_gpu("rtx-4090")
MODEL = load("meta-llama/Llama-3.2-1B")


def setup_of(objective: str, **changes: object) -> TrainSetup:
    return setup_from_dict({"objective": objective, "micro_batch_seqs": 2, **changes})


def text_of(setup: TrainSetup, target: str = "trl") -> str:
    """The one configuration file of a launch."""
    emitted = TARGETS[target].export(ExportRequest(model_id="gpt2", setup=setup, hyper=choose(setup)))
    return next(file.text for file in emitted.files if file.path.endswith(".yaml"))


@pytest.mark.parametrize("objective", OTHERS)
def test_an_objective_goes_through_json_and_is_left_out_where_it_is_the_default(objective: str) -> None:
    setup = setup_of(objective)
    assert setup_from_dict(setup_to_dict(setup)) == setup
    assert "objective" not in setup_to_dict(TrainSetup())


@pytest.mark.parametrize("objective", UNLIKE)
def test_a_loss_that_no_trainer_has_cannot_be_built(objective: str) -> None:
    with pytest.raises(SetupError, match=objective):
        setup_of(objective, loss="liger")


def test_what_is_for_one_gpu_says_why() -> None:
    with pytest.raises(SetupError, match="objective 'embedding' is planned on one GPU: "):
        setup_of("embedding", num_gpus=2, parallel="ddp")
    for generator, parallel in (("transformers", "zero2"), ("vllm", "zero3")):
        with pytest.raises(SetupError, match=f"how generation by {generator} gathers"):
            setup_of("grpo", num_gpus=2, parallel=parallel, rollout={"generator": generator})
    setup_of("grpo", num_gpus=2, parallel="ddp", rollout={"generator": "transformers"})  # each GPU has a whole model


@pytest.mark.parametrize("layout", [{"parallel": "dp"}, {"parallel": "fsdp2", "tensor_degree": 2}])
def test_a_spread_that_no_reference_was_followed_under_is_refused_by_name(layout: dict[str, Any]) -> None:
    with pytest.raises(SetupError, match="'dpo' is planned on several GPUs with ddp, fsdp2, zero1, zero2, zero3"):
        setup_of("dpo", num_gpus=4, **layout)


def test_orpo_on_several_gpus_is_accelerates_to_launch(tmp_path: Path) -> None:
    setup = setup_of("orpo", num_gpus=2, parallel="fsdp2", method="full", precision="bf16-mixed")
    request = ExportRequest(model_id="meta-llama/Llama-3.2-1B", setup=setup, hyper=choose(setup))
    emitted = TARGETS["trl"].export(request)
    words = "accelerate launch --config_file launch/trl/accelerate.yaml launch/trl/trl-orpo.py --config"
    assert emitted.command.startswith(words)
    assert not any("device_map" in file.text for file in emitted.files)  # accelerate refuses one of several processes
    for file in (*emitted.files, *folder_files([emitted], request)):
        path = tmp_path / "launch" / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text)
    reading = read_config(tmp_path / "launch" / "run.sh", model=MODEL)
    read = reading.setup
    assert (reading.missing, read.objective, read.parallel, read.precision) == ((), "orpo", "fsdp2", "bf16-mixed")
    assert read.expandable_segments


def test_an_adapter_that_the_objective_does_not_take_is_named() -> None:
    model = loaded("gpt2")
    fixed = {"objective": ("dpo",), "adapter": ("prompt",), "loss": ("chunked",), "method": ("lora", "qlora")}
    with pytest.raises(UsageError, match="adapter 'prompt' is not planned for objective 'dpo'"):
        plan_workload(PlanRequest(fixed=fixed).workload(model, CARD))


@pytest.mark.parametrize("objective", some(OTHERS, 2))
def test_a_plan_for_an_objective_is_a_whole_setup_that_trl_runs(objective: str) -> None:
    plan_request = PlanRequest(fixed={"objective": (objective,)}, seq_len=1024, global_batch=8).workload(MODEL, CARD)
    plan = planned(plan_request)
    assert plan.chosen.setup.objective == objective
    assert plan.chosen.setup.loss in OBJECTIVES[objective].losses
    assert not TARGETS[plan.chosen.setup.stack].refusal(plan.chosen.setup, plan_request.model)


@pytest.mark.parametrize("objective", these(["kto", "grpo", "embedding"], UNLIKE))
def test_where_nothing_fits_the_refusal_names_the_smallest_and_what_would_help(objective: str) -> None:
    """KTO's smallest micro-batch is two: no point of its walk has one."""
    fixed = {"objective": (objective,), "method": ("full",)}
    refused = plan_workload(
        PlanRequest(fixed=fixed, seq_len=1024, global_batch=8).workload(load("meta-llama/Llama-3.1-8B"), CARD)
    )
    assert isinstance(refused, NoPlan)
    assert refused.nearest.setup.micro_batch_seqs == OBJECTIVES[objective].least(8)
    assert refused.suggestions


def test_a_loss_that_contradicts_the_objective_is_a_usage_error() -> None:
    plan_request = PlanRequest(fixed={"objective": ("dpo",), "loss": ("liger",)}).workload(MODEL, CARD)
    with pytest.raises(UsageError, match="--objective dpo"):
        plan_workload(plan_request)


def test_a_model_without_the_objectives_loss_is_named() -> None:
    """Nobody had given the --loss that "cannot be kept"."""
    workload = PlanRequest(fixed={"objective": ("grpo",)}).workload(load("google/flan-t5-xl"), CARD)
    with pytest.raises(UsageError, match="t5 is not planned with objective grpo"):
        plan_workload(workload)


@pytest.mark.parametrize("objective", UNLIKE)
def test_targets_without_the_objective_are_refused_by_name(objective: str) -> None:
    setup = setup_of(objective)
    for name, target in TARGETS.items():
        refusal = target.refusal(setup)
        assert (name in OBJECTIVES[objective].targets) == (not refusal), (name, refusal)
        assert not refusal or objective in refusal


@pytest.mark.parametrize(("objective", "forwards"), [("dpo", 0), ("kto", 1)])
def test_a_reference_that_was_asked_beforehand_is_in_no_step(objective: str, forwards: int) -> None:
    """By hand: full fine-tuning loses the second copy of the weights; TRL's and Axolotl's files say it and are read."""
    setup = setup_of(objective, method="full", precision="bf16-pure")
    precomputed = setup.replace(precomputed_reference=True)
    assert precomputed.extra_forwards == forwards
    less = predict_memory(MODEL, CARD, setup).peak_allocated_bytes
    less -= predict_memory(MODEL, CARD, precomputed).peak_allocated_bytes
    assert less == sum(weight_bytes(MODEL, setup).values())
    assert "precompute_ref_log_probs: true" in text_of(precomputed)
    assert (
        read_text(text_of(precomputed), "dpo.yaml", model=load("gpt2")).setup.precomputed_reference
        or objective == "kto"
    )
    with pytest.raises(SetupError, match="asks no reference"):
        setup_of("orpo", precomputed_reference=True)


ROLLOUT = Rollout(
    num_generations=4, completion_tokens=128, generation_batch_seqs=8, generator="vllm-sleep", reference=True
)


@pytest.mark.parametrize("objective", BY_TRL)
@pytest.mark.parametrize("method", ["full", "qlora"])
def test_trl_files_are_read_back(objective: str, method: str) -> None:
    setup = setup_of(objective, method=method, accumulation_steps=4, seq_len_tokens=512).run_by("trl")
    if method == "qlora":
        setup = setup.replace(adapter_dtype="bf16")
    if OBJECTIVES[objective].rolls_out:
        setup = setup.replace(
            micro_batch_seqs=4,
            rollout=ROLLOUT if method == "full" else replace(ROLLOUT, generator="transformers", vllm_fraction=0.3),
        )
    config = read_text(text_of(setup), f"{objective}.yaml")
    assert not config.unknown_keys
    assert config.setup == setup.replace(adapter_dtype="auto")
    assert not config.missing


@pytest.mark.parametrize(
    ("objective", "target"),
    [(name, target) for name in BY_TRL for target in OBJECTIVES[name].targets if target != "trl"],
)
def test_other_tools_run_it_on_whole_logits_and_their_files_are_read_back(objective: str, target: str) -> None:
    setup = setup_of(objective, accumulation_steps=4, seq_len_tokens=512)
    runs = TARGETS[target].as_run(setup)
    assert isinstance(runs, TrainSetup)
    assert (runs.loss, runs.stack) == ("full", target)
    config = read_text(text_of(setup, target), f"{target}.yaml")
    assert not config.unknown_keys
    assert config.setup.replace(adapter_dtype="auto") == runs.replace(adapter_dtype="auto")


def test_continued_pretraining_is_the_supervised_step_on_packed_text() -> None:
    sft, text = (
        planned(PlanRequest(fixed=fixed, seq_len=1024, global_batch=8).workload(MODEL, CARD))
        for fixed in ({"packing": (True,)}, {"objective": ("pretrain",)})
    )
    setup = text.chosen.setup
    assert setup.packing
    assert setup.replace(objective="sft") == sft.chosen.setup
    assert text.chosen.formula.peak_device_bytes == sft.chosen.formula.peak_device_bytes
    assert text.chosen.formula.step_time_s == sft.chosen.formula.step_time_s
    llamafactory = text_of(setup, "llamafactory")
    assert "stage: pt" in llamafactory
    assert read_text(llamafactory, "llamafactory.yaml").setup.objective == "pretrain"
    assert "path: launch/data/tokens" in text_of(setup, "axolotl")


@pytest.mark.parametrize("target", ["axolotl", "llamafactory"])
def test_a_plan_for_a_target_is_for_its_own_step(target: str) -> None:
    fixed = {"objective": ("dpo",)}
    plan = planned(PlanRequest(fixed=fixed, seq_len=1024, global_batch=8, targets=(target,)).workload(MODEL, CARD))
    assert (plan.chosen.setup.loss, plan.chosen.setup.stack) == ("full", target)


def test_the_objective_of_a_config_is_asked_for_where_only_the_command_says_it() -> None:
    text = "model_name_or_path: gpt2\nuse_peft: true\nmax_length: 512\nbeta: 0.1\n"
    assert [missing.field for missing in read_text(text, "run.yaml").missing] == ["objective"]
    assert read_text(text, "run-dpo.yaml").setup.objective == "dpo"
    launch = "trl dpo --model_name_or_path gpt2 --use_peft --max_length 512 --beta 0.1\n"
    assert read_text(launch, "run.sh").setup.objective == "dpo"


ENCODERS = (
    "bert-base-uncased", "FacebookAI/roberta-base", "ModernBERT-base", "distilbert-base-uncased", "deberta-v3-base",
)  # fmt: skip


@pytest.mark.parametrize("name", some(ENCODERS, 2))
def test_an_encoder_is_classified_with_and_predicts_no_next_token(name: str) -> None:
    for objective in ("classification", "embedding"):
        request = plan_request(name, seq_len=512, fixed={"objective": (objective,)})
        plan = planned(request)
        assert plan.chosen.fits
        # each emitted script of tiny models of these types trained, full and LoRA (30 November 2026)
        (target,) = OBJECTIVES[objective].targets
        lora = setup_of(objective, loss="full", kernels="eager", attention="eager")
        for setup in (plan.chosen.setup, lora):
            asked = ExportRequest(model_id=name, model=request.model, setup=setup, hyper=choose(setup))
            emitted = TARGETS[target].export(asked)
            assert emitted.files, emitted.refused
        excluded = 'exclude_modules=["pre_classifier"]' in emitted.files[0].text
        assert excluded is (request.model.model_type == "distilbert" and objective == "classification")
    for fixed in ({}, {"objective": ("pretrain",)}, {"objective": ("dpo",)}):
        with pytest.raises(UsageError, match="an encoder"):
            plan_workload(plan_request(name, seq_len=512, fixed=fixed))


def test_a_trl_that_makes_whole_logits_is_not_taken_for_todays(tmp_path: Path) -> None:
    for name, objective in (("dpo.yaml", "beta: 0.1"), ("kto.yaml", "desirable_weight: 1.0")):
        (tmp_path / name).write_text(f"model_name_or_path: gpt2\nuse_peft: true\n{objective}\n")
    assert read_config(tmp_path / "dpo.yaml", versions={"trl": "1.14.0"}).setup.loss == "full"
    with pytest.raises(NotPlanned, match=r"TRL 1\.14\.0, whose step is another"):
        read_config(tmp_path / "kto.yaml", versions={"trl": "1.14.0"})
    older = read_config(tmp_path / "dpo.yaml", versions={"trl": "1.9.0"}).setup
    assert (older.loss, older.trl_version) == ("full", "1.9.0")


def test_a_setting_of_an_older_trainer_of_preferences_says_so_in_a_config_as_in_a_program() -> None:
    """`max_prompt_length` is in DPOConfig of TRL 0.28 and not of 0.29; whoever knows better says the version."""
    text = "model_name_or_path: gpt2\nuse_peft: true\nbeta: 0.1\nmax_prompt_length: 128\n"
    older = read_text(text, "dpo.yaml")
    assert any(
        "TRL 0.28 (the newest that takes max_prompt_length there)" in assumption for assumption in older.assumptions
    )
    assert older.setup.log_probs == "rows"
    config = read_text(text, "dpo.yaml", around=FileContext(versions={"trl": "1.16"}))
    assert (config.setup.objective, config.setup.loss) == ("dpo", "chunked")


def test_pairs_in_a_programs_own_settings_leave_open_whose_step_it_is() -> None:
    text = "base_model: gpt2\nmax_length: 512\nbeta: 0.1\nlora_r: 8\nlora_target_modules: [c_attn]\n"
    text += "load_in_4bit: false\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nbf16: true\n"
    text += "gradient_checkpointing: true\n"
    config = read_text(text, "dpo.yaml")
    assert (config.format, config.setup.objective, config.setup.packing) == ("own settings", "dpo", False)
    assert [missing.field for missing in config.missing] == ["precision", "loss"]
    assert "objective" in {missing.field for missing in read_text(text, "run.yaml").missing}
    with pytest.raises(NotPlanned, match="grpo"):
        read_text(text + "task: grpo\n", "run.yaml")


def test_preferences_behind_dataset_give_the_length_and_other_data_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "pairs.jsonl"
    row = {"prompt": "a" * 400, "chosen": "b" * 1600, "rejected": "c" * 40}
    data.write_text((json.dumps(row) + "\n") * 200)
    plan_request = workload_for(
        "gpt2", "rtx-4090", RequestOptions(objective="dpo"), data=DataOptions(dataset=str(data))
    )
    assert 500 <= plan_request.seq_len_tokens <= 512  # 2,001 bytes, 4 a token, up to the next 64
    assert plan_request.data.epoch_seqs == 200
    assert plan_request.fixed["packing"] == (False,)
    assert plan_request.data.epoch_tokens is not None
    assert plan_request.data.epoch_tokens > 2 * 200 * 400
    with pytest.raises(UsageError, match=r"preference columns.*") as refused:
        workload_for("gpt2", "rtx-4090", RequestOptions(), data=DataOptions(dataset=str(data)))
    assert "--objective dpo" in str(refused.value.hint)
    capsys.readouterr()


PROGRAM = """
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import {objective}Config, {objective}Trainer

model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B", dtype="bfloat16")
args = {objective}Config(per_device_train_batch_size=4, gradient_accumulation_steps=2, max_length=512, {more})
adapters = LoraConfig(r=8, lora_dropout=0.1, target_modules="all-linear")
{objective}Trainer(model, args=args, train_dataset=data, peft_config=adapters, {trainer}).train()
"""


@pytest.mark.parametrize("objective", BY_TRL)
def test_programs_with_trls_trainers_are_read(objective: str) -> None:
    name = "Reward" if objective == "reward" else objective.upper()
    config = read_text(PROGRAM.format(objective=name, more="", trainer=""), "train.py")
    expected = setup_of(
        objective, lora_rank=8, micro_batch_seqs=4, accumulation_steps=2, seq_len_tokens=512, expandable_segments=False
    )
    if OBJECTIVES[objective].rolls_out:
        usual = Rollout(num_generations=2, reference=True) if objective == "rloo" else Rollout()
        expected = expected.replace(seq_len_tokens=1024, rollout=usual, lora_dropout=0.1)
    assert [gap.field for gap in config.missing] == ["seq_len_tokens"] * OBJECTIVES[objective].rolls_out
    assert config.setup.replace(expandable_segments=False) == expected


@pytest.mark.parametrize(
    ("more", "trainer", "version"),
    [
        ("max_prompt_length=128", "", "0.28"), ("", "beta=0.1", "0.12"), ("", "max_length=128", "0.12"),
        ("", "tokenizer=tok", "0.15"), ("beta=0.1", "", ""),
    ],
)  # fmt: skip
def test_programs_of_an_older_trl_are_read_as_that_by_what_they_hand_over(
    more: str, trainer: str, version: str
) -> None:
    setup = read_text(PROGRAM.format(objective="DPO", more=more, trainer=trainer), "train.py").setup
    assert (setup.objective, setup.trl_version) == ("dpo", version)
    assert setup.seq_len_tokens == (128 if "max_length" in trainer else 512)


def generated(**changes: object) -> TrainSetup:
    return setup_of("grpo", accumulation_steps=16, seq_len_tokens=1024, precision="bf16-pure", **changes)


def test_the_forwards_without_gradients_are_those_of_this_global_batch() -> None:
    """A generation of 32 serves one step of 32 completions and, in turn, parts of steps of 48: asked in one process."""
    even, odd = (
        generated(rollout={"generation_batch_seqs": 32}).replace(micro_batch_seqs=2, accumulation_steps=steps)
        for steps in (16, 24)
    )
    assert (even.extra_forwards, odd.extra_forwards) == (0, 1)
    rates = [speed_profile(MODEL, CARD, setup).at(2, setup.accumulation_steps)[1] for setup in (even, odd)]
    assert rates[1] < 0.98 * rates[0]


def test_a_plan_generates_in_parts_where_all_at_once_does_not_fit() -> None:
    """And what the walk said of its memory is what the composition says."""
    fixed = {"objective": ("grpo",), "method": ("lora",)}
    workload = PlanRequest(fixed=fixed, seq_len=2048, global_batch=32).workload(load("meta-llama/Llama-3.1-8B"), CARD)
    plan = planned(workload)
    setup = plan.chosen.setup
    assert setup.rollout_settings.generation_batch_seqs in (8, 16)
    assert setup.rollout_settings.generation_batch_seqs % setup.micro_batch_seqs == 0
    predicted = predict_memory(workload.model, CARD, setup).peak_device_bytes
    assert plan.chosen.formula.peak_device_bytes == predicted <= workload.budget_bytes
    with pytest.raises(UsageError, match="whole groups of 8"):
        plan_workload(PlanRequest(fixed=fixed, seq_len=2048, global_batch=12).workload(workload.model, CARD))


@pytest.mark.parametrize(
    ("card", "num_gpus", "fixed", "taken"),
    some(
        [
            ("h100-sxm", 4, {}, {"vllm", "vllm-sleep"}),
            ("h100-sxm", 1, {}, {"vllm", "vllm-sleep"}),
            ("rtx-4090", 1, {}, {"transformers"}),  # two copies of an 8B's weights are more than it has
            ("h100-sxm", 1, {"method": ("qlora",)}, {"transformers"}),
            ("mi300x", 1, {}, {"transformers"}),
        ],
        2,
    ),
)
def test_a_plan_takes_the_generator_that_is_faster_where_it_runs(
    card: str, num_gpus: int, fixed: dict[str, Any], taken: set[str]
) -> None:
    """Its share of the card holds a second copy of the weights; no other generator that may be had is faster by more
    than a preference."""
    gpu = find_gpu(card)
    cluster = make_cluster(gpu, num_gpus) if num_gpus > 1 else None
    fixed = {"objective": ("grpo",), "optimizer": ("adamw-fused",), "lora_targets": ("all-linear",), **fixed}
    workload = PlanRequest(fixed=fixed).workload(load("meta-llama/Llama-3.1-8B"), gpu, cluster)
    plan = planned(workload)
    setup = plan.chosen.setup
    assert setup.rollout_settings.generator in taken
    if setup.rollout_settings.by_vllm:
        assert setup.rollout_settings.vllm_fraction * gpu.memory_bytes > 2 * workload.model.num_params
        assert packages_of(setup)[-1] == "vllm"
    answer = next(answer for answer in plan.tree if answer.question == "Who generates the completions?")
    assert answer.choice == setup.rollout_settings.generator
    for name in taken & set(COLOCATED):
        alone = replace(
            workload, fixed={**workload.fixed, "rollout": open_rollouts(Rollout(generator=name), ["generator"])}
        )
        assert plan_workload(alone).subject.tokens_per_s <= plan.chosen.tokens_per_s / (1 - PREFERENCE_FRACTION)


def test_gpus_share_a_generation_of_whole_micro_batches() -> None:
    """TRL refuses any other (trl 1.16 grpo_config.py); all completions of a step at once say the same in both words."""
    card, model = find_gpu("h100-sxm"), load("meta-llama/Llama-3.1-8B")
    cluster, fixed = make_cluster(card, 8), {"objective": ("grpo",), "method": ("full",), "optimizer": ("adamw-fused",)}
    workload = PlanRequest(fixed=fixed, seq_len=2048).workload(model, card, cluster)
    setup = planned(workload).chosen.setup
    assert setup.generation_seqs % (setup.micro_batch_seqs * setup.data_degree) == 0
    cut = {"num_gpus": 8, "parallel": "fsdp2", "micro_batch_seqs": 4, "accumulation_steps": 1}

    def made_at_once(seqs: int) -> TrainSetup:
        return setup_of("grpo", **cut, rollout={"generator": "vllm-sleep", "generation_batch_seqs": seqs})

    steps = [layout_step_time(model, card, made_at_once(seqs), cluster).step_time_s for seqs in (0, 32)]
    assert steps[0] == steps[1]
    with pytest.raises(SetupError, match="micro-batches of 4 on each of 8 GPUs"):
        made_at_once(16)


def test_what_trl_switches_off_within_a_step_comes_back_plain() -> None:
    """A plan of DPO moved its checkpoints to the host, and lost that after the first reference (next test)."""
    words: dict[str, Any] = {"checkpointing": 1, "activation_offload": True}
    for lost in (words, {"checkpointing": 2}):
        for objective in ("dpo", "kto", "grpo", "rloo"):
            with pytest.raises(SetupError, match="on again for every layer"):
                setup_of(objective, **lost)
        assert setup_of("orpo", **lost) != setup_of("orpo")
        assert setup_of("dpo", precomputed_reference=True, **lost) != setup_of("dpo")
    assert setup_of("dpo", stack="axolotl", **words).activation_offload
    fixed = {"objective": ("dpo",), "method": ("qlora",)}
    long = PlanRequest(fixed=fixed, seq_len=24576, global_batch=8)
    plan = plan_workload(long.workload(load("meta-llama/Llama-3.1-8B"), find_gpu("rtx-4090")))
    assert isinstance(plan, NoPlan)
    text = "model_name_or_path: Qwen/Qwen3-0.6B\nbf16: true\nactivation_checkpointing: true\n"
    text += "activation_checkpointing_kwargs: {use_reentrant: false, every_n_layers: 2, offload: true}\n"
    for name, expected in (("dpo", (1, False)), ("sft", (2, True))):
        reading = read_text(text, f"{name}.yaml")
        assert (reading.setup.checkpointing, reading.setup.activation_offload) == expected
        assert any("on again for every layer" in sentence for sentence in reading.assumptions) is (name == "dpo")


@pytest.mark.slow
def test_trl_hands_the_words_of_checkpointing_on_to_torch() -> None:
    pytest.importorskip("trl")
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl.models.utils import disable_gradient_checkpointing

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=8)).train()
    model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=2, offload=True)
    layers = model.model.layers
    assert [layer.gradient_checkpointing for layer in layers] == [True, False] * 2
    offloads = layers[0]._gradient_checkpointing_func.func
    with disable_gradient_checkpointing(model, {"use_reentrant": False, "every_n_layers": 2, "offload": True}):
        pass
    assert all(layer.gradient_checkpointing for layer in layers)
    assert layers[0]._gradient_checkpointing_func.func is not offloads


def test_a_generation_of_no_whole_groups_cannot_run() -> None:
    """open-r1's config_demo_code.yaml on one GPU, whose 14 of each prompt are for seven."""
    assert not cannot_run(MODEL, CARD, generated(rollout={"num_generations": 16}))
    assert cannot_run(MODEL, CARD, generated(rollout={"num_generations": 14})) == (
        "32 completions are no whole groups of 14",
    )


def test_a_share_that_does_not_hold_the_weights_is_refused() -> None:
    fixed = {"objective": ("grpo",), "rollout": (Rollout(generator="vllm", vllm_fraction=0.1),)}
    with pytest.raises(UsageError, match=r"10% of the card has 7\.92 GiB, its weights"):
        plan_workload(PlanRequest(fixed=fixed).workload(load("meta-llama/Llama-3.1-8B"), find_gpu("h100-sxm")))
    small, enough = (generated(rollout={"generator": "vllm", "vllm_fraction": share}) for share in (0.05, 0.3))
    assert any("5% of the card has" in reason for reason in cannot_run(MODEL, CARD, small))
    assert not cannot_run(MODEL, CARD, enough)


def test_an_adapter_on_the_output_head_is_no_plan_of_trls() -> None:
    """trl 1.16 `SFTTrainer.__init__`, its trainers of preferences and of rollouts: ValueError."""
    request = PlanRequest(fixed={"lora_targets": (("q_proj", "lm_head"),)})
    for targets in ((), ("trl",)):
        with pytest.raises(UsageError, match="the output head has an adapter"):
            plan_workload(replace(request.workload(MODEL, CARD), targets=targets))
    assert planned(replace(request.workload(MODEL, CARD), targets=("axolotl",))).chosen.setup.stack == "axolotl"
    for loss, stack, stops in (("chunked", "trl", True), ("full", "trl", False), ("chunked", "hf", False)):
        setup = TrainSetup(lora_targets=("q_proj", "lm_head"), loss=loss, stack=stack)
        assert bool(cannot_run(MODEL, CARD, setup)) is stops


def test_a_reference_grows_with_the_micro_batch_and_rows_beside_a_choice_keep_its_precision() -> None:
    """What the walk said is what the composition says, and who trains is TRL's class of the objective."""
    fixed = {"objective": ("dpo",), "method": ("full",)}
    workload = PlanRequest(fixed=fixed, seq_len=2048).workload(MODEL, find_gpu("a100-80gb"))
    plan = planned(workload)
    answers = {answer.question: answer for answer in plan.tree}
    assert plan.chosen.setup.micro_batch_seqs > 1
    peak = answers["Which micro-batch, and how much accumulation?"].needed_bytes
    assert peak == plan.chosen.formula.peak_device_bytes
    assert answers["Which program?"].choice == "TRL's DPOTrainer"
    beside = [row for row in plan.alternatives if row.label in ("checkpointing on", "larger micro-batch")]
    assert {row.candidate.setup.precision for row in beside} <= {plan.chosen.setup.precision}


def test_a_rollout_is_told_in_words() -> None:
    setup = generated(rollout={"generator": "vllm", "completion_tokens": 512})
    words = "completions of 512 tokens generated 32 at a time by vLLM beside it on 30% of the card"
    assert value_words(setup, "rollout") == f"8 of each prompt, {words}"
    assert batch_words(setup).endswith(f"tokens, {words}")


def test_a_server_is_started_on_one_more_gpu_and_ended_with_the_run() -> None:
    setup = setup_of("grpo", rollout={"generator": "vllm-server"}, num_gpus=2, parallel="ddp", accumulation_steps=4)
    request = ExportRequest(model_id=MODEL.model_id, model=MODEL, gpu=CARD, setup=setup, hyper=choose(setup))
    launch = TARGETS["trl"].export(request)
    files = {file.path: file.text for file in (*launch.files, *folder_files([launch], request, jobs=["skypilot"]))}
    server = f"CUDA_VISIBLE_DEVICES=2 trl vllm-serve --model {MODEL.model_id} --host 127.0.0.1 --port 8000 "
    lines = [line.strip() for line in files["run.sh"].splitlines()]
    at = next(place for place, line in enumerate(lines) if line.startswith(server))
    assert lines[at].endswith(" &")
    assert lines[at + 1] == "trap 'kill $! || true' EXIT"
    assert "CUDA_VISIBLE_DEVICES=0,1 trl grpo" in lines[at + 2]
    assert "vllm_server_port: 8000" in files["trl/trl-grpo.yaml"]
    assert "--gpus-per-node=3" in files["trl/slurm.sbatch"]
    assert "RTX4090:3" in files["skypilot.yaml"]
    assert "several nodes" in TARGETS["trl"].export(replace(request, num_nodes=2)).refused
    fixed = {"objective": ("grpo",), "rollout": (Rollout(generator="vllm-server"),)}
    with pytest.raises(UsageError, match="90% of the card"):
        plan_workload(PlanRequest(fixed=fixed).workload(loaded("meta-llama/Llama-3.1-70B"), find_gpu("h100-sxm")))
    served = PlanRequest(fixed=fixed, price=2.0).workload(loaded("Qwen/Qwen2.5-0.5B"), find_gpu("h100-sxm"))
    assert cost_usd(served, 3600) == 4.0  # the server's card too
    gpu, fixed = find_gpu("h100-sxm"), {"objective": ("grpo",), "method": ("full",)}  # beside a 32B no vLLM fits
    refused = refusal_of(PlanRequest(fixed=fixed).workload(loaded("Qwen/Qwen2.5-32B"), gpu, make_cluster(gpu, 8)))
    assert any(each.action.startswith("--generator vllm-server (one more card)") for each in refused.suggestions)


def test_flags_of_generation_need_an_objective_that_generates() -> None:
    rollouts = RequestOptions(objective="grpo", seq_len=4096, generator="vllm", num_generations=4).fixed()["rollout"]
    assert {(rollout.num_generations, rollout.generator) for rollout in rollouts} == {(4, "vllm")}
    plain = RequestOptions(objective="grpo", no_extra_packages=True).fixed()["rollout"]
    assert [rollout.generator for rollout in plain] == ["transformers"]
    with pytest.raises(UsageError, match="contradicts --generator"):
        RequestOptions(objective="grpo", no_extra_packages=True, generator="vllm").fixed()
    with pytest.raises(UsageError, match="objectives that generate"):
        RequestOptions(generator="vllm").fixed()
    with pytest.raises(SetupError, match="no room for a prompt"):
        setup_of("grpo", seq_len_tokens=512, rollout={"completion_tokens": 512})


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_a_classifier_is_a_script_of_transformers_that_is_read_back(method: str) -> None:
    setup = setup_of("classification", method=method, accumulation_steps=4, seq_len_tokens=512)
    assert (setup.stack, setup.loss) == ("hf", "full")
    emitted = TARGETS["hf"].export(ExportRequest(model_id="gpt2", setup=setup, hyper=choose(setup)))
    config = read_text(next(file.text for file in emitted.files if file.path.endswith(".py")), "train.py")
    assert not config.missing
    assert config.setup.replace(expandable_segments=True) == setup.replace(
        adapter_dtype=config.setup.adapter_dtype, lora_targets=config.setup.lora_targets
    )


def test_the_negatives_of_an_embedding_come_from_the_whole_batch() -> None:
    """Accumulation adds none, so a plan's micro-batch is the batch, and a batch that does not fit is refused."""
    fixed = {"objective": ("embedding",), "method": ("lora",)}
    plan = planned(PlanRequest(seq_len=256, global_batch=16, fixed=fixed).workload(MODEL, CARD))
    assert {(candidate.setup.micro_batch_seqs, candidate.setup.accumulation_steps) for candidate in plan.ranked} == {
        (16, 1)
    }
    assert plan.chosen.setup.kernels == "eager"  # transformers' Trainer patches no SentenceTransformer
    whole = fixed | {"cached_seqs": (0,)}
    refused = plan_workload(PlanRequest(seq_len=2048, global_batch=256, fixed=whole).workload(MODEL, CARD))
    assert isinstance(refused, NoPlan)
    (less,) = [each.action for each in refused.suggestions if each.action.startswith("--global-batch")]
    fewer = PlanRequest(seq_len=2048, global_batch=int(less.split()[1]), fixed=whole).workload(MODEL, CARD)
    assert planned(fewer)


def test_a_gradient_cache_trains_batches_that_do_not_fit() -> None:
    """Its memory is that of one piece with accumulation, whatever the batch; it costs a forward, and is left out where
    the batch fits."""
    fixed = {"objective": ("embedding",), "method": ("lora",)}
    large, small = (
        planned(PlanRequest(seq_len=2048, global_batch=batch, fixed=fixed).workload(MODEL, CARD)) for batch in (256, 4)
    )
    assert large.chosen.setup.cached_seqs > 0
    assert small.chosen.setup.cached_seqs == 0
    cached = setup_of("embedding", seq_len_tokens=256, micro_batch_seqs=32, cached_seqs=4)
    twice = predict_memory(MODEL, CARD, cached.replace(micro_batch_seqs=64))
    assert predict_memory(MODEL, CARD, cached).phase_bytes == twice.phase_bytes
    plain = setup_from_dict({"seq_len_tokens": 256, "micro_batch_seqs": 4, "accumulation_steps": 2, "stack": "hf"})
    cached_bytes, other = (predict_memory(MODEL, CARD, setup).phase_bytes["backward"] for setup in (cached, plain))
    assert cached_bytes == pytest.approx(other, rel=0.01)
    assert cached.extra_forwards == 1
    assert cached.num_forwards == 2 * 8


def test_a_hard_negative_is_one_more_column() -> None:
    pairs = setup_of("embedding", seq_len_tokens=256, micro_batch_seqs=8)
    triples = pairs.replace(hard_negatives=1)
    pair_s, triple_s = (predict(MODEL, CARD, setup).step_time_s or 0.0 for setup in (pairs, triples))
    assert 1.45 < triple_s / pair_s < 1.55
    assert triples.tokens_per_step == 3 * pairs.tokens_per_step // 2
    assert triples.forward_tokens == pairs.forward_tokens
    with pytest.raises(SetupError, match="contrasts no samples"):
        TrainSetup(hard_negatives=1)
    with pytest.raises(SetupError, match="more than the 8 pairs"):
        setup_of("embedding", micro_batch_seqs=8, cached_seqs=9)


def test_a_trainer_that_loads_the_model_itself_quantizes_it_as_it_is_told() -> None:
    text = """
from transformers import BitsAndBytesConfig
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
args = GRPOConfig(model_init_kwargs={"attn_implementation": "eager", "dtype": "float32"}, max_completion_length=256)
GRPOTrainer("gpt2", reward, args, data, quantization_config=bits, peft_config=LoraConfig(r=32)).train()
"""
    setup = read_text(text, "train.py").setup
    assert (setup.method, setup.quantization, setup.precision) == ("qlora", "nf4-double", "bf16-mixed")
    assert (setup.attention, setup.rollout_settings.completion_tokens, setup.lora_rank) == ("eager", 256, 32)


@pytest.mark.parametrize("objective", [name for name, row in OBJECTIVES.items() if not row.supervised])
def test_the_band_of_a_speed_that_nobody_compared_holds_all_that_is_its_own(
    objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss, forwards without gradients and generation; the memory's is the formula's, as traced trainers say."""
    monkeypatch.setattr("planner.memory.model.step_profile_of", lambda *_: None)
    setup = setup_of(objective, micro_batch_seqs=4)
    prediction, plain = predict(MODEL, CARD, setup), predict(MODEL, CARD, TrainSetup())
    speed = speed_profile(MODEL, CARD, setup).step_time(setup)
    assert prediction.time_band_fraction == speed.band_fraction
    unmeasured_s = sum(prediction.time_parts_s.get(part, 0.0) for part in ("loss", WITHOUT_GRADIENTS, "generation"))
    more = speed.band_fraction - replace(speed.uncertainty, unmeasured=0.0).slower_fraction
    assert more == pytest.approx(unmeasured_s / prediction.step_time_s)
    assert prediction.memory_band_fraction == plain.memory_band_fraction
    assert any(OBJECTIVES[objective].title in note for note in prediction.notes)


AXOLOTL = "base_model: m\nadapter: lora\nlora_r: 8\nlora_dropout: 0.1\nlora_target_linear: true\nsequence_len: 512\n"
FACTORY = "model_name_or_path: m\ndo_train: true\nfinetuning_type: lora\ncutoff_len: 512\nlora_dropout: 0.1\n"
SWIFT = "swift {} --model m --tuner_type lora --max_length 512 --lora_dropout 0.1 "
OF_TOOLS = [
    ("a.yml", f"{AXOLOTL}rl: kto\n", "kto", "1.5", "TRL 1.5"),
    ("a.yml", f"{AXOLOTL}rl: orpo\n", "orpo", "", ""),
    ("a.yml", f"{AXOLOTL}rl: simpo\n", "orpo", "", "SimPO"),
    ("a.yml", f"{AXOLOTL}reward_model: true\n", "reward", "", ""),
    ("a.yaml", f"{FACTORY}stage: kto\n", "kto", "0.14", "TRL 0.14"),
    ("a.yaml", f"{FACTORY}stage: dpo\npref_loss: simpo\n", "orpo", "", "SimPO"),
    ("run.sh", SWIFT.format("rlhf"), "dpo", "0.28", "TRL 0.28"),
    ("run.sh", SWIFT.format("rlhf --rlhf_type kto"), "kto", "0.28", "TRL 0.28"),
    ("run.sh", SWIFT.format("rlhf --rlhf_type simpo"), "orpo", "", "ORPO"),
    ("run.sh", SWIFT.format("rlhf --rlhf_type rm"), "reward", "", ""),
    ("run.sh", SWIFT.format("sft --num_labels 2 --task_type seq_cls"), "classification", "", ""),
]


@pytest.mark.parametrize(("file", "text", "objective", "version", "words"), OF_TOOLS)
def test_a_tools_step_that_is_trls_is_read_as_its_objective(
    file: str, text: str, objective: str, version: str, words: str
) -> None:
    config = read_text(text, file)
    setup = config.setup
    assert (setup.objective, setup.loss, setup.trl_version, setup.packing) == (objective, "full", version, False)
    assert setup.lora_dropout == (0.1 if objective == "classification" else 0.0)
    counted = [text for text in config.approximations if " counted as " in text]
    assert any(words in text for text in counted) or not words


def test_axolotls_grpo_is_read_with_its_rollout() -> None:
    text = f"{AXOLOTL}micro_batch_size: 4\nrl: grpo\nvllm: {{gpu_memory_utilization: 0.6}}\n"
    text += "trl: {use_vllm: true, num_generations: 4, max_completion_length: 128, beta: 0.04}\n"
    shared = read_text(text.replace("{use_vllm", "{vllm_mode: colocate, use_vllm"), "a.yml").setup.rollout_settings
    assert shared.vllm_fraction == 0.6  # which it hands on where it is told the mode
    config = read_text(text, "a.yml")
    assert config.setup.rollout == Rollout(
        num_generations=4, completion_tokens=128, generator="vllm", vllm_fraction=0.3, reference=True
    )
    assert [gap.field for gap in config.missing] == ["seq_len_tokens"]
    assert (config.setup.objective, config.setup.trl_version) == ("grpo", "1.14")


def test_a_row_that_ms_swift_packs_with_pairs_is_counted_as_one_that_fills_it() -> None:
    setup = read_text(SWIFT.format("rlhf --rlhf_type dpo --packing true"), "run.sh").setup
    assert (setup.seq_len_tokens, setup.packing) == (256, False)


def test_what_transformers_or_peft_stop_before_the_first_step_cannot_run() -> None:
    card = find_gpu("h100-sxm")
    cohere, mixture = loaded("CohereLabs/aya-23-8B"), loaded("Qwen/Qwen3-30B-A3B")
    assert "AutoModelForSequenceClassification" in cannot_run(cohere, card, TrainSetup(objective="reward"))[0]
    assert cannot_run(cohere, card, TrainSetup(objective="dpo", loss="chunked")) == ()
    dropped = TrainSetup(lora_dropout=0.05)
    assert "no LoRA dropout on stacked experts" in cannot_run(mixture, card, dropped)[0]
    assert cannot_run(mixture, card, dropped.replace(lora_targets="attention")) == ()
    with pytest.raises(UsageError, match="no class of cohere that scores"):
        plan_workload(plan_request("CohereLabs/aya-23-8B", fixed={"objective": ("reward",)}))


def test_heads_that_peft_cannot_wrap_are_no_plan() -> None:
    """Dry runs of PEFT's own code: "only Tensors of floating point dtype can require gradients" of RoBERTa's
    classifier.dense in 4 bits, "modules_to_save cannot be applied" of DistilBERT's pre_classifier."""
    scored = {"objective": ("classification",)}
    with pytest.raises(UsageError, match="quantized head"):
        planned(plan_request("FacebookAI/roberta-base", "rtx-4090", fixed={**scored, "method": ("qlora",)}))
    request = plan_request("distilbert/distilbert-base-uncased", "rtx-4090", fixed={**scored, "method": ("lora",)})
    assert planned(request).chosen.setup.lora_targets == "attention"
    setup = TrainSetup(method="lora", objective="classification", loss="full", stack="hf")
    assert any("pre_classifier" in reason for reason in cannot_run(request.model, request.gpu, setup))
