"""Token lengths of a local data set (JSON lines or Parquet), and what they mean for sequence length and batches.

Counting uses the model's own tokenizer where its `tokenizer.json` is at hand, else a stated bytes-per-token ratio.
"""

import random
import re
from bisect import bisect_left, insort_left
from collections.abc import Callable, Iterator
from dataclasses import field
from importlib.util import find_spec
from itertools import chain
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

from planner.errors import ConfigError, EnvironmentProblem
from planner.inputs import open_regular, parse_json, read_lines
from planner.install import packages_command
from planner.records import dataclass
from planner.samples.counting import TokenizerChild
from planner.samples.steps import PADDING_LIMIT

T = TypeVar("T")

BYTES_PER_TOKEN = 4.0
"""UTF-8 bytes per token assumed without a tokenizer: about right for English text and vocabularies from 100k."""

TOKENS_PER_MESSAGE = 5
"""What a chat template adds to each message. ChatML: start, role, line break, end, line break."""

MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_ARRAY_BYTES = 64 * 1024 * 1024
"""Python's values take several times the bytes of the text."""
MAX_SAMPLES = 20_000
"""Samples that are tokenized; of a larger file a fixed random choice."""

COLUMNS = {
    "messages": {"messages"},
    "prompt-completion": {"prompt", "completion"},
    "alpaca": {"instruction", "output"},
    "preference": {"chosen", "rejected"},
    "pairs": {"anchor", "positive"},
}
"""Kind of sample -> the columns that it has."""
CountTokens = Callable[[str], int]


@dataclass(frozen=True, kw_only=True)
class DatasetStats:
    """Token lengths of one data set.

    Attributes:
        columns: "messages", "prompt-completion", "alpaca", "preference" (the longer half counts) or "text".
        num_samples: in the whole file.
        lengths_tokens: of the measured samples, ascending.
        counted_with: what counted the tokens.
    """

    path: str
    columns: str
    num_samples: int
    lengths_tokens: tuple[int, ...] = field(repr=False)
    counted_with: str

    def __post_init__(self) -> None:
        if not self.lengths_tokens:
            raise ConfigError(f"{self.path} holds no samples", hint="one JSON object per line")

    @property
    def scale(self) -> float:
        """Samples in the file per measured sample."""
        return self.num_samples / len(self.lengths_tokens)

    def percentile(self, fraction: float) -> int:
        """The length that `fraction` of the samples do not exceed."""
        index = min(len(self.lengths_tokens) - 1, max(0, round(fraction * len(self.lengths_tokens)) - 1))
        return self.lengths_tokens[index]

    def kept_tokens(self, seq_len_tokens: int) -> int:
        """Tokens of one epoch with longer samples cut."""
        return round(sum(min(length, seq_len_tokens) for length in self.lengths_tokens) * self.scale)

    def cut_fraction(self, seq_len_tokens: int) -> float:
        """Share of the samples that are cut."""
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
        return min(1.0, self.kept_tokens(seq_len_tokens) / self.num_samples / longest) if longest else 1.0


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


