"""TRL's own trainers on the GPU, one setup a process: steps timed, memory read, one step profiled.

    python -m benchmarks.contact.steps CASE OUT [DEVICE]        one case (waits for its turn on standard input)

The model is built with random weights by the project's own stack and given to TRL, which adds adapters, checkpointing
and kernels itself, as it would to a loaded model. Every sequence is full. The first step warms up (and compiles), the
next are timed with a synchronisation at each end, and one more runs under PyTorch's profiler: its trace is condensed by
`benchmarks.contact.operators` in a process of its own while the next case runs.

`CASES` says what is run; a case's `setup` is in the interchange form, so that predictions can be held against it.
"""

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.contact.staged import wait_for_turn
from planner.core.children import child_environment, python_argv

TIMED_STEPS = 4
WORDS = 1000

_LORA = {"method": "lora", "precision": "bf16-autocast", "lora_rank": 16}
_QLORA = {**_LORA, "method": "qlora", "quantization": "nf4-double"}
_FULL = {"method": "full", "precision": "bf16-mixed", "lora_rank": 0}
Q8, L1, Q05 = "Qwen/Qwen3-8B", "meta-llama/Llama-3.2-1B", "Qwen/Qwen2.5-0.5B"


AROUND = ("trainer", "arguments", "profile", "limit_s", "layers")


def _case(model: str, base: Mapping[str, Any], micro_batch: int, **fields: Any) -> dict[str, Any]:
    around = {name: fields.pop(name) for name in AROUND if name in fields}
    setup = {
        "optimizer": "adamw-fused", "attention": "sdpa", "loss": "chunked", "seq_len_tokens": 2048,
        "accumulation_steps": 1, "kernels": "eager", "checkpointing": 0, "expandable_segments": True,
        **base, "micro_batch_seqs": micro_batch, **fields,
    }  # fmt: skip
    usual = {"model": model, "setup": setup, "trainer": "sft", "arguments": {}, "profile": True, "limit_s": 60.0}
    return usual | around


CASES: dict[str, dict[str, Any]] = {
    "q8-lora-mb4-liger": _case(Q8, _LORA, 4, kernels="liger"),
    "q8-lora-mb1-ck-liger": _case(Q8, _LORA, 1, kernels="liger", checkpointing=1, accumulation_steps=2),
    "q8-qlora-mb4-liger": _case(Q8, _QLORA, 4, kernels="liger"),
    "l1-full-mb8-liger": _case(L1, _FULL, 8, kernels="liger"),
    "q8-lora-mb4-ck-eager": _case(Q8, _LORA, 4, checkpointing=1),
    "q05-lora-mb8-ck-liger": _case(Q05, _LORA, 8, kernels="liger", checkpointing=1),
    "q8-qlora-mb2-ck-eager": _case(Q8, _QLORA, 2, checkpointing=1),
    "l1-lora-compiled-4": _case(
        L1, _LORA, 4, compile=True, arguments={"torch_compile": True}, limit_s=75.0, layers=4, profile=False
    ),
    "l1-lora-eager-4": _case(L1, _LORA, 4, layers=4, profile=False),
    "l1-lora-compiled": _case(L1, _LORA, 4, compile=True, arguments={"torch_compile": True}, limit_s=120.0),
    "olmoe-lora-mb4-ck": _case("allenai/OLMoE-1B-7B-0924", _LORA, 4, checkpointing=1),
    "qwen35-4b-lora-mb2-ck": _case("Qwen/Qwen3.5-4B", _LORA, 2, checkpointing=1),
    "q8-int8-mb2-ck-liger": _case(Q8, {**_QLORA, "quantization": "int8"}, 2, checkpointing=1, kernels="liger"),
    "q8-lora-every2-liger": _case(Q8, _LORA, 4, kernels="liger", checkpointing=2, profile=False),
    "q8-lora-32k-ck-liger": _case(Q8, _LORA, 1, kernels="liger", checkpointing=1, seq_len_tokens=32768),
    "l1-lora-packed-8k": _case(L1, _LORA, 1, seq_len_tokens=8192, packing=True, arguments={"packing": True}),
    "gemma3-1b-full-mb4-ck": _case("google/gemma-3-1b-it", _FULL, 4, checkpointing=1),
    "l1-full-compiled": _case(L1, _FULL, 4, compile=True, arguments={"torch_compile": True}, limit_s=120.0),
    "l1-dpo-lora-mb4": _case(L1, _LORA, 4, trainer="dpo", objective="dpo", seq_len_tokens=1024),
    "q05-grpo-lora-mb8": _case(Q05, _LORA, 8, trainer="grpo", objective="grpo", seq_len_tokens=512, profile=False),
    "l1-full-pure-8bit": _case(L1, {**_FULL, "precision": "bf16-pure"}, 4, optimizer="adamw-8bit"),
    "q05-full-mb16-liger": _case(Q05, _FULL, 16, kernels="liger"),
    "l1-lora-eager-attention": _case(L1, _LORA, 2, attention="eager"),
    "q8-lora-selective": _case(Q8, _LORA, 2, checkpointing=1, selective_checkpointing=True, profile=False),
    "q14-qlora-mb2-ck-liger": _case("Qwen/Qwen3-14B", _QLORA, 2, kernels="liger", checkpointing=1),
    "l1-full-mb8-ck-eager": _case(L1, _FULL, 8, checkpointing=1),
    "l1-lora-mb1-512": _case(L1, _LORA, 1, seq_len_tokens=512, accumulation_steps=2),
    "l1-full-pure-fused": _case(L1, {**_FULL, "precision": "bf16-pure"}, 4, loss="chunked"),
}  # fmt: skip
FLA = "qwen35-4b-lora-mb2-ck-fla"
_LOOP = CASES["qwen35-4b-lora-mb2-ck"]
CASES[FLA] = {**_LOOP, "setup": {**_LOOP["setup"], "linear_attention": "fla"}}
"""With flash-linear-attention on the path."""
REHEARSED = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 2, "vocab_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip

