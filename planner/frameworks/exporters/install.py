"""What a launch file needs installed: the arguments of each `pip install`, in the order in which they are called; and
which models the hub hands out only to people who are logged in.

Everything is a wheel where there is one. flash-attn and causal-conv1d come as source alone (their set-up looks for a
ready build on their release pages first): last, after what builds them, and only where nothing else does.
"""

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from planner.core.records import dataclass
from planner.core.shipped import DATA
from planner.frameworks.exporters.types import ExportRequest, Launch
from planner.models.spec import ModelSpec
from planner.options.kernels import LIGER
from planner.options.optimizers import OPTIMIZERS
from planner.setup import TrainSetup
from planner.setup.packages import CHUNKED_TYPES, CONV, DELTA, DELTA_TYPES, FLASH, VLLM, requirement

TORCH_INDEX = "https://download.pytorch.org/whl/"
BUILT_FOR = {"AMD": "rocm7.2", "Intel": "xpu", "NVIDIA": "cu126"}
"""Where PyTorch's own wheels for other cards are; PyPI's torch is CUDA 13's, which begins with Turing. For Volta and
older ones 2.14 is the last.

Source: pytorch RELEASE.md (CUDA support matrix), issues 172352 and 190385; torch 2.11 and 2.12 were seen at rocm7.2.
"""
TURING = (7, 5)
BUILDS = ("setuptools", "wheel", "packaging", "ninja", "psutil")
"""What the set-up of flash-attn and causal-conv1d imports; `--no-build-isolation` lets them see the torch installed."""
FLASH_BUILDS = ("torch==2.8.0", "torchvision==0.23.0", "torchaudio==2.8.0")
"""The newest torch for which flash-attn 2.8.3 has ready builds (`flash_attn-2.8.3+cu12torch2.8...whl` of its release):
its set-up takes one in seconds, where any other torch compiles for an hour."""
HUB_FLASH = "kernels-community/flash-attn2"
"""Flash attention 2 as transformers fetches it from the hub, built for every torch from 2.10 on (`kernels`)."""
HUB_VERSIONS = {"transformers": "5.22.0", "kernels": "0.17.2"}
"""transformers 5.23.0 takes no `kernels` before 0.18.2, and PyPI has none after 0.17.2 (27 November 2026).

Source: transformers 5.22.0 and 5.23.0 `utils/import_utils.py` KERNELS_MIN_VERSION, KERNELS_MAX_VERSION;
`modeling_flash_attention_utils.py` FLASH_ATTN_KERNEL_VERSIONS (flash-attn2: 4, from torch 2.10 on).
"""
PICTURES = ("torchvision", "pillow")
"""What transformers 5.23's processors of pictures import, which neither it nor TRL requires (its extra "vlm" does)."""
OLDER = {"llamafactory": {DELTA: "0.5.2"}}
"""Versions of packages for a target's older transformers: flash-linear-attention 0.6 wants 5.6.2."""
BRINGS = {"axolotl": {LIGER, DELTA, CONV}, "llamafactory": {*PICTURES}, "mlx": {"bitsandbytes"}}
"""What a target has among its own requirements, or does without (Axolotl's convolution of hybrids is fla's; MLX
quantizes by itself)."""


def from_hub(setup: TrainSetup) -> bool:
    """Whether a setup's attention is the hub's kernel where its tool's transformers takes one."""
    return setup.attention == "flash-attention-2"


def versions(tested: Mapping[str, str], setup: TrainSetup) -> dict[str, str]:
    """The versions that a target's file for this setup is written for: those it was tested with, or a transformers
    older by one with the hub's kernels."""
    older = from_hub(setup) and tested.get("transformers") == "5.23.0"
    return {**tested, **HUB_VERSIONS} if older else dict(tested)


@cache
def first_in() -> dict[str, str]:
    """Model type -> of the versions that targets install, the first that builds it; 5.5.4 builds those not here.

    Source: `CONFIG_MAPPING_NAMES` of each wheel.
    """
    with (DATA / "first_in.csv").open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        return {model_type: row["transformers"] for row in rows for model_type in row["model_types"].split()}


def too_new(model: ModelSpec | None, tested: Mapping[str, str]) -> str:
    """Why the transformers of a target's file does not build a model, "" where it does (or has none)."""
    first, installed = first_in().get(model.model_type) if model is not None else None, tested.get("transformers")
    if model is None or first is None or installed is None or _ordered(installed) >= _ordered(first):
        return ""
    return f"its transformers {installed} does not know {model.model_type}, which {first} does"


