"""The defaults that other projects publish (`planner/data/published.yaml.txt`): an example of each with what it leaves
to the tool, read as any file is."""

import re

from planner.core.errors import UsageError
from planner.core.records import dataclass
from planner.core.shipped import DATA


@dataclass(frozen=True, kw_only=True)
class Published:
    """One project's published defaults.

    Attributes:
        title: for people; `file`: its name, by which its reader knows it.
        source: repository, commit and files.
    """

    title: str
    file: str
    source: str
    form: str

    def text(self, model: str, seq_len_tokens: int) -> str:
        """The file for a model and a length."""
        return self.form.format(model=model, seq_len=seq_len_tokens)


_ROW = re.compile(r"^#: (\S+)\n# (.+)\n# (.+)\n# (.+)\n((?:(?!#).*\n)+)", re.MULTILINE)
PUBLISHED = {
    name: Published(title=title, file=file, source=source, form=form)
    for name, title, file, source, form in _ROW.findall((DATA / "published.yaml.txt").read_text("utf-8"))
}
"""Name -> what a project publishes."""


def published(name: str) -> Published:
    """A project's published defaults.

    Raises:
        UsageError: a name that is not known.
    """
    if name not in PUBLISHED:
        raise UsageError(f"--defaults {name}: no such published defaults", hint=f"one of {', '.join(PUBLISHED)}")
    return PUBLISHED[name]
