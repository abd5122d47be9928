"""Runs a command for an agent, each in a child of its own, and keeps the whole answer behind a short one."""

import itertools
import json
import os
import subprocess
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path, user_data_path

from planner.core.children import ROOT, child_environment, python_argv
from planner.core.inputs import WITHIN, reason
from planner.core.install import DISTRIBUTION
from planner.core.redaction import without_secrets_in

MAX_ANSWER_BYTES = 2_000
MAX_KEPT = 64
"""Answers whose details can still be asked for."""
ANSWERED = (0, 1)
"""Exit codes of an answer: yes, and "nothing fits"."""
WITH_DRY_RUN = ("make", "estimate", "check")


class Desk:
    """Runs commands for an agent and keeps their whole answers.

    Attributes:
        roots: folders within which a path may lie.
        limit_s: seconds that one command may take.
        dry_run: whether answers go beyond the formula where torch is installed.
    """

    def __init__(self, roots: list[Path], limit_s: float, *, dry_run: bool = True) -> None:
        self.roots = [root.resolve() for root in roots]
        self.limit_s = limit_s
        self._level = [] if dry_run else ["--no-dry-run"]
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._numbers = itertools.count(1)

    def ask(self, *words: str, files: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The command's JSON, cut, with a handle to the whole; `files`: name -> text of those that lie where it runs.

        Raises:
            ToolError: the command refused, with its own words and hint.
        """
        level = self._level if words[0] in WITH_DRY_RUN else []
        text, code = self._run([words[0], "--json=full", *level, *words[1:]], files or {})
        try:
            document = json.loads(text)
        except ValueError:
            raise refusal(f"no answer (exit code {code})") from None
        handle = f"answer-{next(self._numbers)}"
        self._kept[handle] = document = without_secrets_in(document)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return {**_short(document), "details": handle}

    def say(self, *words: str) -> str:
        """A command's text."""
        return self._run(list(words), {})[0].strip()

    def details(self, handle: str, path: str = "") -> dict[str, Any]:
        """A part of a kept answer by its dotted path (`chosen.formula`, `alternatives.0`), cut likewise.

        Raises:
            ToolError: no such answer or part.
        """
        if handle not in self._kept:
            raise refusal(f"no answer {handle!r}: {', '.join(self._kept) or 'none was given yet'}")
        value = self._kept[handle]
        for name in [part for part in path.split(".") if part]:
            if isinstance(value, Mapping) and name in value:
                value = value[name]
            elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                names = list(value) if isinstance(value, Mapping) else []
                held = f"one of {', '.join(names)}" if names else f"0 to {len(value) - 1}" if value else "nothing below"
                raise refusal(f"no {name!r} there: {held}")
        return _short(value, whole=True)

    def path(self, text: str) -> str:
        """An absolute path, where it lies within the roots.

        Raises:
            ToolError: it does not.
        """
        found = (self.roots[0] / Path(text).expanduser()).resolve()
        if not any(found.is_relative_to(root) for root in self.roots):
            raise refusal(f"{text}: outside the folders that this server was started for (plan mcp --root DIR)")
        return str(found)

    def name(self, text: str) -> str:
        """A hub id or spoken name as it is, a path within the roots absolute.

        Raises:
            ToolError: a path outside, or a word that would be an option.
        """
        if text.startswith("-"):
            raise refusal(f"{text!r} is no name")
        here = text.startswith((".", "/", "~")) or (os.sep in text and (self.roots[0] / text).exists())
        return self.path(text) if here else text

    def _run(self, words: list[str], files: Mapping[str, str]) -> tuple[str, int]:
        with tempfile.TemporaryDirectory() as empty:
            for name, text in files.items():
                try:
                    Path(empty, name).write_text(text, encoding="utf-8")
                except (OSError, ValueError) as error:  # ValueError: half of a character
                    raise refusal(f"{name[:80]!r} cannot be a file with this text: {reason(error)}") from None
            code, said, errors = self._finished(words, empty)
        if code not in ANSWERED:
            raise refusal(self._private(errors.strip()[-1500:]))
        return self._private(said), code

    def _finished(self, words: list[str], empty: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a command in this folder."""
        try:
            done = subprocess.run(
                [*python_argv("-c", "from finetune_planner.cli import main; main()"), *words],
                cwd=empty,
                env=child_environment() | self._within(words[0], empty),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=self.limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise refusal(f"no answer within {self.limit_s:.0f} s (plan mcp --limit)") from None
        return done.returncode, done.stdout, done.stderr

    def _within(self, command: str, empty: str) -> dict[str, str]:
        """The variable that keeps a command to the roots, its own folder, and what this program keeps for itself.

        A traced program (`--allow-trace`) reads what it likes.
        """
        if command == "trace":
            return {}
        from finetune_planner.app.machine import STORE_VARIABLE  # not at the start, which an agent waits for
        from planner.models import hub
        from planner.speed.roofline.calibration import VARIABLE as CALIBRATION_VARIABLE

        own = [ROOT, hub.cache_directory(), user_cache_path(DISTRIBUTION), user_data_path(DISTRIBUTION)]
        named = (os.environ.get(name) for name in (STORE_VARIABLE, CALIBRATION_VARIABLE))
        places = [*self.roots, Path(empty), *own, *(Path(one) for one in named if one)]
        return {WITHIN: json.dumps([os.path.realpath(place) for place in places])}

    def _private(self, text: str) -> str:
        """Without the home folder's name and secrets."""
        home, said = str(Path.home()), str(without_secrets_in(text))
        return said.replace(home, "~") if len(home) > 1 else said


def refusal(words: str) -> Exception:
    from mcp.server.mcpserver.exceptions import ToolError

    return ToolError(words)


def _short(document: Any, *, whole: bool = False) -> dict[str, Any]:
    """A document within MAX_ANSWER_BYTES, as an object; `whole`: also the parts that a brief answer never has."""
    from reports.brief_json import brief

    short = brief(document, max_bytes=MAX_ANSWER_BYTES, heavy=whole)
    return short if isinstance(short, dict) else {"value": short}
