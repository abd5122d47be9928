"""Hostile and broken files: a clear ConfigError, quickly, and nothing executed."""

import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.core.errors import ConfigError, PlannerError
from planner.frameworks.readers import FileContext, read_config, read_text
from planner.frameworks.readers.types import determined

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
CASES = {
    "bomb": (BOMB, "expands to more than"),
    "recursion": ("base_model: &a [*a]\n", "refers to itself"),
    "python tag": ("base_model: !!python/object/apply:os.system ['touch hacked']\n", "not valid YAML"),
    "own tag": ("base_model: !env HOME\n", "not valid YAML"),
    "deep flow": ("base_model: " + "[" * 5000 + "]" * 5000 + "\n", "nested too deep"),
    "deep block": ("".join(" " * i + f"k{i}:\n" for i in range(300)), "nested more than"),
    "list": ("- base_model: x\n", "mapping"),
    "scalar": ("hello\n", "mapping"),
    "empty": ("", "mapping"),
    "many documents": ("base_model: x\n---\n" * 60, "more than 50 documents"),
    "bomb in the second document": (
        "base_model: x\n---\na: &a [1, 1, 1, 1, 1, 1, 1, 1]\n"
        + "".join(f"{letter}: &{letter} [{', '.join([f'*{chr(ord(letter) - 1)}'] * 8)}]\n" for letter in "bcdef"),
        "expands to more",
    ),
    "number key": ("1: 2\nbase_model: x\n", "must be text"),
    "unhashable key": ("? [a]\n: b\nbase_model: x\n", "valid YAML"),
    "unknown key": ("base_model: x\nmicro_batch_sise: 4\n", "no setting 'micro_batch_sise'"),
    "wrong type": ("base_model: x\nmicro_batch_size: [1]\n", "must be a whole number"),
    "negative": ("base_model: x\nmicro_batch_size: -3\n", "at least 1"),
    "huge": ("base_model: x\nmicro_batch_size: 99999999999999999999\n", "reasonable size"),
    "infinite": ("base_model: x\nsequence_len: .inf\n", "reasonable size"),
    "not a number": ("base_model: x\nsequence_len: .nan\n", "reasonable size"),
    "text for a number": ("base_model: x\nsequence_len: many\n", "whole number"),
    "text for a flag": ("base_model: x\nsample_packing: perhaps\n", "true or false"),
    "control characters": ("base_model: x\x00\n", "not valid YAML"),
    "model is a mapping": ("base_model: {a: b}\nsequence_len: 8\n", "must be text"),
    "absolute deepspeed": ("base_model: x\ndeepspeed: /etc/passwd\n", "not beside it"),
    "escaping deepspeed": ("base_model: x\ndeepspeed: ../../../etc/passwd\n", "not beside it"),
    "unknown tool": ("hello: world\n", "no config of a known tool"),
}  # fmt: skip


HOSTILE_LIMIT_S = 300
"""All take well under a second alone; an expanded bomb would take for ever. The rest is for a loaded machine."""


