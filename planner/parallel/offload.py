"""Offloading: the link to the host, and the optimizer step on its CPUs.

Source: Ren et al. 2021, ZeRO-Offload, arXiv:2101.06840 (CPU-Adam: 10B parameters in 2.6 s on two Xeon 8168, table 4;
PyTorch's own CPU Adam 5.7 times slower). `cpu_adam_bytes_per_s` states that rate as bytes.
"""

from planner.choices.optimizers import OPTIMIZERS
from planner.hardware.cluster import Cluster, host_link
from planner.setup import TrainSetup
from planner.throughput.calibration import LayoutConstants

CPU_ADAM_BYTES = 30.0
"""Per parameter: fp32 gradient, weight and two moments read, three written, a 16-bit copy written."""


def host_rate(cluster: Cluster, constants: LayoutConstants) -> float:
    """Bytes per second of pinned copies between one GPU and its host, one direction."""
    return host_link(cluster.gpu).bytes_per_s * constants.host_copy_share


def optimizer_s(setup: TrainSetup, params: float, cluster: Cluster, constants: LayoutConstants) -> float:
    """Seconds of the optimizer step over `params` parameters per GPU, all GPUs of a node sharing its CPUs.

    DeepSpeed runs its vectorised CPU-Adam; FSDP2 runs PyTorch's optimizer on CPU tensors, fused or a loop.
    """
    seconds = params * cluster.gpus_per_node * CPU_ADAM_BYTES / constants.cpu_adam_bytes_per_s
    looped = setup.parallel == "fsdp2" and OPTIMIZERS[setup.optimizer].cpu_looped
    return seconds * (constants.cpu_adam_loop if looped else 1.0)


def back_s(setup: TrainSetup, weight_bytes: float, rate: float) -> float:
    """Seconds to bring this GPU's share of the new 16-bit weights back; weights that stay on the host need none."""
    return weight_bytes / rate if setup.offload == "optimizer" else 0.0