def choose_length(
    stats: DatasetStats,
    *,
    max_tokens: int | None = None,
    micro_batch_seqs: int = 4,
    packs: bool = True,
    seq_len_tokens: int | None = None,
    packing: bool | None = None,
) -> LengthChoice:
    """A sequence length that cuts at most 1 % of the samples, and packing where padding would waste PADDING_LIMIT.

    Lengths are multiples of 256 (64 below that). Rows of packed samples are long enough for the longest where that is
    at most twice as long: nothing is cut then. `max_tokens` is what the model can take; without `packs` no trainer of
    the objective packs. `seq_len_tokens` and `packing` are the user's where not None.
    """
    length, step = _usual_length(stats)
    length = seq_len_tokens or min(length, max_tokens or length)
    padded = stats.padding_fraction(micro_batch_seqs, length)
    packed = stats.packing_fraction(length)
    if packing is None:
        packing = packs and padded < 1 - PADDING_LIMIT and packed > padded
    if packing and seq_len_tokens is None and length < stats.lengths_tokens[-1] <= 2 * length:
        length = min(-(-stats.lengths_tokens[-1] // step) * step, max_tokens or 2 * length)
        padded, packed = stats.padding_fraction(micro_batch_seqs, length), stats.packing_fraction(length)
    shares = f"{padded:.0%} of a padded batch of {micro_batch_seqs}, {packed:.0%} of packed rows"
    rows = ceil(stats.kept_tokens(length) / (packed * length)) if packing else stats.num_samples
    doublings = [1 << power for power in range(len(stats.lengths_tokens).bit_length())]
    return LengthChoice(
        seq_len_tokens=length,
        packing=packing,
        real_fractions=(packed,) if packing else tuple(stats.padding_fraction(num, length) for num in doublings),
        cut_fraction=stats.cut_fraction(length),
        epoch_tokens=stats.kept_tokens(length),
        epoch_seqs=rows,
        samples_per_seq=stats.num_samples / rows,
        reason=f"{length} tokens {_cut_words(stats, length)}; real tokens: {shares}",
    )


def _usual_length(stats: DatasetStats) -> tuple[int, int]:
    """(tokens, step of longer ones) that cut at most 1 % of the samples."""
    wanted = max(64, stats.percentile(0.99))
    step = 64 if wanted <= 256 else 256
    length = -(-wanted // step) * step
    if stats.lengths_tokens[-1] <= length:
        length = max(64, -(-stats.lengths_tokens[-1] // 64) * 64)
    return length, step


def _cut_words(stats: DatasetStats, length: int) -> str:
    return (
        f"cut {stats.cut_fraction(length):.1%} of {stats.num_samples:,} samples (median {stats.percentile(0.5)}, "
        f"99th percentile {stats.percentile(0.99)}, longest {stats.lengths_tokens[-1]}, {stats.counted_with})"
    )


def measure(path: Path, *, tokenizer: Path | None = None, text_field: str = "text") -> DatasetStats:
    """Token lengths of a JSON-lines, JSON or Parquet file, or of the training split in a directory of them.

    Raises:
        ConfigError: no such file, a line that is not a sample, or columns that are not known.
        EnvironmentProblem: Parquet without pyarrow.
    """
    count, counted_with = token_counter(tokenizer)
    dice = random.Random(0)
    lengths: list[int] = []
    columns, total = "", 0
    for row in _all_rows(path):
        columns = columns or columns_of(row, text_field, str(path))
        total += 1
        # Reservoir: every row with the same chance. Its length is kept, not the row: those may have megabytes.
        index = total - 1 if total <= MAX_SAMPLES else dice.randrange(total)
        if index < MAX_SAMPLES:
            lengths[index : index + 1] = [_length(row, columns, text_field, count, f"{path}: sample {total}")]
    return DatasetStats(
        path=str(path),
        columns=columns,
        num_samples=total,
        lengths_tokens=tuple(sorted(lengths)),
        counted_with=counted_with,
    )


def token_counter(tokenizer: Path | None) -> tuple[CountTokens, str]:
    """What counts tokens, and its name: the tokenizer of a model directory (or a tokenizer.json), else bytes / 4."""
    file = tokenizer / "tokenizer.json" if tokenizer is not None and tokenizer.is_dir() else tokenizer
    if file is not None and file.is_file():
        try:
            found = find_spec("tokenizers")
        except ValueError:  # no module at all, but something of that name
            found = None
        if found is not None:
            return TokenizerChild(file), "counted by the tokenizer"
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
        found = try_to_load_from_cache(model_id, "tokenizer.json")
    except (HFValidationError, OSError):
        return None
    return Path(found) if isinstance(found, str) else None


def columns_of(row: dict[str, Any], text_field: str, name: str) -> str:
    """Which kind of sample a row is.

    Raises:
        ConfigError: none of the known kinds.
    """
    for kind, names in (*COLUMNS.items(), ("text", {text_field}), ("prompt", {"prompt"})):
        if names <= set(row):
            return kind
    raise ConfigError(
        f"{name}: columns {', '.join(sorted(map(str, row))[:8])} are not known",
        hint="messages; prompt and completion; instruction and output; chosen and rejected; anchor and positive; "
        f"prompt; or {text_field}",
    )


def _length(row: dict[str, Any], columns: str, text_field: str, count: CountTokens, name: str) -> int:
    try:
        if columns == "messages":
            return sum(count(_content(one)) + TOKENS_PER_MESSAGE for one in _of(list, row["messages"]))
        if columns == "prompt":
            return count(_content(row["prompt"]))
        if columns == "preference":
            halves = (count(_content(row[half])) for half in ("chosen", "rejected"))
            return count(_content(row.get("prompt") or "")) + max(halves) + 1
        if columns == "pairs":
            return max(count(_of(str, row[one])) for one in ("anchor", "positive")) + 1
        if columns == "prompt-completion":
            return count(_content(row["prompt"])) + count(_content(row["completion"])) + 1
        if columns == "alpaca":
            question = count(_of(str, row["instruction"])) + count(_of(str, row.get("input") or ""))
            return question + count(_of(str, row["output"])) + 2 * TOKENS_PER_MESSAGE
        return count(_of(str, row[text_field])) + 1
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{name} has no {columns} like the first one: {str(row)[:80]}") from error


def _of(kind: type[T], value: Any) -> T:
    """The value, which trainers take only as this kind: null or a number is no text."""
    if not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__} instead of {kind.__name__}")
    return value


def _content(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return " ".join(_content(one) for one in value)
    if not isinstance(value, dict):
        raise TypeError(f"{type(value).__name__} instead of a message")
    content = value["content"] if "content" in value else value.get("text", value.get("value"))
    return "" if content is None else content if isinstance(content, str) else _content(content)


def _files_of(path: Path) -> list[Path]:
    """The file, or those that `load_dataset(DIRECTORY, split="train")` reads: in several parts, by name or folder.

    Source: datasets 5.2, data_files.py (SPLIT_KEYWORDS, FILES_TO_IGNORE), load.py (the commonest ending decides).

    Raises:
        ConfigError: nothing there.
    """
    if path.is_file():
        return [path]
    found = [
        one
        for one in sorted(path.rglob("*"))
        if one.suffix in SUFFIXES and one.is_file() and one.name not in NO_SAMPLES and not _hidden(one, path)
    ]
    if not found:
        raise ConfigError(f"no data set at {path}", hint="a .jsonl, .json or .parquet file, or a directory with one")
    train = [one for one in found if any(_TRAIN.search(f"{part}.") for part in one.relative_to(path).parts)] or found
    kinds = [SUFFIXES[one.suffix] for one in train]
    return [one for one in train if SUFFIXES[one.suffix] == max(kinds, key=kinds.count)]


def _hidden(file: Path, below: Path) -> bool:
    return any(part.startswith((".", "__")) for part in file.relative_to(below).parts)


SUFFIXES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""Ending of a file with samples -> what reads it in `datasets`."""
NO_SAMPLES = frozenset({"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"})
_TRAIN = re.compile(r"(?:^|[-._ 0-9])train(?:ing)?[-._ 0-9]")


def _all_rows(path: Path) -> Iterator[dict[str, Any]]:
    return chain.from_iterable(map(_rows, _files_of(path)))


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    if file.suffix == ".parquet":
        yield from _parquet_rows(file)
        return
    if file.suffix not in SUFFIXES:
        raise ConfigError(
            f"{file.name}: only .jsonl, .json and .parquet files are read",
            hint="convert it, for example with load_dataset('csv', data_files=...).to_json('data.jsonl') of `datasets`",
        )
    with open_regular(file) as handle:
        first = handle.read(1)
        if file.suffix == ".json" and first == b"[":
            rest = handle.read(MAX_ARRAY_BYTES + 1)
            if len(rest) > MAX_ARRAY_BYTES:
                raise ConfigError(
                    f"{file.name} is one JSON array of more than {MAX_ARRAY_BYTES:,} bytes",
                    hint="write it as JSON lines (.jsonl), which is read line by line",
                )
            yield from _json_rows(first + rest, file.name)
            return
        handle.seek(0)
        for number, line in read_lines(handle, file.name, max_line_bytes=MAX_LINE_BYTES):
            yield _row(line, f"{file.name} line {number}")


def _json_rows(raw: bytes, name: str) -> Iterator[dict[str, Any]]:
    for number, value in enumerate(parse_json(raw, name), 1):
        if not isinstance(value, dict):
            raise ConfigError(f"{name}: sample {number} is no object")
        yield value


def _row(line: bytes, where: str) -> dict[str, Any]:
    value = parse_json(line, where, hint="one JSON object per line")
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is no JSON object", hint="one sample per line, as an object with columns")
    return value


def _parquet_rows(file: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise EnvironmentProblem(
            "Parquet needs pyarrow", hint=f"{packages_command('pyarrow')}, or give the data set as .jsonl"
        ) from error
    try:
        for batch in ParquetFile(file).iter_batches(batch_size=64):
            yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{file.name} is not a Parquet file that can be read: {str(error)[:120]}") from error


def sample_columns(path: Path, text_field: str = "text") -> str:
    """Which kind of samples a local data set holds, from its first row; nothing else is read.

    Raises:
        ConfigError: no such file, no sample, or columns that are not known.
    """
    for row in _all_rows(path):
        return columns_of(row, text_field, str(path))
    raise ConfigError(f"{path} holds no samples", hint="one JSON object per line")
