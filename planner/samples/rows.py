"""Rows of a data set, and what each of them says: a chat, a prompt with its completion, a text.

The standard library alone (and pyarrow for Parquet): `launch/prepare_data.py` carries the text of this file, so that
what was planned is what is trained on.
"""

import codecs
import csv
import gzip
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

Row = dict[str, Any]
SUFFIXES = {
    ".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".txt": "text",
    ".parquet": "parquet",
}  # fmt: skip
"""Ending of a file, behind which ".gz" may stand -> how it is read."""
NO_SAMPLES = frozenset({
    "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "requirements.txt",
    "license.txt", "readme.txt",
})  # fmt: skip
MAX_LINE_BYTES = 16 * 1024 * 1024
"""Of one sample."""
FEW_ROWS, FEW_BYTES, MOST_UNPACKED = 10_000, 1 << 20, 100
"""A larger file with more rows than bytes, or that unpacks to so many times its bytes, repeats one thing: a bomb."""
EMPTY = "no data set has so little in a row"
DELIMITERS = ",;\t|"
ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(
        ("assistant", "gpt", "chatgpt", "bot", "model", "ai", "bing", "bard", "function_call"), "assistant"
    ),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
}
"""What data sets call who speaks -> what chat templates call them."""
CHATS = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat")
QUESTIONS = ("instruction", "question", "query", "prompt", "input", "user")
ANSWERS = ("output", "answer", "response", "completion", "assistant")
CONTEXTS = ("input", "context")
SYSTEMS = ("system", "system_prompt")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""What a turn thinks before it answers; samples have it under the first name."""
TEXTS = ("text", "content")
LABELS = ("label", "labels")
ANCHORS = ("anchor", "query", "question")
POSITIVES = ("positive", "pos", "answer")
"""Columns of each meaning, the first that a row has counts."""
OTHERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "preference": (("chosen",), ("rejected",)),
    "pairs": (ANCHORS, POSITIVES),
    "unpaired": (("prompt",), ("completion",), ("label",)),
    "labelled": (TEXTS, LABELS),
    "prompt": (("prompt",),),
}
"""Kind of sample that is not trained on as it is -> the columns that it has, each under one of these names."""
SWITCHES = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}

HELD_OUT_FRACTION, MOST_HELD_OUT, LEAST_HELD_OUT = 0.05, 200, 10
"""Samples to evaluate on: a share, at most so many; fewer than the last say nothing. A judgement."""


class DataError(ValueError):
    """Data that cannot be read; the message says where, `hint` what helps."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


# Files


def files_of(path: Path) -> list[Path]:
    """The file, or those of a directory's training split, as `load_dataset(DIRECTORY, split="train")` takes them.

    Source: datasets 5.2, data_files.py (SPLIT_KEYWORDS, FILES_TO_IGNORE), load.py (the commonest ending decides).

    Raises:
        DataError: nothing there, or another kind of file.
    """
    if path.is_file():
        if path.name.lower().startswith("dataset_info"):
            raise DataError(f"{path.name} tells of data and holds none", "name a file of those that it lists")
        if loader_of(path):
            return [path]
        endings = ", ".join(SUFFIXES)
        raise DataError(
            f"{path.name}: files that are read end in {endings}, or these and .gz", "save text as .txt, a table as .csv"
        )
    files = [
        file
        for file in sorted(path.rglob("*"))
        if loader_of(file) and file.is_file() and file.name.lower() not in NO_SAMPLES
        if not any(part.startswith((".", "__")) for part in file.relative_to(path).parts)
    ]
    if not files:
        raise DataError(f"no data set at {path}", f"a file ending in {', '.join(SUFFIXES)}, or a directory of them")
    train = [file for file in files if any(_TRAIN.search(f"{part}.") for part in file.relative_to(path).parts)] or files
    kinds = [loader_of(file) for file in train]
    return [file for file in train if loader_of(file) == max(kinds, key=kinds.count)]


_TRAIN = re.compile(r"(?:^|[-._ 0-9])train(?:ing)?[-._ 0-9]")


def loader_of(path: Path) -> str:
    """How a file is read, by its name; "" where it is none of samples."""
    name = path.name.lower().removesuffix(".gz")
    return SUFFIXES.get(os.path.splitext(name)[1], "")


