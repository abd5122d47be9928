"""Token lengths of local data sets: hand-counted cases, packing and padding against brute force, broken files."""

import json
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from planner.core.errors import ConfigError
from planner.samples import tokenizing as counting
from planner.samples.dataset import DatasetStats, choose_length, kind_of_data, measure, not_read, token_counter
from planner.samples.rows import DataError, kinds_of, renamed, sample_of


def stats(*lengths: int) -> DatasetStats:
    return DatasetStats(
        path="x",
        columns="messages",
        num_samples=len(lengths),
        lengths_tokens=tuple(sorted(lengths)),
        counted_with="hand",
    )


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_lengths_by_hand(tmp_path: Path) -> None:
    """4 bytes a token; 5 tokens a message, 24 before a chat; 1 for the end of a text."""
    chat = {"messages": [{"role": "user", "content": "a" * 40}, {"role": "assistant", "content": "b" * 8}]}
    assert measure(write(tmp_path / "a.jsonl", [chat])).lengths_tokens == (24 + 10 + 5 + 2 + 5,)
    assert measure(write(tmp_path / "b.jsonl", [{"text": "a" * 400}])).lengths_tokens == (101,)
    assert measure(write(tmp_path / "c.jsonl", [{"prompt": "a" * 8, "completion": "b" * 8}])).lengths_tokens == (5,)
    alpaca = {"instruction": "a" * 8, "input": "", "output": "b" * 4}
    assert measure(write(tmp_path / "d.jsonl", [alpaca])).lengths_tokens == (24 + 2 + 5 + 1 + 5,)


def test_tools_calls_and_reasoning_have_tokens(tmp_path: Path) -> None:
    """3 bytes a token of what is JSON, 110 for how to call, 15 around a call."""
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    turns = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "a" * 40},
        {"role": "assistant", "thinking": "c" * 12, "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "d" * 4},
        {"role": "assistant", "content": "b" * 8},
    ]
    tool = {"type": "function", "function": {"name": "f"}}
    plain, calls = (round(len(json.dumps(value)) / 3) for value in (tool, call))
    chat = {"tools": [tool], "messages": turns[1:]}
    length = 24 + 10 + 5 + 3 + 5 + calls + 15 + 1 + 5 + 2 + 5 + 110 + plain
    assert measure(write(tmp_path / "a.jsonl", [chat])).lengths_tokens == (length,)
    short = length - 1 - 5 - 2 - 5  # as far as the call
    split = measure(tmp_path / "a.jsonl", row_per_answer=True)
    assert (split.lengths_tokens, split.num_rows) == ((short, length - 3), 2)  # what it thought before is gone
    assert split.answers_fraction == pytest.approx((3 + 5 + calls + 15 + 2 + 5) / (short + length - 3))
    assert measure(tmp_path / "a.jsonl", row_per_answer=True, loss_on="all").lengths_tokens == (length,)
    told = {"tools": json.dumps([tool]), "messages": json.dumps(turns[1:])}  # as CSV has them
    assert measure(write(tmp_path / "b.jsonl", [told])).lengths_tokens == (length,)
    for name in ("tools", "tool_calls"):
        bad = {"tools": "{"} if name == "tools" else {"messages": [turns[1], {**turns[2], "tool_calls": "no"}]}
        with pytest.raises(ConfigError, match=f"{name} is no list of objects"):
            measure(write(tmp_path / "c.jsonl", [chat | bad]))


def test_a_row_for_every_answer_is_counted_as_rows() -> None:
    """240 chats of six answers each: rows, tokens and what is not held out."""
    chats = DatasetStats(
        path="x", columns="messages", num_samples=240, lengths_tokens=(100,) * 1440, counted_with="hand",
        rows_per_sample=6,
    )  # fmt: skip
    choice = choose_length(chats, held_out=12)
    assert (chats.num_rows, choice.epoch_seqs, choice.epoch_tokens) == (1440, 1368, 136_800)
    assert choice.samples_per_seq == 1
    assert "of 1,440 rows" in choice.reason


def test_rows_whose_answers_begin_too_late_are_no_steps(tmp_path: Path) -> None:
    """Of four chats one begins to answer within 64 tokens: 24 + 10 + 5, then a cut answer."""
    rows = [{"question": "a" * num, "answer": "b" * 400} for num in (40, 400, 400, 400)]
    chats = measure(write(tmp_path / "a.jsonl", rows))
    assert chats.starts_tokens == (39, 129, 129, 129)
    choice = choose_length(chats, seq_len_tokens=64)
    assert (choice.epoch_seqs, choice.epoch_tokens, choice.samples_per_seq) == (1, 64, 1)
    assert "cut 100.0% of 4 samples" in choice.reason
    assert "3 left out as no answer begins within it" in choice.reason
    with pytest.raises(ConfigError, match="no answer begins within 32 tokens"):
        choose_length(chats, seq_len_tokens=32)
    assert choose_length(measure(tmp_path / "a.jsonl", loss_on="all"), seq_len_tokens=32).epoch_seqs == 4


