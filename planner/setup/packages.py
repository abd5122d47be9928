"""Which choices need a package beside a plain stack of torch, transformers, TRL, peft and bitsandbytes."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from planner.core.shipped import model_types
from planner.options.kernels import KERNELS, LIGER
from planner.options.losses import LOSSES
from planner.setup import TrainSetup
from planner.setup import allowed as fields

FLASH = "flash-attn"
DELTA, CONV = "flash-linear-attention", "causal-conv1d"
VLLM = "vllm"
TESTED = {LIGER: "0.8.5", FLASH: "2.8.3", DELTA: "0.6.0", CONV: "1.7.0", VLLM: "0.30.0"}
"""The version that is installed: of Liger that whose own code was run here (tools/build_types.py,
benchmarks/trace_liger.py at e34acc15), of the others PyPI's newest of November 2026 (flash-attn: the newest with
ready builds; vLLM: the newest that pip resolves beside transformers 5.23, and that trl 1.16 takes)."""
CHUNKED_TYPES = model_types("hands_on_delta_rule")
"""Model types whose gated delta rule transformers hands to flash-linear-attention's `chunk_gated_delta_rule` where
that is installed (`use_kernel_func_from_hub_with_fallback(..., "fla")`); without it a loop in PyTorch runs, in fp32."""
DELTA_TYPES = CHUNKED_TYPES | model_types("own_delta_rule")
"""With those whose delta rule is the package's `chunk_kda`, which is counted as the loop without it."""
PACKAGED: Mapping[str, Mapping[object, str]] = {
    "loss": {name: LIGER for name, row in LOSSES.items() if row.triton},
    "attention": {"flash-attention-2": FLASH},
    "kernels": {name: row.package or "another tool" for name, row in KERNELS.items() if row.triton},
    "linear_attention": {"fla": DELTA},
}
"""Field of a setup -> its values that need a package -> the package."""
PROGRAMS = ("axolotl",)
"""Launch targets that a plan takes unasked and that come as programs of their own, with what they bring along."""
_MODULES = {LIGER: "liger_kernel", FLASH: "flash_attn", DELTA: "fla", VLLM: VLLM} | {name: name for name in PROGRAMS}


PACKAGE_PRICES = {"flash-attention-2": 0.03}
"""What must be gained, beyond what the speed model can tell apart, for a package that a plain stack does without: so
much of the speed of the same setup on SDPA. (Liger gains more than that everywhere, docs/choices.md.) flash attention
is fetched from the hub at the first start and holds transformers back by a version
(`planner.frameworks.exporters.install`)."""


def absent_packages() -> tuple[str, ...]:
    """Those that cannot be imported here."""
    return tuple(name for name, module in _MODULES.items() if find_spec(module) is None)


def packages_of(setup: TrainSetup) -> list[str]:
    """Those that the choices of a setup need."""
    if setup.stack in PROGRAMS:
        return [setup.stack]
    needs = [packages.get(getattr(setup, name)) for name, packages in PACKAGED.items()]
    needs += [VLLM] * (setup.objective_spec.rolls_out and setup.rollout_settings.by_vllm)
    return [name for name in dict.fromkeys(needs) if name]


def unpackaged() -> dict[str, tuple[str, ...]]:
    """Field of a setup -> its values that need no further package."""
    values = {
        "loss": fields.LOSSES,
        "attention": fields.ATTENTIONS,
        "kernels": fields.KERNEL_FAMILIES,
        "linear_attention": fields.LINEAR_ATTENTIONS,
    }
    return {name: tuple(value for value in values[name] if value not in PACKAGED[name]) for name in PACKAGED}


def rules_packages_out(fixed: Mapping[str, tuple[Any, ...]]) -> bool:
    """Whether the allowed values (`Workload.fixed`) leave no choice that needs one, as after --no-extra-packages."""
    return all(name in fixed and packages.keys().isdisjoint(fixed[name]) for name, packages in PACKAGED.items())


def requirement(package: str) -> str:
    """As pip takes it: with the tested version where there is one."""
    return f"{package}=={TESTED[package]}" if package in TESTED else package