def read_rows(
    path: Path,
    *,
    opened: Callable[[Path], BinaryIO] = lambda path: path.open("rb"),
    parsed: Callable[[str, str], Any] = lambda text, where: json.loads(text),
) -> Iterator[Row]:
    """Every row of a file or of a directory's training split, one at a time.

    Args:
        opened: opens a file; parsed: reads a JSON text, of which the second argument says where it stands.

    Raises:
        DataError: what is no row.
        ImportError: Parquet without pyarrow.
    """
    for file in files_of(path):
        if loader_of(file) == "parquet":
            with opened(file) as plain:
                yield from _parquet_rows(file.name, plain)
            continue
        with opened(file) as plain:
            packed = file.suffix.lower() == ".gz"
            handle: Any = io.BufferedReader(_Unpacked(plain, file.name)) if packed else plain
            try:
                yield from _READERS[loader_of(file)](handle, file.name, parsed)
            except (EOFError, OSError, UnicodeDecodeError, csv.Error) as error:
                raise DataError(f"{file.name} cannot be read: {str(error)[:120]}", "save it as UTF-8") from error


class _Unpacked(io.RawIOBase):
    """What a .gz file holds, as far as there is something in it."""

    def __init__(self, plain: BinaryIO, name: str) -> None:
        self._plain, self._name, self._unpacked = plain, name, gzip.GzipFile(fileobj=plain)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._unpacked.seek(offset, whence)

    def tell(self) -> int:
        return self._unpacked.tell()

    def readinto(self, buffer: Any, /) -> int:
        piece = self._unpacked.read(len(buffer))
        num, packed = self._unpacked.tell(), self._plain.tell()
        if num > max(FEW_BYTES, MOST_UNPACKED * packed):
            raise DataError(f"{self._name} has {num:,} bytes in the first {packed:,}", EMPTY)
        buffer[: len(piece)] = piece
        return len(piece)


def _lines(handle: BinaryIO, name: str) -> Iterator[tuple[str, bytes]]:
    number = 0
    while line := handle.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise DataError(f"{name} line {number} is longer than {MAX_LINE_BYTES:,} bytes")
        yield f"{name} line {number}", line


def _json_rows(handle: Any, name: str, parsed: Callable[[str, str], Any]) -> Iterator[Row]:
    """JSON lines, or one array of objects."""
    head = handle.read(1 << 10).lstrip(b"\xef\xbb\xbf \t\r\n")
    handle.seek(0)
    lines = ((where, line.decode("utf-8-sig")) for where, line in _lines(handle, name) if line.strip())
    for where, text in _array(handle, name) if head.startswith(b"[") else lines:
        try:
            value = parsed(text, where)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not JSON: {str(error)[:80]}", "one JSON object per line") from error
        if not isinstance(value, dict):
            raise DataError(f"{where} is no JSON object", "one sample per line, as an object with columns")
        yield value


def _array(handle: BinaryIO, name: str) -> Iterator[tuple[str, str]]:
    """(where it stands, JSON text) of every value of an array, which may be larger than memory."""
    reader, decoder = codecs.getreader("utf-8-sig")(handle), json.JSONDecoder()
    text, place, number = reader.read(_PIECE), 1, 1
    place += text.index("[")
    while True:
        place = gap.end() if (gap := _GAP.match(text, place)) else place
        if text.startswith("]", place):
            return
        where = f"{name}: sample {number}"
        try:
            end = decoder.raw_decode(text, place)[1]
        except RecursionError as error:
            raise DataError(f"{where} is not JSON: nested too deeply") from error
        except ValueError as error:
            more = reader.read(max(_PIECE, len(text) - place))
            if not more or len(text) - place > MAX_LINE_BYTES:
                raise DataError(f"{where} is not JSON: {str(error)[:80]}") from error
            text, place = text[place:] + more, 0
            continue
        yield where, text[place:end]
        place, number = end, number + 1


_PIECE = 1 << 20
_GAP = re.compile(r"[\s,]*")


def _csv_rows(handle: BinaryIO, name: str, parsed: Callable[[str, str], Any]) -> Iterator[Row]:
    """Rows under a header line, whose commonest delimiter is the file's."""
    csv.field_size_limit(MAX_LINE_BYTES)
    text = io.TextIOWrapper(handle, encoding="utf-8-sig", newline="")
    try:
        header = text.readline(MAX_LINE_BYTES)
        text.seek(0)
        for row in csv.DictReader(text, delimiter=max(DELIMITERS, key=header.count)):
            row.pop(None, None)  # fields beyond the header's
            yield row
    finally:
        text.detach()  # the file is closed by who opened it


def _text_rows(handle: BinaryIO, name: str, parsed: Callable[[str, str], Any]) -> Iterator[Row]:
    """Paragraphs: a blank line ends one."""
    paragraph: list[bytes] = []
    size = 0
    for _, line in _lines(handle, name):
        if paragraph or line.strip():
            paragraph.append(line)
        size += len(line)
        if paragraph and (not line.strip() or size > MAX_LINE_BYTES):
            yield {"text": b"".join(paragraph).decode("utf-8-sig").strip()}
            paragraph, size = [], 0
    yield {"text": b"".join(paragraph).decode("utf-8-sig").strip()}


