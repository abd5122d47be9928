"""What a program loads and adapts: the base, quantized by which configuration, of pictures, sound or text; the adapters
that it hands to peft, or to Unsloth: whether, of which kind and size, on what."""

import re
from collections.abc import Mapping
from typing import Any

from planner.core.errors import NotPlanned
from planner.core.records import dataclass
from planner.frameworks.readers import common
from planner.frameworks.readers.fields import adapter_kind
from planner.frameworks.readers.objectives import refusal
from planner.frameworks.readers.program import Made, Unknown, plain
from planner.frameworks.readers.training import BASE_QUANTIZATIONS, RUN_IT, Training
from planner.frameworks.readers.values import Settings
from planner.frameworks.tools.transformers import SCRIPT
from planner.models.encoders import SEEING
from planner.models.spec import ModelSpec
from planner.models.targets import scaling_targets
from planner.options.adapters import Adapter
from planner.options.sound import TEXT_TOKENS

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


def quantization(found: Training, arguments: Settings, *, unsloth: bool) -> str:
    """How the base is quantized, by the configuration that it is loaded with.

    `arguments` note what has to be asked for; blocks of them are the settings of the loading and that configuration.
    """
    made, missing = found.quantization, arguments.missing
    loader, given = arguments.blocks["loader"], arguments.blocks["quantization"]
    if isinstance(made, Unknown):
        missing["quantization"] = made.reason
        return "none"
    if made is None and found.loader is None and found.handed_over:
        missing["quantization"] = missing["precision"] = found.unknown_model
    if isinstance(made, Made) and made.name not in BASE_QUANTIZATIONS:
        if made.name.endswith("Config") and "Mxfp4" not in made.name:
            loader.approximate(f"{made.name} is counted as 4-bit NF4")
            return "nf4"
        if not made.name.endswith("Config"):
            missing["quantization"] = f"{made.where}: what {made.name}() returns"
        return "none"
    source = given if made is not None else loader
    if source.flag("load_in_8bit", False):
        return "int8"
    if not source.flag("load_in_4bit", unsloth):
        return common.stored(loader) if made is None else "none"
    if made is None and unsloth and (loader.flag("full_finetuning", False) or loader.flag("load_in_16bit", False)):
        return "none"
    double = True if unsloth else source.flag("bnb_4bit_use_double_quant", False)
    return "nf4-double" if double else "nf4"


def pictures(found: Training, model: ModelSpec | None, name: str) -> str:
    """Why what a sample shows is open, of a program with a model of pictures; "" of text alone.

    Raises:
        NotPlanned: the model's eyes are not modelled.
    """
    if found.pictures and model is not None and model.model_type not in SEEING:
        raise refusal(f"{name} trains with {found.pictures} (vision)", RUN_IT)
    shown = "how many pictures a sample shows is known to the data alone"
    return f"{name}: {found.pictures}: {shown}" if found.pictures else ""


def heard(found: Training, arguments: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    """The setup's fields of a model that hears; none of another.

    Args:
        given: the fields that are known; what `arguments` miss loses what is settled here.

    Raises:
        NotPlanned: the model makes text of sound in another way than Whisper.
    """
    model = arguments.model
    if not found.has_audio:
        return {}
    if model is not None and model.front_end is None:
        raise refusal(f"{model.model_id} trains with {found.has_audio} (speech)", RUN_IT)
    tokens = int(given["seq_len_tokens"])
    positions = model.max_position_embeddings if model is not None else None
    if arguments.missing.pop("seq_len_tokens", "") or (positions is not None and tokens > positions):
        tokens = TEXT_TOKENS
        arguments.assume(f"texts are taken to be {tokens} tokens long: only the data says it (--set seq_len=N)")
    if arguments.flag("predict_with_generate", False):
        arguments.approximate("evaluation that generates is counted as forwards")
    models = [*found.touched, *([found.loader] if found.loader is not None else [])]
    frozen = given["method"] == "full" and any("freeze_encoder" in one.called for one in models)
    return {"seq_len_tokens": tokens, "frozen_encoder": frozen, "loss": "full", "kernels": "eager"}