@pytest.mark.parametrize("name", CASES)
def test_hostile_yaml_gets_a_clear_error_quickly(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text, words = CASES[name]
    file = tmp_path / "config.yaml"
    file.write_text(text)
    start = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        determined(read_config(file, num_gpus=2))
    assert words in caught.value.message, caught.value.message
    assert len(caught.value.message) < 400
    assert caught.value.hint
    assert time.perf_counter() - start < HOSTILE_LIMIT_S
    assert os.listdir(tmp_path) == ["config.yaml"]


def test_a_hundred_megabytes_are_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "big.yaml"
    with file.open("wb") as handle:
        handle.truncate(100 * 1024 * 1024)
    start = time.perf_counter()
    with pytest.raises(ConfigError, match="bytes"):
        read_config(file)
    assert time.perf_counter() - start < HOSTILE_LIMIT_S


def test_links_directories_devices_and_odd_endings_are_refused(tmp_path: Path) -> None:
    real = tmp_path / "real.yaml"
    real.write_text("base_model: x\n")
    link = tmp_path / "link.yaml"
    link.symlink_to(real)
    folder = tmp_path / "folder.yaml"
    folder.mkdir()
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    missing = tmp_path / "missing.yaml"
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x81")
    odd = tmp_path / "data.pkl"
    odd.write_text("base_model: x\n")
    for path, words in {
        link: "symbolic link",
        folder: "a directory",
        pipe: "not a regular file",
        missing: "no such file",
        binary: "UTF-8",
        odd: "ends in",
    }.items():
        with pytest.raises(ConfigError, match=words):
            read_config(path)


def test_a_linked_deepspeed_file_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"zero_optimization": {"stage": 3}}')
    (tmp_path / "linked.json").symlink_to(secret)
    file = tmp_path / "config.yaml"
    file.write_text("base_model: x\ndeepspeed: linked.json\n")
    with pytest.raises(ConfigError, match="not beside it"):
        determined(read_config(file, num_gpus=2))


@pytest.mark.parametrize(
    "text", ["import os\nos.system('touch hacked')\n", "(" * 3000, "x = 1\n", "def f(:\n", "a" * 60_000]
)
def test_scripts_are_read_never_run(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_text(text)
    with pytest.raises(ConfigError):
        read_config(file)
    assert os.listdir(tmp_path) == ["train.py"]


@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
def test_a_key_written_twice_is_said(name: str) -> None:
    """Of the Accelerate config that starts it too."""
    text = "base_model: x\nmicro_batch_size: 2\nmicro_batch_size: 4\n"
    if name == "a.json":
        text = '{"base_model": "x", "micro_batch_size": 2, "micro_batch_size": 4}'
    launcher = "distributed_type: MULTI_GPU\nnum_machines: ${NODES}\nnum_processes: 2\nnum_processes: 4\n"
    config = read_text(text, name, launcher=launcher)
    assert (config.setup.micro_batch_seqs, config.setup.num_gpus) == (4, 4)
    for key in ("micro_batch_size", "num_processes"):
        assert f"{key} is written twice: the last one counts" in config.assumptions


KEYS = st.sampled_from(
    ["base_model", "model_name_or_path", "micro_batch_size", "load_in_4bit", "adapter", "use_peft", "lora_r", "dtype",
     "bf16", "fp16", "training", "model", "deepspeed", "zero_optimization", "distributed_type", "fsdp_config",
     "num_processes", "do_train", "stage", "finetuning_type", "quantization_bit", "cutoff_len", "lora_target_modules",
     "model_init_kwargs", "activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing"]
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**20) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=8), st.sampled_from(["a.yaml", "a.json"]))
def test_any_mapping_is_read_or_refused_with_a_reason(values: dict[str, object], name: str) -> None:
    import json

    import yaml

    text = json.dumps(values) if name.endswith("json") else yaml.safe_dump(values)
    try:
        config = read_text(text, name)
    except PlannerError:
        return  # refused with a reason
    assert config.setup.micro_batch_seqs >= 1


