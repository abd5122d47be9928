"""`plan oom`: tracebacks and logs in the forms in which people paste them, and memory snapshots."""

import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from finetune_planner.cli.app import run
from planner.core.units import GIB, MIB
from planner.planning.failures.diagnosis import diagnose
from planner.planning.failures.message import read_message
from tests.whole import paired

NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of {total} of "
    "which {free} is free. {others}Including non-PyTorch memory, this process has {mine} memory in use. Of the "
    "allocated memory {held} is allocated by PyTorch, and {pieces} is reserved by PyTorch but unallocated. If ..."
)
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 150.00 MiB (GPU 0; 8.00 GiB total capacity; 7.25 GiB already "
    "allocated; 0 bytes free; 7.50 GiB reserved in total by PyTorch)"
)
PLAIN = {"tried": "1.50 GiB", "total": "23.65 GiB", "free": "0.50 GiB", "others": "", "mine": "23.10 GiB"}
PLAIN |= {"held": "22.00 GiB", "pieces": "0.30 GiB"}
SITE = "/opt/venv/lib/python3.11/site-packages"
TRAIN = (f"{SITE}/transformers/trainer.py:train", f"{SITE}/transformers/trainer.py:_inner_training_loop")
STEP = (*TRAIN, f"{SITE}/transformers/trainer.py:training_step")
FORWARD = (*STEP, f"{SITE}/trl/trainer/sft_trainer.py:compute_loss", f"{SITE}/torch/nn/modules/module.py:_call_impl")
CASES = {
    "load": (
        f"{SITE}/transformers/models/auto/auto_factory.py:from_pretrained",
        f"{SITE}/torch/nn/modules/module.py:to",
    ),
    "kbit-cast": (f"{SITE}/peft/utils/other.py:prepare_model_for_kbit_training",),
    "attention": (*FORWARD, f"{SITE}/transformers/integrations/sdpa_attention.py:sdpa_attention_forward"),
    "forward": (*FORWARD, f"{SITE}/transformers/models/llama/modeling_llama.py:forward"),
    "loss": (*FORWARD, f"{SITE}/transformers/loss/loss_utils.py:ForCausalLMLoss"),
    "backward": (
        *STEP,
        f"{SITE}/accelerate/accelerator.py:backward",
        f"{SITE}/torch/autograd/graph.py:_engine_run_backward",
    ),
    "recompute": (*STEP, f"{SITE}/torch/_tensor.py:backward", f"{SITE}/torch/utils/checkpoint.py:unpack_hook"),
    "optimizer": (*TRAIN, f"{SITE}/accelerate/optimizer.py:step", f"{SITE}/torch/optim/adamw.py:_init_group"),
    "evaluation": (*TRAIN, f"{SITE}/transformers/trainer.py:evaluate", f"{SITE}/transformers/loss/loss_utils.py:f"),
    "evaluation-gather": (
        *TRAIN,
        f"{SITE}/transformers/trainer.py:evaluation_loop",
        f"{SITE}/x.py:pad_across_processes",
    ),
    "zero-states": (
        *TRAIN,
        f"{SITE}/deepspeed/runtime/engine.py:__init__",
        f"{SITE}/deepspeed/runtime/zero/stage_1_and_2.py:initialize_optimizer_states",
    ),
    "generation": (*TRAIN, f"{SITE}/transformers/generation/utils.py:_sample", f"{SITE}/m/modeling_qwen2.py:forward"),
    "reference": (*FORWARD, f"{SITE}/trl/trainer/dpo_trainer.py:compute_ref_log_probs", f"{SITE}/m.py:forward"),
    "wrap": (
        *TRAIN,
        f"{SITE}/accelerate/accelerator.py:prepare_model",
        f"{SITE}/torch/nn/parallel/distributed.py:__init__",
    ),
    "save": (*TRAIN, f"{SITE}/transformers/trainer.py:_save_checkpoint", f"{SITE}/torch/x.py:state_dict"),
}
"""Part of the run -> calls, the innermost last, named as in torch 2.11, transformers 5 and TRL 1.16."""


def as_python(calls: tuple[str, ...], prefix: str = "") -> str:
    frames = [f'  File "{call.rpartition(":")[0]}", line 7, in {call.rpartition(":")[2]}\n    x = 1' for call in calls]
    text = "\n".join(["Traceback (most recent call last):", *frames])
    return "\n".join(prefix + line for line in text.splitlines())


