"""Golden files: the page as it was last looked at by a person."""

import os
from pathlib import Path

FOLDER = Path(__file__).parent


def assert_golden(name: str, text: str) -> None:
    """`text` equals the golden file; `UPDATE_GOLDEN=1` writes it instead; look at the difference before committing.

    Trailing spaces do not count: a table pads its last column.
    """
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    path = FOLDER / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text
