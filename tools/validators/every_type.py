"""Lets a tool load a tiny model of every type of the catalogue by the file emitted for it:
every_type.py TOOL [--kept FILE] [TYPE ...]

Run inside the tool's venv. Its own loading code takes the attention (flash attention said to be installed), the class,
the quantization and the LoRA targets; the attention that runs, the class, the kind of matrices, the number and data
type of trained parameters have to be the planned ones. Prints how many of how many were accepted, and each refusal.
Exit 1 when one was refused. With `--kept` each type's result is a line of FILE, and a type that has one is not loaded
again: a run that was stopped goes on where it stood. Delete the lines of what was mended.
"""

import argparse
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from itertools import cycle, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

os.environ |= {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "LLAMAFACTORY_VERBOSITY": "ERROR"}

import stand_ins
import torch
import transformers
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from planner.frameworks.exporters import EXPORTERS  # noqa: E402
from planner.hardware.gpus import find_gpu  # noqa: E402
from planner.memory.attention_kernels import supported_attentions  # noqa: E402
from planner.models import catalogue, module_tree  # noqa: E402
from planner.models.spec import ModelSpec  # noqa: E402
from planner.models.targets import num_lora_params  # noqa: E402
from planner.setup import TrainSetup  # noqa: E402
from planner.setup.codec import decode  # noqa: E402
from tests.launch.tiny_models import (  # noqa: E402
    TYPES,
    save_tiny,
    tiny_config,
    tiny_request,
    tiny_spec,
    tokenizer,
)

TREES = """
import json, sys
from probes.module_tree import answer
for line in sys.stdin:
    print(json.dumps(answer(json.loads(line))), flush=True)
"""
_reader: list["subprocess.Popen[str]"] = []


