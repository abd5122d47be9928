"""Kernel names of one step, and the SDPA backend they tell."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from probes.gpu.meters import KEPT, attention_backend, kernels_of_step

NAMES = {
    "cudnn": "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_kernel0_0",
    "flash": "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4",
    "memory-efficient": "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention",
    "math": "void (anonymous namespace)::softmax_warp_forward<float, float, float, 11>",
}


@pytest.mark.parametrize("backend", sorted(NAMES))
def test_the_backend_is_known_by_its_kernels(backend: str) -> None:
    """Names as PyTorch's profiler shows them; a flash kernel beside cuDNN's own name is cuDNN's."""
    assert attention_backend(["nvjet_hsh_192x192_64x3", NAMES[backend]]) == backend


def test_nothing_known_is_no_backend() -> None:
    assert attention_backend([]) == ""


def test_a_step_is_profiled_and_a_profiler_that_fails_costs_only_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    events = [SimpleNamespace(key=f"k{index}", self_device_time_total=index) for index in range(KEPT + 10)]

    class Profile:
        def __init__(self, activities: Any) -> None:
            pass

        def __enter__(self) -> "Profile":
            return self

        def __exit__(self, *exc: object) -> None:
            pass

        def key_averages(self) -> Any:
            return events

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr("torch.profiler.profile", Profile)
    names = kernels_of_step(lambda: steps.append(1))
    assert steps == [1]
    assert names[0] == f"k{KEPT + 9}"
    assert len(names) == KEPT

    def broken(activities: Any) -> Profile:
        raise RuntimeError("CUPTI_ERROR_NOT_INITIALIZED")

    monkeypatch.setattr("torch.profiler.profile", broken)
    assert kernels_of_step(lambda: None) == ()
