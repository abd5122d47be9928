"""The callback inside transformers' Trainer and TRL's, and the keyword arguments of their classes."""

import ast
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl")
import torch
import trl
import yaml
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from finetune_planner import PlannerError, plan
from finetune_planner.callback import PlanCallback, PredictedOutOfMemory, program
from planner.core.errors import UsageError
from planner.frameworks.readers.read import read_text
from planner.planning.check import Verdict
from probes.store import Store

TOKENS = 32
CARD = "rtx-4090"
MODEL = "HuggingFaceTB/SmolLM2-135M"


def small() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=2, max_position_embeddings=128, **sizes)
    return LlamaForCausalLM(config)


def trainer_of(folder: Path, *callbacks: PlanCallback, **more: Any) -> Trainer:
    rows = [{"input_ids": [1] * TOKENS, "labels": [1] * TOKENS}] * 32
    model = get_peft_model(small(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    args = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=6, report_to="none", use_cpu=True,
        save_strategy="no", logging_strategy="no", disable_tqdm=True, **more,
    )  # fmt: skip
    return Trainer(model=model, args=args, train_dataset=Dataset.from_list(rows), callbacks=list(callbacks))


def test_a_run_is_predicted_and_its_receipt_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, float] = {}
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=SimpleNamespace(summary=seen)))
    callback = PlanCallback(CARD, store=tmp_path / "store.jsonl", report_to="wandb")
    longer = PlanCallback(CARD, store=tmp_path / "longer.jsonl", seq_len=2 * TOKENS)
    trainer_of(tmp_path / "run", callback, longer, gradient_accumulation_steps=2).train()
    setup = callback.checked.config.setup
    assert (setup.micro_batch_seqs, setup.accumulation_steps, setup.seq_len_tokens) == (2, 2, TOKENS)
    assert (setup.method, setup.lora_rank, setup.lora_targets, setup.weight_dtype) == (
        "lora", 4, ("q_proj", "v_proj"), "fp32",
    )  # fmt: skip
    assert callback.checked.verdict is Verdict.FITS
    (record,) = Store(tmp_path / "store.jsonl").records()
    assert record.setup["lora_rank"] == 4
    assert record.outcome == callback.measured
    assert len(callback.measured.step_times_s) == 4
    assert seen["plan/predicted_peak_device_bytes"] == callback.checked.prediction.peak_device_bytes
    assert seen["plan/measured_tokens_per_s"] > 0
    text = capsys.readouterr().err
    assert "fits: " in text
    assert "taken: " in text
    assert "held 50% of the tokens" in text
    assert not (tmp_path / "longer.jsonl").exists()


@pytest.mark.parametrize("stop", [False, True])
def test_what_does_not_fit_is_said_before_the_first_step(tmp_path: Path, stop: bool) -> None:
    callback = PlanCallback("tiny:1GiB:100GB/s:1TFLOPS", stop=stop, seq_len=4_000_000)
    expected = pytest.raises(UsageError) if stop else pytest.warns(PredictedOutOfMemory)
    trainer = trainer_of(tmp_path, callback)
    with expected as caught:
        trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
    assert "does not fit: " in str(caught.value if stop else caught[0].message)


def test_no_fault_of_ours_ends_a_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune_planner.callback.program", lambda *_: 1 / 0)
    assert trainer_of(tmp_path, PlanCallback(CARD, store=False)).train().global_step == 6
    assert "nothing is predicted: an internal error, ZeroDivisionError" in capsys.readouterr().err


def test_trl_s_arguments_are_read_as_trl_runs_them(tmp_path: Path) -> None:
    model = small().to(torch.bfloat16)
    args = trl.SFTConfig(
        output_dir=str(tmp_path), max_length=64, packing=True, optim="adafactor", use_cpu=True, bf16=False,
        gradient_checkpointing=False,
    )  # fmt: skip
    setup = read_text(program(args, model, "a/b"), "train.py").setup
    assert (setup.method, setup.optimizer, setup.seq_len_tokens, setup.packing) == ("full", "adafactor", 64, True)
    assert (setup.loss, setup.weight_dtype, setup.checkpointing) == ("chunked", "bf16", 0)


@pytest.mark.parametrize(
    ("target", "plan_request"),
    [
        ("trl", {"method": "qlora", "seq_len": 1024}),
        ("trl", {"method": "lora", "objective": "dpo"}),
        ("trl", {"method": "lora", "objective": "grpo"}),
        ("hf", {"method": "qlora", "checkpointing": True}),
        ("hf", {"method": "full", "optimizer": "adafactor"}),
    ],
)
def test_keywords_make_what_the_launch_file_says(target: str, plan_request: dict[str, Any], tmp_path: Path) -> None:
    """The classes take them, and the emitted file says the same of each."""
    planned = plan(MODEL, "rtx-4090", dry_run=False, target=target, **plan_request)
    keywords = planned.trl() if target == "trl" else planned.hf()
    kind = {"dpo": "DPOConfig", "grpo": "GRPOConfig"}.get(plan_request.get("objective", ""), "SFTConfig")
    made = getattr(trl, kind) if target == "trl" else TrainingArguments
    args = made(**keywords | {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "fp16": False})
    assert args.per_device_train_batch_size == planned.chosen.setup.micro_batch_seqs
    (launch,) = planned.write(tmp_path / "plan")
    main = launch.files[0]
    if target == "trl":
        written = yaml.safe_load(main.text)
    else:
        calls = [node for node in ast.walk(ast.parse(main.text)) if isinstance(node, ast.Call)]
        (call,) = [node for node in calls if getattr(node.func, "id", "") == "TrainingArguments"]
        written = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    init = keywords.pop("model_init_kwargs", planned.model_kwargs())
    names = {field.name for field in fields(made)} & set(written) - NOT_THE_TRAINER_S
    assert keywords == {name: written[name] for name in names}
    assert init["dtype"] in main.text
    if plan_request["method"] == "full":
        assert planned.peft() == planned.bitsandbytes() == {}
        return
    assert LoraConfig(**planned.peft()).r == planned.chosen.setup.lora_rank
    if plan_request["method"] == "qlora":
        assert BitsAndBytesConfig(**planned.bitsandbytes()).bnb_4bit_quant_type == "nf4"


NOT_THE_TRAINER_S = {"dtype", "chat_template_path", "model_init_kwargs", "remove_unused_columns"} | {
    "eval_strategy",
    "eval_steps",
}
"""Of a file: what is the model's, its own collator's and its own held-out samples'."""


def test_a_plan_that_a_tool_cannot_run_has_no_keywords_for_it() -> None:
    planned = plan(MODEL, "rtx-4090", dry_run=False, target="hf", method="qlora", quantization="int8")
    assert planned.bitsandbytes() == {"load_in_8bit": True}
    with pytest.raises(PlannerError, match="cannot run this setup"):
        plan(MODEL, "rtx-4090", dry_run=False, objective="embedding").trl()
