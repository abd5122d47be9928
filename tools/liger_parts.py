"""What Liger's switch replaces in one model of each type of the catalogue: the source of `LIGER_PARTS`.

    python tools/liger_parts.py        # needs liger-kernel and triton beside transformers; models on meta, no GPU

Prints, per type, the modules whose forward was replaced, those norms, MLPs and experts that were left, and whether the
module's rotary function was. `planner/options/kernels.py` was written from that by hand.
"""

import sys
from typing import Any

import torch

from planner.models import catalogue
from probes.stack.build import bare_model
from probes.stack.configs import load_config, truncated_config

LOOKED_AT = ("Norm", "MLP", "Experts")


def replaced(name: str) -> tuple[dict[str, str], dict[str, str], bool]:
    """(path without indices -> class and its replacement, path -> class that was left, rotary replaced) of a model."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    spec = catalogue.load(name)
    assert spec is not None
    model = bare_model(truncated_config(load_config(spec.config), min(spec.num_layers, 8)), torch.bfloat16, "eager")
    module: Any = sys.modules[type(model).__module__]
    rotary = getattr(module, "apply_rotary_pos_emb", None)
    before = {path: getattr(submodule.forward, "__func__", None) for path, submodule in model.named_modules()}
    _apply_liger_kernel_to_instance(model=model)
    patched, left = {}, {}
    for path, submodule in model.named_modules():
        plain = ".".join(part for part in path.split(".") if not part.isdigit())
        now, kind = getattr(submodule.forward, "__func__", None), type(submodule).__name__
        if now is not before[path]:
            patched[plain] = f"{kind} -> {now.__qualname__.partition('.')[0]}"
        elif any(word in kind for word in LOOKED_AT):
            left[plain] = kind
    turned = rotary is not None and module.apply_rotary_pos_emb is not rotary
    if rotary is not None:
        module.apply_rotary_pos_emb = rotary
    return patched, left, turned


def main() -> None:
    """One block of lines per type."""
    first: dict[str, str] = {}
    for entry in catalogue.entries():
        first.setdefault(entry.model_type, entry.model_id)
    for kind, name in sorted(first.items()):
        try:
            patched, left, rotary = replaced(name)
        except ImportError as error:  # a type that this version of Liger breaks on
            print(f"{kind} ({name}): {error}")
            continue
        print(f"{kind} ({name}): rotary {'replaced' if rotary else 'left'}\n  replaced {patched}\n  left {left}")


if __name__ == "__main__":
    main()
