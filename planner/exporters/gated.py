"""Which models the hub hands out only to people who accepted their terms and are logged in.

The catalogue's configs do not say it, so only families whose authors say so themselves stand here; of all others it is
not known, and said so.
"""

from pathlib import Path

TERMS = {
    "meta-llama/": "Meta's model cards: accept the licence and share your contact information",
    "google/gemma-2b": "Google's model card: accept the Gemma terms of use",
    "google/gemma-7b": "Google's model card: accept the Gemma terms of use",
    "google/gemma-2-": "Google's model card: accept the Gemma terms of use",
    "google/gemma-3-": "Google's model card: accept the Gemma terms of use",
}
"""Beginning of a hub id -> what its authors ask for. Source: the models' own cards on the hub."""


def terms(model_id: str) -> str:
    """What the authors of a gated model ask for, "" where that is not known here."""
    name = model_id.lower()
    return next((words for start, words in TERMS.items() if name.startswith(start)), "")


def on_hub(model_id: str) -> bool:
    """Whether a name is a hub id rather than a directory."""
    return not (model_id.startswith((".", "/", "~")) or Path(model_id).exists())
