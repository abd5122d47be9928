"""What people call a card, taken apart: "2 x RTX 3090", "RTX 3060 12GB", 8xH100, "MacBook Pro M3 Max 64GB"."""

import re

MAX_NAME = 200
_COUNT = r"[1-9]\d{0,2}"
_COUNTED = (
    re.compile(rf"({_COUNT})\s*[x×*]\s*(?=[a-z]|\d{{3}})(.+)", re.IGNORECASE),
    re.compile(r"([1-9]\d?)\s+(?=[a-z])(.+)", re.IGNORECASE),
)
_COUNTED_BEHIND = re.compile(rf"(.+?)(?:\s+[x×*]\s*|\s*:\s*)({_COUNT})", re.IGNORECASE)
_MEMORY = re.compile(r"(?<![a-z\d.])(\d{1,4}(?:\.\d+)?)[\s_-]*g(?:i?b)?(?![a-z\d])", re.IGNORECASE)
_MACHINES = re.compile(r"\b(?:mac\s*book\s*(?:pro|air)?|mac\s*(?:studio|mini|pro)|imac)\b")
_WORDS = re.compile(r"[a-z0-9]+").findall
_MAKERS = ("nvidia", "amd", "apple", "intel", "geforce", "tesla", "instinct", "radeon", "arc")
"""Words that tell nothing apart at the head of a name."""
_NOISE = frozenset({"r", "tm", "gpu", "card", "graphics", "vram", "ram", "memory", "unified", "desktop", "generation"})
_SAME = {"mobile": "laptop", "notebook": "laptop"}


def normalized(name: str) -> str:
    """A name without case, spacing, punctuation and words that tell nothing apart: "NVIDIA GeForce RTX 4090" gives
    "rtx4090"."""
    text = name.lower()
    without = _WORDS(_MACHINES.sub(" ", text)) if "mac" in text else ()
    words = [_SAME.get(one, one) for one in without or _WORDS(text)]
    while len(words) > 1 and words[0] in _MAKERS:
        del words[0]
    return "".join([one for one in words if one not in _NOISE] or words)


def size_alone(name: str) -> float | None:
    """The memory in GiB, where a name is nothing else: "16GB", "24 GB GPU"."""
    sizes = _MEMORY.findall(name)
    rest = set(_WORDS(_MEMORY.sub(" ", name.lower())))
    return float(sizes[0]) if len(sizes) == 1 and rest <= {*_MAKERS, *_NOISE} else None


def words_of(name: str) -> frozenset[str]:
    """The words of a name that tell something, without its size."""
    return frozenset(_WORDS(_MEMORY.sub(" ", name.lower().replace("-", " ")))) - {*_MAKERS, *_NOISE}


def size_and_words(name: str) -> tuple[float | None, str]:
    """(the memory in GiB that stands in a name, the rest of it, normalized)."""
    sizes, words = _MEMORY.findall(name), without_size(name)
    return (float(sizes[0]), words) if len(sizes) == 1 and words else (None, words)


def counted(text: str) -> tuple[int | None, str]:
    """(how many cards a name asks for, the card): (8, "H100") of "8xH100", (None, "RTX 4090") of "RTX 4090"."""
    text = text.strip()[:MAX_NAME]
    if size_alone(text) is not None:  # "24 GB" is no 24 of a GB200
        return None, text
    for pattern in _COUNTED:
        if found := pattern.fullmatch(text):
            return int(found[1]), found[2]
    behind = _COUNTED_BEHIND.fullmatch(text) if text.count(":") < 2 else None
    return (int(behind[2]), behind[1]) if behind is not None else (None, text)


def without_size(name: str) -> str:
    """A name, normalized, without the memory that stands in it."""
    return normalized(_MEMORY.sub(" ", name))
