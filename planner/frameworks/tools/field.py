"""`Field`: one setting of a tool's file and the field of a setup that it says. `Tool`: all of them."""

from collections.abc import Callable, Mapping
from typing import Any, final

from planner.core.errors import ConfigError
from planner.core.records import dataclass
from planner.setup import TrainSetup

Edit = Callable[[str, TrainSetup, TrainSetup], Mapping[str, Any]]
"""(the field's key in the file, the setup that it says, the one that it shall say) -> settings to write."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One setting of a tool.

    Attributes:
        of: the field of `TrainSetup` that it says, or "model".
        key: its name today; a dot stands between a block and a setting in it.
        older: other names of it, in files of other versions.
        more: settings that say the field together with it.
        default: what the tool takes where the file says nothing; None where that hangs on more than this setting.
        words: the setup's value -> the file's; None: the same.
        fix: whether `--fix` may write it, or the only key in a file under which it may; `edit`: what it writes, where
            that is more than the value.
        fixes: the only values that `--fix` can say with it; (): all.
        runs: the only values that the tool can run; (): all.
    """

    of: str
    key: str
    older: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    default: Any = None
    words: Mapping[Any, Any] | None = None
    fix: bool | str = True
    edit: Edit | None = None
    fixes: tuple[Any, ...] = ()
    runs: tuple[Any, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that stands for it, without its block."""
        return tuple(name.rpartition(".")[2] for name in (self.key, *self.older, *self.more))

    def fixable(self, key: str) -> bool:
        """Whether `--fix` may write it where it is `key` in the file."""
        return self.fix if isinstance(self.fix, bool) else self.fix == key

    def spelled(self, value: Any) -> Any:
        """The setup's value as the file says it."""
        return value if self.words is None else self.words[value]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """One tool's files.

    Attributes:
        name: of the format; title: for people.
        fields: its settings.
        fixed: fields of a setup that its files cannot say: the tool runs them one way alone.
    """

    name: str
    title: str
    fields: tuple[Field, ...]
    fixed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len({field.of for field in self.fields}) != len(self.fields):
            raise AssertionError(f"{self.name}: two rows say one field")

    @property
    def names(self) -> tuple[str, ...]:
        """Every name of every setting, without blocks."""
        return tuple(name for field in self.fields for name in field.names)

    def field(self, of: str) -> Field | None:
        """The setting that says a field of the setup, None where none does."""
        return next((field for field in self.fields if field.of == of), None)

    def setting(self, setup: TrainSetup, of: str) -> tuple[str, Any]:
        """(name, value) that says a field of a setup in the file."""
        field = self.field(of)
        assert field is not None, (self.name, of)
        return field.key.rpartition(".")[2], field.spelled(getattr(setup, of))

    def runs(self, before: TrainSetup, after: TrainSetup) -> bool:
        """Whether the tool can run a changed setup."""
        for of in changed_fields(before, after):
            field = self.field(of)
            if of in self.fixed or (field is not None and field.runs and getattr(after, of) not in field.runs):
                return False
        return True

    def fixes(self, keys: Mapping[str, str], before: TrainSetup, after: TrainSetup) -> bool:
        """Whether `--fix` can write a changed setup into a file that says the first; `keys`: as `edits` has them."""
        for of in _written_fields(before, after):
            field = self.field(of)
            fixable = field is not None and field.fixable(keys.get(of, field.key))
            if field is None or not fixable or (field.fixes and getattr(after, of) not in field.fixes):
                return False
        return self.runs(before, after)

    def edits(self, keys: Mapping[str, str], before: TrainSetup, after: TrainSetup, file: str) -> dict[str, Any]:
        """Settings to write (nested ones dotted), so that the file says the second setup.

        Args:
            keys: field -> its key in this file, where it is not today's.

        Raises:
            ConfigError: a field that cannot be changed in place.
        """
        edits: dict[str, Any] = {}
        for of in _written_fields(before, after):
            field = self.field(of)
            if field is None or not field.fixable(keys.get(of, field.key)):
                raise ConfigError(
                    f"{file}: {of} cannot be changed in a {self.name} file",
                    hint="make the changes that plan check lists by hand",
                )
            key = keys.get(of, field.key)
            edits |= field.edit(key, before, after) if field.edit else {key: field.spelled(getattr(after, of))}
        return edits


def _written_fields(before: TrainSetup, after: TrainSetup) -> tuple[str, ...]:
    """The changed fields that a file has to say: others follow from them, as checkpointing that is switched on or off
    has its version's own form."""
    switched = bool(before.checkpointing) != bool(after.checkpointing)
    follow = ("adapter_dtype", *["reentrant_checkpointing"] * switched)
    return tuple(name for name in changed_fields(before, after) if name not in follow)


def changed_fields(before: TrainSetup, after: TrainSetup) -> tuple[str, ...]:
    """Names of the fields in which two setups differ."""
    return tuple(name for name in TrainSetup.__dataclass_fields__ if getattr(before, name) != getattr(after, name))
