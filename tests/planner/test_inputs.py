"""What is read from a person's disk: bounded, regular, and every error names the field."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from planner.core.errors import ConfigError, UsageError
from planner.core.inputs import MAX_VALUES, check_values, open_regular, parse_json, parse_object, read_lines, read_text
from planner.frameworks.readers.loading import parse_yaml
from planner.planning.option_values import amount, choices, length, named

QUICK_S = 5.0
"""CPU seconds; a bomb takes minutes."""


def test_a_pipe_a_device_and_a_directory_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(ConfigError, match="it is"):
            read_text(path, max_bytes=100)
    with pytest.raises(ConfigError, match="no such file"):
        open_regular(tmp_path / "missing")


def test_size_and_encoding_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 11)
    assert read_text(tmp_path / "a", max_bytes=11) == "x" * 11
    with pytest.raises(ConfigError, match="more than the 10 bytes"):
        read_text(tmp_path / "a", max_bytes=10)
    (tmp_path / "a").write_bytes(b"ab\xff")
    with pytest.raises(ConfigError, match="byte 2"):
        read_text(tmp_path / "a", max_bytes=10)


def test_a_link_is_followed_only_where_it_may_be(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert read_text(tmp_path / "b", max_bytes=9) == "x"
    with pytest.raises(ConfigError, match="symbolic link"):
        read_text(tmp_path / "b", max_bytes=9, follow=False)


def test_lines_are_numbered_and_bounded(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one\n\nthree")
    with open_regular(tmp_path / "a") as file:
        assert list(read_lines(file, "a", max_line_bytes=5)) == [(1, b"one\n"), (3, b"three")]
    with open_regular(tmp_path / "a") as file, pytest.raises(ConfigError, match="a line 3 is longer"):
        list(read_lines(file, "a", max_line_bytes=4))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("NaN", "NaN is no JSON number"),
        ('{"a": [1, {"b": Infinity}]}', "Infinity"),
        ('{"a": [1, {"b": 1e999}]}', "x: a.1.b is no number of a reasonable size"),
        ('{"a": 99999999999999999999}', "x: a is no number of a reasonable size"),
        ('{"a": ' + "9" * 5000 + "}", "not JSON"),
        ('{"a": {"b c": "\\ud800"}}', "x: a.b c is no text"),
        ('{"\\udfff": 1}', "a name in the value is no text"),
        ("[" * 70 + "]" * 70, "nested too deeply"),
        ("[" * 100_000, "nested too deeply"),
        ("", "not JSON"),
        ("[" + "0," * (MAX_VALUES * 2) + "0]", "more than"),
    ],
    ids=lambda value: value[:40],  # the longest has 16 MB
)
def test_json_that_cannot_be_meant_names_its_field(text: str, words: str) -> None:
    for content in (text, text.encode()):
        with pytest.raises(ConfigError) as caught:
            parse_json(content, "x")
        assert words in caught.value.message


def test_an_object_is_an_object() -> None:
    assert parse_object('{"a": "\U0001f600"}', "x") == {"a": "\U0001f600"}
    with pytest.raises(ConfigError, match="expected a JSON object, got list"):
        parse_object("[]", "x")


def test_values_are_counted_before_they_are_looked_at() -> None:
    with pytest.raises(ConfigError, match="more than 10 values"):
        check_values(list(range(11)), "x", max_values=10)
    check_values(list(range(9)), "x", max_values=10)


def merge_bomb(levels: int, width: int = 9) -> str:
    """Each level merges the one before several times: width ** levels keys."""
    lines = ["a0: &a0 {x0: 1, y0: 2}"]
    for level in range(1, levels):
        before = ", ".join([f"*a{level - 1}"] * width)
        lines.append(f"a{level}: &a{level} {{<<: [{before}], x{level}: 1}}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        merge_bomb(9),
        "a: &a [x, x, x, x, x, x, x, x, x]\n"
        + "\n".join(f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]" for i in range(8)),
        "a: &a {b: *a}",
        "a: &a [*a]",
        "a: !!bool x",
        "a: !!int x",
        "a: !!float x",
        "a: !!timestamp x",
        "a: !!python/object/apply:os.system [ls]",
        "a: 2024-13-01",
        "a: 0x" + "f" * 5000,
        "a: " + "9" * 5000,
        "a: .inf",
        "- " * 2000,
        "? [a, b]\n: 1",
        "a: {? {b: c} : d}",
        "a: !!set {[b]}",
        "a: !!omap [b]",
        "a: !!pairs x",
        "a: \ud800",
        "[" * 150,
        "&a a: 1\n<<: *a",
        "<<: [1, 2]",
    ],
    ids=lambda text: text[:30],
)
def test_yaml_from_strangers_is_an_error_and_a_quick_one(text: str) -> None:
    start = time.process_time()
    with pytest.raises(ConfigError):
        parse_yaml(text, "x")
    assert time.process_time() - start < QUICK_S


def test_ordinary_merges_and_aliases_are_read() -> None:
    values: dict[str, Any] = parse_yaml("base: &b {x: 1, y: 2}\nmine: {<<: *b, y: 3}\nlist: [*b, *b]", "x")[0]
    assert values["mine"] == {"x": 1, "y": 3}
    assert values["list"] == [{"x": 1, "y": 2}] * 2


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("20M", 20_000_000),
        ("1.5B", 1_500_000_000),
        ("300k", 300_000),
        ("20,000_000", 20_000_000),
        (7, 7),
        ("2 t", 2 * 10**12),
    ],
)
def test_an_amount_is_read_as_people_write_it(text: str | int, number: int) -> None:
    assert amount(text) == number


@pytest.mark.parametrize("text", ["", "many", "-3", "0.5", "1.2345k", "20MB", "1e6"])
def test_what_is_no_whole_amount_is_an_error(text: str) -> None:
    with pytest.raises(UsageError, match="whole number"):
        amount(text)


def test_lengths_and_choices_are_read_as_people_write_them() -> None:
    assert [length(text) for text in ("8k", "1.5K", "8,192", 2048)] == [8192, 1536, 8192, 2048]
    assert choices("method", ["Qlora", "lora,FULL"], ("full", "lora", "qlora")) == ("qlora", "lora", "full")
    with pytest.raises(UsageError) as refused:
        choices("method", ["qlroa"], ("full", "lora", "qlora"))
    assert refused.value.hint == "for example --method qlora"
    with pytest.raises(UsageError, match=r"^--seq-len: expected a positive whole number"):
        named("seq-len", length)("8.0001k")
