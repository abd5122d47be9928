"""Where a model's configuration comes from: directory, catalogue, cache, hub; and what is said when nothing answers."""

import http.server
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.core.errors import ConfigError, PlannerError, UnknownModelError, UsageError
from planner.models import catalogue, hub
from planner.models.resolve import model_beside, resolve_model
from tests.whole import paired

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_hidden_layers": 2, "vocab_size": 100,
}  # fmt: skip
COMMIT = "0123456789abcdef0123456789abcdef01234567"
PATIENCE_S = 600.0
"""What takes this long hangs; alone it takes milliseconds."""


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache, no token, an endpoint that refuses at once."""
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGING", "TRANSFORMERS_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)


def write_model(directory: Path, **changes: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return directory


def write_cache(root: Path, name: str, commit: str = COMMIT, reference: str | None = "main", **changes: Any) -> None:
    repository = root / f"models--{name.replace('/', '--')}"
    write_model(repository / "snapshots" / commit, **changes)
    if reference:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / reference).write_text(commit)


class Hub:
    """A stand-in for the hub: answers on localhost, remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self.status = 200
        self.body = json.dumps(LLAMA).encode()
        self.location = ""
        self.may_answer = threading.Event()
        self.may_answer.set()
        answers = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answers.asked.append((self.path, self.headers.get("Authorization")))
                answers.may_answer.wait(PATIENCE_S)
                self.send_response(answers.status)
                if answers.location and len(answers.asked) == 1:
                    self.send_header("Location", answers.location)
                self.send_header("X-Repo-Commit", COMMIT)
                self.end_headers()
                self.wfile.write(answers.body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    fake_hub = Hub()
    monkeypatch.setenv("HF_ENDPOINT", fake_hub.url)
    monkeypatch.setattr(hub, "HUB_LIMIT_S", PATIENCE_S)
    yield fake_hub
    fake_hub.may_answer.set()
    fake_hub.server.shutdown()
    fake_hub.server.server_close()


# Local paths


@pytest.mark.parametrize("name", ["my-model", "./my-model", "my-model/", "my-model/config.json"])
def test_a_directory_or_its_config_resolves(tmp_path: Path, name: str) -> None:
    write_model(tmp_path / "my-model")
    spec = resolve_model(name)
    assert spec.num_layers == 2
    assert "local file" in spec.config_source
    assert Path(spec.model_id).is_dir()


def test_a_directory_wins_over_the_hub_model_of_its_name(tmp_path: Path) -> None:
    write_model(tmp_path / "gpt2")
    spec = resolve_model("gpt2")
    assert spec.model_type == "llama"
    assert "wins over the hub model gpt2" in spec.config_source


def test_a_file_that_happens_to_be_called_like_a_model_does_not_hide_it(tmp_path: Path) -> None:
    (tmp_path / "gpt2").write_text("notes")
    assert resolve_model("gpt2").model_type == "gpt2"


def test_a_directory_without_config_says_what_it_holds(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_model("./adapter")
    for name, words in (("params.json", "original weights"), ("w.gguf", "GGUF"), ("adapter_config.json", "adapter")):
        (adapter / name).write_text("{}")
        with pytest.raises(ConfigError) as error:
            resolve_model("./adapter")
        assert words in error.value.hint
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-8B"}')
    with pytest.raises(ConfigError) as error:
        resolve_model("./adapter")
    assert error.value.hint.endswith("its base model, Qwen/Qwen3-8B")


def test_broken_paths_are_config_errors(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "weights.bin").write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "config.json").mkdir()
    (tmp_path / "looped").mkdir()
    (tmp_path / "looped" / "config.json").symlink_to("config.json")
    for name in ("./loop", "loop", "./dangling", "./weights.bin", "pipe.json", "./inside", "./looped"):
        with pytest.raises(ConfigError) as error:
            resolve_model(name)
        assert error.value.hint


def test_an_unreadable_config_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "m")

    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("planner.core.inputs.os.open", denied)
    with pytest.raises(ConfigError, match="permission denied"):
        resolve_model("./m")


def test_a_huge_config_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "m", filler="x" * 5_000_000)
    with pytest.raises(ConfigError, match="more than the 5,000,000 bytes"):
        resolve_model("./m")


def test_a_revision_of_a_path_is_a_usage_error(tmp_path: Path) -> None:
    write_model(tmp_path / "m")
    with pytest.raises(UsageError, match="--revision"):
        resolve_model("./m", revision="main")


# Catalogue


def test_a_catalogue_name_needs_neither_cache_nor_hub(stand_in: Hub, tmp_path: Path) -> None:
    write_cache(tmp_path / "hf-home" / "hub", "Qwen/Qwen2.5-7B")
    spec = resolve_model("Qwen/Qwen2.5-7B")
    assert spec.num_params == 7_615_616_512
    assert "built-in catalogue" in spec.config_source
    assert stand_in.asked == []