def _parquet_rows(name: str, file: BinaryIO) -> Iterator[Row]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        rows, size = ParquetFile(file), os.fstat(file.fileno()).st_size
        if rows.metadata.num_rows > max(FEW_ROWS, size):
            raise DataError(f"{name} has {rows.metadata.num_rows:,} rows in {size:,} bytes", EMPTY)
        for batch in rows.iter_batches(batch_size=64):
            yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        raise DataError(f"{name} is not a Parquet file that can be read: {str(error)[:120]}") from error


_READERS = {"json": _json_rows, "csv": _csv_rows, "text": _text_rows}

# Samples


def renamed(row: Row, columns: Mapping[str, str]) -> Row:
    """The row under the names that are known, in lower case.

    Args:
        columns: known name -> its column; others are read where these alone are no sample or a prompt, else those that
            stand beside one (tools, pictures, a system, negatives, a preference's prompt). Empty: every column has the
            name that it says.

    Raises:
        DataError: it lacks one of them.
    """
    named = {str(name).strip().lower(): value for name, value in row.items()}
    if not columns:
        return named
    there = {**named, **row}  # a refusal lists them in lower case
    if missing := [column for column in columns.values() if column not in there]:
        raise DataError(f"no column {missing[0]!r}; there are {', '.join(sorted(map(str, row))[:12])}")
    stated = {name: there[column] for name, column in columns.items()}
    if (kinds := kinds_of(stated)) and kinds != ("prompt",):
        kept = {"tools", "images", "image", *SYSTEMS, *({"prompt"} if "chosen" in stated else ())}
        named = {name: value for name, value in named.items() if name in kept or _NEGATIVE.fullmatch(name)}
    return {**named, **stated}


_NEGATIVE = re.compile(r"neg(ative)?s?(_?\d+)?")


def kinds_of(row: Row) -> tuple[str, ...]:
    """What a row can be taken as, likeliest first: "messages" (who said what), "prompt-completion" (a text and how it
    goes on), "text", and those of OTHERS; empty where its columns are not known."""
    kinds = []
    raw = {"prompt", "completion"} <= set(row)
    if _first(row, CHATS) or (raw and isinstance(row["prompt"], list)):
        kinds.append("messages")
    if raw:
        kinds.append("prompt-completion")
    elif _question(row) and _first(row, ANSWERS):
        kinds.append("messages")
    if _first(row, TEXTS):
        kinds.append("text")
    kinds += [kind for kind, columns in OTHERS.items() if all(_first(row, names) for names in columns)]
    return tuple(dict.fromkeys(kinds))


def _first(row: Row, names: Iterable[str]) -> str:
    return next((name for name in names if name in row), "")


def _question(row: Row) -> str:
    return _first(row, QUESTIONS)


def sample_of(row: Row, kind: str) -> Row | None:
    """What is trained on: {"messages": [{"role", "content"}, ...]}, {"prompt", "completion"}, {"text"}; of a preference
    the row with prompt, chosen and rejected, of what is unpaired with prompt, completion and a true or false label, all
    texts or all lists of turns; {"anchor", "positive", "negative", "negative_1", ...}, {"text", "label"}; of a prompt
    the row. None where a row has nothing to learn: no answer, no text, no label.

    Turns of one speaker in a row are joined; what stands before the first question or behind the last answer that is
    learned is left out, as templates of chats take turns about. An answer that is not to be learned has "train": False.

    Raises:
        DataError: a row unlike its kind.
    """
    if kind == "text":
        text = _text(row, _first(row, TEXTS) or TEXTS[0])
        return {"text": text} if text.strip() else None
    if kind == "prompt-completion":
        prompt, completion = _text(row, "prompt"), _text(row, "completion")
        return {"prompt": prompt, "completion": completion} if completion.strip() else None
    if kind in _OTHER_SAMPLES:
        return _OTHER_SAMPLES[kind](row)
    turns = _alternating(_messages(row))
    if not turns:
        return None
    tools = objects_of(row, "tools")
    return {"messages": turns, "tools": tools} if tools else {"messages": turns}


