"""No password and no token in what is written down or shown: by the key that it stands behind, and by form."""

import json
import time
from pathlib import Path

import pytest

from finetune_planner.cli.app import run
from planner.core.redaction import is_secret_name, without_secrets, without_secrets_in, without_secrets_in_words

HUB = "hf_" + "aB3" * 11
SECRET = "c0rrecthorse"


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://me:{}@host/d", "https://{}@github.com/a/b", "https://h/x.jsonl?a=1&access_token={}&b=2",
        "https://h/x?X-Amz-Signature={}", "HF_TOKEN={} python train.py", "python train.py --hub_token {} --lr 1",
        "python train.py --api-key={}", "Authorization: Bearer {}",
    ],
)  # fmt: skip
def test_a_secret_behind_its_key_is_left_out(text: str) -> None:
    redacted = without_secrets(text.format(SECRET))
    assert SECRET not in redacted
    assert redacted.split("...")[0] == text.split("{}")[0].replace("me:", "")
    assert redacted.endswith(text.split("{}")[1])


@pytest.mark.parametrize(
    "secret",
    [
        HUB,
        "ghp_" + "a1" * 18,
        "sk-proj-" + "a1" * 20,
        "AKIA" + "A1" * 8,
        "eyJhbGciOiJI.eyJzdWIi.abc",
        "glpat-" + "a1" * 10,
    ],
)
def test_a_token_is_known_by_its_form(secret: str) -> None:
    assert without_secrets(f"login({secret}) failed") == "login(...) failed"


@pytest.mark.parametrize(
    "text",
    [
        "--max_tokens 512 --pad_token <pad> --tokenizer gpt2 --eos-token=</s> --num-tokens=3",
        "hf_model_of_mine sk-learn-thing-for-all-of-us key=3 tokenizer=AutoTokenizer user@host.example https://h/a@b",
        "torch.cuda.memory_allocated() # pk",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert without_secrets(text) == text
    assert without_secrets_in_words(text.split()) == text.split()


@pytest.mark.parametrize("part", ["sk-", "eyJ-", "eyJaaaaaaaaaa.", "hf_", "?a", "://", "--token ", "-- ", "Bearer "])
def test_long_texts_take_no_longer_a_letter(part: str) -> None:
    """A second's bound is a hundred times what they take, and a thousandth of what the square of their length would."""
    began = time.process_time()
    without_secrets(part * (120_000 // len(part)))
    without_secrets(part + " " * 120_000)
    assert time.process_time() - began < 1


def test_words_of_a_command_line() -> None:
    words = ["env", f"HF_TOKEN={SECRET}", "python", "--hub_token", SECRET, "--token", "--lr", "1", "--password=a b"]
    assert without_secrets_in_words(words) == [
        "env", "HF_TOKEN=...", "python", "--hub_token", "...", "--token", "--lr", "1", "--password=..."
    ]  # fmt: skip
    assert without_secrets_in({"a": [f"x {SECRET}", 1, None]}, [SECRET]) == {"a": ["x ...", 1, None]}
    assert not any(is_secret_name(name) for name in ("--bos_token", "PWD", "OLDPWD", "SSH_AUTH_SOCK", "TOKENIZERS"))
    assert all(is_secret_name(name) for name in ("DB_PWD", "--hub-token", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY"))


def test_a_data_sets_password_is_in_its_launch_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"https://bob:{SECRET}@data.example.com/x.jsonl?token={HUB}"
    words = ["gpt2", "--gpu", "t4", "--no-dry-run", "--no-history", "--dataset", url, "--target", "hf"]
    words += ["--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["plan", *words])
    assert run(words) == 0
    holding = {
        path.relative_to(tmp_path).as_posix()
        for path in tmp_path.rglob("*")
        if path.is_file() and any(secret in path.read_text() for secret in (SECRET, HUB))
    }
    assert holding == {"launch/prepare_data.py"}
    assert "data.example.com" in json.loads((tmp_path / "plan.json").read_text())["command"]
