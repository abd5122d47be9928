"""The optimizers: bytes, passes over memory, names in every tool, who steps them. To add one, add its row."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, final

from planner.core.records import dataclass

BLOCK_8BIT = 256
"""Elements per scale of an 8-bit state. Source: bitsandbytes 0.50 `Optimizer2State` (block-wise, 256)."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class States:
    """What an optimizer keeps from step to step.

    Attributes:
        param_dtype_states: states per parameter in the parameter's own type.
        eight_bit: states per parameter of one byte and an fp32 scale per BLOCK_8BIT.
        fp32: states per parameter in fp32.
        factored: one fp32 row and one fp32 column per matrix instead of a state per parameter.
    """

    param_dtype_states: int = 0
    eight_bit: int = 0
    fp32: int = 0
    factored: bool = False


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Temporaries:
    """What a step makes and drops again.

    Attributes:
        copies: in multiples of all trained parameters.
        fp32_of_largest: fp32 copies of the largest tensor, and as many again where parameters are 16-bit.
    """

    copies: int = 0
    fp32_of_largest: int = 0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """One optimizer.

    Attributes:
        name: as `TrainSetup.optimizer` says it.
        planned: whether a plan chooses it by itself; others change what is optimized, or are never better.
        tie_break: breaks ties in speed: fewer extra packages, nothing lost; smaller is simpler.
        adamw: whether it computes AdamW, so that another AdamW can take its place.

        states: what it keeps; temporaries: what a step makes.
        paged: states lie in CUDA's managed memory, which PyTorch does not count.

        passes: over parameter-sized tensors in one step; extra_bytes: further bytes moved per parameter.
        kernels_per_tensor: kernels of one step; looped: whether Python goes through the tensors one by one.
        cpu_looped: the same for the step on offloaded CPU tensors.
        rate_rule: which rule of thumb its learning rate follows: "Adam", "Lion" or "SGD".

        bitsandbytes: whether it is that package's, which has none for Apple's GPUs.
        steps_dtensors: whether it steps FSDP2's and tensor parallelism's DTensors; others mix them with plain state
            tensors and raise. Measured: one-process `fully_shard` on CPU, PyTorch 2.13.
        steps_on_cpu: whether it has a form that steps states in the host's memory (DeepSpeedCPUAdam, AdamW on CPU).

        transformers: its name in transformers' `OptimizerNames` (5.23), which TRL, Axolotl, LLaMA-Factory and Unsloth
            take over; "" where a program alone can build it.
        aliases: other names that those tools read as the same.
        same_states: names of optimizers that are not in this table and keep the same states. Measured: two steps on
            CPU (bitsandbytes 0.50, torch-optimi 0.3.3, schedulefree 1.4.1).
        class_path: the class that the dry run and the probe build, with its `arguments`.
    """

    name: str
    planned: bool = False
    tie_break: int = 4
    adamw: bool = False
    states: States
    temporaries: Temporaries
    paged: bool = False
    passes: float
    extra_bytes: float = 0.0
    kernels_per_tensor: float
    looped: bool = False
    cpu_looped: bool = True
    rate_rule: str = "Adam"
    bitsandbytes: bool = False
    steps_dtensors: bool = True
    steps_on_cpu: bool = False
    transformers: str = ""
    aliases: tuple[str, ...] = ()
    same_states: tuple[str, ...] = ()
    class_path: str
    arguments: Mapping[str, Any]

    def all_state_bytes(self, num_trained: int, size_bytes: int, *, matrix_edge_sum: int) -> int:
        """Bytes of all states, wherever they lie, of parameters of `size_bytes` each.

        Args:
            matrix_edge_sum: rows + columns over the trained matrices.

        Not counted: vectors below 4,096 elements, which bitsandbytes keeps in fp32 (under 0.01 % of a model).
        """
        states = self.states
        eight_bit = states.eight_bit * num_trained + self.scale_bytes(num_trained)
        factored = 4 * matrix_edge_sum if states.factored else 0
        return (states.param_dtype_states * size_bytes + 4 * states.fp32) * num_trained + eight_bit + factored

    def scale_bytes(self, num: int) -> int:
        return self.states.eight_bit * 4 * (num // BLOCK_8BIT)

    def wide_state_bytes(self, num: int) -> int:
        """Bytes that the states of `num` parameters take beyond `all_state_bytes` where 8-bit states are kept in 32."""
        return self.states.eight_bit * (3 * num - 4 * (num // BLOCK_8BIT))

    def step_bytes(self, num_trained: int, size_bytes: int, *, largest_tensor: int) -> int:
        of_largest = self.temporaries.fp32_of_largest * (1 + int(size_bytes != 4))
        return self.temporaries.copies * size_bytes * num_trained + of_largest * 4 * largest_tensor


def _with_paged(
    name: str, class_name: str, states: States, *, paged_aliases: tuple[str, ...] = (), **overrides: Any
) -> tuple[Optimizer, Optimizer]:
    """One of bitsandbytes' optimizers, whose kernel reads and writes each state, and its paged form.

    Source: bitsandbytes 0.50 `GlobalPageManager`, `get_paged`: managed memory, evicted to the host under pressure.
    """
    moved = round(2.1 * states.eight_bit + 8.0 * states.fp32, 1)
    plain = Optimizer(
        name=name,
        states=states,
        temporaries=Temporaries(),  # in place
        passes=3.0,
        extra_bytes=moved,
        kernels_per_tensor=1.0,
        looped=True,
        bitsandbytes=True,
        steps_dtensors=False,
        class_path=f"bitsandbytes.optim.{class_name}",
        arguments={},
        **overrides,
    )
    return plain, replace(
        plain,
        name=f"paged-{name}",
        tie_break=min(plain.tie_break + 1, 4),
        paged=True,
        transformers=f"paged_{name.replace('-', '_')}",
        aliases=paged_aliases,
        same_states=(),
        class_path=f"bitsandbytes.optim.Paged{class_name}",
    )


_ROWS = (
    # Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101. PyTorch's default is the foreach form: about 20
    # passes, and one temporary of the size of all trained parameters (the square root of the second moments; PyTorch
    # 2.13 `optim/adamw.py` _multi_tensor_adamw; Mistral-7B in bf16 peaks at 5.00 copies, fms_acceleration, A100).
    # `foreach` is said because meta and CPU tensors would be looped over otherwise.
    Optimizer(
        name="adamw",
        tie_break=1,
        adamw=True,
        states=States(param_dtype_states=2),
        temporaries=Temporaries(copies=1),
        passes=20.0,
        kernels_per_tensor=0.3,
        steps_on_cpu=True,
        transformers="adamw_torch",
        aliases=("adamw_hf", "adamw"),
        same_states=(
            "adamw_torch_npu_fused",
            "adamw_torch_xla",
            "schedule_free_adamw",
            "schedule_free_radam",
            "adam",
            "adopt_adamw",
            "ao_adamw",
            "sophia",
        ),
        class_path="torch.optim.AdamW",
        arguments={"weight_decay": 0.0, "foreach": True},
    ),
    # Reddi et al. 2018, https://arxiv.org/abs/1904.09237: the largest second moment beside both.
    Optimizer(
        name="adamw-amsgrad",
        states=States(param_dtype_states=3),
        temporaries=Temporaries(copies=1),
        passes=23.0,
        kernels_per_tensor=0.34,
        class_path="torch.optim.AdamW",
        arguments={"weight_decay": 0.0, "foreach": True, "amsgrad": True},
    ),
    # The fused kernel reads four tensors and writes three, in place.
    Optimizer(
        name="adamw-fused",
        planned=True,
        tie_break=0,
        adamw=True,
        states=States(param_dtype_states=2),
        temporaries=Temporaries(),
        passes=7.0,
        kernels_per_tensor=0.05,
        cpu_looped=False,
        steps_on_cpu=True,
        transformers="adamw_torch_fused",
        aliases=("adamw_apex_fused",),
        class_path="torch.optim.AdamW",
        arguments={"weight_decay": 0.0, "fused": True},
    ),
    # Dettmers et al. 2022, 8-bit Optimizers, https://arxiv.org/abs/2110.02861; bitsandbytes runs a kernel per tensor.
    *_with_paged(
        "adamw-8bit",
        "AdamW8bit",
        States(eight_bit=2),
        adamw=True,
        planned=True,
        tie_break=2,
        transformers="adamw_bnb_8bit",
        aliases=("adamw_8bit",),
    ),
    *_with_paged(
        "adamw-32bit",
        "AdamW32bit",
        States(fp32=2),
        adamw=True,
        same_states=("adamw_anyprecision",),
        paged_aliases=("paged_adamw",),
    ),
    # Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235. transformers' is a Python loop, tensor by tensor in fp32
    # with two temporaries of the largest (the gradient's square, the update), and casts of gradient and parameter where
    # those are 16-bit (transformers 5.23 `optimization.py`).
    Optimizer(
        name="adafactor",
        states=States(factored=True),
        temporaries=Temporaries(fp32_of_largest=2),
        passes=16.0,
        extra_bytes=16.0,
        kernels_per_tensor=18.0,
        looped=True,
        steps_dtensors=False,
        transformers="adafactor",
        class_path="transformers.optimization.Adafactor",
        arguments={"scale_parameter": False, "relative_step": False},
    ),
    *_with_paged(
        "lion-8bit",
        "Lion8bit",
        States(eight_bit=1),
        rate_rule="Lion",
        transformers="lion_8bit",
        same_states=("rmsprop_bnb_8bit",),
    ),
    *_with_paged(
        "lion-32bit",
        "Lion32bit",
        States(fp32=1),
        rate_rule="Lion",
        transformers="lion_32bit",
        aliases=("lion",),
        same_states=("rmsprop_bnb", "rmsprop_bnb_32bit"),
        paged_aliases=("paged_lion",),
    ),
    # Pagliardini et al. 2024, https://arxiv.org/abs/2409.03137: a slow average of the gradients beside AdamW's states.
    *_with_paged("ademamix-32bit", "AdEMAMix", States(fp32=3), transformers="ademamix"),
    *_with_paged("ademamix-8bit", "AdEMAMix8bit", States(eight_bit=3), transformers="ademamix_8bit"),
    # Without momentum: no state.
    Optimizer(
        name="sgd",
        states=States(),
        temporaries=Temporaries(),
        passes=3.0,
        kernels_per_tensor=0.05,
        rate_rule="SGD",
        transformers="sgd",
        class_path="torch.optim.SGD",
        arguments={"foreach": True},
    ),
    Optimizer(
        name="sgd-momentum",
        states=States(param_dtype_states=1),
        temporaries=Temporaries(),
        passes=8.0,
        kernels_per_tensor=0.12,
        rate_rule="SGD",
        same_states=("lion_pytorch", "schedule_free_sgd"),
        class_path="torch.optim.SGD",
        arguments={"foreach": True, "momentum": 0.9},
    ),
    # The foreach forms, passes counted as AdamW's (PyTorch 2.13 `optim/rmsprop.py`, `optim/adagrad.py`).
    Optimizer(
        name="rmsprop",
        states=States(param_dtype_states=1),
        temporaries=Temporaries(copies=1),
        passes=13.0,
        kernels_per_tensor=0.2,
        transformers="rmsprop",
        class_path="torch.optim.RMSprop",
        arguments={"foreach": True},
    ),
    Optimizer(
        name="adagrad",
        states=States(param_dtype_states=1),
        temporaries=Temporaries(copies=2),
        passes=13.0,
        kernels_per_tensor=0.2,
        transformers="adagrad",
        class_path="torch.optim.Adagrad",
        arguments={"foreach": True},
    ),
)

OPTIMIZERS: Mapping[str, Optimizer] = {row.name: row for row in _ROWS}
"""Every optimizer by its name."""
PLANNED_OPTIMIZERS = tuple(row.name for row in _ROWS if row.planned)
"""Those that a plan chooses from."""

_WORDS = [row.transformers for row in _ROWS if row.transformers]
if len(OPTIMIZERS) != len(_ROWS) or len({*_WORDS}) != len(_WORDS):
    raise AssertionError("two optimizers share a name")
