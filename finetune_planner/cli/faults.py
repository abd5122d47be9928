"""A fault of this program: a report in a private file, one line that says where it lies, an exit code of its own."""

import os
import platform
import re
import sys
import tempfile
import traceback
from collections.abc import Sequence

from finetune_planner.app.progress import printable
from planner.core.errors import EXIT_INTERNAL
from planner.core.redaction import LEFT_OUT, without_secrets, without_secrets_in_words
from planner.core.version import version_words

_BEHIND_A_KEY = re.compile(r"((?:token|password|secret|key)\w*[=:]\s*)\S+", re.IGNORECASE)
"""More than reports leave out: nobody reads a fault's figures."""


def fail_internal(error: BaseException, arguments: Sequence[str]) -> int:
    """Writes the report and tells where; returns the exit code."""
    text = report(error, arguments)
    kind = printable(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")[:300]
    print(f"internal error: {_without_secrets(kind)}", file=sys.stderr)
    try:
        descriptor, path = tempfile.mkstemp(prefix="finetune-planner-fault-", suffix=".txt")  # this user's alone
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        print(text, file=sys.stderr)
        path = "the text above"
    print(
        f"hint: this is a fault of finetune-planner, not of your input; please send {path} to its issue tracker "
        "(SECURITY.md says how to do so in private)",
        file=sys.stderr,
    )
    return EXIT_INTERNAL


def report(error: BaseException, arguments: Sequence[str]) -> str:
    """Version, machine, command and traceback; no environment variables, no passwords."""
    trace = "".join(traceback.format_exception(error))
    return _without_secrets(
        f"finetune-planner {version_words()}, Python {platform.python_version()}, {platform.platform()}\n"
        f"command: plan {' '.join(map(ascii, without_secrets_in_words(arguments)))}\n\n{trace}"
    )


def _without_secrets(text: str) -> str:
    return _BEHIND_A_KEY.sub(rf"\1{LEFT_OUT}", without_secrets(text))
