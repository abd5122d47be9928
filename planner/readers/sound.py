"""What a program that trains on clips of sound says beside the usual: the half that is frozen, lengths of texts."""

from collections.abc import Mapping
from typing import Any

from planner.choices.sound import TEXT_TOKENS
from planner.models.spec import ModelSpec
from planner.readers.objectives import refusal
from planner.readers.training import RUN_IT, Training
from planner.readers.values import Settings


def fields(
    found: Training, model: ModelSpec | None, arguments: Settings, given: Mapping[str, Any], missing: dict[str, str]
) -> dict[str, Any]:
    """The setup's fields of a model that hears; none of another.

    Args:
        given: the fields that are known; missing: what has to be asked for, less what is settled here.

    Raises:
        NotPlanned: the model makes text of sound in another way than Whisper.
    """
    if not found.hears:
        return {}
    if model is not None and model.front_end is None:
        raise refusal(f"{model.model_id} trains with {found.hears} (speech)", RUN_IT)
    tokens = int(given["seq_len_tokens"])
    positions = model.max_position_embeddings if model is not None else None
    if missing.pop("seq_len_tokens", "") or (positions is not None and tokens > positions):
        tokens = TEXT_TOKENS
        arguments.assume(f"texts are taken to be {tokens} tokens long: only the data says it (--set seq_len=N)")
    if arguments.flag("predict_with_generate", False):
        arguments.approximate("evaluation that generates is counted as forwards")
    models = [*found.touched, *([found.loader] if found.loader is not None else [])]
    frozen = given["method"] == "full" and any("freeze_encoder" in one.called for one in models)
    return {"seq_len_tokens": tokens, "frozen_encoder": frozen, "loss": "full", "kernels": "eager"}
