"""The first evening as a product: spoken model name x card as its box says it x form of data x target.

Each case is typed once; then the name must be understood, `run.sh install` must install what the card and the file need
(proven installable: tests/planner/test_install_lines.py), the data must be made, and one step of a tiny model of the
same type must train from the emitted file, of which only weights, precision, quantization and GPU kernels are swapped.
LLaMA-Factory reads and trains its cases in its own venv (tools/validators/product.py).
"""

import io
import itertools
import json
import math
import os
import re
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("trl")

from accelerate.state import AcceleratorState  # noqa: E402

from finetune_planner.cli.app import run  # noqa: E402
from planner.frameworks.exporters.mlx import TYPES  # noqa: E402
from planner.hardware.gpu import GpuSpec  # noqa: E402
from planner.hardware.gpus import find_gpus  # noqa: E402
from planner.models.stored import PLAIN_COPIES  # noqa: E402
from tests.launch.conftest import run_script, run_trl  # noqa: E402
from tests.launch.data_formats import FORMATS, NUM  # noqa: E402
from tests.launch.product import PAIRED, Case, cases, on_cpu  # noqa: E402
from tests.launch.tiny_models import save_tiny  # noqa: E402
from tests.planner.spoken_names import CARDS, SPOKEN  # noqa: E402
from tests.whole import some  # noqa: E402

CASES = cases()
PROCESSORS = ("gemma3",)
"""Kinds whose image processors TRL and sentence-transformers load, which a tiny checkpoint does not have."""
SOURCE_ONLY = ("flash-attn", "causal-conv1d")
RESOLVED = (Path(__file__).parents[1] / "planner" / "resolved_installs.txt").read_text().splitlines()[1:]


def test_every_pair_of_values_is_a_case() -> None:
    sizes = (len(SPOKEN), len(CARDS), len(FORMATS), len({case.target for case in CASES}))
    for first, two in itertools.combinations(range(4), 2):
        assert len({(case[first], case[two]) for case in CASES}) == sizes[first] * sizes[two]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with every form of data, in which commands run; the hub is out of reach, and programs of an
    environment that `run.sh install` makes write down what they are called with."""
    folder = tmp_path_factory.mktemp("product")
    for name, write in FORMATS.items():
        write(folder if name == "who/what" else folder / name)
    programs = folder / "programs"
    programs.mkdir()
    for name, does in (("python3", "exit 0"), ("pip", 'printf "%s\\n" "$*" >> installed.txt')):
        (programs / name).write_text(f"#!/bin/sh\n{does}\n")
        (programs / name).chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
        patch.setattr("transformers.utils.logging._tqdm_active", False)
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.chdir(folder)
        yield folder
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", some(CASES, 800), ids="-".join)
def test_a_first_evening(case: Case, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = place / "out" / str(CASES.index(case))
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
        code = run([*case.words, "--out", str(out)])
    gpu, num = find_gpus(case.card)
    reason = why_not(case, gpu, num or 1)
    if code:
        assert (reason or ("missing" if code == 1 else "NO REASON")) in output.getvalue() + errors.getvalue()
        assert (code, "hint: " in errors.getvalue()) in ((1, False), (2, True))
        return
    assert not reason
    planned = json.loads((out / "plan.json").read_text())["workload"]
    assert planned["model"]["model_id"] in (SPOKEN[case.typed], PLAIN_COPIES.get(SPOKEN[case.typed]))
    assert planned["gpu"]["key"] == CARDS[case.card][0]
    files = [path for path in (out / "launch" / case.target).rglob("*") if path.is_file()]
    text = "".join(path.read_text() for path in files)
    assert files
    if (out / "launch" / "run.sh").exists():
        installs(case, gpu, text, out, place)
        monkeypatch.chdir(out)
        step(case, out, place)


def why_not(case: Case, gpu: GpuSpec, num: int) -> str:
    """What a case is refused with, "" where it may be planned."""
    if case.target == "sentence-transformers" and num > 1:
        return "is planned on one GPU"
    if case.kind == "whisper":
        return "has no column audio"
    if case.target == "sentence-transformers" and case.data not in PAIRED:
        return "trains on anchor and positive"
    if case.target == "mlx" and gpu.vendor != "Apple":
        return "for Apple's GPUs"
    if case.target == "mlx" and case.kind not in TYPES:
        return "was not read in MLX-LM"
    if case.target == "unsloth" and (num > 1 or gpu.vendor == "Apple"):
        return "is written for one GPU" if num > 1 else "its kernels are Triton's"
    if case.target == "unsloth" and case.kind in ("bloom", "gemma2", "gptj"):  # which transformers runs without SDPA
        return "Unsloth picks its attention itself"
    if (case.target, case.kind) == ("unsloth", "gpt_oss"):
        return "Unsloth loads conversions of its own"
    several = {"deepspeed": "DeepSpeed shards", "torchtitan": "for several GPUs"}
    if case.target in several and num == 1:
        return several[case.target]
    if case.target == "torchtitan" and not re.search(
        r"/(Meta-)?Llama-3\.1-|/Qwen3-|-Distill-Llama-", SPOKEN[case.typed]
    ):
        return "torchtitan 0.2.2 has"
    if case.target == "torchtitan" and gpu.compute_capability == (7, 5):  # no bf16
        return "torchtitan 0.2.2 trains whole models"
    return "attention sinks" if (case.target, case.kind) == ("llamafactory", "gpt_oss") else ""


def installs(case: Case, gpu: GpuSpec, text: str, out: Path, place: Path) -> None:
    """`bash launch/run.sh install` calls pip as the card and the file ask for; programs that write down what they are
    called with stand in for Python and pip."""
    programs = f"{place / 'programs'}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "launch/run.sh", "install", case.target]
    subprocess.run(command, cwd=out, env={**os.environ, "PATH": programs}, check=True, stdout=subprocess.DEVNULL)
    calls = [line.split()[1:] for line in (out / "installed.txt").read_text().splitlines()]
    old = gpu.vendor == "NVIDIA" and gpu.compute_capability is not None and gpu.compute_capability < (7, 5)
    builds = "cu126" if old else {"AMD": "rocm7.2", "Intel": "xpu"}.get(gpu.vendor)
    first = calls.pop(0)[-1] if builds else ""
    assert first.endswith(f"/{builds}" if builds else "")
    words = {word for call in calls for word in call}
    names = {word.partition("==")[0] for word in words}
    for package, sign in NEEDS.items():
        if package not in BROUGHT.get(case.target, ()):
            assert bool(re.search(sign, text)) == (package in names), (package, names)
    mac = gpu.vendor == "Apple"
    assert not (mac and names & {"liger-kernel", "flash-linear-attention", "flash-attn", "unsloth", "deepspeed"})
    system = "aarch64-apple-darwin" if mac else "x86_64-manylinux_2_28"
    requirements = {word for word in words if not word.startswith("--") and word.partition("==")[0] not in SOURCE_ONLY}
    proven = [line.split() for line in RESOLVED if line.startswith(f"{case.target} ") and system in line]
    assert any(requirements <= set(resolved) for resolved in proven), requirements


NEEDS = {
    "bitsandbytes": r"(load_in_[48]bit|quantization_bit)\W+(?![Ff]alse)\w|optim\w*\W+\w*(8bit|paged)",
    "liger-kernel": r"(use|enable)_liger_kernel\W+[Tt]rue",
    "kernels": r"kernels-community/|attn_implementation\W+flash_attention_2",  # on AMD's cards the hub's by itself
}
"""Package -> what in a file needs it."""
BROUGHT = {"axolotl": ("liger-kernel", "kernels"), "unsloth": ("bitsandbytes",)}
"""What a target's own requirements bring."""


