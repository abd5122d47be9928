"""Every model type of the catalogue x launch targets: what a file says is what runs.

A tiny random model of the same class and head sizes is loaded by transformers and PEFT with the attention, the target
modules and the quantization of the emitted file (flash attention's presence stubbed). TRL and the plain script train
two steps of the file on the CPU, in this process, with only the attention changed. A setting that the tools replace,
refuse or drop fails here; a target that cannot run a type has to be refused with a reason.
"""

import ast
import io
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from accelerate.state import AcceleratorState  # noqa: E402

from planner.frameworks.exporters import EXPORTERS, Launch  # noqa: E402
from planner.frameworks.exporters.install import first_in  # noqa: E402
from planner.hardware.gpus import find_gpu  # noqa: E402
from planner.memory.attention_kernels import HUBLESS, supported_attentions  # noqa: E402
from planner.models import catalogue  # noqa: E402
from planner.models.targets import num_lora_params  # noqa: E402
from planner.setup import TrainSetup  # noqa: E402
from probes.stack.build import auto_class  # noqa: E402
from probes.stack.tree import unadaptable_modules  # noqa: E402
from tests.launch.conftest import prepared, run_script, run_trl  # noqa: E402
from tests.launch.tiny_models import (  # noqa: E402
    TYPES,
    built_config,
    save_tiny,
    tiny_config,
    tiny_request,
    tiny_spec,
    tokenizer,
    write_rows,
)  # fmt: skip
from tests.whole import some, these  # noqa: E402

RANK = 4
ATTENTIONS = {"eager": "eager", "sdpa": "sdpa", "kernels-community/flash-attn2": "flash-attention-2"}
NO_FILE = {"t5": "encoder-decoder"}
"""Types that no target trains, and a word of the reason."""
REFUSED = {
    **{
        (target, kind): "loads the class"
        for target in ("trl", "axolotl")
        for kind in ("llama4", "qwen3_5", "qwen3_5_moe")
    },
    ("trl", "phimoe"): "num_experts",
    **{(target, "whisper"): "Seq2SeqTrainer" for target in ("trl", "axolotl")},
}
"""What one target cannot run, and a word of the reason."""
NOT_QUANTIZED = ("falcon",)
"""Of which transformers quantizes nothing: LoRA stands for QLoRA."""
PROCESSORS = ("gemma3", "gemma4", "gemma4+audio", "gemma4+experts")
"""TRL loads their image processors, which a tiny checkpoint does not have: the plain script alone trains them here."""


def emit(target: str, model_type: str, **fields: Any) -> Launch:
    """The file of a target for a tiny model."""
    loss = "chunked" if target in ("trl", "unsloth") else "full"
    base: dict[str, Any] = {
        "loss": loss, "attention": "eager", "micro_batch_seqs": 2, "seq_len_tokens": 16, "lora_rank": RANK,
    }  # fmt: skip
    return EXPORTERS[target](tiny_request(model_type, TrainSetup(**{**base, **fields})))


def settings(target: str, launch: Launch) -> tuple[str | None, Any]:
    """(attn_implementation, None where none is named; target_modules as PEFT gets them) of an emitted file."""
    text = launch.files[0].text
    if target == "hf":
        attention = re.search(r'attn_implementation="([^"]+)"', text)
        modules = re.search(r"target_modules=(.*),\n", text)
        return attention[1] if attention else None, ast.literal_eval(modules[1])
    values = yaml.safe_load(text)
    modules = values["lora_target_modules"]
    return values.get("attn_implementation"), modules[0] if target == "trl" and len(modules) == 1 else modules