def _preference(row: Row) -> Row | None:
    """Halves that begin with what the system or a user says are whole chats: what they share is the prompt.

    Source: trl 1.16 data_utils.py extract_prompt (of texts a shared space before the answers stays theirs).
    """
    halves = [row["chosen"], row["rejected"]]
    prompt = next((row[name] for name in ("prompt", *CHATS, *QUESTIONS) if row.get(name) is not None), None)
    if any(half is None for half in halves):
        return None
    if all(isinstance(part, str) for part in (*halves, prompt or "")):
        if prompt is None:
            num = num_shared(*halves)
            num -= halves[0][num - 1 : num] == " "
            prompt, halves = halves[0][:num], [half[num:] for half in halves]
        alike = halves[0] == halves[1] or not all(half.strip() for half in halves)
        return None if alike else {**row, "prompt": prompt, "chosen": halves[0], "rejected": halves[1]}
    chosen, rejected = (turns_of(half, "assistant") for half in halves)
    question = [] if prompt is None else turns_of(prompt, "user")
    if not all(half and half[0]["role"] == "assistant" for half in (chosen, rejected)):
        shared = num_shared(chosen, rejected)
        question, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    system = next((row[key] for key in SYSTEMS if row.get(key)), None)
    if system is not None and not (question and question[0]["role"] == "system"):
        question.insert(0, _message("system", system))
    if not question:
        raise DataError("nothing is asked before chosen and rejected")
    return (
        {**row, "prompt": question, "chosen": chosen, "rejected": rejected}
        if chosen != rejected and chosen and rejected
        else None
    )


def _unpaired(row: Row) -> Row | None:
    """What someone likes, or does not. Source: trl 1.16 trainer/kto_trainer.py takes texts and lists of turns."""
    label, prompt, completion = (row[name] for name in ("label", "prompt", "completion"))
    if label is None or not prompt or not completion:
        return None
    liked = SWITCHES.get(str(label).strip().lower().removesuffix(".0"))
    if liked is None:
        raise DataError(f"label is {str(label)[:40]!r} instead of true or false")
    if not all(isinstance(part, str) for part in (prompt, completion)):
        prompt, completion = turns_of(prompt, "user"), turns_of(completion, "assistant")
    return {**row, "prompt": prompt, "completion": completion, "label": liked}


def _pair(row: Row) -> Row | None:
    """Texts that belong together, with those that do not: `negative` is the first of them, `negative_1` too."""
    texts = {"anchor": row[_first(row, ANCHORS)], "positive": row[_first(row, POSITIVES)]}
    others = [row[name] for name in sorted(row) if _NEGATIVE.fullmatch(name) and row[name] is not None]
    others = [text for value in others for text in (value if isinstance(value, list) else [value])]
    texts |= {f"negative_{number}": text for number, text in enumerate(others, 1)}
    texts |= {"negative": others[0]} if others else {}
    if isinstance(texts["positive"], list) and len(texts["positive"]) > 1:
        raise DataError(f"{len(texts['positive'])} positives in a row: one is trained", "write a row for each")
    pair = {
        name: _text({name: text[0] if isinstance(text, list) and text else text}, name) for name, text in texts.items()
    }
    return pair if pair["anchor"].strip() and pair["positive"].strip() else None


def _labelled(row: Row) -> Row | None:
    """A text with the class that it is of: its name, or a whole number."""
    column = _first(row, LABELS)
    text, label = _text(row, _first(row, TEXTS)), row[column]
    if not text.strip() or label is None or label == "":
        return None
    if isinstance(label, (list, dict)):
        raise DataError(f"{column} is {type(label).__name__}: one class of each text is trained", CLASSES)
    if isinstance(label, float) and label.is_integer():  # a whole number beside empty ones, as pandas writes it
        label = int(label)
    elif isinstance(label, str) and (whole := _WHOLE.fullmatch(label.strip())):
        label = whole[1]
    if isinstance(label, float) or _FRACTION.fullmatch(str(label).strip()):
        raise DataError(f"{column} is {label}: classes are trained, no scores", CLASSES)
    return {"text": text, "label": label}


CLASSES = "give every row one class by its name or a whole number; no launch file trains scores or several labels"
_FRACTION = re.compile(r"\A[-+]?\d*\.\d+(?:[eE][-+]?\d+)?")
_WHOLE = re.compile(r"\A([-+]?\d++)\.0++")
_OTHER_SAMPLES: Mapping[str, Callable[[Row], Row | None]] = {
    "preference": _preference,
    "unpaired": _unpaired,
    "pairs": _pair,
    "labelled": _labelled,
    "prompt": lambda row: row,
}