def test_parquet_and_json_arrays_read_like_json_lines(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"text": "a" * n} for n in (40, 80, 4000)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    lines = measure(write(tmp_path / "a.jsonl", rows))
    assert measure(tmp_path / "a.parquet").lengths_tokens == lines.lengths_tokens
    assert measure(tmp_path / "a.json").lengths_tokens == lines.lengths_tokens == (11, 21, 1001)


def test_the_models_tokenizer_counts_where_it_is_at_hand(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    count, name = token_counter(tmp_path)
    assert count("a b c a") == 4
    assert name == "counted by the tokenizer"
    dataset = measure(write(tmp_path / "a.jsonl", [{"text": "a b c"}]), tokenizer=tmp_path)
    assert dataset.lengths_tokens == (4,)


def test_packing_by_hand() -> None:
    assert stats(6, 4, 5, 5).packing_fraction(10) == 1.0
    assert stats(6, 6, 6).packing_fraction(10) == pytest.approx(18 / 30)
    assert stats(25).packing_fraction(10) == 1.0  # cut to one full row


def test_padding_by_hand() -> None:
    assert stats(5, 5, 5, 5).padding_fraction(2, 10) == 1.0
    assert stats(10, 2).padding_fraction(2, 10) == pytest.approx(12 / 20)
    assert stats(10, 2).padding_fraction(1, 10) == 1.0
    assert stats(100, 2).padding_fraction(8, 64) == pytest.approx(33 / 64)


@pytest.mark.parametrize("drawn", [1, 2, 3, 5])
def test_padding_is_that_of_every_batch_that_can_come(drawn: int) -> None:
    lengths = (3, 7, 7, 20, 64)
    longest = [min(50, max(batch)) for batch in combinations(lengths, drawn)]
    real = sum(min(50, length) for length in lengths) / len(lengths)
    assert stats(*lengths).padding_fraction(drawn, 50) == pytest.approx(real * len(longest) / sum(longest))


def test_packing_never_beats_full_rows_nor_loses_to_one_sample_a_row() -> None:
    import random

    dice = random.Random(3)
    for _ in range(50):
        lengths = [dice.randint(1, 300) for _ in range(dice.randint(1, 60))]
        dataset = stats(*lengths)
        row = dice.randint(10, 400)
        alone = sum(min(length, row) for length in lengths) / (row * len(lengths))
        assert alone - 1e-9 <= dataset.packing_fraction(row) <= 1.0


def test_a_length_cuts_at_most_one_percent_and_packs_uneven_data() -> None:
    uneven = choose_length(stats(*([50] * 95 + [2000] * 5)))
    assert uneven.packing
    assert uneven.cut_fraction <= 0.01
    even = choose_length(stats(*([500] * 100)))
    assert not even.packing
    assert even.seq_len_tokens == 512
    assert even.epoch_tokens == 50_000
    assert choose_length(stats(*([9000] * 10)), max_tokens=4096).seq_len_tokens == 4096


def test_packed_rows_hold_the_longest_sample_where_that_is_not_much_longer() -> None:
    far = choose_length(stats(*([100] * 900 + [600] * 98 + [5000] * 2)))
    assert far.packing
    assert (far.seq_len_tokens, far.cut_fraction) == (768, 0.002)
    near = choose_length(stats(*([100] * 900 + [600] * 98 + [1100] * 2)))
    assert (near.seq_len_tokens, near.cut_fraction) == (1280, 0.0)
    assert near.samples_per_seq == pytest.approx(8, rel=0.2)


def test_a_wished_length_and_packing_are_what_is_counted() -> None:
    data = stats(*([50] * 95 + [2000] * 5))
    padded = choose_length(data, packing=False)
    assert (padded.packing, padded.epoch_seqs, padded.samples_per_seq) == (False, 100, 1.0)
    assert list(padded.real_fractions) == sorted(padded.real_fractions, reverse=True)
    short = choose_length(data, seq_len_tokens=512)
    assert (short.seq_len_tokens, short.cut_fraction, short.epoch_tokens) == (512, 0.05, 95 * 50 + 5 * 512)
    assert short.real_fractions == (data.packing_fraction(512),)


def test_large_files_are_sampled_and_scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.samples.dataset.MAX_SAMPLES", 50)
    dataset = measure(write(tmp_path / "a.jsonl", [{"text": "a" * 40}] * 200))
    assert dataset.num_samples == 200
    assert len(dataset.lengths_tokens) == 50
    assert round(sum(dataset.lengths_tokens) * dataset.scale) == 200 * 11


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no samples"),
        ("{}\n", "not known"),
        ("[1]\n", "no JSON object"),
        ('{"text": "a"}\nnonsense\n', "line 2"),
        ('{"messages": 5}\n', "has no question with an answer: messages is no list"),
        ('{"messages": "hello"}\n', "has no question with an answer"),
        ('{"conversations": [{"from": "crow", "value": "a"}]}\n', "nobody is called 'crow'"),
        ('{"text": null}\n', "has no text"),
        ('{"text": 5}\n', "text is int instead of text"),
        ('{"instruction": "a", "output": {"a": 7}}\n', "assistant says is dict"),
        ('{"question": "a", "answer": ""}\n', "none of its 1 rows"),
        ('{"text": "a"}\n{"other": 1}\n', "sample 2 has no text"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_broken_files_are_named_with_their_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        measure(file)


def test_a_missing_file_and_a_false_parquet_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no data set"):
        measure(tmp_path / "none.jsonl")
    (tmp_path / "a.parquet").write_text("hello")
    with pytest.raises(ConfigError, match="Parquet"):
        measure(tmp_path / "a.parquet")


def test_columns_come_from_the_first_row_alone(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "train.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\nnonsense\n')
    assert kind_of_data(file) == kind_of_data(tmp_path / "data") == "prompt-completion"
    file.write_text("")
    with pytest.raises(ConfigError, match="no samples"):
        kind_of_data(file)


def test_data_of_two_kinds_and_the_table_of_llamafactory_are_refused_by_what_is_in_them(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"instruction": "a", "output": "b"}])
    write(tmp_path / "b.jsonl", [{"question_de": "a", "chosen": "b", "rejected": "c"}])
    with pytest.raises(ConfigError, match=r"sample 2 .*its columns are chosen, question_de, rejected") as refusal:
        measure(tmp_path)
    assert refusal.value.hint == "name a file of it whose samples are of one kind"
    (tmp_path / "dataset_info.json").write_text('{"mine": {"file_name": "a.jsonl"}}')
    with pytest.raises(ConfigError, match="holds none"):
        measure(tmp_path / "dataset_info.json")


def test_files_of_a_directory_that_nobody_reads_are_named(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "chats.jsonl", "notes.md", "README.md", "dataset_info.json", "x.docx", "y.png"):
        (tmp_path / name).write_text("a")
    assert not_read(tmp_path) == ["chats.jsonl", "notes.md", "x.docx"]
    assert not_read(tmp_path / "a.txt") == []


@pytest.mark.parametrize(
    "files",
    [
        ("data/train-00000-of-00003.parquet", "data/train-00001-of-00003.parquet", "data/train-00002-of-00003.parquet",
         "data/test-00000-of-00001.parquet", "dataset_infos.json"),
        ("train/a.jsonl", "train/b.jsonl", "test/c.jsonl"),
        ("part-1.jsonl", "part-2.jsonl", ".cache/part-3.jsonl"),
        ("my_training_data.jsonl", "my_eval_data.jsonl"),
        ("b.parquet", "c.parquet", "a.json"),
    ],
)  # fmt: skip
def test_a_directory_is_read_as_the_launch_files_read_it(files: tuple[str, ...], tmp_path: Path) -> None:
    """All parts of the training split, no other, as `load_dataset(DIRECTORY, split="train")`."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    for number, name in enumerate(files):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        rows = [{"text": "a" * 4 * length} for length in range(1, 1 + 5 * 2**number)]
        if name.endswith(".parquet"):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name)
        else:
            write(tmp_path / name, rows if name.endswith("l") else [{}])
    dataset = measure(tmp_path)
    read = datasets.load_dataset(str(tmp_path), split="train", cache_dir=str(tmp_path / ".hf"))
    assert dataset.num_samples == len(read)
    assert dataset.lengths_tokens == tuple(sorted(len(row["text"]) // 4 + 1 for row in read))


def test_other_kinds_of_file_are_refused_by_their_name(tmp_path: Path) -> None:
    file = tmp_path / "samples.xlsx"
    file.write_text("text,label\nhello,1\n")
    with pytest.raises(ConfigError, match=r"read end in \.jsonl"):
        measure(file)


def test_a_tokenizer_that_panics_or_hangs_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    monkeypatch.setattr(counting, "TEXT_LIMIT_S", 1)
    panics = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {}, "unk_token": "a"}}
    panics |= dict.fromkeys(("truncation", "padding", "pre_tokenizer", "post_processor", "decoder"))
    panics["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    for name, content in (("empty", ""), ("panics", json.dumps(panics))):
        (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match="no tokenizer that can be read"):
            token_counter(tmp_path / name)
    tokenizer = Tokenizer(models.WordLevel({"a": 0}))  # has no word for what it does not know
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    tokenizer.save(str(tmp_path / "hangs"))
    count, _ = token_counter(tmp_path / "hangs")
    with pytest.raises(ConfigError, match="cannot count a text"):
        count("b")
    count, _ = token_counter(tmp_path / "hangs")
    start = time.monotonic()
    with pytest.raises(ConfigError, match="cannot count a text"):
        count("a" * 40 + "b")
    assert time.monotonic() - start < 60


SAID = [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("kind", "row", "sample"),
    [
        ("labelled", {"content": "a", "labels": 1.0}, {"text": "a", "label": 1}),
        ("labelled", {"text": "a", "label": None}, None),
        ("labelled", {"text": "a", "label": "3.29"}, "3.29: classes are trained, no scores"),
        ("labelled", {"text": "a", "labels": ["x", "y"]}, "list: one class"),
        ("labelled", {"text": "a", "label": "1.0"}, {"text": "a", "label": "1"}),
        ("unpaired", {"prompt": "a", "completion": "b", "label": "False"}, {"label": False}),
        ("unpaired", {"prompt": SAID[0], "completion": SAID[1], "label": 1}, {"completion": SAID[1], "label": True}),
        ("unpaired", {"prompt": "a", "completion": "b", "label": "good"}, "'good' instead of true or false"),
        ("pairs", {"query": "a", "pos": ["b"], "neg": ["c", "d"]}, {"anchor": "a", "positive": "b", "negative_2": "d"}),
        ("pairs", {"anchor": "a", "positive": "b", "negative": "c"}, {"negative": "c", "negative_1": "c"}),
        ("pairs", {"query": "a", "pos": ["b", "c"]}, "2 positives in a row: one is trained"),
        (
            "pairs",
            {"query": "a", "pos": "b", "neg": ["c"], "neg_scores": [0.5]},
            {"anchor": "a", "positive": "b", "negative": "c", "negative_1": "c"},
        ),
    ],
)
def test_rows_of_other_objectives_are_what_their_trainers_take(
    kind: str, row: dict[str, Any], sample: dict[str, Any] | str | None
) -> None:
    """Each stopped a real run, or trained a class for every score."""
    assert kind in kinds_of(row)
    if isinstance(sample, str):
        with pytest.raises(DataError, match=sample):
            sample_of(row, kind)
        return
    made = sample_of(row, kind)
    assert made == sample if sample is None else made is not None and sample.items() <= made.items()


def test_a_column_that_is_named_alone_is_read_beside_those_that_say_what_they_are() -> None:
    row = {"Frage": "a", "positive": "b", "text": "c"}
    assert renamed(row, {"anchor": "Frage"}) == {"frage": "a", "positive": "b", "text": "c", "anchor": "a"}
    assert renamed(row, {"text": "Frage"}) == {"text": "a"}


def test_what_stands_beside_named_columns_is_kept() -> None:
    """Each was lost in silence: tools and pictures of a chat, a preference's prompt, negatives, what a reward reads."""
    row = {"A": "a", "B": "b", "system": "s", "tools": [], "images": [], "prompt": "p", "neg": ["c"], "neg_scores": [1]}
    kept = {"system": "s", "tools": [], "images": [], "neg": ["c"]}
    assert renamed(row, {"question": "A", "answer": "B"}) == kept | {"question": "a", "answer": "b"}
    assert renamed(row, {"chosen": "A", "rejected": "B"}) == kept | {"prompt": "p", "chosen": "a", "rejected": "b"}
    assert renamed({"A": "a", "solution": "42"}, {"prompt": "A"}) == {"a": "a", "solution": "42", "prompt": "a"}


def test_prompts_of_turns_count_what_the_template_puts_around_them(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "a" * 40}]}
    assert measure(write(tmp_path / "a.jsonl", [row]), kinds=("prompt",)).lengths_tokens == (24 + 10 + 5 + 5,)
