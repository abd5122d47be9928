"""Passwords and tokens, left out of whatever is written down or shown: by the key that they stand behind, and by form.

What a program needs in order to run (a launch file's own data set) keeps them; reports, plan.json, traces and fault
reports do not.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LEFT_OUT = "..."
_SHORT = 8
_KEY = r"(?:token|passw(?:or)?d|pwd|secret|credentials?|api[_-]?key|access[_-]?key|private[_-]?key|bearer)"
_SECRET_NAME = rf"(?i)(?:^|[\W_]){_KEY}(?:[_-]?id)?$"
_SPECIAL = (
    r"^(?:old)?pwd$|(?:^|[\W_])(?:eos|bos|pad|unk|sep|cls|mask|image|video|audio|stop|end|start|special)[_-]token$"
)
"""Tokens of a vocabulary, and the shell's working folder."""
_FORMS = (
    (r"(://)[^/@\s'\"]{1,500}@", rf"\1{LEFT_OUT}@"),  # user:password@host
    (rf"(?i)([?&][\w.-]*(?:{_KEY}|sig|signature|key)=)[^&#\s'\"]+", rf"\1{LEFT_OUT}"),
    (r"\b(?:hf|api_org|ghp|gho|ghs|github_pat)_(?=\w{0,99}\d)\w{16,500}", LEFT_OUT),
    (r"\b(?:sk|pk|rk|xox[abps]|glpat|nvapi)-(?=[\w-]{0,99}\d)[\w-]{20,500}", LEFT_OUT),
    (r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\beyJ[\w-]{8,400}\.[\w-]{2,2000}\.[\w-]{2,2000}|\bAIza[\w-]{30,99}", LEFT_OUT),
    (r"(?i)(\bBearer\s+)[\w.~+/=-]{8,}", rf"\1{LEFT_OUT}"),
)

_SECRET_ARGUMENT = r"((?<!\S)(?:--?([\w-]{1,60})(?:=|\s+)|([A-Z][A-Z0-9_]{1,60})=))[^\s'\"-][^\s'\"]*"
"""--hub_token X and HF_TOKEN=X in a line for a shell."""


def without_secrets(text: str) -> str:
    """The text without what looks like a secret wherever it stands."""
    for pattern, instead in _FORMS:
        text = re.sub(pattern, instead, text)
    return re.sub(
        _SECRET_ARGUMENT,
        lambda match: f"{match[1]}{LEFT_OUT}" if is_secret_name(match[2] or match[3]) else match[0],
        text,
    )


def is_secret_name(name: str) -> bool:
    """Whether an option or a variable of that name holds a secret: --hub_token, HF_TOKEN, not --max_tokens."""
    return bool(re.search(_SECRET_NAME, name)) and not re.search(_SPECIAL, name.lower())


def without_secrets_in_words(words: Sequence[str]) -> list[str]:
    """A command line: also the value of an option whose name tells (`--hub_token X`, `--password=X`, `HF_TOKEN=X`)."""
    masked = list(words)
    for index, secret in _secret_values(words):
        masked[index] = words[index].removesuffix(secret) + LEFT_OUT
    redacted: list[str] = without_secrets_in(masked, secrets_known(words))
    return redacted


def secrets_known(words: Sequence[str]) -> list[str]:
    """Values of this process's variables and of options whose names tell; short ones may stand anywhere: none."""
    of_words = (secret for _, secret in _secret_values(words))
    of_variables = (text for name, text in os.environ.items() if is_secret_name(name))
    return sorted((secret for secret in (*of_words, *of_variables) if len(secret) >= _SHORT), key=len, reverse=True)


def _secret_values(words: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Index of a word, and the secret that it ends in."""
    for index, word in enumerate(words):
        name, _, value = word.partition("=")
        before = words[index - 1] if index else ""
        if before.startswith("-") and is_secret_name(before) and not word.startswith("-"):
            yield index, word
        elif value and (name.startswith("-") or not re.search(r"\s", word)) and is_secret_name(name):
            yield index, value


def without_secrets_in(value: Any, secrets: Sequence[str] = ()) -> Any:
    """Plain data with every text in it so; `secrets`: those to leave out."""
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, LEFT_OUT)
        return without_secrets(value)
    if isinstance(value, Mapping):
        return {name: without_secrets_in(entry, secrets) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets_in(element, secrets) for element in value]
    return value
