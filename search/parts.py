"""Where a prediction's time and memory go, as shares: the handles by which its errors are learned.

A formula is a sum of parts (matrix multiplications, attention, loss, ... in time; weights, activations, ... in
memory). If part p is misjudged by a factor exp(e_p), the whole is misjudged by about share_p x e_p in the logarithm.
Parts are what setups and models have in common, so an error learned on one setup tells about all others in proportion
to their shares.
"""

from collections.abc import Sequence

import numpy as np

from planner.outcome import Prediction
from planner.setup import TrainSetup
from planner.units import GIB
from search.arrays import Floats, Target

VARIANTS = {
    "attention": "attention",
    "loss": "loss",
    "optimizer": "optimizer",
    "quant": "quantization",
    "activations": "checkpointing",
    "communication": "parallel",
    "in transit": "parallel",
}
"""A part whose name contains the key has one kernel (and one error) per value of the field; activations are other
tensors altogether with each way of checkpointing, and each way of spreading sends and gathers by its own code."""

TIME_SD = 0.25
TIME_SDS = {"communication": 0.60, "bubble": 0.40, "offload": 0.60}
"""Links are nominal, and how much of them compute hides is fitted to few machines: off by factors, not by quarters."""
TIME_VARIANT_SD = 0.60  # kernels for one purpose differ by factors of 1.3 to 5 in reports
SMALL_BATCH_SD = 0.35
HALF_FULL_TOKENS = 1000  # order of magnitude of the tokens at which large matrix multiplications reach half their rate
MEMORY_SD = {"weights": 0.02, "adapters": 0.10, "gradients": 0.05, "optimizer": 0.05}
MEMORY_SD_OTHER = 0.06  # activations, loss, workspace and what else
MEMORY_VARIANT_SD = 0.10
TRANSIT = ("gathered", "bucket", "reduce")
"""Words in the names of terms that an engine keeps for sending and gathering, whatever they hold."""
CONSTANT_SD = 0.5  # of one GiB that no formula counts: driver context, libraries, other processes


Parts = dict[str, tuple[float, float]]
"""Name -> (share of the whole time or of the device peak, prior standard deviation) of the parts of one prediction."""


def parts_of(setup: TrainSetup, prediction: Prediction, target: Target) -> Parts:
    """The parts of one prediction; empty where it names none."""
    parts: Parts = {}

    def add(name: str, share: float, sd: float, variant_sd: float) -> None:
        own = [f"{name}:{getattr(setup, field)}" for word, field in VARIANTS.items() if word in name]
        for one, its_sd in ((name, sd), *((one, variant_sd) for one in own)):
            parts[one] = parts.get(one, (0.0, 0.0))[0] + share, its_sd

    if target == "speed":
        total = sum(prediction.time_parts_s.values())
        for name, part_s in prediction.time_parts_s.items():
            add(name, part_s / total, TIME_SDS.get(name, TIME_SD), TIME_VARIANT_SD)
        # How far the GPU is from full with this few tokens at once: a formula's guess of it is off by a factor, and
        # launches, which many formulas leave out, weigh in the same places.
        share = HALF_FULL_TOKENS / (HALF_FULL_TOKENS + setup.tokens_per_micro_batch)
        parts["small micro-batch"] = share, SMALL_BATCH_SD
    else:
        for term in prediction.terms:
            moving = setup.num_gpus > 1 and any(word in term.name for word in TRANSIT)
            name = "in transit" if moving else term.category
            sd = MEMORY_SD.get(name, MEMORY_SD_OTHER)
            add(name, term.size_bytes / prediction.peak_device_bytes, sd, MEMORY_VARIANT_SD)
        parts["constant"] = GIB / prediction.peak_device_bytes, CONSTANT_SD
    return parts


def share_matrix(parts: Sequence[Parts]) -> Floats:
    """[setups, parts] shares times standard deviations: the covariance by parts is this matrix times its transpose."""
    names = list(dict.fromkeys(name for part in parts for name in part))
    index = {name: column for column, name in enumerate(names)}
    matrix = np.zeros((len(parts), len(names)))
    for row, part in enumerate(parts):
        for name, (share, sd) in part.items():
            matrix[row, index[name]] = share * sd
    return matrix