def num_shared(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Items with which both begin."""
    return [*(left == right for left, right in zip(first, second, strict=False)), False].index(False)


def turns_of(value: Any, role: str) -> list[Row]:
    """The turns of a chat, of one of its turns, or of a text that `role` says."""
    if isinstance(value, str):
        return [_message(role, value)]
    return [_message_of(turn) for turn in (value if isinstance(value, list) else [value])]


def _text(row: Row, column: str) -> str:
    value = row[column]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{column} is {type(value).__name__} instead of text")
    return value


def objects_of(row: Row, column: str) -> list[Row]:
    """A list of objects, or its JSON in a column of text."""
    values = row.get(column) or []
    if isinstance(values, str):
        try:
            values = json.loads(values)
        except ValueError:
            values = None
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise DataError(f"{column} is no list of objects")
    return values


def _messages(row: Row) -> list[Row]:
    messages: list[Row] = []
    if column := _first(row, CHATS):
        turns = row[column]
        if isinstance(turns, str):  # JSON in a column of text, as in CSV
            try:
                turns = json.loads(turns)
            except ValueError:
                turns = None
        if not isinstance(turns, list):
            raise DataError(f"{column} is no list of turns")
        for number, message in enumerate(turns):  # plain texts take turns
            messages.append(
                _message_of(message)
                if isinstance(message, dict)
                else _message(("user", "assistant")[number % 2], message)
            )
    elif isinstance(row.get("prompt"), list) and "completion" in row:
        completion = row["completion"]
        messages = [
            _message_of(message) for message in [*row["prompt"], *(completion if isinstance(completion, list) else [])]
        ]
        messages += [_message("assistant", completion)] * isinstance(completion, str)
    else:
        question, answer = _question(row), _first(row, ANSWERS)
        for pair in row.get("history") or ():
            messages += [_message(*role_text) for role_text in zip(("user", "assistant"), pair, strict=False)]
        context = next((row[key] for key in CONTEXTS if key != question and row.get(key)), None)
        prompt = _message("user", row[question])
        if context is not None:
            prompt["content"] = f"{prompt['content']}\n{_message('user', context)['content']}"
        messages += [prompt, _message("assistant", row[answer])]
    system = next((row[key] for key in SYSTEMS if row.get(key)), None)
    if system is not None and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, _message("system", system))
    return messages


def _message_of(message: Any) -> Row:
    if not isinstance(message, dict):
        raise DataError(f"a turn is {type(message).__name__}, no object")
    who = message.get("role") or message.get("from")
    role = ROLES.get(str(who).lower())
    if role is None:
        raise DataError(f"nobody is called {str(who)[:40]!r}: {', '.join(sorted(ROLES))} are known")
    converted = _message(
        role, message["content"] if "content" in message else message.get("value", message.get("text"))
    )
    thought = next((text for key in REASONING if isinstance(text := message.get(key), str) and text.strip()), None)
    if thought is not None and role == "assistant":
        converted[REASONING[0]] = thought
    if role == "assistant" and (message.get("train") is False or message.get("weight") == 0):  # Axolotl's, OpenAI's
        converted["train"] = False
    if calls := objects_of(message, "tool_calls"):
        converted["tool_calls"] = calls
    return converted | ({"name": message["name"]} if message.get("name") else {})


def _message(role: str, content: Any) -> Row:
    if isinstance(content, list):  # parts, of which the texts count
        content = "".join(str(part.get("text") or "") if isinstance(part, dict) else str(part) for part in content)
    if isinstance(content, (dict, bool)):
        raise DataError(f"what {role} says is {type(content).__name__} instead of text")
    return {"role": role, "content": "" if content is None else str(content)}


def _alternating(turns: list[Row]) -> list[Row]:
    """Turns that templates of chats take: a question after what the system says, an answer last."""
    alternating: list[Row] = []
    for message in turns:
        content = message["content"].strip() or message.get("tool_calls")
        if not content or (
            message["role"] == "assistant" and all(earlier["role"] == "system" for earlier in alternating)
        ):
            continue
        if (
            alternating
            and alternating[-1]["role"] == message["role"] != "tool"
            and not {"tool_calls", REASONING[0]} & {*message}
            and "tool_calls" not in alternating[-1]
            and message.get("train") == alternating[-1].get("train")
        ):
            alternating[-1] = {**alternating[-1], "content": f"{alternating[-1]['content']}\n\n{message['content']}"}
        else:
            alternating.append(message)
    while alternating and (alternating[-1]["role"] != "assistant" or not alternating[-1].get("train", True)):
        alternating.pop()
    return alternating


def num_held_out(num_samples: int) -> int:
    """Samples that are not trained on but evaluated: 0 of small data, where every sample is worth more trained on."""
    num = min(MOST_HELD_OUT, round(HELD_OUT_FRACTION * num_samples))
    return num if num >= LEAST_HELD_OUT else 0