TRAINED = {
    "trl": ("trl/trl-sft.yaml", run_trl),
    "hf": ("hf/train_hf.py", run_script),
    "sentence-transformers": ("sentence-transformers/train_embedding.py", run_script),
}


def tiny(case: Case, place: Path) -> Path:
    """The tiny model that stands for the case's."""
    folder = place / "models" / case.kind
    if not folder.exists():
        save_tiny(case.kind, folder)
    return folder


def step(case: Case, out: Path, place: Path) -> None:
    """Data are made, and one step of the tiny model trains from the emitted file."""
    form = re.search(rf"(?m)^  {case.target}\)[\s\S]*?\n    ;;", (out / "launch" / "run.sh").read_text())
    form = re.search(r"python launch/prepare_data.py (\w+)", form[0])
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        model = tiny(case, place)
        if form is not None:
            prepare = out / "launch" / "prepare_data.py"
            scope: dict[str, Any] = {"__name__": "made", "__file__": str(prepare)}
            exec(on_cpu(prepare.read_text("utf-8"), model), scope)
            scope["main"](form[1])
            assert num_rows(next((out / "launch" / "data" / form[1]).glob("train.*"))) >= NUM // 2
        if case.target not in TRAINED or (case.target != "hf" and case.kind in PROCESSORS):
            return
        name, runs = TRAINED[case.target]
        trainer = runs(on_cpu((out / "launch" / name).read_text(), model), out)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert trainer.state.global_step == len(losses) == 1
    assert all(math.isfinite(loss) and 0 < loss < 20 for loss in losses)  # the Trainer logs a NaN as 0


def num_rows(file: Path) -> int:
    """Rows of a file that `prepare_data.py` made, each with something to learn."""
    if file.suffix != ".parquet":
        return len(file.read_text("utf-8").splitlines())
    import pyarrow.parquet

    labels = pyarrow.parquet.read_table(file)["labels"].to_pylist()
    assert all(any(label != -100 for label in row[1:]) for row in labels)
    return len(labels)