def as_notebook(calls: tuple[str, ...]) -> str:
    cells = "\n\n".join(
        f"File {call.rpartition(':')[0]}:7, in Some.{call.rpartition(':')[2]}(self, x)\n      6 y = 2\n----> 7 x = 1"
        for call in calls
    )
    return f"OutOfMemoryError    Traceback (most recent call last)\nCell In[3], line 1\n----> 1 go()\n\n{cells}\n"


def as_old_notebook(calls: tuple[str, ...]) -> str:
    cells = "\n\n".join(
        f"{f'[{file}](https://localhost/#)' if number % 2 else file} in {name}(self, x)\n      6 y = 2\n----> 7 x = 1"
        for number, (file, _, name) in enumerate(call.rpartition(":") for call in calls)
    )
    return f"OutOfMemoryError    Traceback (most recent call last)\n<ipython-input-3-0a> in <module>()\n{cells}\n"


def as_pytest(calls: tuple[str, ...]) -> str:
    return "\n".join(f"{call.rpartition(':')[0]}:7: in {call.rpartition(':')[2]}\n    x = 1" for call in calls)


def as_narrow_rich(calls: tuple[str, ...]) -> str:
    return "\n".join(
        f"│ {call.rpartition(':')[0]}:7  │\n│ in {call.rpartition(':')[2]}    │\n│  6 x │" for call in calls
    )


def as_rich(calls: tuple[str, ...]) -> str:
    boxed = "\n".join(
        f"│ {call.rpartition(':')[0]}:7 in {call.rpartition(':')[2]}    │\n│  6 x = 1  │" for call in calls
    )
    return f"╭─── Traceback (most recent call last) ───╮\n{boxed}\n╰───╯"


def phase_of(text: str) -> str:
    """The part of the run that a text tells of, "" where it tells of none."""
    phase = diagnose(text).phase
    return phase.name if phase else ""


FORMS = ["python", "ranks", "quoted", "rich", "windows", "notebook", "old notebook", "pytest", "narrow rich"]


@pytest.mark.parametrize(("phase", "form"), paired(CASES, FORMS, 2))
def test_the_part_of_the_run_is_named(phase: str, form: str) -> None:
    calls = CASES[phase]
    text = {
        "python": as_python(calls) + "\n" + NEW.format(**PLAIN),
        "ranks": as_python(calls, "[rank3]: ") + "\n[rank3]: " + NEW.format(**PLAIN),
        "quoted": as_python(calls, "> [rank3]: ") + "\n> [rank3]: " + NEW.format(**PLAIN),
        "notebook": as_notebook(calls) + "\n" + NEW.format(**PLAIN),
        "old notebook": as_old_notebook(calls) + "\n" + OLD,
        "pytest": as_pytest(calls) + "\n" + OLD,
        "narrow rich": as_narrow_rich(calls) + "\n" + OLD,
        "rich": as_rich(calls) + "\n" + OLD,
        "windows": as_python(calls).replace("/", "\\") + "\n" + OLD,
    }[form]
    diagnosis = diagnose(f"{'{loss: 1}'}\n" * 50 + text + "\nsomething after\n")
    assert diagnosis.phase.name == phase
    assert diagnosis.causes[0].name == phase
    assert diagnosis.causes[0].changes
    assert not diagnosis.unknown


