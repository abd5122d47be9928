"""What a shell script holds beside its commands: functions that it calls later, and files that it writes itself."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import field

from planner.records import dataclass

MARK = "\x05"
"""Stands for a file that the script writes: MARK, its number, a blank, its path."""
MAX_CALLS = 64
"""Calls of functions that are followed, one inside another counted too."""
_OPENS = re.compile(r"<<-?[ \t]*(['\"\\]?)([A-Za-z_]\w*)['\"]?")
_INTO = re.compile(r"(?<![\d&])>{1,2}[ \t]*[\"']?([^\s\"'<>|&;]+)")
_BY_TEE = re.compile(r"\btee[ \t]+(?:-\w[ \t]+)?[\"']?([^\s\"'<>|&;-][^\s\"'<>|&;]*)")
_TAKES_TEXT = re.compile(r"(?:^|[|;&(][ \t]*)(?:sudo[ \t]+)?(?:cat|tee|python[\d.]*)\b")
_FUNCTION = re.compile(
    r"^(?:function[ \t]+([\w-]+)[ \t]*(?:\([ \t]*\))?|([\w-]+)[ \t]*\([ \t]*\))[ \t]*(\{)?[ \t]*(.*)$", re.DOTALL
)


@dataclass(slots=True)
class Script:
    """A script while its commands are followed.

    Attributes:
        functions: name -> the lines of its body; called: how many calls were followed.
        documents: the text of files that it writes ("here documents"), each with whether variables are put in.
        files: path -> text of those that were written so far; exported: names of exported variables.
    """

    functions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    documents: list[tuple[str, bool]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    called: int = 0


def without_documents(text: str, script: Script) -> str:
    """The text with a marked line for each file that it writes; text for another command than a shell goes."""
    kept: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        opens = _OPENS.search(line) if "<<" in line and "<<<" not in line else None
        if opens is None or line.lstrip().startswith("#") or not _TAKES_TEXT.search(line.strip()):
            kept.append(line)  # of `bash <<EOF` the text is commands
            continue
        body: list[str] = []
        for inner in lines:
            if inner.strip() == opens[2]:
                break
            body.append(inner)
        around = line[: opens.start()] + line[opens.end() :]
        into = _BY_TEE.search(around) or _INTO.search(around)
        if into is None:
            kept.append(line[: opens.start()])
            continue
        kept.append(f"{MARK}{len(script.documents)} {into[1]}")
        script.documents.append(("\n".join(body) + "\n", not opens[1]))
    return "\n".join(kept)


def without_functions(lines: Iterable[str], script: Script) -> tuple[str, ...]:
    """The lines without those of functions, which the script holds from now on."""
    kept: list[str] = []
    name, depth, body = "", 0, list[str]()
    for line in lines:
        if not name and (found := _FUNCTION.match(line)):
            name, depth, body = found[1] or found[2], 0, []
            line = f"{{ {found[4]}" if found[3] else found[4]
            if not line:
                continue  # its brace opens the next line
        if not name:
            kept.append(line)
            continue
        starts, ends = re.match(r"\{(?=\s|$)", line), re.search(r"(?:^|[;\s])\}(?:\s*$|\s*[;|&>])", line)
        grouped = re.search(r"(?:^|&&|\|\||;)\s*\{\s*$", line) if depth else None
        depth += bool(starts and not depth) + bool(grouped) - bool(ends)
        inner = line[1:] if starts and not body else line
        inner = inner[: ends.start()] if ends and depth == 0 else inner
        body += [inner.strip()] if inner.strip() else []
        if depth <= 0:
            script.functions[name] = tuple(body)
            name = ""
    return (*kept, *body) if name else tuple(kept)


def positional(words: Sequence[str], quoted: str) -> dict[str, str]:
    """A function's own parameters; `quoted`: its words as one text."""
    return {str(place): word for place, word in enumerate(words, start=1)} | {"@": quoted}
