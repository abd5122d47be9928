"""Constants of the speed model, apart from the facts of the GPU table, dated and with their points.

`planner/data/calibration.json` holds them: `constants` (all architectures), `architectures` (what differs by
architecture), `matmul_share` (measured share of the nominal matmul rate by GPU). `plan calibrate` writes a file of the
same form, with `bands`.
"""

import os
from collections.abc import Mapping
from dataclasses import field, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from planner.core.errors import ConfigError
from planner.core.inputs import parse_object, read_text
from planner.core.records import dataclass
from planner.core.shipped import DATA
from planner.hardware.gpu import GpuSpec

DATA_FILE = DATA / "calibration.json"
FORM = 1
MAX_BYTES = 1_000_000
VARIABLE = "FINETUNE_PLANNER_CALIBRATION"
_LARGEST = 1e18


def family(gpu: GpuSpec) -> str:
    """The group of cards that behave alike: "Ampere:geforce" (consumer) or "Ampere:pro"."""
    return f"{gpu.arch}:{'geforce' if 'GeForce' in gpu.driver_name else 'pro'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """Every fitted or stated number of the speed model. Shares are fractions of a nominal or measured rate.

    Attributes:
        training_share: of the measured matmul rate, sustained inside a step (clocks fall under load).
        wave_loss: tiles lost to the last, unfilled wave, in waves.
        k_half: columns of the inner loop that a tile's start-up costs on an A100.
        attention_forward_share, attention_backward_share: of the matmul rate that fused attention reaches.
        attention_math_passes: times that a materialised tokens x tokens matrix moves, forward and backward together.
        bandwidth_share: of the nominal memory bandwidth that elementwise kernels reach.
        loss_bandwidth_share: the same for the loss chain.
        dequantize_share: of the bandwidth that bitsandbytes' NF4 dequantization reaches.
        int8_rate: matmul rate of LLM.int8() relative to 16 bit (quantization of inputs not included).
        lora_share: of the matmul rate that LoRA's thin matrices reach.
        kernel_gap_s: least time of a kernel on the GPU.
        card_scale: seconds of this card's kernels beside those that all else says.
        host_scale: seconds of this machine's host beside those of the rented one that was measured.
        published_host: the same of the machines of published runs.
        compile_bytes, compile_host: what torch.compile leaves of elementwise bytes, and of the host's time around
            quantized matrices and adapters.
        elementwise_scale: fitted correction of the counted elementwise bytes.
        optimizer_share: of the bandwidth that optimizer kernels reach.
        l2_gain: how much faster elementwise kernels run on tensors far smaller than the L2 cache (1: twice as fast).
        flash_1_share: speed of the first FlashAttention relative to the second.
        overlap_power: p of the p-norm that joins GPU and host time (large: the larger of both).
        waiting_power: the same where the host waits for the GPU in every layer.
    """

    training_share: float = 0.9
    wave_loss: float = 0.35
    k_half: float = 180.0
    attention_forward_share: float = 0.78
    attention_backward_share: float = 0.62
    attention_math_passes: float = 14.0
    bandwidth_share: float = 0.85
    loss_bandwidth_share: float = 0.85
    dequantize_share: float = 0.4
    int8_rate: float = 1.3
    lora_share: float = 0.7
    kernel_gap_s: float = 3.0e-6
    card_scale: float = 1.0
    host_scale: float = 1.0
    published_host: float = 0.6
    compile_bytes: float = 0.45
    compile_host: float = 0.15
    elementwise_scale: float = 1.0
    optimizer_share: float = 0.86
    l2_gain: float = 0.8
    flash_1_share: float = 0.55
    overlap_power: float = 4.0
    waiting_power: float = 1.5

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all constants."""
        return tuple(constant.name for constant in fields(cls))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutConstants:
    """Fitted or stated numbers of several GPUs' speed; the links' rates are facts of `planner.hardware.cluster`.

    Attributes:
        nvlink_share, pcie_share, network_share: of a link's nominal one-directional rate that NCCL's collectives reach.
        pcie_staged_share: the same where GPUs cannot reach each other's memory (GeForce): staged by the host.
        host_copy_share: of PCIe that pinned copies between host and GPU reach.
        collective_s: start of one collective (kernel launch, synchronisation of streams).
        overlap_cost: share of hidden communication that compute pays for (multiprocessors and memory that it takes).
        overlap_cost_fsdp_1: the same under FSDP version 1.
        unit_host_s: host time of one gather or reduction of a sharded unit (hooks, flat buffers, streams).
        cpu_adam_bytes_per_s: what a node's CPUs move in an optimizer step, all GPUs of the node together.
        cpu_adam_loop: how many times slower PyTorch's own CPU optimizer is than a fused one.
    """

    nvlink_share: float = 0.75
    pcie_share: float = 0.65
    pcie_staged_share: float = 0.17
    network_share: float = 0.8
    host_copy_share: float = 0.8
    collective_s: float = 1.5e-5
    overlap_cost: float = 0.15
    overlap_cost_fsdp_1: float = 0.5
    unit_host_s: float = 2.0e-4
    cpu_adam_bytes_per_s: float = 1.15e11
    cpu_adam_loop: float = 5.7

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all constants."""
        return tuple(constant.name for constant in fields(cls))


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """One calibration file.

    Attributes:
        date: when it was fitted (ISO), "" for stated defaults.
        constants: the values for every architecture.
        architectures: architecture -> values that differ there.
        matmul_share: GPU key or family -> measured share of the nominal 16-bit matmul rate.
        fp32_share: GPU key or family -> the same for fp32 outside the tensor cores.
        rates_flops_per_s: GPU key -> data type -> measured matmul rate where the nominal one does not apply.
        spread: what several GPUs add, see `LayoutConstants`.
        bands: key of a card that `plan calibrate` has seen -> half-width of the speed's band there, as a fraction.
        points: what it was fitted on, for people.
    """

    date: str = ""
    constants: Mapping[str, float] = field(default_factory=dict)
    architectures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    matmul_share: Mapping[str, float] = field(default_factory=dict)
    fp32_share: Mapping[str, float] = field(default_factory=dict)
    rates_flops_per_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)
    bands: Mapping[str, float] = field(default_factory=dict)
    points: Mapping[str, Any] = field(default_factory=dict)

    def constants_for(self, gpu: GpuSpec) -> Constants:
        """The constants of one GPU: general, then its architecture's, its family's, its own."""
        names = (gpu.arch, family(gpu), gpu.key)
        constants = self._by_gpu.get(names)
        if constants is None:
            values = dict(self.constants)
            for name in names:
                values.update(self.architectures.get(name, {}))
            constants = self._by_gpu[names] = Constants(**values)
        return constants

    @cached_property
    def _by_gpu(self) -> dict[tuple[str, ...], Constants]:
        """Those that were asked for: a walk over spreads asks thousands of times."""
        return {}

    @cached_property
    def layout_constants(self) -> LayoutConstants:
        """What several GPUs add."""
        return LayoutConstants(**self.spread)

    def share_for(self, gpu: GpuSpec) -> tuple[float, str]:
        """Share of the nominal 16-bit matmul rate and where it comes from: "gpu", "family" or "default"."""
        return _share(self.matmul_share, gpu, 0.75)

    def fp32_share_for(self, gpu: GpuSpec) -> float:
        """Share of the nominal fp32 rate that a large matmul reaches outside the tensor cores."""
        return _share(self.fp32_share, gpu, 0.7)[0]


def _share(table: Mapping[str, float], gpu: GpuSpec, default: float) -> tuple[float, str]:
    for name, source in ((gpu.key, "gpu"), (family(gpu), "family")):
        if name in table:
            return table[name], source
    return table.get("default", default), "default"


def calibration_from_dict(values: Mapping[str, Any], *, source: str = "calibration") -> Calibration:
    """A validated calibration.

    Raises:
        ConfigError: another form, an unknown constant, or a value that is not a positive number.
    """
    if values.get("form") != FORM:
        raise ConfigError(f"{source}: expected calibration form {FORM}, got {values.get('form')!r}")
    hint = "fit it again with `plan calibrate`"
    constant_names, layout_names = set(Constants.names()), set(LayoutConstants.names())
    tables: list[tuple[str, Any, set[str] | None]] = [
        ("constants", values.get("constants", {}), constant_names),
        ("spread", values.get("spread", {}), layout_names),
    ]
    tables += [(name, values.get(name, {}), None) for name in ("matmul_share", "fp32_share", "bands")]
    for name in ("architectures", "rates_flops_per_s"):
        allowed = constant_names if name == "architectures" else None
        tables += [(f"{name}.{key}", table, allowed) for key, table in _table(values, name, source).items()]
    for where, table, names in tables:
        if not isinstance(table, Mapping):
            raise ConfigError(f"{source}: {where} must be an object, got {table!r:.80}", hint=hint)
        for name, value in table.items():
            if names is not None and name not in names:
                raise ConfigError(f"{source}: unknown constant {name!r:.80}", hint=hint)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _LARGEST:
                raise ConfigError(f"{source}: {where}.{name} must be a number of at least 0, got {value!r:.80}")
    points = _table(values, "points", source)
    for name in ("gpus", "families"):
        if not isinstance(points.get(name, []), (list, Mapping)) or not all(
            isinstance(entry, str) for entry in points.get(name, [])
        ):
            raise ConfigError(f"{source}: points.{name} must be a list of names", hint=hint)
    if not isinstance(values.get("date", ""), str):
        raise ConfigError(f"{source}: date must be text, got {values['date']!r:.80}", hint=hint)
    wanted = {attribute.name for attribute in fields(Calibration)}
    return Calibration(**{name: value for name, value in values.items() if name in wanted})


def _table(values: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    table = values.get(name, {})
    if not isinstance(table, Mapping):
        raise ConfigError(f"{source}: {name} must be an object, got {table!r:.80}")
    return table


def calibration_to_dict(calibration: Calibration) -> dict[str, Any]:
    """The calibration as the JSON values that `calibration_from_dict` reads."""
    values: dict[str, Any] = {"form": FORM}
    for attribute in fields(Calibration):
        value = getattr(calibration, attribute.name)
        values[attribute.name] = dict(value) if isinstance(value, Mapping) else value
    return values


def load_calibration(path: str | None = None) -> Calibration:
    """The calibration of `path`; else of the file that FINETUNE_PLANNER_CALIBRATION names; else the one that ships.

    Raises:
        ConfigError: the file cannot be read or makes no sense.
    """
    return _load(path or os.environ.get(VARIABLE) or None)


@cache
def _load(path: str | None) -> Calibration:
    """One file, read once.

    Raises:
        ConfigError: the file cannot be read or makes no sense.
    """
    file = DATA_FILE if path is None else Path(path)
    hint = "give a file that `plan calibrate` wrote"
    values = parse_object(read_text(file, max_bytes=MAX_BYTES, hint=hint), str(file), hint=hint)
    return calibration_from_dict(values, source=str(file))
