"""The adapters that a program hands to peft, or to Unsloth: whether, of which kind and size, on what."""

import re
from typing import Any

from planner.choices.adapters import Adapter
from planner.errors import NotPlanned
from planner.models.targets import scaling_targets
from planner.readers import common
from planner.readers.fields import adapter_kind
from planner.readers.program import Made, Unknown, plain
from planner.readers.training import RUN_IT, Training
from planner.readers.values import Settings
from planner.records import dataclass
from planner.tools.transformers import SCRIPT

UNSLOTH_WHOLE = "embed_tokens"


@dataclass(frozen=True)
class Adapters:
    """One program's adapters.

    Attributes:
        found: what the program makes them of; lora: their settings.
        missing: field of a setup -> why it has to be asked for.
    """

    found: Training
    lora: Settings
    unsloth: bool
    missing: dict[str, str]

    def wanted(self) -> bool:
        """Whether there are any, with what of them has to be asked for.

        Raises:
            NotPlanned: of a kind that is not planned.
        """
        adapter, continued = self.found.adapter, self.found.continued
        if isinstance(adapter, Unknown):
            self.missing["method"] = adapter.reason
            return True
        if continued is not None and adapter is None:
            self.missing["lora_rank"] = f"{continued.where}: adapters that stand in another file are trained"
            return True
        if isinstance(adapter, Made) and not adapter.owner.startswith("Fast"):
            if adapter.name == "from_pretrained" and adapter.owner in ("LoraConfig", "PeftConfig"):
                self.missing["lora_rank"] = f"{adapter.where}: the adapter's settings stand in another file"
                self.missing["lora_targets"] = self.missing["lora_rank"]
            elif adapter.name == "get_peft_config":
                self.missing["method"] = f"{adapter.where}: the adapter's settings come from the command line"
            elif adapter.name.endswith("Config") and adapter.name not in ("LoraConfig", "PeftConfig", *common.CONFIGS):
                raise NotPlanned(
                    f"{self.lora.name}: adapters of {adapter.name} are not planned, only LoRA's", hint=RUN_IT
                )
            elif adapter.name != "LoraConfig" and adapter.name not in common.CONFIGS:
                self.missing["method"] = f"{adapter.where}: what {adapter.name}() returns"
        return adapter is not None

    def row(self) -> Adapter | None:
        """The kind that a configuration class of its own stands for; None for LoRA's and where none is made."""
        made = self.found.adapter
        return common.CONFIGS.get(made.name) if isinstance(made, Made) else None

    def kind(self) -> str:
        """The kind of adapter: by peft's configuration class, or by LoraConfig's switches."""
        row = self.row()
        return row.name if row is not None else adapter_kind(self.lora, SCRIPT.name)

    def size(self) -> int:
        """The adapter's size by its own name."""
        row, lora = self.row(), self.lora
        if row is None:
            return lora.integer("r", 16 if self.unsloth else 8, at_least=1)
        if row.form == "rows":
            indices = lora.raw("token_indices")
            return len(indices) if isinstance(indices, list) and indices else 1
        keys = {"shared": "r", "rotations": "oft_block_size", "prompt": "num_virtual_tokens"}
        keys |= {"prefix": "num_virtual_tokens", "low-rank": "init_r"}
        return lora.integer(keys[row.form], row.usual_size, at_least=1) if row.size else 0

    def fields(self, method: str, arguments: Settings, *, trl: bool, stated: Any) -> dict[str, Any]:
        """Size, targets and types. `stated`: the type that the program names; `trl`: TRL's trainer makes them."""
        lora, unsloth = self.lora, self.unsloth
        names = lora.text_or_names("target_modules")
        if len(names) == 1 and re.fullmatch(r"[\w.]+(\s*,\s*[\w.]+)+", names[0]):
            names = tuple(part.strip() for part in names[0].split(","))
        saved = common.modules_to_save(lora, "modules_to_save", arguments)
        if unsloth and UNSLOTH_WHOLE in names:
            names = tuple(name for name in names if name != UNSLOTH_WHOLE)
            saved = tuple(dict.fromkeys((*saved, UNSLOTH_WHOLE)))
            lora.assume(f"{UNSLOTH_WHOLE} as a target: Unsloth trains it whole; counted")
        fields: dict[str, Any] = {
            "lora_rank": self.size(),
            "modules_to_save": saved,
            "lora_dropout": lora.real("lora_dropout", 0.0),
            "lora_targets": common.targets(lora, names or (("all-linear",) if unsloth else ())),
        }
        row = self.row()
        if row is not None and not row.adapts_matrices:
            fields["lora_targets"] = "all-linear"  # it adapts none: nothing is said
        elif row is not None and row.form == "scales" and not names and lora.model is not None:
            fields["lora_targets"] = scaling_targets(lora.model)
            lora.assume(
                "target_modules absent: keys, values and the MLP's last matrix (peft may scale queries for keys)"
            )
        stated = plain(stated)
        if stated in common.DTYPES:
            fields["adapter_dtype"] = common.DTYPES[stated]
        elif unsloth or (method == "qlora" and not trl):
            fields["adapter_dtype"] = "fp32"
        return fields
