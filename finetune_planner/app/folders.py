"""What is written into the folder that a person named with `--out`, again and again, without losing what the person
changed there."""

import errno
from collections.abc import Container, Mapping
from contextlib import suppress
from pathlib import Path

from finetune_planner.app.progress import say
from planner.core.errors import ConfigError, EnvironmentProblem
from planner.core.inputs import read_text
from planner.core.locks import folder_lock
from planner.core.outputs import sha256, write_whole

RECORD = ".written.sha256"
"""In the folder, as `sha256sum -c` reads it: what was written there last. A file that is otherwise is the person's."""
MAX_RECORD_BYTES = 10**6


def write_files(folder: Path, texts: Mapping[str, str], *, executable: Container[str] = ()) -> None:
    """Write files by their names below a folder; each is written beside and renamed. One that holds what was not
    written here is kept as NAME.orig, and said.

    Raises:
        EnvironmentProblem: the folder cannot be written.
    """
    with folder_lock(folder):
        written = _record(folder)
        try:
            for name, text in texts.items():
                content = encoded(text)
                may_run = name in executable
                ours = (written.get(name, ""),)
                kept = write_whole(folder / name, content, inside=folder, executable=may_run, replaceable=ours)
                if kept is not None:
                    say_kept(folder / name, kept)
                written[name] = sha256(content)
            lines = "".join(f"{digest}  {name}\n" for name, digest in written.items())
            write_whole(folder / RECORD, lines.encode(), inside=folder)
        except OSError as error:
            raise cannot_write(folder, error) from error


def encoded(text: str) -> bytes:
    """File names in a text that Python could not decode are written as the bytes they were."""
    return text.encode("utf-8", "surrogateescape")


def say_kept(path: Path, kept: Path) -> None:
    """What a person finds where."""
    say(f"kept as {kept}: {path} was not as a plan had written it, and is written anew")


FULL = (errno.ENOSPC, errno.EDQUOT)


def cannot_write(path: Path, error: OSError) -> EnvironmentProblem:
    """A full disk, a missing permission, a folder of that name."""
    return EnvironmentProblem(
        f"cannot write {error.filename or path}: {error.strerror or error}",
        hint="choose another --out directory" + (", or free some space" if error.errno in FULL else ""),
    )


def _record(folder: Path) -> dict[str, str]:
    """SHA-256 by name; empty where there is no record, or none of ours."""
    with suppress(ConfigError):
        lines = read_text(folder / RECORD, max_bytes=MAX_RECORD_BYTES, follow=False).splitlines()
        return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    return {}