def test_every_figure_of_both_forms_is_read() -> None:
    new = read_message(NEW.format(**{**PLAIN, "others": "Process 41 has 1.25 GiB memory in use. "}))
    assert (new.tried_bytes, new.total_bytes, new.free_bytes) == (3 * GIB // 2, int(23.65 * GIB), GIB // 2)
    assert (new.process_bytes, new.allocated_bytes) == (int(23.10 * GIB), 22 * GIB)
    assert (new.unallocated_bytes, new.other_bytes) == (int(0.3 * GIB), int(1.25 * GIB))
    old = read_message(OLD)
    assert (old.tried_bytes, old.total_bytes, old.free_bytes) == (150 * MIB, 8 * GIB, 0)
    assert (old.allocated_bytes, old.unallocated_bytes) == (29 * GIB // 4, GIB // 4)


def test_the_first_form_counts_pieces_as_cached_and_memory_outside_of_pytorch_is_told() -> None:
    first = read_message("Tried to allocate 1.00 GiB (GPU 0; 12.00 GiB total capacity; 2.00 GiB already allocated; "
                         "256.00 MiB free; 512.00 MiB cached)")  # fmt: skip
    assert (first.allocated_bytes, first.unallocated_bytes) == (2 * GIB, GIB // 2)
    assert first.other_bytes == 12 * GIB - GIB // 4 - 5 * GIB // 2 - GIB
    assert read_message(OLD).other_bytes == 0


@pytest.mark.parametrize(
    ("processes", "others_gib"),
    [("Process 7 has 22.50 GiB memory in use. ", 0), ("Process 7 has 22.50 GiB memory in use. Process 8 has 3.00 GiB "
     "memory in use. ", 3), ("Including non-PyTorch memory, this process has 0 bytes memory in use. ", 0)],
)  # fmt: skip
def test_in_a_container_the_process_itself_is_not_one_of_the_others(processes: str, others_gib: int) -> None:
    message = read_message(
        f"CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacty of 24.00 GiB of which 1.00 GiB is "
        f"free. {processes}Of the allocated memory 21.75 GiB is allocated by PyTorch, and 512.00 MiB is reserved by "
        "PyTorch but unallocated."
    )
    assert message.other_bytes == others_gib * GIB


def test_a_message_cut_by_a_narrow_terminal_is_read() -> None:
    text = NEW.format(**PLAIN)
    assert (
        read_message("\n".join(text[start : start + 77] for start in range(0, len(text), 77))).allocated_bytes
        == 22 * GIB
    )
    words = text.split(" ")
    assert read_message("\n".join(" ".join(words[at : at + 9]) for at in range(0, len(words), 9))).total_bytes == int(
        23.65 * GIB
    )


@pytest.mark.parametrize(
    ("code", "phase"),
    [
        ("  loss.backward()", "backward"),
        ("❱ 91 │   optimizer.step()", "optimizer"),
        ("----> 3 logits = self.lm_head(hidden)", "loss"),
        ("  scores = attn.softmax(dim=-1)", "attention"),
        ("  model.to(device)", "load"),
        ("  model.save_pretrained_merged(folder)", "save"),
        ("  return F.linear(x, w)", "forward"),
        ("return cross_entropy_loss(x, y)   torch.cuda.OutOfMemoryError", "loss"),
        ("h = (scores @ v).transpose(1, 2) RuntimeError", "attention"),
        ("gpu-q-13: ret = input.softmax(dim)", "attention"),
        (">       return F.cross_entropy(x, y)\nE       torch.cuda.OutOfMemoryError", "loss"),
        ("UserWarning: could not copy a tensor of state_dict(): Error", "save"),
        ("  batch = self.rollouts.generate_sequences(batch)", "generation"),
        ("t = torch.einsum('bcft, bcfy->bfty', [qt, kt])", "attention"),
    ],
)
def test_the_source_line_alone_tells_the_part(code: str, phase: str) -> None:
    separator = ": " if "Warning" in code or "Error" in code else "\n"
    assert phase_of(f"{code}{separator}CUDA out of memory. Tried to allocate 1.00 GiB.") == phase


@pytest.mark.parametrize(
    ("call", "phase"),
    [
        ("torch/serialization.py:persistent_load", "load"),
        ("torch/optim/optimizer.py:load_state_dict", "save"),
        ("torch/nn/modules/module.py:__call__", "forward"),
        ("torch/nn/modules/module.py:_apply", "load"),
        ("transformers/trainer_pt_utils.py:torch_pad_and_concatenate", "evaluation-gather"),
        ("accelerate/optimizer.py:step", "optimizer"),
        ("accelerate/utils/operations.py:_convert_to_fp32", "loss"),
        ("m/modeling_x.py:attention_fn", "attention"),
        ("flash_attn/flash_attn_interface.py:_flash_attn_varlen_forward", "attention"),
        ("m/mistral.py:MistralForCausalLM_fast_forward", "forward"),
        ("trainer/utils.py:unwrap_model_for_generation", "generation"),
        ("trl/trainer/grpo_trainer.py:_generate_and_score_completions", "generation"),
        ("train/checkpoint.py:fsdp_save_folder", "save"),
        ("unsloth/save.py:merge_and_overwrite_lora", "save"),
        ("trainer/ccip_trainer.py:val_one_epoch", "evaluation"),
        ("axolotl/train.py:setup_model_and_tokenizer", "load"),
        ("vllm/engine/llm_engine.py:_initialize_kv_caches", "vllm-start"),
        ("deepspeed/runtime/zero/partitioned_param_coordinator.py:__all_gather_params", "gather"),
        ("torch/nn/utils/clip_grad.py:clip_grad_norm_", "backward"),
        ("bitsandbytes/functional.py:get_paged", "optimizer"),
        ("unsloth_zoo/fused_losses/cross_entropy_loss.py:_get_chunk_multiplier", "unsloth-loss"),
    ],
)
def test_a_call_alone_tells_the_part(call: str, phase: str) -> None:
    assert phase_of(f"{as_python((f'{SITE}/{call}',))}\n{OLD}") == phase


@pytest.mark.parametrize(
    ("total", "card"), [("14.74", "t4"), ("11.76", "rtx-3060"), ("12.00", "rtx-3060"), ("8.00", "rtx-4060")]
)
def test_the_card_is_among_those_of_its_total(total: str, card: str) -> None:
    """On Colab's T4; on an RTX 3060 by an older driver and on Windows, which keeps nothing back."""
    cards = diagnose(f"CUDA out of memory. Tried to allocate 1.96 GiB (GPU 0; {total} GiB total capacity").cards
    assert card in cards
    assert not any(key.startswith("apple") for key in cards)


def test_unsloths_own_words_for_a_full_card_are_an_out_of_memory_error() -> None:
    text = "RuntimeError: Unsloth: No or negligible GPU memory available for fused cross entropy."
    assert diagnose(text).message.where == "device"


def test_a_card_of_no_memory_and_a_line_without_an_end_are_read() -> None:
    assert not diagnose("CUDA out of memory. Tried to allocate 1 bytes (GPU 0; 0 bytes total capacity").cards
    assert diagnose("a" * 3_000_000 + " CUDA out of memory").message.where == "device"


def test_each_process_of_a_log_has_its_own_traceback() -> None:
    first = as_python(CASES["optimizer"], "[rank0]: ").splitlines()
    second = as_python(CASES["loss"], "[rank1]: ").splitlines()
    mixed = [line for pair in zip(first, second, strict=False) for line in pair]
    assert phase_of("\n".join([*mixed, *second[len(first) :], "[rank0]: " + OLD])) == "optimizer"


def test_what_a_closure_calls_is_not_the_optimizers_and_a_launchers_handler_kills_no_host() -> None:
    calls = (
        f"{SITE}/torch/optim/adamw.py:step",
        f"{SITE}/lightning/pytorch/loops/automatic.py:closure",
        "m.py:forward",
    )
    launcher = "[launch.py:315:sigkill_handler] Killing subprocess 2442"
    assert phase_of(f"{as_python(calls)}\n{OLD}\n{launcher}") == "forward"
    assert diagnose(f"CUDA out of memory\n{launcher}").message.where == "device"


@pytest.mark.parametrize(
    "words", ["we get OOM after two steps", "微调时oom了", "it runs Out-of-Memory", "Cuda out of memory!"]
)
def test_people_say_it_in_words(words: str) -> None:
    assert diagnose(words).message.where == "device"
    assert diagnose(words).unknown
    assert not diagnose(f"{words}\nKeyError: 'text'").message.where or "uda" in words


@pytest.mark.parametrize(
    ("words", "phase"),
    [
        ("CUDA OOM\nThe training suddenly crashed during `loss.backward()`.", "backward"),
        ("CUDA OOM during the first optimizer.step()", "optimizer"),
        ("FSDP cuda out of memory during checkpoint saving", "save"),
        ("Merging LoRA into the model goes out of memory", "save"),
        ("一到eval_step就爆OOM了", "evaluation"),
        ("CUDA OOM when doing rollout in GRPO", "generation"),
        ("Out of memory while loading the checkpoint", "load"),
        ("CUDA OOM when initializing DDP", "wrap"),
        ("It was OOM. I fixed it, it got solved when I installed flash attention", "attention"),
        ("OOM after a validation", ""),
        ("gradient checkpointing does not help, still OOM", ""),
        ("OOM on 32 GB; offloading of optimizer states yields the same OOM", ""),
        ("per_device_eval_batch_size调到1了，还是显存不够", ""),
        ("OOM at the beginning of a new epoch after saving checkpoint", ""),
        ("Running out of memory when resuming the training from a checkpoint", "load"),
        ("显存溢出: the error occurs in `rw_model.load_state_dict(torch.load(PATH))`", "load"),
        ("我检索到占满显存的代码是 loss = model(image, caption)", "forward"),
        ("I load the model and save it. Then it is OOM.", ""),
        ("export_model.py 合并 lora后sft报OOM", ""),
        ("the saved model loaded always got OOM", "load"),
        ("Possible memory leak in validation", "evaluation"),
        ("OOM in train.py. GPU usage keeps increasing until it fails", "growth"),
        ("CUDA out of memory occurs after training several steps", "growth"),
        ("显卡内存一直上涨，最终显存溢出", "growth"),
        ("OOM: memory usage is not increasing", ""),
        ("OOM after 2 epochs. The error occurs during evaluation.", "evaluation"),
        ("CUDA out of memory during training, works fine during inference.", ""),
        ("CUDA out of memory is solved, the other error appears at loss.backward()", ""),
        ("在加载完数据开始训练时报OOM", ""),
        ("OOM when it computes logps", "loss"),
        ("CUDA OOM when calling `_setup_for_real_optimizer()`", "wrap"),
        ("VRAM overflow with every sample image", "generation"),
        ("OOM: it dies during the first training pass", "forward"),
        ("OOM\nRunning validation on dev set\nTraceback (most recent call last):", "evaluation"),
        ("OOM\n│ 746 │ ) # Calls into the C++ engine to run the backward pass │", "backward"),
    ],
)
def test_what_people_say_of_the_moment_counts_where_nothing_else_is_shown(words: str, phase: str) -> None:
    assert phase_of(words) == phase
    assert phase_of(f"{words}\n{as_python(CASES['forward'])}\n{OLD}") == "forward"


@pytest.mark.parametrize(
    ("text", "phase"),
    [
        ('efficient_cross_entropy.py", line 108, in forward\n    x = y\n' + OLD, "loss"),
        ('  File "/x/node.py", line 3, in load_model\n    m.to(device)\nAllocation on device', "load"),
        ('  File "r.py", line 9, in train\n    loss = self._loss_step(batch)\n' + OLD, "forward"),
        (as_python((f"{SITE}/transformers/modeling_utils.py:load_shard_file",)) + "\n" + OLD, "load"),
        (
            'OutOfMemoryError: Caught OutOfMemoryError in replica 0 on device 0.\nTraceback: File "/x/p.py", line 6, '
            'in _worker output = module(x) File "/x/m.py", line 7, in forward return x',
            "forward",
        ),
        ("base.py 410 training_step\nloss = x\n\nmodule.py 1532 _call_impl\nreturn y\n" + OLD, "forward"),
        # the model's head is the loss; other lines of the source change no part that is known
        (f'  File "{SITE}/m/modeling_llama.py", line 3, in forward\n    logits = self.lm_head(x)\n{OLD}', "loss"),
        (f'  File "{SITE}/m/modeling_llama.py", line 3, in forward\n    x = model.to(device)\n{OLD}', "forward"),
        # the engine's own calls
        (
            f"{as_python(CASES['backward'])}\n{OLD}\n\nAt:\n  /opt/torch/nn/functional.py(12): linear\n"
            "  /opt/torch/utils/checkpoint.py(34): unpack_hook\n",
            "recompute",
        ),
    ],
)
def test_a_traceback_that_lost_an_end_is_read(text: str, phase: str) -> None:
    assert phase_of(text) == phase


def test_others_and_pieces_come_first_only_where_they_would_have_been_enough() -> None:
    calls = as_python(CASES["loss"]) + "\n"
    others = diagnose(calls + NEW.format(**{**PLAIN, "others": "Process 41 has 9.00 GiB memory in use. "}))
    assert [cause.name for cause in others.causes] == ["other processes", "loss"]
    large = {**PLAIN, "tried": "11.00 GiB", "others": "Process 41 has 9.00 GiB memory in use. "}
    assert [cause.name for cause in diagnose(calls + NEW.format(**large)).causes] == ["loss", "other processes"]
    pieces = diagnose(calls + NEW.format(**{**PLAIN, "pieces": "4.00 GiB"}))
    assert pieces.causes[0].name == "fragmentation"
    whole = diagnose(calls + NEW.format(**{**PLAIN, "tried": "64.00 GiB"}))
    assert [cause.name for cause in whole.causes] == ["one allocation", "loss"]


def test_what_no_smaller_batch_helps_and_what_no_traceback_explains_have_their_changes() -> None:
    """Of liucongg/ChatGLM-Finetuning#28 (a card that is nearly empty) and ragntune/code-llama-finetune#3."""
    empty = (
        "RuntimeError: CUDA out of memory. Tried to allocate 128.00 MiB (GPU 0; 44.99 GiB total capacity; 6.15 GiB "
        "already allocated; 37.32 GiB free; 6.15 GiB reserved in total by PyTorch)"
    )
    assert diagnose(empty).causes[0].name == "room on the card"
    full = diagnose(empty.replace("37.32 GiB free", "0.10 GiB free"))
    assert "room on the card" not in [cause.name for cause in full.causes]
    large = diagnose(NEW.format(**{**PLAIN, "tried": "64.00 GiB"})).causes[0]
    assert large.name == "one allocation"
    assert any("sdpa" in change for change in large.changes)


def test_ranks_that_all_load_onto_one_card_are_told_from_strangers() -> None:
    """Numbers next to one another (rwth-i6/returnn#1469, huggingface/trl#3172), or far apart."""

    def first(*numbers: int) -> str:
        others = "".join(f"Process {number} has 5.00 GiB memory in use. " for number in numbers)
        return diagnose(NEW.format(**{**PLAIN, "others": others})).causes[0].changes[0]

    assert "LOCAL_RANK" in first(3427, 3423, 3424, 3426)
    assert "nvidia-smi" in first(441650, 449657)
    assert "nvidia-smi" in first(41)


def test_pieces_larger_than_what_was_asked_for_are_advised_on_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for pieces, first in (("1.60 GiB", "expandable_segments"), ("0.30 GiB", "per_device_train_batch_size")):
        (tmp_path / "log.txt").write_text(NEW.format(**{**PLAIN, "pieces": pieces}))
        run(["oom", str(tmp_path / "log.txt")])
        assert first in capsys.readouterr().out.partition("→")[2].partition("→")[0]


def test_the_card_is_told_by_its_memory_and_asked_for_where_several_have_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.txt"
    log.write_text(as_python(CASES["loss"]) + "\n" + NEW.format(**PLAIN))
    config = (
        "model_name_or_path: Qwen/Qwen2.5-7B\ndataset_name: a/b\nper_device_train_batch_size: 16\nmax_length: 2048\n"
    )
    (tmp_path / "train.yaml").write_text(config + "use_peft: true\nlora_r: 16\nbf16: true\ndtype: bfloat16\n")
    assert {"rtx-3090", "rtx-4090"} <= set(diagnose(log.read_text()).cards)
    assert run(["oom", str(log)]) == 0
    assert "train.yaml: not checked: the card is not known: --gpu NAME" in capsys.readouterr().out
    assert run(["oom", str(log), "--gpu", "rtx-9999", "--json"]) == 2
    assert "rtx-9999" in capsys.readouterr().err
    assert run(["oom", str(log), "--gpu", "rtx-4090", "--json=full"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["check"]["verdict"] == "does_not_fit"
    assert document["config"].endswith("train.yaml")
    assert run(["oom", str(log), "--gpu", "rtx-4090"]) == 0
    text = capsys.readouterr().out
    assert "Ran out of memory: the loss over the vocabulary" in text
    assert "need less and fit" in text


def test_advice_is_of_the_program_that_ran() -> None:
    """A loop of somebody's own has no Trainer's arguments, a run of adapters no full fine-tuning, and bitsandbytes'
    optimizer may still be unpaged."""

    def changes(*calls: str, said: str = "") -> str:
        return " ".join(diagnose(f"{said}\n{as_python(calls)}\n{NEW.format(**PLAIN)}").causes[0].changes)

    assert "per_device" in changes(*CASES["loss"])
    assert "loss_type='chunked_nll'" in changes(*CASES["loss"])
    assert "loss_type" not in changes(f"{SITE}/trl/trainer/grpo_trainer.py:_compute_loss", CASES["loss"][-1])
    own = changes("/work/loop.py:main", f"{SITE}/torch/nn/modules/module.py:_call_impl", CASES["loss"][-1])
    assert "micro-batch" in own
    assert not any(word in own for word in ("per_device", "use_liger", "optim="))
    assert "full fine-tuning" in changes(*CASES["optimizer"])
    unsloth = changes(
        *TRAIN, f"{SITE}/bitsandbytes/optim/optimizer.py:step", said="Trainable parameters = 6,039/78,520"
    )
    assert "full fine-tuning" not in unsloth
    assert "embed_tokens" in unsloth
    assert "quarter of the states" not in unsloth
    its_own = changes(*STEP, f"{SITE}/unsloth/models/_utils.py:_unsloth_training_step", CASES["backward"][-1])
    assert "use_gradient_checkpointing='unsloth'" in its_own
    assert "use_liger_kernel" not in its_own


def test_a_run_that_its_config_does_not_explain_is_advised_nothing_that_needs_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`plan check` names no checkpointing as faster; here the log's own advice stays, and only what needs less."""
    log, config = tmp_path / "log.txt", tmp_path / "train.yaml"
    log.write_text(as_python(CASES["loss"]) + "\n" + NEW.format(**PLAIN))
    config.write_text(
        "model_name_or_path: HuggingFaceTB/SmolLM2-135M\ndataset_name: a/b\nper_device_train_batch_size: 4\n"
        "max_length: 1024\ngradient_checkpointing: true\nuse_peft: true\nlora_r: 16\nbf16: true\ndtype: bfloat16\n"
    )
    command = ["oom", str(log), "--config", str(config), "--gpu", "rtx-4090"]
    assert run([*command, "--json=full"]) == 0
    check = json.loads(capsys.readouterr().out)["check"]
    more = [each for each in check["changes"] if each["peak_device_bytes"] >= check["prediction"]["peak_device_bytes"]]
    assert check["verdict"] == "fits"
    assert more
    assert run(command) == 0
    text = capsys.readouterr().out
    assert "What helps, smallest change first" in text
    assert all(f"→ {change['label']}:" not in text for change in more)


@pytest.mark.parametrize(
    "text",
    [
        "[1]    4242 killed\nexitcode  : -9 (pid: 42)",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 123 bytes",
        "Loading checkpoint shards: 50%\nKilled\n",
        "zsh: killed     python train.py",
        "run.sh: line 3:  4242 Killed                  python train.py",
        "['python', 'train.py'] exits with return code = -9",
        "RuntimeError: DataLoader worker (pid 5) is killed by signal: Killed.",
        "the node was running low on memory",
        "killed by OOM killer",
        "DataLoader worker is killed by singal: Killed",
        "the ram usage is maxed and the notebook crashes",
        "Your session crashed after using all available RAM.",
        "Your notebook tried to allocate more memory than is available. It has restarted.",
        "内存在训练过程中越来越高最后，oom\nFile torch/cuda/streams.py",
        "the validation leads to an increase in system memory, which leads to Out Of Memory",
        "DataLoader worker (pid 5) is killed by signal: Killed\nIs there `cuda out of memory` in dmesg?",
    ],
)
def test_the_hosts_memory_is_told_from_the_cards(text: str) -> None:
    diagnosis = diagnose(text)
    assert diagnosis.message.where == "host"
    assert diagnosis.causes[0].name == "host memory"


def test_layers_for_which_the_card_had_no_room_are_told() -> None:
    """Colab's first error of a model too large: transformers 5.23 `quantizers/quantizer_bnb_4bit.py`."""
    text = "ValueError: Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM to fit"
    assert [cause.name for cause in diagnose(text).causes] == ["no room for the model"]


def test_shared_memory_is_told_from_the_hosts() -> None:
    diagnosis = diagnose(
        "RuntimeError: DataLoader worker (pid 5) is killed by signal: Bus error. More shared memory ..."
    )
    assert [cause.name for cause in diagnosis.causes] == ["shared memory"]


def test_a_pipe_into_which_nobody_writes_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "log.txt")
    assert run(["oom", str(tmp_path / "log.txt")]) == 2
    assert "no out-of-memory error" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_log_is_read_from_a_pipe_and_in_powershells_letters(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = f"{as_python(CASES['loss'])}\n{OLD}\n".encode(encoding)
    (tmp_path / "log.txt").write_bytes(data)
    assert run(["oom", str(tmp_path / "log.txt")]) == 0
    from_file = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert run(["oom", "-"]) == 0
    assert capsys.readouterr().out == from_file
    assert "the loss over the vocabulary" in from_file


def test_what_is_no_such_error_is_refused_and_what_is_not_told_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"KeyError: 'text'\n")))
    assert run(["oom", "-"]) == 2
    assert "hint: paste it" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(OLD.encode())))
    assert run(["oom", "-"]) == 1
    out = capsys.readouterr().out
    assert "Not known: the traceback" in out
    assert "→ per_device_train_batch_size down" in out
    assert run(["oom", "no-such-file"]) == 2


