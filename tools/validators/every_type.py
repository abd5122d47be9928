"""Lets LLaMA-Factory load a tiny model of every type of the catalogue by the file emitted for it. Run inside its venv.

Its own loading code takes the attention (flash attention said to be installed), the class and the LoRA targets; the
attention that runs, the class and the number of trained parameters have to be the planned ones. Prints how many of how
many were accepted, and each refusal. Exit 1 when one was refused.
"""

import os
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
os.environ["LLAMAFACTORY_VERBOSITY"] = "ERROR"

import llamafactory.hparams.parser as parser  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import transformers.training_args as arguments  # noqa: E402
from llamafactory.model import loader  # noqa: E402

from planner.exporters.llamafactory import TARGET, export  # noqa: E402
from planner.gpus import find_gpu  # noqa: E402
from planner.kernels import supported_attentions  # noqa: E402
from planner.models import catalogue  # noqa: E402
from planner.models.targets import num_lora_params  # noqa: E402
from planner.setup import TrainSetup  # noqa: E402
from tests.launch.tiny_models import TYPES, tiny_config, tiny_request, tiny_spec  # noqa: E402

RANK = 4
NAMES = {"eager": "eager", "sdpa": "sdpa", "flash-attention-2": "flash_attention_2"}


def say_that_everything_is_installed() -> None:
    """What only a GPU machine has."""
    arguments.is_torch_bf16_gpu_available = lambda: True
    parser.is_torch_bf16_gpu_available = lambda: True
    transformers.utils.is_flash_attn_2_available = lambda: True
    transformers.PreTrainedModel._flash_attn_can_dispatch = lambda *args, **kwargs: True
    transformers.modeling_utils.lazy_import_flash_attention = lambda *args, **kwargs: None


def check(kind: str, attention: str, targets: str) -> str:
    """Loads the tiny model as the file says; why our exporter refuses, "" where the tool did what was planned."""
    setup = TrainSetup(attention=attention, loss="full", lora_rank=RANK, lora_targets=targets, seq_len_tokens=16)
    launch = export(tiny_request(kind, setup))
    if launch.refused:
        return launch.refused
    with tempfile.TemporaryDirectory() as name:
        for file in launch.files:
            path = Path(name) / "launch" / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.text)
        values = yaml.safe_load((Path(name) / "launch" / launch.files[0].path).read_text())
        model_args, _, _, tuning, _ = parser.get_train_args(values)
    raw = tiny_config(TYPES[kind])
    config = transformers.AutoConfig.for_model(**raw)
    loader.load_config = lambda _: config
    model_args.train_from_scratch = True  # from the configuration alone
    tokenizer: Any = SimpleNamespace(init_kwargs={})
    with torch.device("meta"):
        model = loader.load_model(tokenizer, model_args, tuning, is_trainable=True)
    base = model.get_base_model()
    assert type(base).__name__ == TYPES[kind].built_class, f"{type(base).__name__}, not {TYPES[kind].built_class}"
    runs = base.config._attn_implementation
    assert runs == NAMES[attention], f"{runs} runs, not {attention}"
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    planned = num_lora_params(tiny_spec(kind), targets, RANK)
    assert trained == planned, f"{trained} parameters train, not {planned} ({targets})"
    return ""


def main() -> int:
    say_that_everything_is_installed()
    accepted, refused, failures = 0, Counter[str](), []
    for kind, entry in sorted(TYPES.items()):
        spec = catalogue.load(entry.model_id)
        assert spec is not None
        for attention in supported_attentions(spec, find_gpu("h100-sxm")):
            for targets in ("all-linear", "attention"):
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        reason = check(kind, attention, targets)
                except (Exception, SystemExit) as error:
                    failures.append(f"{kind} {attention} {targets}: {type(error).__name__}: {str(error)[:300]}")
                else:
                    refused.update([kind] * bool(reason))
                    accepted += not reason
    words = f"{accepted} accepted, {len(failures)} refused by the tool, {refused.total()} not expressible"
    print(f"{TARGET}, {len(TYPES)} model types: {words} ({', '.join(refused)})")
    for failure in failures:
        print(f"  {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