@contextmanager
def flash_attention_present(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers' own checks, with the package said to be installed."""
    matrix = transformers.modeling_flash_attention_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX
    with monkeypatch.context() as patch:
        patch.setitem(matrix[2], "general_availability_check", lambda: True)
        patch.setattr(transformers.PreTrainedModel, "_flash_attn_import_error", lambda *args, **kwargs: None)
        patch.setattr("transformers.modeling_utils.lazy_import_flash_attention", lambda *args, **kwargs: None)
        yield


def test_types_with_an_attention_table_of_their_own_are_known() -> None:
    """A class that looks its attention up in a dictionary of its own has no kernel of the hub there."""
    kinds = set()
    for kind in TYPES:
        package = Path(transformers.__file__).parent / "models" / kind.removesuffix("_text")
        modeling = package / f"modeling_{package.name}.py"
        if modeling.exists() and re.search(r"_ATTENTION_CLASSES\[", modeling.read_text(encoding="utf-8")):
            kinds.add(kind)
    assert kinds == HUBLESS


@pytest.mark.parametrize("model_type", some(sorted(TYPES), 8))
def test_every_file_is_taken_as_it_stands(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention and target modules of every attention that a plan may choose, for 3 targets on transformers."""
    entry = TYPES[model_type]
    full = catalogue.load(entry.model_id)
    assert full is not None
    taken: set[str] = set()  # the targets mostly say the same
    for target in ("trl", "hf", "axolotl"):
        for attention in supported_attentions(full, find_gpu("h100-sxm")):
            for targets in ("all-linear", "attention"):
                launch = emit(target, model_type, attention=attention, lora_targets=targets)
                reason = NO_FILE.get(model_type) or REFUSED.get((target, model_type))
                if model_type in first_in() and (target == "axolotl" or attention == "flash-attention-2"):
                    reason = "does not know"  # the transformers that it is installed with
                if reason:
                    assert reason in launch.refused
                    continue
                assert not launch.refused, launch.refused
                implementation, modules = settings(target, launch)
                assert ATTENTIONS[implementation or "sdpa"] == attention
                if f"{implementation} {modules}" in taken:
                    continue
                taken.add(f"{implementation} {modules}")
                config = built_config(tiny_config(entry))
                with flash_attention_present(monkeypatch), torch.device("meta"), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # fan_in_fan_out of Conv1D, tied heads
                    model = auto_class(config).from_config(
                        config, dtype=torch.bfloat16, attn_implementation=implementation
                    )
                    assert model.config._attn_implementation == (implementation or "sdpa")
                    refused = {model.get_submodule(name) for name in unadaptable_modules(model)}
                    lora = peft.LoraConfig(r=RANK, target_modules=modules, task_type="CAUSAL_LM")
                    adapted = peft.get_peft_model(model, lora)
                for module in adapted.modules():
                    assert not hasattr(module, "lora_A") or module.base_layer not in refused
                trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
                assert trained == num_lora_params(tiny_spec(model_type), targets, RANK)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with the data; checkpoints are made when asked for."""
    folder = tmp_path_factory.mktemp("every-model")
    write_rows(folder / "rows" / "train.jsonl", 4)
    tokenizer().save_pretrained(folder / "tokenizer")  # every type's
    prepared(folder, replace(tiny_request("llama", TrainSetup(seq_len_tokens=16)), model_id="./tokenizer"))
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)
    AcceleratorState._reset_state(reset_partial_state=True)


RUNS: dict[str, tuple[Callable[[str, Path], Any], dict[str, Any]]] = {
    "trl": (run_trl, {}),
    "hf": (run_script, {"method": "qlora", "quantization": "nf4-double"}),
}


TRAINED = [
    (model_type, target)
    for model_type in sorted(TYPES.keys() - NO_FILE.keys() - {"whisper"})  # tests/launch/test_sound.py
    for target in RUNS
    if (target, model_type) not in REFUSED and (target == "hf" or model_type not in PROCESSORS)
]
ONCE = {model_type: (model_type, target) for model_type, target in (*TRAINED, *TRAINED[::2])}
"""Every type once, about half of them by each target."""
EVERY_SIXTH = [*ONCE.values()][::6]


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "target"), these(EVERY_SIXTH, TRAINED))
def test_two_steps_of_every_file_train(
    model_type: str, target: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL with LoRA, the plain script with 4-bit QLoRA: the class, the number of trained parameters, finite losses."""
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = place / model_type
    run, fields = RUNS[target]
    fields = {} if model_type in NOT_QUANTIZED else fields
    launch = emit(target, model_type, **fields)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        if not folder.exists():
            save_tiny(model_type, folder)
        trainer = run(launch.files[0].text, folder)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    assert all(math.isfinite(loss) and loss > 1 for loss in losses)  # the Trainer logs a NaN as 0
    base = trainer.model.get_base_model()
    assert base.config._attn_implementation == "eager"
    assert type(base).__name__ == TYPES[model_type].built_class
    assert getattr(base, "is_loaded_in_4bit", False) == (fields.get("method") == "qlora")
    trained = {name: parameter for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert sum(parameter.numel() for parameter in trained.values()) == num_lora_params(
        tiny_spec(model_type), "all-linear", RANK
    )
    wanted = TrainSetup(**fields).resolved_adapter_dtype
    assert {str(parameter.dtype) for parameter in trained.values()} == {
        {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[wanted]
    }