def test_apples_form_says_what_pytorch_holds() -> None:
    message = read_message(
        "RuntimeError: MPS backend out of memory (MPS allocated: 44.20 GiB, other allocations: 1.20 GiB, max allowed: "
        "45.90 GiB). Tried to allocate 1.16 GiB on private pool."
    )
    assert message.allocated_bytes == pytest.approx(44.20 * GIB)
    assert message.tried_bytes == pytest.approx(1.16 * GIB)


def frames(*calls: str) -> list[dict[str, Any]]:
    """As a snapshot has them: the innermost first."""
    split = [call.rpartition(":") for call in reversed(calls)]
    return [{"filename": file, "line": 7, "name": name} for file, _, name in split]


def snapshot(tmp_path: Path, document: Any) -> Path:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(document))
    return path


def test_a_memory_snapshot_says_what_held_the_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [
        {"size": 6 * GIB, "state": "active_allocated", "frames": frames("/home/me/train.py:load", *CASES["load"])},
        {"size": 3 * GIB, "state": "active_allocated", "frames": frames("/home/me/train.py:main", *CASES["forward"])},
        {"size": GIB, "state": "inactive", "frames": []},
    ]
    failed = {"action": "oom", "size": 2 * GIB, "frames": frames("/home/me/train.py:main", *CASES["optimizer"])}
    document = {"segments": [{"total_size": 10 * GIB, "blocks": blocks}], "device_traces": [[failed]]}
    assert run(["oom", str(snapshot(tmp_path, document)), "--json=full"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["phase"]["name"] == "optimizer"
    assert answer["message"]["allocated_bytes"] == 9 * GIB
    assert answer["message"]["unallocated_bytes"] == GIB
    holders = [(holder["place"], holder["phase"], holder["size_bytes"]) for holder in answer["holders"]]
    assert holders == [("train.py:7 (load)", "load", 6 * GIB), ("train.py:7 (main)", "forward", 3 * GIB)]


class Harmful:
    """Runs a command where it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch harmed",)


@pytest.mark.parametrize(
    "document", [Harmful(), {"segments": [Harmful()]}, [1, 2], {"segments": [{}]}, {"segments": 3}]
)
def test_a_pickle_that_is_no_snapshot_is_refused_and_calls_nothing(
    document: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["oom", str(snapshot(tmp_path, document))]) == 2
    assert "hint: write it with torch.cuda.memory._dump_snapshot" in capsys.readouterr().err
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("size", [10**400, -1, 2**63, float("nan")], ids=lambda size: str(size)[:12])
@pytest.mark.parametrize("place", ["total_size", "size", "failed"])
def test_a_snapshot_of_sizes_that_no_card_has_is_refused(size: float, place: str, tmp_path: Path) -> None:
    sizes = {"total_size": 9, "size": 9, "failed": 9, place: size}
    block = {"size": sizes["size"], "state": "active_allocated", "frames": []}
    segment = {"total_size": sizes["total_size"], "blocks": [block]}
    document = {"segments": [segment], "device_traces": [[{"action": "oom", "size": sizes["failed"], "frames": []}]]}
    assert run(["oom", str(snapshot(tmp_path, document))]) == 2


@pytest.mark.parametrize("form", [[], ["--json=full"], ["--json"]], ids=str)
def test_half_characters_of_a_snapshot_are_told(form: list[str], tmp_path: Path) -> None:
    block = {"size": GIB, "state": "active_allocated", "frames": frames("/x/\ud800.py:\ud800")}
    document = {"segments": [{"total_size": GIB, "blocks": [block]}], "device_traces": []}
    assert run(["oom", str(snapshot(tmp_path, document)), *form]) == 1


def test_a_pickle_that_asks_for_memory_is_refused(tmp_path: Path) -> None:
    """An index of 2**30 in the memo: 16 GiB that CPython before 3.14 clears."""
    (tmp_path / "large.pickle").write_bytes(b"\x80\x04]r\xff\xff\xff\x3f.")
    assert run(["oom", str(tmp_path / "large.pickle")]) == 2


def test_a_cut_snapshot_is_refused(tmp_path: Path) -> None:
    whole = pickle.dumps({"segments": [], "device_traces": []})
    (tmp_path / "cut.pickle").write_bytes(whole[: len(whole) // 2])
    assert run(["oom", str(tmp_path / "cut.pickle")]) == 2
