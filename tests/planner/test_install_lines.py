"""Every `pip install` that a launch folder can write, proven installable: resolved by uv for the Python and the system
that it is for, without a download of any package (metadata alone).

What is resolved is every largest set of requirements: what satisfies it satisfies all its subsets. A set that was
resolved stands in `resolved_installs.txt` and is not asked for again; RESOLVE_INSTALLS=1 resolves all and writes the
file anew (80 s, 19 CPU seconds, most of them Axolotl's). flash-attn and
causal-conv1d, which come as source alone and whose metadata takes a build, are looked up by their version. PyTorch's
own indexes answer on no machine of the tests: of a line for AMD's and Intel's cards, and NVIDIA's before Turing, all
but torch's origin is proven.
"""

import datetime
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from planner.frameworks.exporters import EXPORTERS
from planner.frameworks.exporters.install import BUILDS, TORCH_INDEX, install_calls
from planner.hardware.gpus import find_gpu
from planner.memory.attention_kernels import missing_kernels
from planner.options.optimizers import OPTIMIZERS
from planner.setup import TrainSetup
from planner.setup.packages import TESTED
from tests.planner.helpers import loaded
from tests.planner.launch_sweep import request as asked_for
from tests.planner.launch_sweep import setups

SYSTEMS = {"NVIDIA": "x86_64-manylinux_2_28", "AMD": "x86_64-manylinux_2_28", "Apple": "aarch64-apple-darwin"}
CARDS = ("rtx-3060", "mi300x", "apple-m3-max")
MODELS = ("Qwen/Qwen2.5-1.5B", "Qwen/Qwen3-8B", "Qwen/Qwen3-Next-80B-A3B-Instruct")
RESOLVED = Path(__file__).with_name("resolved_installs.txt")
SOURCE_ONLY = ("flash-attn", "causal-conv1d")
EMBEDDING = TrainSetup(objective="embedding", micro_batch_seqs=8)
EMBEDDINGS = tuple(
    EMBEDDING.replace(attention=attention, **how)
    for attention in ("sdpa", "flash-attention-2")
    for how in ({}, {"method": "qlora", "quantization": "nf4-double"})
)
Line = tuple[str, str, str]
"""Target, oldest Python, system."""


@cache
def calls_of_all() -> Mapping[Line, frozenset[tuple[tuple[str, ...], ...]]]:
    """Every distinct list of calls of every target, by what it is installed on."""
    calls_by_line: dict[Line, set[tuple[tuple[str, ...], ...]]] = {}
    for card in CARDS:
        gpu = find_gpu(card)
        for name in MODELS:
            model = loaded(name)
            for setup in unlike():
                if missing_kernels(model, gpu, setup) or (gpu.vendor == "Apple" and setup.num_gpus > 1):
                    continue
                export_request = asked_for(setup, gpu=gpu, model=model)
                for target, export in EXPORTERS.items():
                    launch = export(export_request)
                    if launch.complete and not launch.refused:
                        line = (target, launch.python, SYSTEMS[gpu.vendor])
                        calls = tuple(map(tuple, install_calls(launch, export_request)))
                        calls_by_line.setdefault(line, set()).add(calls)
    return {line: frozenset(calls) for line, calls in calls_by_line.items()}


def unlike() -> list[TrainSetup]:
    """Of the sweep two of each combination of what a package can hang on."""
    seen: Counter[tuple[object, ...]] = Counter()
    selected = []
    for setup in (*setups(), *EMBEDDINGS):
        names = ("quantized", "zero", "loss", "kernels", "attention", "packing")
        key = (setup.objective == "embedding", OPTIMIZERS[setup.optimizer].bitsandbytes)
        key += tuple(getattr(setup, name) for name in names)
        seen[key] += 1
        if seen[key] <= 2:
            selected.append(setup)
    return selected


def largest_sets() -> list[tuple[Line, frozenset[str]]]:
    """The sets of requirements that no other set of the same line holds."""
    largest = []
    for line, every in calls_of_all().items():
        sets = {frozenset(word for call in calls for word in call if not is_option(word)) for calls in every}
        largest += [(line, requirements) for requirements in sets if not any(requirements < other for other in sets)]
    return sorted(largest, key=lambda row: (row[0], sorted(row[1])))


