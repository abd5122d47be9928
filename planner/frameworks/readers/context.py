"""What is known from outside a file that is read: whose model it trains, how many GPUs, the files beside it."""

import os
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path

from planner.core.errors import ConfigError
from planner.core.records import dataclass
from planner.frameworks.readers.loading import read_bounded
from planner.frameworks.readers.program import ProgramContext
from planner.hardware.gpu import GpuSpec
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup


@dataclass(frozen=True, kw_only=True)
class FileContext:
    """What is known from outside the file.

    Attributes:
        model: that it trains, where it is at hand; base: the setup of what a launcher's file does not say.
        num_gpus: processes of the run; roots: where files that it names may lie.
        gpu: the card, for programs that ask it; None: one that computes in bf16.
        arguments: the words behind a program's name on its command line; None: nobody said.
        versions: package -> version that the run is said or pinned to use.
        depth: shell scripts that started one another on the way here.
        environment: variables that the launch sets.
        written: text of files that the checked one writes before it trains, by their paths.
        read: files beside it that were found so far.
    """

    model: ModelSpec | None = None
    base: TrainSetup | None = None
    num_gpus: int = 1
    roots: tuple[Path, ...] = field(default=())
    gpu: GpuSpec | None = None
    arguments: tuple[str, ...] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    depth: int = 0
    written: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    read: set[Path] = field(default_factory=set)

    @property
    def half(self) -> str:
        """The 16-bit type that a tool takes which asks the card: bf16 where its units compute it."""
        return "bf16" if self.gpu is None or self.gpu.bf16 else "fp16"

    def below(self, folder: str) -> "FileContext":
        """As this, from a folder that a script goes to first: those of it that lie within the folders known here."""
        tops = [root.absolute() for root in self.roots]
        parts = Path(folder).parts
        ends = [Path(*parts[start:]) for start in range(len(parts))]  # its beginning may be above what is here
        places = [Path(os.path.normpath(root / end)) for end in ends for root in tops]
        places = [place for place in places if place not in tops and place.is_dir()]
        inner = [place for place in places if any(place.is_relative_to(top) for top in tops)]
        return replace(self, roots=(*inner, *self.roots)) if inner else self

    def read_by_suffix(self, path: str) -> str | None:
        """As `read_relative`, by the end of the path where another machine, or only the shell, knows its beginning."""
        parts = path.split("/")
        if not path.startswith("/") and "$" not in path:
            return self.read_relative(path)
        ends = ("/".join(parts[start:]) for start in range(1, len(parts)))
        return next(
            (text for end in ends if end and "$" not in end and (text := self.read_relative(end)) is not None), None
        )

    def of_program(self) -> ProgramContext:
        """What a program that is read may learn from outside."""
        gpu = self.gpu
        return ProgramContext(
            arguments=self.arguments,
            environment={**self.environment, "WORLD_SIZE": str(self.num_gpus), "LOCAL_RANK": "0", "RANK": "0"},
            bf16=gpu.bf16 if gpu is not None else True,
            capability=(gpu.compute_capability if gpu is not None else None) or (8, 0),
            read=self.read_relative,
            read_exact=self.read_exact,
        )

    def read_exact(self, path: str) -> str | None:
        """As `read_relative`, by no other path than this."""
        return self.read_relative(path, exact=True)

    def read_relative(self, path: str, *, exact: bool = False) -> str | None:
        """The text of a file that lies beside the config by a relative path, None where there is none."""
        if (text := self.written.get(path, self.written.get(path.rpartition("/")[2]))) is not None:
            return text
        file = self.find(path, exact=exact)
        if file is None:
            return None
        try:
            return read_bounded(file)
        except ConfigError:
            return None

    def find(self, value: str, *, exact: bool = False) -> Path | None:
        """Where a file lies that is named by a relative path, None where there is none."""
        if not self.roots or Path(value).is_absolute() or value.startswith("~"):
            return None
        tops = [root.absolute() for root in self.roots]
        places = [Path(os.path.normpath(root / value)) for root in tops]
        candidates = [path for path in places if any(path.is_relative_to(top) for top in tops)]
        if value.endswith(".py"):  # packages may lie in `src`
            candidates += [root / "src" / value for root in tops]
        if ".." not in Path(value).parts and not exact:
            candidates += [root / Path(value).name for root in (*tops[:2], tops[-1])]
        file = next((path for path in candidates if path.is_file() and not path.is_symlink()), None)
        self.read.update([file] if file is not None else ())
        return file
