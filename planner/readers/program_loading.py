"""How a program loads its base: quantized by which configuration, of pictures, sound or text."""

from collections.abc import Mapping
from typing import Any

from planner.choices.sound import TEXT_TOKENS
from planner.models.spec import ModelSpec
from planner.models.towers import SEEING
from planner.readers.objectives import refusal
from planner.readers.program import Made, Unknown
from planner.readers.training import BASE_QUANTIZATIONS, RUN_IT, Training
from planner.readers.values import Settings


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
        return "none"
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
    if not found.hears:
        return {}
    if model is not None and model.front_end is None:
        raise refusal(f"{model.model_id} trains with {found.hears} (speech)", RUN_IT)
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