OPTIMIZERS = {"adamw-fused": "adamw_torch_fused", "adamw": "adamw_torch", "adamw-8bit": "adamw_bnb_8bit"}


def import_all(trainer: str) -> None:
    """What a case needs but bitsandbytes, whose import initialises CUDA."""
    for name in ("accelerate", "datasets", "peft", "torch", "transformers", "trl"):
        importlib.import_module(name)
    import transformers
    import trl

    for module, name in (
        (transformers, "Trainer"),
        (trl, f"{trainer.upper()}Config"),
        (trl, f"{trainer.upper()}Trainer"),
    ):
        getattr(module, name)  # both load their modules when they are asked for


def base_model(config: Mapping[str, Any], setup: Any, device: str, layers: int | None) -> Any:
    """The model before TRL adds anything, random weights, quantized where the setup says so."""
    import torch

    from probes.stack.build import ATTENTION_NAMES, _quantize, bare_model, materialize
    from probes.stack.configs import load_config, truncated_config
    from probes.stack.dtypes import DTYPES

    model = bare_model(
        truncated_config(load_config(config), layers) if layers else load_config(config),
        DTYPES[setup.weight_dtype],
        ATTENTION_NAMES[setup.attention],
    )
    if setup.quantized:
        _quantize(model, setup)
    materialize(model, torch.device(device))
    if setup.quantized:
        from types import SimpleNamespace

        method = "bitsandbytes"
        model.hf_quantizer = SimpleNamespace(
            is_trainable=True, is_qat_trainable=False, is_compileable=False,
            quantization_config=SimpleNamespace(quant_method=method, to_dict=lambda: {"quant_method": method}),
        )  # fmt: skip
    return model


def arguments_of(case: Mapping[str, Any], setup: Any, out: Path, device: str) -> dict[str, Any]:
    rows = setup.accumulation_steps * (TIMED_STEPS + 1 + bool(case["profile"]))
    settings: dict[str, Any] = {
        "output_dir": str(out), "per_device_train_batch_size": setup.micro_batch_seqs,
        "gradient_accumulation_steps": setup.accumulation_steps, "max_steps": rows // setup.accumulation_steps,
        "bf16": setup.precision in ("bf16-autocast", "bf16-mixed"), "gradient_checkpointing": bool(setup.checkpointing),
        "optim": OPTIMIZERS[setup.optimizer], "logging_steps": 10, "save_strategy": "no", "report_to": "none",
        "max_length": setup.seq_len_tokens, "disable_tqdm": True, "learning_rate": 1e-5, "use_liger_kernel": False,
    }  # fmt: skip
    if setup.checkpointing:
        kwargs: dict[str, Any] = {"use_reentrant": False}
        if setup.selective_checkpointing:
            kwargs["selective"] = True
        if setup.checkpointing > 1:
            kwargs["every_n_layers"] = setup.checkpointing
        del settings["gradient_checkpointing"]
        settings |= {"activation_checkpointing": True, "activation_checkpointing_kwargs": kwargs}
    if setup.kernels == "liger":
        settings |= {"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": False}}
    if device == "cpu":
        settings |= {"use_cpu": True, "bf16": False}
    return {**settings, **case["arguments"]}


