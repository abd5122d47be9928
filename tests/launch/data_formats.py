"""The same questions and answers in every form that people keep them in, written by hand or by the libraries."""

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Pair = tuple[str, str]
NUM = 24


def pairs(num: int = NUM) -> list[Pair]:
    """Questions and answers with all that files and templates may stumble over."""
    questions = ("Who is number {}, and why?", 'Say "{}";\nthen stop.', "Größe von {} 🦆?", "{% raw %}{}\t|x|")
    answers = ("It is {}.", '"{}", he said; then\nhe stopped.', "{} Ellen 🪿", "<b>{}</b>, {{ nothing }}")
    return [(questions[n % 4].replace("{}", str(n)), answers[n // 2 % 4].replace("{}", str(n))) for n in range(num)]


def _lines(path: Path, rows: list[Any], opened: Callable[..., Any] = open) -> None:
    with opened(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _array(path: Path, rows: list[Any]) -> None:
    path.write_text(json.dumps(rows, indent=2), "utf-8")


def _table(path: Path, header: tuple[str, str], rows: list[Pair], delimiter: str) -> None:
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter).writerows([header, *rows])
    data = text.getvalue().encode("utf-8-sig")
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def _parquet(path: Path, rows: list[Any]) -> None:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def _sharegpt(path: Path) -> None:
    """Two turns each; a greeting first, a question left open last, a system, as such dumps have them."""
    rows = []
    for number, (question, answer) in enumerate(pairs()):
        turns = [("human", question), ("gpt", answer), ("human", "And then?"), ("gpt", f"Then {number}.")]
        turns = [("gpt", "Hello!")] * (number % 3 == 1) + turns + [("human", "Thanks")] * (number % 3 == 2)
        system = {"system": "Be brief."} if number % 2 else {}
        rows.append(
            {"id": f"{number}", "conversations": [{"from": who, "value": text} for who, text in turns], **system}
        )
    _array(path, rows)


def _messages(path: Path) -> None:
    """As the chat interfaces have them: a system's turn, contents in parts."""
    rows = [
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": question}]},
                {"role": "assistant", "content": answer, "weight": 1},
            ]
        }
        for question, answer in pairs()
    ]
    _lines(path, rows, gzip.open)


def _history(path: Path) -> None:
    first, *others = pairs()
    rows = [{"instruction": q, "input": "", "output": a, "history": [list(first)]} for q, a in others]
    _array(path, [*rows, {"instruction": first[0], "input": None, "output": first[1], "history": []}])


def _hub(path: Path) -> None:
    """A data set of the hub in its cache, as `hf download --repo-type dataset` leaves it."""
    place = path / "hub" / "datasets--who--what"
    _parquet(place / "snapshots" / ("0" * 40) / "data" / "train-00000-of-00001.parquet", _named("question", "answer"))
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0" * 40)


def _shards(path: Path) -> None:
    rows = _named("instruction", "response")
    for number in range(3):
        _parquet(path / f"train-{number:05d}-of-00003.parquet", rows[number::3])
    _parquet(path / "test-00000-of-00001.parquet", [{"instruction": "never read", "response": "never read"}])


def _named(asks: str, answers: str, **more: Any) -> list[dict[str, Any]]:
    return [{asks: question, answers: answer, **more} for question, answer in pairs()]


def _conversational(path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": q}], "completion": [{"role": "assistant", "content": a}]}
        for q, a in pairs()
    ]
    _lines(path, rows)


FORMATS: dict[str, Callable[[Path], None]] = {
    "sharegpt.json": _sharegpt,
    "messages.jsonl.gz": _messages,
    "alpaca.json": lambda path: _array(path, _named("instruction", "output", input="")),
    "context.jsonl": lambda path: _lines(path, _named("question", "answer", context="Some book.")),
    "history.json": _history,
    "faq.csv": lambda path: _table(path, ("Question", "Answer"), pairs(), ";"),
    "io.tsv": lambda path: _table(path, ("input", "output"), pairs(), "\t"),
    "query.csv.gz": lambda path: _table(path, ("query", "response"), pairs(), ","),
    "prompt.parquet": lambda path: _parquet(path, _named("prompt", "response")),
    "completion.ndjson": lambda path: _lines(path, _named("prompt", "completion")),
    "conversational.jsonl": _conversational,
    "shards": _shards,
    "who/what": _hub,
    "texts.jsonl": lambda path: _lines(path, [{"text": f"{question} {answer}"} for question, answer in pairs()]),
    "notes.txt": lambda path: path.write_text("\n\n".join(f"{q} {a}" for q, a in pairs()), "utf-8"),
    "texts.csv": lambda path: _table(path, ("text", "source"), [(f"{q} {a}", "x") for q, a in pairs()], ","),
}  # fmt: skip
"""Name -> writes it there; "who/what" is a hub id, whose cache is made in the folder."""
TEXTS = ("texts.jsonl", "notes.txt", "texts.csv")
RAW = ("completion.ndjson",)
"""Those without roles: plain texts, and a text with how it goes on."""


def answers_of(name: str) -> list[list[str]]:
    """What a sample of a format teaches, in order: its answers, or the whole text."""
    if name in TEXTS:
        return [[f"{question} {answer}"] for question, answer in pairs()]
    if name == "sharegpt.json":
        return [[answer, f"Then {number}."] for number, (_, answer) in enumerate(pairs())]
    if name == "history.json":
        first, *others = pairs()
        return [*([first[1], answer] for _, answer in others), [first[1]]]
    order = [number for part in range(3) for number in range(part, NUM, 3)] if name == "shards" else range(NUM)
    return [[pairs()[number][1]] for number in order]