def _ordered(number: str) -> list[int]:
    return [int(part) for part in number.split(".")]


def checkpointing_key(setup: TrainSetup) -> str:
    """What transformers calls its switch of checkpointing in the version that is installed for a setup."""
    return "gradient_checkpointing" if from_hub(setup) else "activation_checkpointing"


def packages_of(runs: TrainSetup) -> dict[str, bool]:
    """The packages that some setups need beside their trainer's own, and whether this one does."""
    return {
        "bitsandbytes": runs.quantized or OPTIMIZERS[runs.optimizer].bitsandbytes,
        LIGER: "liger" in (runs.loss, runs.kernels),
        "deepspeed": runs.zero,
        **dict.fromkeys(PICTURES, runs.images is not None),
        VLLM: runs.objective_spec.rolls_out and runs.rollout_settings.by_vllm,
    }


def packages_added(before: TrainSetup, after: TrainSetup) -> list[str]:
    """What a changed setup needs that it did not need before."""
    had = packages_of(before)
    return [name for name, needed in packages_of(after).items() if needed and not had[name]]


def install_calls(launch: Launch, request: ExportRequest) -> list[list[str]]:
    """Arguments of `pip install`, one list per call."""
    runs = launch.runs  # which for another target's plan is not the request's
    assert runs is not None, f"{launch.target} has no files"
    vendor = request.gpu.vendor if request.gpu is not None else "NVIDIA"
    tested, brings = launch.validated_with, BRINGS.get(launch.target, set())
    # Whether flash-linear-attention computes layers of a model, or is all that keeps its packed samples apart.
    kind = "" if request.model is None else request.model.model_type
    uses_fla = runs.linear_attention == "fla" or runs.packing or kind not in CHUNKED_TYPES
    delta = (kind in DELTA_TYPES and uses_fla) and vendor != "Apple"
    flash = launch.target == "llamafactory" and runs.attention == "flash-attention-2"
    needed = {**packages_of(runs), DELTA: delta}
    packages = [f"{name}=={version}" for name, version in tested.items() if needed.get(name, True)]
    older = OLDER.get(launch.target, {})
    for name, on in needed.items():
        if on and name not in tested and name not in brings:
            packages.append(f"{name}=={older[name]}" if name in older else requirement(name))
    calls = [[*packages, *FLASH_BUILDS] if flash and vendor == "NVIDIA" else packages]
    older_card = request.gpu is not None and (request.gpu.compute_capability or TURING) < TURING
    if (vendor != "NVIDIA" or older_card) and (builds := BUILT_FOR.get(vendor)):
        # whatever version is there: a pin would bring PyPI's in its place
        calls[0] = [word for word in calls[0] if not word.startswith("torch==")]
        calls.insert(
            0, ["torch", *["torchvision"] * ("torchvision" in packages), "--index-url", f"{TORCH_INDEX}{builds}"]
        )
    # TRL hands packed samples' borders to the convolution too, which refuses them without this package
    built = [FLASH] * flash + [CONV] * (delta and runs.packing and launch.target == "trl" and CONV not in brings)
    if built:
        calls += [list(BUILDS), *([requirement(name), "--no-build-isolation"] for name in built)]
    return calls


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """What is known of the access to some models: which of them the hub hands out only to people who accepted their
    terms and are logged in. Of all that the table does not name it is not known, and said so.

    Attributes:
        begins: of their hub ids.
        asks: what their authors ask for on the models' cards; "" where the download was only seen to be refused, which
            may have changed.
        seen: the year, or the day, on which it was so.
        source: who says so.
    """

    begins: str
    asks: str
    seen: str
    source: str


@cache
def gates() -> tuple[Gate, ...]:
    with (DATA / "gated.csv").open(newline="", encoding="utf-8") as file:
        return tuple(Gate(**row) for row in csv.DictReader(file))


def gate_of(model_id: str) -> Gate | None:
    """What is known of a model's access, None where nothing is."""
    name = model_id.lower()
    return next((gate for gate in gates() if name.startswith(gate.begins.lower())), None)


def on_hub(model_id: str) -> bool:
    """Whether a name is a hub id rather than a directory."""
    return not (model_id.startswith((".", "/", "~")) or Path(model_id).exists())
