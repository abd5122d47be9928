"""A model's config.json from the local Hugging Face cache, or from the hub in one short attempt.

Both follow the conventions of huggingface_hub (HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE) without
importing it: the import alone would cost more than the whole formula plan, and its retries wait for half a minute.
"""

import os
import re
import threading
from pathlib import Path
from typing import Any

from planner.core.errors import ConfigError
from planner.core.inputs import open_regular
from planner.core.records import dataclass
from planner.models.config_file import CONFIG_NAME, MAX_CONFIG_BYTES, parse_config, read_config

HUB_LIMIT_S = 3.0
"""The whole attempt, name resolution included."""

_REPO_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,95})?")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/+-]{0,199}")
_TRUE = {"1", "ON", "YES", "TRUE"}


@dataclass(frozen=True, kw_only=True, slots=True)
class HubAnswer:
    """What became of an attempt: the configuration and where it came from, or why there is none."""

    config: dict[str, Any] | None = None
    source: str = ""
    reason: str = ""


def is_repo_id(name: str) -> bool:
    """Whether the hub could have a model of this name."""
    return _REPO_ID.fullmatch(name) is not None and "--" not in name and ".." not in name and not name.endswith(".git")


def is_revision(name: str) -> bool:
    """Whether a branch, tag or commit could have this name."""
    return _REVISION.fullmatch(name) is not None and ".." not in name and "//" not in name


def _home() -> Path:
    given = os.environ.get("HF_HOME")
    if given:
        return Path(os.path.expandvars(given)).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface"


def cache_directory() -> Path:
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(os.path.expandvars(given)).expanduser() if given else _home() / "hub"


def from_cache(name: str, revision: str | None) -> HubAnswer:
    """The cached config.json of a hub id.

    Raises:
        ConfigError: it is cached and cannot be read.
    """
    if not is_repo_id(name) or (revision is not None and not is_revision(revision)):
        return HubAnswer(reason="not a hub id")
    try:
        snapshots = cache_directory() / f"models--{name.replace('/', '--')}" / "snapshots"
        snapshot = _snapshot(snapshots, revision)
        if snapshot is None or not (snapshot / CONFIG_NAME).exists():
            return HubAnswer(reason="not in the local Hugging Face cache")
    except (
        OSError,
        RuntimeError,
        ValueError,
        ConfigError,
    ) as error:  # RuntimeError: no home directory to expand "~" with
        return HubAnswer(reason=f"the local Hugging Face cache cannot be read: {error}")
    config = read_config(snapshot / CONFIG_NAME)
    return HubAnswer(config=config, source=f"local Hugging Face cache, commit {snapshot.name[:12]}")


def weights_in_cache(name: str) -> bool:
    """Whether the local Hugging Face cache holds weights of a hub id (of which revision it does not ask)."""
    if not is_repo_id(name):
        return False
    try:
        snapshot = _snapshot(cache_directory() / f"models--{name.replace('/', '--')}" / "snapshots", None)
        kinds = ("*.safetensors", "*.bin")
        return snapshot is not None and any(next(snapshot.glob(kind), None) for kind in kinds)
    except (OSError, RuntimeError, ValueError):  # RuntimeError: no home directory to expand "~" with
        return False


def _snapshot(snapshots: Path, revision: str | None) -> Path | None:
    """The directory of a revision: by its reference, by its commit, or the newest one if none is asked for."""
    if not snapshots.is_dir():
        return None
    reference = snapshots.parent / "refs" / (revision or "main")
    if reference.is_file():
        with open_regular(reference) as file:
            commit = file.read(100).decode("ascii", "replace").strip()
        return snapshots / commit if re.fullmatch(r"[0-9a-f]{7,64}", commit) else None
    if revision is not None:
        return snapshots / revision if re.fullmatch(r"[0-9a-f]{40}", revision) else None
    candidates = [path for path in snapshots.iterdir() if (path / CONFIG_NAME).is_file()]
    return max(candidates, key=lambda path: path.stat().st_mtime, default=None)


def from_hub(name: str, revision: str | None) -> HubAnswer:
    """The config.json of a hub id, in one attempt of at most HUB_LIMIT_S.

    The request runs in a daemon thread, because a resolver that hangs obeys no socket timeout.

    Raises:
        ConfigError: the hub's answer is no configuration.
    """
    if any(os.environ.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
        return HubAnswer(reason="HF_HUB_OFFLINE is set")
    if not is_repo_id(name) or (revision is not None and not is_revision(revision)):
        return HubAnswer(reason="not a hub id")
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    if not endpoint.startswith(("https://", "http://")):
        return HubAnswer(reason="HF_ENDPOINT is not an http address")
    answers: list[HubAnswer] = []
    worker = threading.Thread(target=lambda: answers.append(_download(endpoint, name, revision)), daemon=True)
    worker.start()
    worker.join(HUB_LIMIT_S)
    return answers[0] if answers else HubAnswer(reason=f"the hub did not answer within {HUB_LIMIT_S:g} s")


def _download(endpoint: str, name: str, revision: str | None) -> HubAnswer:
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.parse import quote
    from urllib.request import Request, build_opener

    url = f"{endpoint}/{name}/resolve/{quote(revision or 'main', safe='')}/{CONFIG_NAME}"
    try:
        request = Request(url, headers={"User-Agent": "finetune-planner"})
        token = _token()
        if token:
            # Unredirected: urllib would hand an ordinary header on to whatever host a redirect names.
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        with build_opener().open(request, timeout=HUB_LIMIT_S) as response:
            content = response.read(MAX_CONFIG_BYTES + 1)
            commit = response.headers.get("X-Repo-Commit", "")
    except HTTPError as error:
        error.close()  # it is the response; Python 3.14 warns where it is left open
        return HubAnswer(reason=_status(error.code, token is not None))
    except URLError as error:
        return HubAnswer(reason=f"the hub cannot be reached: {error.reason}")
    except ValueError:
        return HubAnswer(reason="the hub cannot be reached: HF_ENDPOINT is not an http address")
    except (OSError, HTTPException) as error:
        return HubAnswer(reason=f"the hub cannot be reached: {type(error).__name__}")
    try:
        config = parse_config(content, f"{name} on the hub: {CONFIG_NAME}")
    except ConfigError as error:
        return HubAnswer(reason=error.message)
    at = f", commit {commit[:12]}" if re.fullmatch(r"[0-9a-f]{7,64}", commit) else ""
    return HubAnswer(config=config, source=f"{endpoint.partition('://')[2]}, revision {revision or 'main'}{at}")


def _status(code: int, has_token: bool) -> str:
    if code in (401, 403):
        if has_token:
            return f"the hub refuses it (HTTP {code}): it does not exist, or HF_TOKEN has no access to it"
        return f"the hub refuses it (HTTP {code}): it does not exist, or it is gated: accept its terms and set HF_TOKEN"
    if code == 404:
        return "the hub has no such model or revision, or it has no config.json"
    return f"the hub answers HTTP {code}"


def _token() -> str | None:
    """The user's token, from the environment or from the file that `hf auth login` writes; never shown."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        value = os.environ.get(name, "").strip()
        if value:
            return value if value.isascii() and value.isprintable() else None
    if os.environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() in _TRUE:
        return None
    try:
        path = Path(os.environ.get("HF_TOKEN_PATH") or _home() / "token").expanduser()
        value = ""
        if path.is_file():
            with open_regular(path, trusted=True) as file:
                value = file.read(1000).decode("utf-8").strip()
    except (OSError, ValueError, RuntimeError, ConfigError):
        return None
    return value if value and value.isascii() and value.isprintable() else None
