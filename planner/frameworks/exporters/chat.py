"""Chat data for a model whose tokenizer has no chat template: one that the launch files bring along.

transformers' `apply_chat_template` raises where a tokenizer has none, and base models often have none. ChatML in plain
text works with any tokenizer: no token is added. Each answer ends in the tokenizer's own end-of-sequence token.
"""

import re
from pathlib import Path

from planner.frameworks.exporters.types import ExportRequest
from planner.samples import TEMPLATE as TEMPLATE
from planner.samples import TEMPLATE_FILE as TEMPLATE_FILE

OPTION = "--chat_template_path"
"""`trl sft`'s option for a template in a file (TRL 1.16)."""
FALLBACK = f"""if tokenizer.chat_template is None:  # a base model's: without one, chats cannot be rendered
    tokenizer.chat_template = (
        {TEMPLATE!r}
    )
"""
"""What a script does about it, where `tokenizer` is at hand."""
TUNED = r"(?i)instruct|chat|(^|[-_/])(it|sft|dpo|thinking|reasoning|assistant)([-_.]|$)"
"""Names that authors give to models tuned for chat."""
BASES = (
    r"(?i)^(meta-llama/|google/gemma-|mistralai/.*-v0\.|openai-community/|gpt2|eleutherai/|facebook/opt|tiiuae/falcon|"
    r"allenai/olmo|huggingfacetb/smollm)|[-_](base|pt)([-_.]|$)"
)
"""Families whose models without such a word are bases, and words that say so."""

_SPLITS = r"(?i)(^|[-_/])(gpt-oss-|phi-3(\.5)?-mini|qwen3-[\d.]+b(?!.*(instruct|coder))|qwen3\.[56]-)"
"""Models whose templates write an answer otherwise once the chat goes on, by TRL 1.16's copies (`chat_templates/`;
Phi 3's ends what it writes, however long)."""


def splits(model_id: str) -> bool:
    """Whether the model's template makes a row of every answer, as far as its name tells."""
    return bool(re.search(_SPLITS, model_id))


def lacks_template(model_id: str) -> bool | None:
    """Whether the model's tokenizer has no chat template: read from its files where they are on this machine, else
    guessed from the name; None where the name says nothing."""
    from planner.samples.dataset import tokenizer_file  # late: a plan asks for none
    from planner.samples.tokenizing import tokenizer_config

    tokenizer = tokenizer_file(model_id)
    folder = Path(model_id) if Path(model_id).is_dir() else tokenizer.parent if tokenizer is not None else None
    if folder is not None and (config := tokenizer_config(folder)) is not None:
        return not (
            config.get("chat_template") or (folder / TEMPLATE_FILE).is_file() or (folder / "chat_templates").is_dir()
        )
    if re.search(TUNED, model_id):
        return False
    return True if re.search(BASES, model_id) else None


def chats(request: ExportRequest) -> bool:
    """Whether the data are chats that a target renders; of chats with preferences `launch/prepare_data.py` writes texts
    where the tokenizer has no template."""
    return request.columns == "messages"


def brought_along(request: ExportRequest) -> bool:
    """Whether a target that cannot ask the tokenizer brings its own template."""
    return chats(request) and request.lacks_template is True