# Cache


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"])
def test_the_cache_is_found_where_huggingface_hub_puts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in: Hub, variable: str
) -> None:
    monkeypatch.delenv("HF_HOME")
    below = {"HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}.get(variable, "")
    monkeypatch.setenv(variable, str(tmp_path / "cache"))
    write_cache(tmp_path / "cache" / below, "someone/small")
    spec = resolve_model("someone/small")
    assert spec.model_id == "someone/small"
    assert f"local Hugging Face cache, commit {COMMIT[:12]}" in spec.config_source
    assert stand_in.asked == []


def test_the_cache_honours_the_revision(tmp_path: Path) -> None:
    root = tmp_path / "hf-home" / "hub"
    write_cache(root, "someone/small")
    write_cache(root, "someone/small", commit="f" * 40, reference="v2", num_hidden_layers=5)
    assert resolve_model("someone/small").num_layers == 2
    assert resolve_model("someone/small", revision="v2").num_layers == 5
    assert resolve_model("someone/small", revision="f" * 40).num_layers == 5
    with pytest.raises(UnknownModelError):
        resolve_model("someone/small", revision="v3")


def test_a_cache_without_reference_gives_its_newest_snapshot(tmp_path: Path) -> None:
    root = tmp_path / "hf-home" / "hub"
    write_cache(root, "someone/small", reference=None)
    assert resolve_model("someone/small").num_layers == 2


def test_a_broken_cache_entry_is_no_crash(tmp_path: Path) -> None:
    root = tmp_path / "hf-home" / "hub"
    write_cache(root, "someone/small")
    (root / "models--someone--small" / "refs" / "main").write_bytes(b"../../../../etc\xff")
    with pytest.raises(UnknownModelError):
        resolve_model("someone/small")


# Hub


def test_the_hub_answers_last_with_one_request(stand_in: Hub) -> None:
    spec = resolve_model("someone/new")
    assert spec.num_layers == 2
    assert f"revision main, commit {COMMIT[:12]}" in spec.config_source
    assert stand_in.asked == [("/someone/new/resolve/main/config.json", None)]


def test_revision_and_ask_hub_go_to_the_hub_first(stand_in: Hub) -> None:
    assert resolve_model("Qwen/Qwen2.5-7B", ask_hub=True).num_layers == 2
    assert resolve_model("Qwen/Qwen2.5-7B", revision="refs/pr/3").num_layers == 2
    assert [path for path, _ in stand_in.asked] == [
        "/Qwen/Qwen2.5-7B/resolve/main/config.json",
        "/Qwen/Qwen2.5-7B/resolve/refs%2Fpr%2F3/config.json",
    ]


def test_ask_hub_falls_back_and_says_so() -> None:
    spec = resolve_model("Qwen/Qwen2.5-7B", ask_hub=True)
    assert spec.num_params == 7_615_616_512
    assert "hub not used" in spec.config_source
    with pytest.raises(UnknownModelError, match="has no revision 'v2'") as error:
        resolve_model("Qwen/Qwen2.5-7B", revision="v2")
    assert error.value.hint == "leave --revision out to plan the catalogue's Qwen/Qwen2.5-7B"


def test_ask_hub_goes_past_a_directory_of_the_same_name(stand_in: Hub, tmp_path: Path) -> None:
    write_model(tmp_path / "gpt2", num_hidden_layers=7)
    assert resolve_model("gpt2").num_layers == 7
    assert resolve_model("gpt2", ask_hub=True).num_layers == 2


def test_the_token_is_sent_to_the_hub_and_to_nobody_else(stand_in: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    other = Hub()
    stand_in.status, stand_in.location = 302, f"{other.url}/elsewhere"
    try:
        spec = resolve_model("someone/new")
    finally:
        other.server.shutdown()
        other.server.server_close()
    assert stand_in.asked[0][1] == "Bearer hf_secret"
    assert other.asked == [("/elsewhere", None)]
    assert "secret" not in spec.config_source


def test_the_token_file_is_used_and_can_be_forbidden(
    stand_in: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hf-home").mkdir()
    (tmp_path / "hf-home" / "token").write_text("hf_from_file\n")
    resolve_model("someone/new")
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    resolve_model("someone/new")
    assert [token for _, token in stand_in.asked] == ["Bearer hf_from_file", None]


@pytest.mark.parametrize(
    ("status", "message"), [(401, "gated"), (403, "gated"), (404, "no such model"), (500, "HTTP 500")]
)
def test_what_the_hub_refuses_is_explained(
    stand_in: Hub, monkeypatch: pytest.MonkeyPatch, status: int, message: str
) -> None:
    stand_in.status = status
    with pytest.raises(UnknownModelError, match=message):
        resolve_model("someone/new")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with pytest.raises(UnknownModelError) as error:
        resolve_model("someone/new")
    assert "secret" not in error.value.message + error.value.hint


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"\xff", b" " * 5_000_001])
def test_what_is_no_configuration_on_the_hub_is_refused(stand_in: Hub, body: bytes) -> None:
    stand_in.body = body
    with pytest.raises(UnknownModelError) as error:
        resolve_model("someone/new")
    assert error.value.hint


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_asks_nobody(stand_in: Hub, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(UnknownModelError, match="HF_HUB_OFFLINE"):
        resolve_model("someone/new")
    assert stand_in.asked == []


@pytest.mark.parametrize("endpoint", ["file:///etc", "ftp://host", "nonsense", "http://[::1", "http://127.0.0.1:99999"])
def test_a_senseless_endpoint_is_no_crash(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(UnknownModelError):
        resolve_model("someone/new")


def test_a_slow_hub_is_given_up(stand_in: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the question and does not answer before we have given up."""
    monkeypatch.setattr(hub, "HUB_LIMIT_S", 0.2)
    stand_in.may_answer.clear()
    with pytest.raises(UnknownModelError, match=r"did not answer within 0.2 s|cannot be reached"):
        resolve_model("someone/new")


def test_a_resolver_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """No socket timeout covers name resolution: the whole attempt must still end."""
    requested, release = threading.Event(), threading.Event()

    def hang(*_: object, **__: object) -> list[Any]:
        requested.set()
        release.wait(PATIENCE_S)
        raise socket.gaierror("released")

    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    monkeypatch.setattr(hub, "HUB_LIMIT_S", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", hang)
    with pytest.raises(UnknownModelError, match=r"did not answer within 0\.2 s"):
        resolve_model("someone/new")
    assert requested.wait(PATIENCE_S)
    assert not release.is_set()
    release.set()


# Nothing answers


@pytest.mark.parametrize("there", [True, False])
def test_an_unknown_name_gets_close_names_and_the_way_out(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the environment of a traced program, which has no rapidfuzz."""
    if not there:
        monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    with pytest.raises(UnknownModelError) as error:
        resolve_model("someone/Llama-3.1-8b-of-mine")
    assert "meta-llama/Llama-3.1-8B" in error.value.hint
    assert "local directory" in error.value.hint
    with pytest.raises(UnknownModelError) as error:
        resolve_model("zzzz/qqqqqq")
    assert "plan models" in error.value.hint


@pytest.mark.parametrize(
    ("name", "options"),
    paired(
        ["", "  ", ".", "..", "/", "~", "~nobody-here/x", "a/b/c", "x" * 5000, "\x00", "a\x00b", "\ud800", "-", "a b",
         "../../etc/passwd", "https://huggingface.co/a/b/c", "no\nline", "*", "%00", "a--b/c", "con.json", "üñí/ç"],
        [{}, {"ask_hub": True}, {"revision": "main"}, {"revision": "../x"}], 1,
    ),
)  # fmt: skip
def test_senseless_names_are_planner_errors(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(PlannerError) as error:
        resolve_model(name, **options)
    assert error.value.exit_code == 2
    assert error.value.hint
    assert len(error.value.message) < 400


def test_every_catalogue_name_resolves_offline() -> None:
    for name in catalogue.names():
        assert resolve_model(name).num_params > 0


def test_a_bare_name_that_several_owners_use_for_one_model_resolves() -> None:
    assert resolve_model("Llama-3.2-1B").model_id == "meta-llama/Llama-3.2-1B"
    assert resolve_model("unsloth/Llama-3.2-1B").model_id == "unsloth/Llama-3.2-1B"


@pytest.mark.parametrize(
    "name",
    [
        "https://huggingface.co/Qwen/Qwen2.5-7B",
        "huggingface.co/Qwen/Qwen2.5-7B/tree/main",
        "hf.co/Qwen/Qwen2.5-7B?x=y",
        "hf.co/Qwen/Qwen2.5-7B:Q4_K_M",
    ],
)
def test_the_address_of_a_page_is_its_hub_id(name: str) -> None:
    assert resolve_model(name).model_id == "Qwen/Qwen2.5-7B"


def test_a_copy_answers_where_neither_cache_nor_hub_does(stand_in: Hub, tmp_path: Path) -> None:
    """Offline alone: the hub's own answer is another model here."""
    assert resolve_model("someone/Qwen2.5-7B").num_layers == 2
    assert stand_in.asked
    stand_in.status = 404
    copy = resolve_model("someone/Qwen2.5-7B")
    assert (copy.model_id, copy.num_params) == ("someone/Qwen2.5-7B", 7_615_616_512)
    with pytest.raises(UnknownModelError):
        resolve_model("someone/Qwen2.5-7B", revision="v2")


def test_a_spoken_name_asks_the_hub_for_its_id(stand_in: Hub) -> None:
    spec = resolve_model("qwen 2.5 7b", ask_hub=True)
    assert (spec.model_id, spec.num_layers) == ("Qwen/Qwen2.5-7B", 2)
    assert "qwen 2.5 7b" in spec.taken_as


def test_a_plans_relative_model_is_found_from_inside_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").touch()
    (tmp_path / "out" / "plan").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "out" / "plan")
    assert Path(model_beside("./mine", Path())) == tmp_path / "mine"
    assert model_beside("Qwen/Qwen3-8B", Path()) == "Qwen/Qwen3-8B"