def _own_tree(config: Any, model_type: str) -> ModelSpec:
    """A module tree as the project's own environment reads it: the tool's pins are older than what reads trees."""
    if not _reader:
        words = [str(ROOT / ".venv" / "bin" / "python"), "-W", "ignore", "-c", TREES]
        _reader.append(subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    child = _reader[0]
    assert child.stdin is not None
    assert child.stdout is not None
    print(json.dumps(dict(config), default=str), file=child.stdin, flush=True)
    return decode(ModelSpec, json.loads(child.stdout.readline())["spec"])


module_tree._read_tree = _own_tree

RANK = 4
NAMES = {
    "eager": {"eager"}, "sdpa": {"sdpa"}, "flash-attention-2": {"flash_attention_2", "kernels-community/flash-attn2"},
}  # fmt: skip
DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
Load = Callable[[Path, str], Any]


def axolotl() -> Load:
    """Its reader of a config file and its ModelLoader, from a checkpoint on disk."""
    import axolotl.cli.config as config
    from axolotl.loaders.model import ModelLoader

    config.gpu_capabilities = lambda: (stand_ins.CAPABILITIES, stand_ins.AXOLOTL["env_capabilities"])

    def load(file: Path, kind: str) -> Any:
        if not Path(kind).exists():
            save_tiny(kind, Path(kind))
        return ModelLoader(config.load_cfg(str(file)), tokenizer()).load()[0]

    return load


def llamafactory() -> Load:
    """Its parser and loader, from the configuration alone."""
    get_train_args = stand_ins.llamafactory()
    from llamafactory.model import loader

    def load(file: Path, kind: str) -> Any:
        model_args, _, _, tuning, _ = get_train_args(yaml.safe_load(file.read_text()))
        config = transformers.AutoConfig.for_model(**tiny_config(TYPES[kind]))
        loader.load_config = lambda _: config
        model_args.train_from_scratch = True
        nobody: Any = SimpleNamespace(init_kwargs={})
        with torch.device("meta"):
            return loader.load_model(nobody, model_args, tuning, is_trainable=True)

    return load


def unsloth() -> Load:
    """Its `FastLanguageModel`, by the lines of the script before it reads data. It wants a GPU as it is imported."""
    import unsloth

    def load(file: Path, kind: str) -> Any:
        assert unsloth
        if not Path(kind).exists():
            save_tiny(kind, Path(kind))
        scope: dict[str, Any] = {}
        exec(file.read_text().partition("\nkind = ")[0], scope)
        return scope["model"]

    return load


class Tool(NamedTuple):
    """How a tool loads, and what it is shown.

    Attributes:
        crossed: LoRA with every attention times both sets of targets; else each of them once.
        chooses_attention: the tool takes no name of one; both sets of targets then.
        more: setups beside those; `llama_more` with Llama alone, because they do not depend on the model.
    """

    load: Callable[[], Load]
    crossed: bool = False
    chooses_attention: bool = False
    more: tuple[dict[str, Any], ...] = ()
    llama_more: tuple[dict[str, Any], ...] = ()


TOOLS = {
    "axolotl": Tool(
        load=axolotl,
        more=(
            {"method": "qlora", "quantization": "nf4-double"},
            {"method": "full", "lora_rank": 0, "precision": "bf16-pure"},
        ),
        llama_more=(
            {"method": "qlora", "quantization": "nf4"},
            {"method": "qlora", "quantization": "int8"},
            {"adapter_dtype": "bf16", "precision": "bf16-pure"},
        ),
    ),
    "llamafactory": Tool(load=llamafactory, crossed=True),
    "unsloth": Tool(load=unsloth, chooses_attention=True),
}


def say_that_flash_attention_is_installed() -> None:
    """What only a GPU machine has."""
    from transformers import PreTrainedModel, modeling_flash_attention_utils, modeling_utils

    transformers.utils.is_flash_attn_2_available = lambda: True
    PreTrainedModel._flash_attn_can_dispatch = lambda *args, **kwargs: True
    PreTrainedModel._flash_attn_import_error = lambda *args, **kwargs: None
    modeling_utils.lazy_import_flash_attention = lambda *args, **kwargs: None
    for row in getattr(modeling_flash_attention_utils, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", {}).values():
        row["general_availability_check"] = lambda: True


def setups(kind: str, tool: Tool) -> Iterator[TrainSetup]:
    """What the tool is shown of one model type."""
    spec = catalogue.load(TYPES[kind].model_id)
    assert spec is not None
    attentions = supported_attentions(spec, find_gpu("h100-sxm"))[: 1 if tool.chooses_attention else None]
    sets = ("all-linear", "attention")
    pairs = product(attentions, sets) if tool.crossed else zip((*attentions, *attentions[:1]), cycle(sets))
    base: dict[str, Any] = {"loss": "full", "lora_rank": RANK, "seq_len_tokens": 16}
    for attention, targets in pairs:
        yield TrainSetup(**{**base, "attention": attention, "lora_targets": targets})
    for fields in (*tool.more, *(tool.llama_more if kind == "llama" else ())):
        flash = fields.get("method") == "full" and "flash-attention-2" in attentions
        yield TrainSetup(**{**base, "attention": "flash-attention-2" if flash else attentions[0], **fields})


def check(tool: str, load: Load, kind: str, setup: TrainSetup) -> str:
    """Loads the tiny model as the file says; why our exporter refuses, "" where the tool did what was planned."""
    launch = EXPORTERS[tool](tiny_request(kind, setup))
    if launch.refused:
        return launch.refused
    for file in launch.files:
        path = Path("launch") / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text)
    model = load(Path("launch") / launch.files[0].path, kind)
    runs = launch.runs
    base = model.get_base_model() if setup.lora_rank else model
    assert type(base).__name__ == TYPES[kind].built_class, f"{type(base).__name__}, not {TYPES[kind].built_class}"
    attention = base.config._attn_implementation
    if not TOOLS[tool].chooses_attention:
        assert attention in NAMES[runs.attention], f"{attention} runs, not {runs.attention}"
    routers = tool == "axolotl" and any("trains the routers" in note for note in launch.notes)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    num = sum(parameter.numel() for parameter in trained)
    if setup.lora_rank:
        planned = num_lora_params(tiny_spec(kind), setup.lora_targets, RANK)
        assert num == planned, f"{num} parameters train, not {planned} ({setup.lora_targets})"
    else:
        assert len(trained) == len(list(model.parameters())), "some parameters are frozen"
    if tool == "llamafactory":  # casts them as it prepares training, not while it loads
        return ""
    dtype = runs.resolved_adapter_dtype if setup.lora_rank else runs.weight_dtype
    router_weights = [
        parameter for name, parameter in model.named_parameters() if routers and name.endswith(".gate.weight")
    ]
    assert {str(weight.dtype) for weight in router_weights} <= {DTYPES["fp32"]}, (
        "the routers are not in fp32, as the file says"
    )
    dtypes = {
        str(parameter.dtype) for parameter in trained if not any(parameter is router for router in router_weights)
    }
    assert dtypes == {DTYPES[dtype]}, f"{dtypes}, not {dtype}"
    classes = {
        type(getattr(module, "base_layer", module)).__name__ for module in model.modules() if hasattr(module, "lora_A")
    }
    matrix = {"none": "Linear", "int8": "Linear8bitLt"}.get(runs.quantization, "Linear4bit")
    wrong = [name for name in classes if "Linear" in name and not name.endswith(matrix)]  # FalconLinear
    assert not wrong, f"{wrong}, not {matrix}"
    return ""


def of_type(tool: str, load: Load, kind: str) -> dict[str, Any]:
    """What became of every setup of one model type."""
    row: dict[str, Any] = {"kind": kind, "accepted": 0, "refused": [], "failures": []}
    for setup in setups(kind, TOOLS[tool]):
        try:
            with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                warnings.simplefilter("ignore")
                reason = check(tool, load, kind, setup)
        except (Exception, SystemExit) as error:
            words = f"{setup.method} {setup.quantization} {setup.attention} {setup.lora_targets}"
            row["failures"].append(f"{kind} {words}: {type(error).__name__}: {str(error)[:300]}")
        else:
            row["refused"] += [f"{kind}: {reason}"] * bool(reason)
            row["accepted"] += not reason
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("kinds", nargs="*", metavar="TYPE")
    parser.add_argument("--kept", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    record_file = arguments.kept.resolve() if arguments.kept else Path(os.devnull)
    kinds = arguments.kinds or sorted(TYPES)
    lines = record_file.read_text().splitlines() if record_file.is_file() else []
    rows = {row["kind"]: row for row in map(json.loads, lines)}
    load = TOOLS[arguments.tool].load()
    say_that_flash_attention_is_installed()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder, record_file.open("a") as out:
        os.chdir(folder)
        for kind in kinds:
            if kind not in rows:
                rows[kind] = of_type(arguments.tool, load, kind)
                print(json.dumps(rows[kind]), file=out, flush=True)
    outcomes = [rows[kind] for kind in kinds]
    accepted = sum(row["accepted"] for row in outcomes)
    failures = [message for row in outcomes for message in row["failures"]]
    refused = Counter(message for row in outcomes for message in row["refused"])
    words = f"{accepted} accepted, {len(failures)} refused by the tool, {refused.total()} not expressible"
    print(f"{arguments.tool}, {len(kinds)} model types: {words}")
    for reason, num in refused.items():
        print(f"  not expressible ({num}): {reason}")
    for failure in failures:
        print(f"  {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