def tokenizer(folder: Path) -> Any:
    """A tokenizer of a thousand words, with a chat template."""
    from transformers import AutoTokenizer

    from probes.launched.prepare import make_tokenizer

    make_tokenizer(folder)
    made = AutoTokenizer.from_pretrained(folder)
    made.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return made


def words(num: int, seed: int) -> str:
    return " ".join(f"w{(seed * 31 + index * 7) % WORDS}" for index in range(num))


def trainer_of(case: Mapping[str, Any], setup: Any, model: Any, out: Path, device: str, callback: Any) -> Any:
    """TRL's trainer for a case, as its own command would make it."""
    from datasets import Dataset
    from peft import LoraConfig

    settings = arguments_of(case, setup, out, device)
    rows = setup.micro_batch_seqs * setup.accumulation_steps * settings["max_steps"]
    adapters = None
    if setup.method != "full":
        adapters = LoraConfig(
            r=setup.lora_rank, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    common = {
        "model": model, "processing_class": tokenizer(out / "tokenizer"), "peft_config": adapters,
        "callbacks": [callback],
    }  # fmt: skip
    length = setup.seq_len_tokens
    if case["trainer"] == "sft":
        from trl import SFTConfig, SFTTrainer

        if setup.packing:  # of a quarter's length, so that four make a row
            data = Dataset.from_dict({"text": [words(length // 4 - 1, row) for row in range(rows * 4)]})
        else:
            data = Dataset.from_dict({"text": [words(length + 8, row) for row in range(rows)]})
        return SFTTrainer(args=SFTConfig(**settings), train_dataset=data, **common)
    if case["trainer"] == "dpo":
        from trl import DPOConfig, DPOTrainer

        half = length // 2
        data = Dataset.from_dict({
            "prompt": [words(half, row) for row in range(rows)],
            "chosen": [" " + words(half + 8, row + 1) for row in range(rows)],
            "rejected": [" " + words(half + 8, row + 2) for row in range(rows)],
        })  # fmt: skip
        return DPOTrainer(args=DPOConfig(**settings), train_dataset=data, **common)
    from trl import GRPOConfig, GRPOTrainer

    settings.pop("max_length")
    settings |= {"num_generations": 8, "max_completion_length": length // 2, "beta": 0.0, "temperature": 1.0}
    data = Dataset.from_dict({"prompt": [words(length // 2, row) for row in range(rows)]})
    return GRPOTrainer(
        args=GRPOConfig(**settings), train_dataset=data, **common,
        reward_funcs=lambda completions, **_: [float(len(completion)) for completion in completions],
    )  # fmt: skip


def watching(profiled: int | None, trace: Path, seen: dict[str, Any]) -> Any:
    """A callback that notes every step's times and profiles step number `profiled`."""
    import torch
    import transformers

    gpu = torch.cuda.is_available()

    class Watching(transformers.TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.began = 0.0
            self.ended: float | None = None
            self.profiler: Any = None

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if gpu:
                torch.cuda.synchronize()
            if state.global_step == profiled:
                kinds = [torch.profiler.ProfilerActivity.CPU]
                kinds += [torch.profiler.ProfilerActivity.CUDA] if gpu else []
                self.profiler = torch.profiler.profile(activities=kinds, record_shapes=True)
                self.profiler.__enter__()
            now = time.perf_counter()
            if self.ended is not None:
                seen["between_s"].append(round(now - self.ended, 5))
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            issued = time.perf_counter()
            if gpu:
                torch.cuda.synchronize()
            now = time.perf_counter()
            if self.profiler is not None:
                self.profiler.__exit__(None, None, None)
                seen["profiled_step_s"] = round(now - self.began, 5)
                self.profiler.export_chrome_trace(str(trace))
                self.profiler = None
            else:
                seen["step_s"].append(round(now - self.began, 5))
                seen["issued_s"].append(round(issued - self.began, 5))
            self.ended = time.perf_counter()

    return Watching()


def driver_view() -> dict[str, Any]:
    """What the driver counts in use, and the processes that it lists."""
    from planner.hardware.driver import device_handle, nvml

    with nvml() as module:
        if module is None:
            return {}
        handle = device_handle(module, "cuda:0")
        listed = module.nvmlDeviceGetComputeRunningProcesses(handle)
        return {
            "used_bytes": int(module.nvmlDeviceGetMemoryInfo(handle).used),
            "processes": [[int(process.pid), int(process.usedGpuMemory or 0)] for process in listed],
        }


def run_case(name: str, out: Path, device: str) -> dict[str, Any]:
    import torch

    from planner.models.resolve import resolve_model
    from planner.setup import TrainSetup

    case = CASES[name]
    gpu = device != "cpu"
    fields = dict(case["setup"])
    if not gpu:
        fields |= {"seq_len_tokens": max(32, fields["seq_len_tokens"] // 32), "quantization": "none"}
        fields |= {"kernels": "eager", "compile": False}
        fields |= {"method": "lora"} if fields["method"] == "qlora" else {}
        fields |= {"optimizer": "adamw"} if "8bit" in fields["optimizer"] else {}
        case = {**case, "arguments": {k: v for k, v in case["arguments"].items() if k != "torch_compile"}}
    fields.pop("objective", None)  # the model below is the policy alone
    setup = TrainSetup(**fields)
    record: dict[str, Any] = {"case": name, "trainer": case["trainer"]}
    record |= {"setup": {"model": case["model"], **case["setup"]}, "cuda_by_import": torch.cuda.is_initialized()}
    before = driver_view() if gpu else {}
    work = out / f"work-{name}"
    work.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    config = resolve_model(case["model"]).config if gpu else REHEARSED
    model = base_model(config, setup, device, case.get("layers"))
    if gpu:
        torch.cuda.synchronize()
        record["load_peak_bytes"] = torch.cuda.max_memory_allocated()
    record["build_s"] = round(time.perf_counter() - began, 3)
    seen: dict[str, Any] = {"step_s": [], "issued_s": [], "between_s": []}
    record |= seen
    trace = work / "trace.json"
    profiled = TIMED_STEPS + 1 if case["profile"] else None
    trainer = trainer_of(case, setup, model, work, device, watching(profiled, trace, record))
    record["trainer_init_s"] = round(time.perf_counter() - began - record["build_s"], 3)
    trainable = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    del model
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    if gpu:
        record |= {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "device_bytes": driver_view()["used_bytes"] - before["used_bytes"],
            "process_bytes": dict(driver_view().get("processes", [])).get(os.getpid()),
            "num_alloc_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
        }
    record["trainable_parameters"] = trainable
    record["tokens_per_step"] = setup.micro_batch_seqs * setup.accumulation_steps * setup.seq_len_tokens
    record["experts"] = str(getattr(trainer.model.config, "_experts_implementation", None))
    record["layers"] = case.get("layers")
    record["attention"] = str(getattr(trainer.model.config, "_attn_implementation", None))
    if trace.exists():
        table = out / f"profile-{name}.json"
        subprocess.Popen(
            python_argv("-m", "benchmarks.contact.operators", str(trace), str(table), name),
            start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=sys.stderr,
            env=child_environment(),
        )  # fmt: skip
    return record


def main(arguments: list[str]) -> int:
    """Runs one case and appends its line to OUT/steps.jsonl; a failed one is a line that says why."""
    name, out = arguments[0], Path(arguments[1])
    if os.environ.get("FLA_PATH"):
        sys.path.insert(0, os.environ["FLA_PATH"])
    device = arguments[2] if len(arguments) > 2 else "cuda:0"
    with_stdout = sys.stdout
    import_all(CASES[name]["trainer"])
    wait_for_turn()
    import faulthandler

    faulthandler.dump_traceback_later(float(CASES[name]["limit_s"]) - 8.0, exit=False)
    sys.stdout = sys.stderr
    try:
        record = run_case(name, out, device)
    except Exception as error:
        import traceback

        traceback.print_exc()
        record = {"case": name, "problem": f"{type(error).__name__}: {str(error)[:800]}"}
    finally:
        sys.stdout = with_stdout
    with open(out / "steps.jsonl", "a", encoding="utf-8") as handle:
        handle.write(json.dumps(record) + "\n")
    sys.stderr.flush()
    os._exit(1 if "problem" in record else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