def is_option(word: str) -> bool:
    """Whether a word of a call is no requirement, or one that is looked up by its version."""
    return word.startswith(("--", TORCH_INDEX)) or word.partition("==")[0] in SOURCE_ONLY


def test_what_is_built_from_source_comes_last_and_after_what_builds_it() -> None:
    """`pip install flash-attn` in a bare environment: "No module named 'wheel'" (flash-attn 2.8.3 setup.py)."""
    built = 0
    for every in calls_of_all().values():
        for calls in every:
            names = [[word.partition("==")[0] for word in call] for call in calls]
            first = next((place for place, call in enumerate(names) if set(call) & {*SOURCE_ONLY}), None)
            if first is None:
                assert not any("--no-build-isolation" in call for call in calls)
                continue
            built += 1
            assert names[first - 1] == list(BUILDS)
            assert all(len(call) == 2 and call[1] == "--no-build-isolation" for call in calls[first:])
    assert built >= 4


def test_no_line_has_the_transformers_whose_flash_attention_stops() -> None:
    """transformers 5.6.0's forward wants `s_aux`, which only models with sinks have: with a stand-in for the kernel
    5.5.4's forward of a Llama passes and 5.6.0's raises AttributeError (30 November 2026)."""
    words = {word for every in calls_of_all().values() for calls in every for call in calls for word in call}
    assert {"flash-attn==2.8.3", "llamafactory==0.9.5"} <= words
    assert "transformers==5.6.0" not in words


def test_no_line_for_a_mac_has_tritons_kernels_and_torch_is_built_for_the_card() -> None:
    for (target, _, system), every in calls_of_all().items():
        for calls in every:
            words = {word.partition("==")[0] for call in calls for word in call}
            if "darwin" in system:
                assert not words & {"liger-kernel", "flash-linear-attention", "flash-attn", "unsloth"}, target
    for card, builds in {"mi300x": "rocm7.2", "arc-b580": "xpu", "v100-16gb": "cu126"}.items():
        export_request = asked_for(TrainSetup(precision="fp16-autocast"), gpu=find_gpu(card))
        for target in ("trl", "hf", "axolotl", "llamafactory"):
            calls = install_calls(EXPORTERS[target](export_request), export_request)
            assert calls[0] == ["torch", "--index-url", f"{TORCH_INDEX}{builds}"]


@pytest.fixture(scope="module")
def uv(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """uv, told where pip finds packages, as setup.sh tells it."""
    sibling = Path(sys.executable).with_name("uv")
    executable = str(sibling) if sibling.exists() else shutil.which("uv")
    if executable is None:
        pytest.skip("uv is not here")
    options = "pip compile - --quiet --no-annotate --no-header --index-strategy=unsafe-best-match"
    command = [executable, *options.split()]
    done = subprocess.run([*command, "--no-deps"], input="packaging", capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"no package index answers: {done.stderr.strip().splitlines()[-1][:100]}")
    return command


def test_every_largest_set_of_requirements_resolves(request: pytest.FixtureRequest) -> None:
    sets = {f"{' '.join(line)}: {' '.join(sorted(words))}": (line, words) for line, words in largest_sets()}
    refresh = bool(os.environ.get("RESOLVE_INSTALLS"))
    resolved = () if refresh else RESOLVED.read_text().splitlines()[1:]
    assert len(sets) >= 12
    failed, open_ = {}, [name for name in sets if name not in resolved]
    uv = request.getfixturevalue("uv") if open_ else []
    environment = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"}  # what torch's wheels are for
    for name in open_:
        (_, python, system), words = sets[name]
        command = [*uv, "--python-version", python, "--python-platform", system]
        requirements = "\n".join(sorted(words))
        done = subprocess.run(command, input=requirements, capture_output=True, text=True, timeout=300, env=environment)
        if done.returncode:
            failed[name] = done.stderr[-800:]
    assert not failed
    if refresh:
        for name in SOURCE_ONLY:
            asking = [sys.executable, "-m", "pip", "index", "versions", name]
            assert f"{TESTED[name]}," in subprocess.run(asking, capture_output=True, text=True, timeout=120).stdout
        day = datetime.datetime.now(datetime.UTC).date()
        RESOLVED.write_text("\n".join([f"# resolved on {day}: target, oldest Python, system: requirements", *sets, ""]))
