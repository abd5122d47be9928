"""What the tools ask for on their way to a config and a machine without a GPU has not."""

import sys
from types import ModuleType
from typing import Any

CAPABILITIES = {"bf16": True, "fp8": False, "tf32": True, "n_gpu": 1, "n_node": 1, "compute_capability": "sm_90"}
"""An H100, in Axolotl's words."""
AXOLOTL: dict[str, Any] = {"capabilities": CAPABILITIES, "env_capabilities": {"torch_version": "2.13.0"}}
TORCHTITAN = (
    ("torchtitan.models.moe.kernels", "generate_permute_indices"),  # Triton's: a GPU machine has it
    ("torch.utils.tensorboard", "SummaryWriter"),  # writes logs
)
"""Imported and never called."""


def torchtitan() -> None:
    for name, attribute in TORCHTITAN:
        sys.modules[name] = ModuleType(name)
        setattr(sys.modules[name], attribute, None)


def half_precision() -> None:
    """transformers' arguments take bf16 and TF32."""
    import transformers.training_args as arguments

    arguments.is_torch_bf16_gpu_available = arguments.is_torch_tf32_available = lambda: True


def llamafactory() -> Any:
    """LLaMA-Factory's parser of a file's values, which takes bf16 too."""
    half_precision()
    sys.modules.setdefault("torchaudio", ModuleType("torchaudio"))  # imported with the templates, for sound alone
    import llamafactory.hparams.parser as parser

    parser.is_torch_bf16_gpu_available = lambda: True
    return parser.get_train_args
