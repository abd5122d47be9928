"""Text as every report prints it: cleaned, joined, counted."""

from collections.abc import Iterable

_TO_ASCII = str.maketrans(
    {"±": "+-", "·": "|", "×": "x", "→": "->", "│": "|", "✓": "yes", "✗": "no", "≤": "<=", "–": "-"}
    | {"█": "#", "▓": "=", "▒": "-", "▚": "%", "▪": "o", "░": "."}
)


def clean(text: str) -> str:
    """`text` without control characters, so that a hostile name can neither move the cursor nor break a line."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def to_ascii(text: str) -> str:
    """`text` for an output that only takes ASCII."""
    return text.translate(_TO_ASCII).encode("ascii", "replace").decode("ascii")


def joined(parts: Iterable[str], separator: str = ", ") -> str:
    return separator.join(part for part in parts if part)


def plural(number: float, word: str) -> str:
    """`word`, with an s unless there is one of it."""
    return word if number == 1 else f"{word}s"