TOML = {
    "not toml": ("[training\n", "not valid TOML"),
    "deep": ("a = " + "[" * 5000 + "]" * 5000 + "\n", "nested too deep"),
    "unknown table": ("[training]\nseq_len = 1\n[trainin]\nseq_len = 1\n", "no setting 'trainin'"),
    "unknown key": ("[training]\nseq_length = 1\n", "no setting 'seq_length'"),
    "wrong type": ("[training]\nseq_len = [1]\n", "must be a whole number"),
    "a value for a table": ("training = 3\n", "must be a block"),
    "no gpus": ("[parallelism]\ndata_parallel_shard_degree = 0\n", "do not divide"),
    "degrees": (
        "[parallelism]\ndata_parallel_shard_degree = 1\n"
        "tensor_parallel_degree = 2\n[training]\nglobal_batch_size = -7\ndtype = 'float16'\n",
        "float32 or bfloat16",
    ),
}
LAYOUTS = {
    "fsdp is a word": ("fsdp_config: yes\nfsdp_version: 2", "block of settings"),
    "half a mesh": ("dp_shard_size: [2]", "whole number"),
    "more cuts than GPUs": ("tensor_parallel_size: 3", "cannot be cut"),
    "offload without a file": ("deepspeed: {zero_optimization: {stage: 9}}", "0 to 3"),
    "a list for zero": ("deepspeed: {zero_optimization: [3]}", "block of settings"),
}


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [*(("config.toml", *case) for case in TOML.values()), *(("config.yaml", *case) for case in LAYOUTS.values())],
)
def test_settings_that_make_no_sense_get_a_clear_error(file: str, text: str, words: str) -> None:
    text = text if file.endswith(".toml") else f"base_model: x\n{text}\n"
    with pytest.raises(ConfigError) as caught:
        read_text(text, file, around=FileContext(num_gpus=4))
    assert words in caught.value.message, caught.value.message


TRAINS = """
from trl import SFTConfig, SFTTrainer
SFTTrainer("HuggingFaceTB/SmolLM2-135M", args=SFTConfig(max_length=x, per_device_train_batch_size=2)).train()
"""


@pytest.mark.parametrize(
    "start", ["x = {}\nx['x'] = x\n", "x = [1]\n" + "x = [x, x]\n" * 60, "x = [1]\n" + "x = [x]\n" * 500]
)
def test_a_value_that_holds_itself_or_doubles_is_left_open(start: str) -> None:
    config = read_text(start + TRAINS, "train.py")
    assert "seq_len_tokens" in {missing.field for missing in config.missing}


@pytest.mark.parametrize(
    "start",
    [
        "a = [1, 2]\n" + "a = a + a\n" * 36,
        "a = [1, 2]\n" + "a.extend(a)\n" * 36,
        "def f(*a):\n    return [*a, *a]\na = f(1, 2)\n" + "a = f(*a)\n" * 36,
        "import os\na = 'x'\n" + "a = os.path.join(a, a)\n" * 36,
        "a = [1]\n" + "a = [a, a]\n" * 13 + "b = a == a\n" * 500,
        "".join(f"n{i} = {i}\n" for i in range(1_500)) + "if unknown:\n    pass\n" * 1_500,
    ],
    ids=("sum", "extend", "arguments", "text", "comparisons", "scopes"),
)
def test_a_program_that_grows_ends_at_the_budget_of_size(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.frameworks.readers.program.values.MAX_SIZE", 500_000)
    with pytest.raises(ConfigError, match="computes more than is followed"):
        read_text(start + TRAINS, "train.py")


@pytest.mark.parametrize(
    "value",
    [
        "{(i, 'x'): i for i in [1]}",
        "list(range(10 ** 20))",
        "0x" + "f" * 4_000,
        "round(1, -10 ** 10)",
        "sum([[1], [2]], [])",
    ],
    ids=("unhashable key", "range", "digits", "round", "lists"),
)
def test_what_is_not_computed_is_left_open(value: str) -> None:
    config = read_text(f"x = {value}\n" + TRAINS, "train.py")
    assert "seq_len_tokens" in {missing.field for missing in config.missing}


def test_a_program_too_deep_to_parse_is_no_internal_error() -> None:
    with pytest.raises(ConfigError, match="is not Python that can be read"):
        read_text("x = " + "{" * 200_000 + TRAINS, "train.py")


def test_a_shell_variable_that_doubles_line_by_line_stays_small() -> None:
    text = "A=xy\n" + "A=$A$A\n" * 40 + "trl sft --model_name_or_path gpt2 --output_dir $A --max_length 512\n"
    assert read_text(text, "run.sh").setup.seq_len_tokens == 512
