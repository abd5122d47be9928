"""Token lengths of a data set (`planner.samples.rows` reads it), and what they mean for sequence length and batches.

Counting uses the model's own tokenizer where its `tokenizer.json` is at hand, else a stated bytes-per-token ratio.
"""

import json
import random
from bisect import bisect_left, insort_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Any

from planner.core.errors import ConfigError, EnvironmentProblem
from planner.core.inputs import open_regular, parse_json
from planner.core.install import packages_command
from planner.core.records import dataclass
from planner.samples.rows import (
    NO_SAMPLES,
    REASONING,
    DataError,
    Row,
    files_of,
    kinds_of,
    loader_of,
    objects_of,
    read_rows,
    renamed,
    sample_of,
    turns_of,
)
from planner.samples.steps import PADDING_LIMIT
from planner.samples.tokenizing import TokenizerChild


def path_of(name: str) -> Path | None:
    """The file or directory of that name, or what the hub's cache holds of the data set; None where there is none, and
    of an address.

    Raises:
        ConfigError: something that looks like a path and is not there.
    """
    path = Path(name)
    if path.exists():
        return path
    if "://" in name:
        return None
    if loader_of(path) or name.startswith((".", "/", "~")):
        raise ConfigError(f"no data set at {name}", hint="give a hub id, or a file or folder that exists")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        return Path(snapshot_download(name, repo_type="dataset", local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return None


BYTES_PER_TOKEN = 4.0
"""UTF-8 bytes per token assumed without a tokenizer: about right for English text and vocabularies from 100k."""

TOKENS_PER_MESSAGE = 5
"""What a chat template adds to each message. ChatML: start, role, line break, end, line break."""
TOKENS_BEFORE_TOOLS, TOKENS_PER_CALL = 110, 15
"""What it says about calling tools, beside their descriptions (Qwen 3's 110, Llama 3.1's about 90), and around a call
and its result."""
JSON_BYTES_PER_TOKEN = 3.0
"""Of descriptions of tools (3.6) and of calls (2.5), by SmolLM2's tokenizer. Of two tools, a call and its result this
gives 467 tokens, Qwen 3's template has 429 and Llama 3.1's 492."""
TOKENS_BEFORE_CHAT = 24
"""What it may say before a chat without a system's turn, where nobody sees it: Qwen 2.5's begins with 86 bytes and four
tokens, Llama 3.1's with 60 bytes and nine (trl 1.16 chat_templates/)."""

COUNTED = "counted by the tokenizer"
MAX_SAMPLES = 20_000
"""Rows that are tokenized; of a larger file a fixed random choice of samples."""
SUPERVISED = ("messages", "prompt-completion", "text")
"""Kinds of samples that supervised training takes."""
AS_IT_IS: Mapping[str, str] = MappingProxyType({})
"""No column has another name than it says."""
CountTokens = Callable[[str], int]


@dataclass(frozen=True, kw_only=True)
class DatasetStats:
    """Token lengths of one data set.

    Attributes:
        columns: the kind of its samples (`planner.samples.rows.kinds_of`); of "preference" the longer half counts.
        num_samples: in the whole file; num_left_out: rows beside them that have nothing to learn.
        rows_per_sample: more than one where chats are prepared as a row for every answer (`planner.samples.chats`).
        lengths_tokens: of the rows of the measured samples, ascending; starts_tokens: of each, where its first answer
            begins; empty where nothing is asked.
        answers_fraction: share of their tokens that answer; None where nothing is asked.
        refused: the first measured sample that the model's chat template does not take, and why; "" where none is.
    """

    path: str
    columns: str
    num_samples: int
    lengths_tokens: tuple[int, ...] = field(repr=False)
    counted_with: str
    num_left_out: int = 0
    rows_per_sample: float = 1.0
    starts_tokens: tuple[int, ...] = field(default=(), repr=False)
    answers_fraction: float | None = None
    refused: str = ""

    def __post_init__(self) -> None:
        if not self.lengths_tokens:
            raise ConfigError(f"{self.path} holds no samples", hint="one JSON object per line")

    @property
    def num_rows(self) -> int:
        """Rows that the samples of the whole file become."""
        return round(self.num_samples * self.rows_per_sample)

    @property
    def scale(self) -> float:
        """Rows of the file per measured row."""
        return self.num_rows / len(self.lengths_tokens)

    @property
    def longest_tokens(self) -> int | None:
        """Of all rows, None where some were not measured, or none was counted by the model's tokenizer."""
        whole = self.counted_with == COUNTED and len(self.lengths_tokens) == self.num_rows
        return self.lengths_tokens[-1] if whole else None

    def percentile(self, fraction: float) -> int:
        index = min(len(self.lengths_tokens) - 1, max(0, round(fraction * len(self.lengths_tokens)) - 1))
        return self.lengths_tokens[index]

    def kept_tokens(self, seq_len_tokens: int) -> int:
        """Tokens of one epoch with longer rows cut."""
        return round(sum(min(length, seq_len_tokens) for length in self.lengths_tokens) * self.scale)

    def with_pictures(self, tokens: int) -> "DatasetStats":
        """Of samples with so many tokens of pictures, which answer nothing, beside their texts."""
        lengths = tuple(length + tokens for length in self.lengths_tokens)
        share = sum(self.lengths_tokens) / sum(lengths)
        answers = None if self.answers_fraction is None else self.answers_fraction * share
        return replace(self, lengths_tokens=lengths, answers_fraction=answers)

    def in_pieces(self, seq_len_tokens: int) -> "DatasetStats":
        """Of texts, which go on in another row where one is full (`launch/prepare_data.py`)."""
        whole = self.lengths_tokens
        lengths = [min(left, seq_len_tokens) for length in whole for left in range(length, 0, -seq_len_tokens)]
        num = round(len(lengths) * self.scale)
        return replace(self, lengths_tokens=tuple(sorted(lengths)), num_samples=num)

    def answered(self, seq_len_tokens: int) -> "DatasetStats":
        """Of rows with a part of an answer in so many tokens: the others are left out (`launch/prepare_data.py`).

        Raises:
            ConfigError: there are none.
        """
        if not self.starts_tokens or max(self.starts_tokens) < seq_len_tokens:
            return self
        rows = zip(self.lengths_tokens, self.starts_tokens, strict=True)
        kept = [(length, start) for length, start in rows if start < seq_len_tokens]
        if not kept:
            raise ConfigError(
                f"{self.path}: no answer begins within {seq_len_tokens} tokens",
                hint=f"--seq-len {self.lengths_tokens[-1]} holds the longest sample",
            )
        lengths, starts = zip(*kept, strict=True)
        share = len(kept) / len(self.lengths_tokens)
        return replace(self, lengths_tokens=lengths, starts_tokens=starts, rows_per_sample=self.rows_per_sample * share)

    def cut_fraction(self, seq_len_tokens: int) -> float:
        return sum(length > seq_len_tokens for length in self.lengths_tokens) / len(self.lengths_tokens)

    def packing_fraction(self, seq_len_tokens: int) -> float:
        """Share of real tokens in packed rows, best fit decreasing.

        Source: TRL 1.16 `packing_strategy: bfd`; the same rule on the measured lengths.
        """
        room: list[int] = []  # free tokens of every row, ascending
        rows = 0
        for length in reversed(self.lengths_tokens):
            need = min(length, seq_len_tokens)
            index = bisect_left(room, need)
            if index < len(room):
                left = room.pop(index) - need
            else:
                rows += 1
                left = seq_len_tokens - need
            if left:
                insort_left(room, left)
        return self.kept_tokens(seq_len_tokens) / self.scale / (rows * seq_len_tokens)

    def padding_fraction(self, micro_batch_seqs: int, seq_len_tokens: int) -> float:
        """Share of real tokens in batches padded to their longest sample: the mean length over that of the longest of
        `micro_batch_seqs` samples drawn at random, no sample twice."""
        num = len(self.lengths_tokens)
        drawn = min(micro_batch_seqs, num)
        longest, share = 0.0, drawn / num  # the chance that the n-th shortest is the longest drawn, from n = num down
        for shorter in range(num - 1, drawn - 2, -1):
            longest += share * min(self.lengths_tokens[shorter], seq_len_tokens)
            share *= (shorter + 1 - drawn) / max(1, shorter)
        return min(1.0, self.kept_tokens(seq_len_tokens) / self.num_rows / longest) if longest else 1.0


@dataclass(frozen=True, kw_only=True)
class LengthChoice:
    """A sequence length for a data set, with its reason and what it costs; `epoch_seqs` are its rows once packed, of
    `samples_per_seq` samples each, `real_fractions` the share of a batch that is not padding (`Workload`)."""

    seq_len_tokens: int
    packing: bool
    real_fractions: tuple[float, ...]
    cut_fraction: float
    epoch_tokens: int
    epoch_seqs: int
    samples_per_seq: float
    reason: str


PADDED_SEQS = 4
"""The micro-batch whose padding is told, and decides on packing."""


def choose_length(
    stats: DatasetStats,
    *,
    max_tokens: int | None = None,
    packs: bool = True,
    seq_len_tokens: int | None = None,
    packing: bool | None = None,
    held_out: int = 0,
) -> LengthChoice:
    """A sequence length that cuts at most 1 % of the samples, and packing where padding would waste PADDING_LIMIT.

    Lengths are multiples of 256 (64 below that). Rows of packed samples are long enough for the longest where that is
    at most twice as long: nothing is cut then. `max_tokens` is what the model can take; without `packs` no trainer of
    the objective packs. `seq_len_tokens` and `packing` are the user's where not None. Of the samples `held_out` are
    not trained on.
    """
    whole, trained, longest = stats, 1 - held_out / stats.num_samples, stats.lengths_tokens[-1]
    wanted = max(64, stats.percentile(0.99))
    step = 64 if wanted <= 256 else 256
    length = -(-wanted // step) * step
    if longest <= length:
        length = max(64, -(-longest // 64) * 64)
    length = seq_len_tokens or min(length, max_tokens or length)
    fitted = whole.in_pieces if whole.columns == "text" else whole.answered
    stats = fitted(length)
    padded = stats.padding_fraction(PADDED_SEQS, length)
    packed = stats.packing_fraction(length)
    if packing is None:
        packing = packs and padded < 1 - PADDING_LIMIT and packed > padded
    if packing and seq_len_tokens is None and length < stats.lengths_tokens[-1] <= 2 * length:
        length = min(-(-stats.lengths_tokens[-1] // step) * step, max_tokens or 2 * length)
        stats = fitted(length)
        padded, packed = stats.padding_fraction(PADDED_SEQS, length), stats.packing_fraction(length)
    unit = "samples" if whole.rows_per_sample == 1 else "rows"
    cut = (
        f"{'split' if whole.columns == 'text' else 'cut'} {whole.cut_fraction(length):.1%} of {whole.num_rows:,} "
        f"{unit} (median {whole.percentile(0.5)}, 99th percentile {whole.percentile(0.99)}, longest {longest}, "
        f"{whole.counted_with})"
    )
    if num_lost := whole.num_rows - stats.num_rows if whole.columns != "text" else 0:
        cut += f", {num_lost:,} left out as no answer begins within it"
    shares = f"{padded:.0%} of a padded batch of {PADDED_SEQS}, {packed:.0%} of packed rows"
    rows = ceil(trained * (stats.kept_tokens(length) / (packed * length) if packing else stats.num_rows))
    doublings = [1 << power for power in range(len(stats.lengths_tokens).bit_length())]
    return LengthChoice(
        seq_len_tokens=length,
        packing=packing,
        real_fractions=(packed,) if packing else tuple(stats.padding_fraction(num, length) for num in doublings),
        cut_fraction=stats.cut_fraction(length),
        epoch_tokens=round(trained * stats.kept_tokens(length)),
        epoch_seqs=rows,
        samples_per_seq=trained * (whole if whole.columns == "text" else stats).num_rows / rows,
        reason=f"{length} tokens {cut}; real tokens: {shares}",
    )


def measure(
    path: Path,
    *,
    tokenizer: Path | None = None,
    columns: Mapping[str, str] = AS_IT_IS,
    kinds: Sequence[str] = SUPERVISED,
    loss_on: str = "answers",
    row_per_answer: bool = False,
) -> DatasetStats:
    """Token lengths of a file of samples, or of the training split in a directory of them.

    Args:
        columns: known name -> the column that has it; kinds: of samples that are trained on; loss_on: "all" where chats
            are learned whole; row_per_answer: what templates make of chats of several answers, where none is at hand.

    Raises:
        ConfigError: no such file, a line that is not a sample, or columns that are not known.
        EnvironmentProblem: Parquet without pyarrow.
    """
    count, counted_with = token_counter(tokenizer)
    dice = random.Random(0)
    measured: list[list[tuple[int, int, int]]] = []  # (whole, answers, before the first) of every row of a sample
    split, kind, refused, total, left_out, num_rows = row_per_answer and loss_on != "all", "", "", 0, 0, 0
    for number, row in enumerate(_rows(path, columns), 1):
        kind = kind or _kind(row, kinds, str(path))
        try:
            sample = sample_of(row, kind) if kind in kinds else row
        except (KeyError, DataError) as error:
            there = f"its columns are {', '.join(sorted(map(str, row))[:8])}"
            why = there if isinstance(error, KeyError) else str(error)
            hint = "name a file of it whose samples are of one kind" if path.is_dir() and kinds_of(row) else ""
            raise _unlike(f"{path}: sample {number}", kind, why, getattr(error, "hint", hint)) from error
        if sample is None:
            left_out += 1
            continue
        total += 1
        # Reservoir: every row with the same chance. Its length is kept, not the row: those may have megabytes.
        index = total - 1 if num_rows < MAX_SAMPLES else dice.randrange(total)
        if num_rows < MAX_SAMPLES or index < len(measured):
            if kind == "messages":
                rows = _chat_lengths(sample, count, loss_on, split)
            else:
                rows = [_length(sample, kind, count, f"{path}: sample {number}")]
            if not refused and isinstance(count, TokenizerChild) and count.refused:
                refused = f"sample {number}: {count.refused}"
            measured[index : index + 1] = [rows]
            num_rows += len(measured[index])
    if left_out and not total:
        raise _unlike(str(path), kind, f"none of its {left_out:,} rows has one")
    lengths = sorted(length for rows in measured for length in rows)
    whole = sum(length for length, _, _ in lengths)
    return DatasetStats(
        path=str(path),
        columns=kind,
        num_samples=total,
        lengths_tokens=tuple(length for length, _, _ in lengths),
        starts_tokens=tuple(start for _, _, start in lengths) if kind in SUPERVISED[:2] and loss_on != "all" else (),
        counted_with=counted_with,
        num_left_out=left_out,
        refused=refused,
        rows_per_sample=len(lengths) / max(1, len(measured)),
        answers_fraction=sum(answers for _, answers, _ in lengths) / whole
        if kind in SUPERVISED[:2] and whole
        else None,
    )


def _unlike(where: str, kind: str, why: str, hint: str = "") -> ConfigError:
    content = {"messages": "question with an answer", "text": "text", "labelled": "text with a class"}.get(
        kind, f"{kind} columns"
    )
    named = {"labelled": "text=NAME,label=NAME", "pairs": "anchor=NAME,positive=NAME"}
    hint = hint or f"--columns {named.get(kind, 'question=NAME,answer=NAME')} says which columns"
    return ConfigError(f"{where} has no {content}: {why}", hint=hint)


def _rows(path: Path, columns: Mapping[str, str]) -> Iterator[Row]:
    hint = "one JSON object per line"
    try:
        for row in read_rows(path, opened=open_regular, parsed=lambda text, at: parse_json(text, at, hint=hint)):
            yield renamed(row, columns)
    except DataError as error:
        raise ConfigError(str(error), hint=error.hint) from error
    except ImportError as error:
        raise EnvironmentProblem(
            "Parquet needs pyarrow", hint=f"{packages_command('pyarrow')}, or give the data set as .jsonl"
        ) from error


def token_counter(tokenizer: Path | None) -> tuple[CountTokens, str]:
    """What counts tokens, and its name: the tokenizer of a model directory (or a tokenizer.json), else bytes / 4."""
    file = tokenizer / "tokenizer.json" if tokenizer is not None and tokenizer.is_dir() else tokenizer
    if file is not None and file.is_file():
        try:
            spec = find_spec("tokenizers")
        except ValueError:  # no module at all, but something of that name
            spec = None
        if spec is not None:
            return TokenizerChild(file), COUNTED
    return lambda text: round(len(text.encode()) / BYTES_PER_TOKEN), f"estimated at {BYTES_PER_TOKEN:g} bytes a token"


def tokenizer_file(model_id: str) -> Path | None:
    """The tokenizer.json of a local model directory or of the Hugging Face cache, None where there is none."""
    local = Path(model_id) / "tokenizer.json"
    if local.is_file():
        return local
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        cached = try_to_load_from_cache(model_id, "tokenizer.json")
    except (HFValidationError, OSError):
        return None
    return Path(cached) if isinstance(cached, str) else None


def _kind(row: Row, kinds: Sequence[str], name: str) -> str:
    possible = kinds_of(row)
    if not possible:
        there = ", ".join(sorted(map(str, row))[:8])
        raise ConfigError(
            f"{name}: columns {there} are not known",
            hint="say which they are: --columns question=NAME,answer=NAME, text=NAME or messages=NAME; known are "
            "messages, conversations, instruction/question/query/prompt/input with output/answer/response/completion, "
            "text, text with label, and pairs of chosen and rejected or anchor (or query) and positive",
        )
    return next((kind for kind in possible if kind in kinds), possible[0])


def _chat_lengths(
    sample: Row, count: CountTokens, loss_on: str = "all", split: bool = False
) -> list[tuple[int, int, int]]:
    """(tokens, those of answers, those before the first) of every row that a chat becomes."""
    rows = count.rows(sample, loss_on) if isinstance(count, TokenizerChild) else None
    if rows:
        return rows
    turns = sample["messages"]
    answers = [at for at, turn in enumerate(turns) if turn["role"] == "assistant" and turn.get("train", True)]
    if not split:
        return [_chat_length(sample, count, answers)]
    earlier = [turn | {REASONING[0]: ""} for turn in turns]
    return [_chat_length({**sample, "messages": [*earlier[:at], turns[at]]}, count, [at]) for at in answers]


def _length(sample: Row, kind: str, count: CountTokens, name: str) -> tuple[int, int, int]:
    """(tokens of a sample that is one row, those of its answers, those before)."""
    try:
        if kind == "prompt-completion":
            question, answer = count(_content(sample["prompt"])), count(_content(sample["completion"])) + 1
            return question + answer, answer, question
        return _unanswered_length(sample, kind, count), 0, 0
    except (KeyError, TypeError, AttributeError, DataError) as error:
        raise ConfigError(f"{name} has no {kind} like the first one: {str(sample)[:80]}") from error


def _unanswered_length(sample: Row, kind: str, count: CountTokens) -> int:
    """Tokens of a sample of which no part is an answer alone."""
    if kind == "prompt" and isinstance(sample["prompt"], list):
        chat = {"messages": turns_of(sample["prompt"], "user"), "tools": objects_of(sample, "tools")}
        return _chat_lengths(chat, count)[0][0] + TOKENS_PER_MESSAGE  # with how an answer begins
    if kind == "prompt":
        return count(_content(sample["prompt"]))
    if kind == "preference" and isinstance(sample["prompt"], list):
        return max(_answered(sample, half, count) for half in ("chosen", "rejected"))
    if kind == "preference":
        return count(sample["prompt"]) + max(count(sample[half]) for half in ("chosen", "rejected")) + 1
    if kind == "pairs":
        return max(count(_content(text)) for text in sample.values()) + 1
    if kind == "unpaired" and isinstance(sample["prompt"], list):
        return _answered(sample, "completion", count)
    if kind == "unpaired":
        return count(sample["prompt"]) + count(sample["completion"]) + 1
    return count(sample["text"]) + 1


def _answered(sample: Row, answer: str, count: CountTokens) -> int:
    """Tokens of a prompt of turns with one of its answers."""
    chat = {"messages": sample["prompt"] + sample[answer], "tools": objects_of(sample, "tools")}
    return _chat_lengths(chat, count)[0][0]


def _chat_length(sample: Row, count: CountTokens, answers: list[int]) -> tuple[int, int, int]:
    """(tokens of a chat whose template is not known, those of the turns `answers`, those before them)."""
    turns, tools = sample["messages"], sample.get("tools") or ()
    sizes = [
        count(turn["content"])
        + count(turn.get(REASONING[0], ""))
        + TOKENS_PER_MESSAGE
        + sum(_json_length(call, count) + TOKENS_PER_CALL for call in turn.get("tool_calls") or ())
        for turn in turns
    ]
    before = TOKENS_BEFORE_CHAT * (turns[0]["role"] != "system")
    before += TOKENS_BEFORE_TOOLS * bool(tools) + sum(_json_length(tool, count) for tool in tools)
    return before + sum(sizes), sum(sizes[at] for at in answers), before + sum(sizes[: (answers or [0])[0]])


def _json_length(value: Any, count: CountTokens) -> int:
    text = json.dumps(value, ensure_ascii=False)
    return count(text) if isinstance(count, TokenizerChild) else round(len(text.encode()) / JSON_BYTES_PER_TOKEN)


def _content(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return " ".join(_content(part) for part in value)
    if not isinstance(value, dict):
        raise TypeError(f"{type(value).__name__} instead of a message")
    content = value["content"] if "content" in value else value.get("text", value.get("value"))
    return "" if content is None else content if isinstance(content, str) else _content(content)


def not_read(path: Path) -> list[str]:
    """Names of a directory's files that may hold samples and end otherwise than those that are read."""
    if path.is_file():
        return []
    kinds = {loader_of(file) for file in files_of(path)}
    return sorted(
        file.name
        for file in path.rglob("*")
        if file.is_file() and (loader_of(file) or file.suffix.lower() in DOCUMENTS) and loader_of(file) not in kinds
        if file.name.lower() not in NO_SAMPLES and file.stem.lower() != "readme" and not file.name.startswith(".")
    )


DOCUMENTS = (".md", ".docx", ".pdf", ".xlsx", ".xls", ".html", ".odt")
"""Endings of what people keep beside text and tables."""


def first_row(path: Path, columns: Mapping[str, str] = AS_IT_IS) -> Row:
    """The first row of a local data set under known names; nothing else is read.

    Raises:
        ConfigError: no such file, or no sample.
    """
    if (row := next(_rows(path, columns), None)) is None:
        raise ConfigError(f"{path} holds no samples", hint="one JSON object per line")
    return row


def kind_of_data(path: Path, kinds: Sequence[str] = SUPERVISED, columns: Mapping[str, str] = AS_IT_IS) -> str:
    """Which kind of samples a local data set holds, from its first row.

    Raises:
        ConfigError: no such file, no sample, or columns that are not known.
    """
    return _kind(first_row(path, columns), kinds, str(path))
