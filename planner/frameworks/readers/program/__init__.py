"""Training programs read without running them: a small abstract interpreter over Python's own syntax tree.

`run` follows what training scripts do with their settings (constants, dictionaries, functions, command-line defaults,
simple branches) up to the call that trains. What only running the program would tell is `Unknown`, with the reason.
"""

from planner.frameworks.readers.program.interpret import Reader, run
from planner.frameworks.readers.program.reading import Program, ProgramContext
from planner.frameworks.readers.program.values import (
    Argument,
    CallResult,
    Constant,
    Function,
    Undecided,
    Unknown,
    plain,
)

__all__ = [
    "Argument",
    "CallResult",
    "Constant",
    "Function",
    "Program",
    "ProgramContext",
    "Reader",
    "Undecided",
    "Unknown",
    "plain",
    "run",
]  # fmt: skip
