"""The interpreter: statements of a program, in the order in which it would run them.

Both sides of a branch whose condition is not known are read; a name that they leave different is `Unknown` afterwards.
A loop of unknown length is read once. Nothing is imported or executed; modules beside the program are read likewise.
"""

import ast
import posixpath
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any

from planner.core.errors import ConfigError
from planner.frameworks.readers import versions
from planner.frameworks.readers.program import loops, values
from planner.frameworks.readers.program.functions import Functions
from planner.frameworks.readers.program.reading import (
    LIBRARIES,
    MAX_LOOP,
    MAX_MODULES,
    MAX_SOURCE_BYTES,
    Break,
    ControlFlow,
    Loop,
    Program,
    Raise,
    Return,
    changes,
    file_of,
)
from planner.frameworks.readers.program.source import parsable, tree_of
from planner.frameworks.readers.program.values import (
    CallResult,
    Class,
    Constant,
    DictValue,
    Function,
    ImportedName,
    Instance,
    Scope,
    TooLong,
    Undecided,
    Unknown,
    Value,
    join_values,
    plain,
    same,
    size_budget,
    spend,
)
from planner.frameworks.readers.values import FileContext

MAX_FRAMES = 6000
"""Of ours, four for each `elif`: Python itself compiles some 2,000 in a row."""
BROUGHT = ("torch", "transformers", "yaml", "numpy", "tqdm", "packaging", "regex", "huggingface_hub", "accelerate")
"""What is there wherever transformers trains. Source: transformers 5.23's metadata."""


def _imports(scope: Scope | None, package: str) -> bool:
    """Whether the program has certainly imported from a package before."""
    while scope is not None:
        paths = (value.path for value in scope.names.values() if isinstance(value, ImportedName))
        if any(path.partition(".")[0] == package for path in paths):
            return True
        scope = scope.parent
    return False


def run(text: str, name: str, context: FileContext, label: Callable[[int], str] | None = None) -> Program:
    """Reads a program; `label` names a line of it ("cell 3, line 5") where line numbers are not the reader's.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: as `ast.parse`.
        ConfigError: more to follow than the budgets of steps, sizes and nesting allow.
    """
    tree = tree_of(text)
    usual = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(max(usual, MAX_FRAMES))
        with size_budget():
            return _read(tree, text, name, context, label)
    except (TooLong, RecursionError) as error:
        raise ConfigError(
            f"{name} computes more than is followed without running it", hint="plan trace runs it on a phantom GPU"
        ) from error
    finally:
        sys.setrecursionlimit(usual)


def _read(tree: ast.Module, text: str, name: str, context: FileContext, label: Callable[[int], str] | None) -> Program:
    reader = Reader(name, context, label)
    reader.program.differentiates += [name] if ".backward(" in text else []
    reader.whole(tree)
    if "store_true" in text and context.arguments is None and not reader.makes_trainer():
        retry = Reader(name, replace(context, open_switches=True), label)
        retry.whole(tree)
        if retry.makes_trainer():
            return retry.program
    reader.program.starts = reader.makes_trainer()
    with suppress(TooLong, ControlFlow):
        if context.uncalled:
            reader.uncalled(reader.program.module)
    return reader.program


class Reader(Functions):
    """Reads a whole program."""

    def whole(self, tree: ast.Module) -> None:
        """The main module, as far as it leads."""
        scope = self.program.module
        scope.file = self.name
        scope.names |= {"__name__": Constant("__main__"), "__file__": Constant(self.name)}
        with suppress(ControlFlow):
            self.block(tree.body, scope)

    def makes_trainer(self) -> bool:
        """Whether a trainer or its arguments were made so far."""
        made = self.program.calls
        trains = any(values.is_trainer(call) or values.holds_arguments(call) for call in made)
        return trains or any(context.loader is not None for _, context in self.program.steps.backwards.values())

    def block(self, body: Sequence[ast.stmt], scope: Scope) -> None:
        """Statements in order."""
        for statement in body:
            self.step()
            self.statement(statement, scope)

    def statement(self, node: ast.stmt, scope: Scope) -> None:
        match node:
            case ast.Expr():
                self.value(node.value, scope)
            case ast.Assign():
                value = self.value(node.value, scope)
                for target in node.targets:
                    self.assign(target, value, scope)
            case ast.AnnAssign(value=ast.expr()):
                assert node.value is not None
                self.assign(node.target, self.value(node.value, scope), scope)
            case ast.AugAssign():
                left = self.value(node.target, scope)
                made = values.binary(node.op, left, self.value(node.value, scope), self.place(node, scope))
                self.assign(node.target, made, scope)
            case ast.If():
                self.branch(node, scope)
            case ast.For() | ast.AsyncFor():
                self.loop(node, scope)
            case ast.While():
                self.once(node.body, scope)
            case ast.With() | ast.AsyncWith():
                self.within(node, scope)
            case ast.Try():
                self.attempt(node, scope)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                scope.names[node.name] = self.decorated(node, scope)
            case ast.ClassDef():
                scope.names[node.name] = self.class_of(node, scope)
            case ast.Import() | ast.ImportFrom():
                self.imported(node, scope)
            case ast.Return() | ast.Break() | ast.Continue() | ast.Raise():
                self.leave(node, scope)
            case ast.Match():
                self.match(node, scope)
            case ast.Delete():
                for target in node.targets:
                    gone = scope.names.pop(target.id, None) if isinstance(target, ast.Name) else None
                    if isinstance(gone, CallResult):
                        gone.called["del"] = gone

    def within(self, node: ast.With | ast.AsyncWith, scope: Scope) -> None:
        outer = self.turn
        for item in node.items:
            value = self.value(item.context_expr, scope)
            if (autocast := loops.autocast_of(value)) is not None:
                self.turn = replace(self.turn, autocast=autocast)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value, scope)
        try:
            self.block(node.body, scope)
        finally:
            self.turn = outer

    def leave(self, node: ast.Return | ast.Break | ast.Continue | ast.Raise, scope: Scope) -> None:
        """Out of the function, the loop or the program, as an exception that whoever runs it catches."""
        match node:
            case ast.Break():
                raise Break
            case ast.Continue():
                raise Loop
            case ast.Raise():
                ended = self.value(node.exc, scope) if node.exc is not None else None
                raise (Return if values.ends_well(ended) else Raise)(Constant(None))
        value = self.value(node.value, scope) if node.value is not None else Constant(None)
        if self.uncertain and self.maybe_returned:
            self.maybe_returned[-1].append(value)
        raise Return(value)

    def branch(self, node: ast.If, scope: Scope) -> None:
        truth = values.truth(self.value(node.test, scope))
        if truth is None:
            decides = self.turn.loader is None and changes([*node.body, *node.orelse])  # settings are made before it
            truth = self.decided(node.test, self.place(node, scope) if decides else "")
        if truth is not None:
            taken, other = (node.body, node.orelse) if truth else (node.orelse, node.body)
            branches = self.program.branches
            branches.update(dict.fromkeys(taken, True))
            for statement in other:
                branches.setdefault(statement, False)
            try:
                self.block(taken, scope)
            except Raise:
                branches.update(dict.fromkeys(other, True))
                self.block(other, scope)
            return
        place = f"{self.place(node, scope)}: depends on a condition"
        before = self.copied(scope.names)
        left_by: list[ControlFlow] = []
        ends: list[dict[str, Value]] = []
        outer = self.turn
        every: list[Value | None] = [self.value(divisor, scope) for divisor in loops.divisors(node.test)]
        every = every or [None]
        for body in (node.body, node.orelse):
            scope.names = self.copied(before)
            self.uncertain += 1
            self.turn = replace(outer, divisors=(*outer.divisors, *every))
            try:
                self.block(body, scope)
                ends.append(scope.names)
            except ControlFlow as leave:
                left_by.append(leave)
                if isinstance(leave, Loop) and self.maybe_left:
                    self.maybe_left[-1].append(scope.names)
            finally:
                self.uncertain -= 1
                self.turn = outer
        if not ends:  # both sides leave
            scope.names = before
            raise left_by[0]
        scope.names = ends[0] if len(ends) == 1 else _joined(ends[0], ends[1], place)

    def attempt(self, node: ast.Try, scope: Scope) -> None:
        """What a `try` does; where that is an import with another way without it, which holds is not known."""
        imports = [statement for statement in node.body if isinstance(statement, (ast.Import, ast.ImportFrom))]
        without = None
        for handler in reversed(node.handlers):  # the first that is for a package that is absent
            caught = {child.id for child in ast.walk(handler.type or handler) if isinstance(child, ast.Name)}
            if handler.type is None or caught & {"ImportError", "ModuleNotFoundError", "Exception"}:
                without = handler.body
        installed = None
        if imports and without is not None and changes([*node.body, *without]):
            place = self.place(node, scope)
            package = ast.unparse(imports[0]).split()[1].partition(".")[0]
            if _imports(scope, package):  # it is there, with the names of its version
                names = {alias.name for alias in imports[0].names}
                installed = package != "trl" or versions.has(names, self.outside.versions)
            elif package not in BROUGHT and package not in sys.stdlib_module_names:
                installed = self.decided(ast.Name(f"{package} is installed"), place)
        taken = without or [] if installed is False else [*node.body, *node.orelse]
        self.block([*taken, *node.finalbody], scope)

    def match(self, node: ast.Match, scope: Scope) -> None:
        """A `match`: the case of a known value, else each may run."""
        subject = plain(self.value(node.subject, scope))
        body: list[ast.stmt] = []
        for case in reversed(node.cases):  # as `if`, `elif`, `else`
            fits = _fits(case.pattern, subject) if case.guard is None else None
            if fits is None:
                condition = f"{ast.unparse(node.subject)} is {ast.unparse(case.pattern)}"
                test = ast.copy_location(ast.Name(condition, ast.Load()), node)
                body = [ast.copy_location(ast.If(test, case.body, body), node)]
            elif fits:
                body = case.body
        self.block(body, scope)

    def once(self, body: Sequence[ast.stmt], scope: Scope) -> None:
        """A body that may run any number of times."""
        for name in filter(scope.names.__contains__, _counters(body)):  # any value in it, not its first
            scope.names[name] = Unknown(f"{scope.file}: {name} changes in a loop")
        before = self.copied(scope.names)
        self.uncertain += 1
        self.maybe_left.append([])
        try:
            self.block(body, scope)
        except ControlFlow:
            pass
        finally:
            self.uncertain -= 1
            left = self.maybe_left.pop()
        for name, value in scope.names.items():
            if name in before and isinstance(value, Constant) and not same(before[name], value):
                scope.names[name] = Unknown(f"{scope.file}: {name} changes in a loop")
        self.left_by_iteration(left, scope, scope.file)

    def loop(self, node: ast.For | ast.AsyncFor, scope: Scope) -> None:
        over = self.value(node.iter, scope)
        items = values.items_of(over)
        if items is None or len(items) > MAX_LOOP:
            outer = self.turn
            if (loader := loops.loader_of(over)) is not None:
                self.turn = loops.LoopContext(loader, self.depth)
            self.assign(node.target, Unknown(f"{self.place(node, scope)}: a loop over what is not known"), scope)
            self.once(node.body, scope)
            self.turn = outer
            return
        before = self.copied(scope.names)
        self.maybe_left.append([])
        try:
            for item in items:
                self.assign(node.target, item, scope)
                try:
                    self.block(node.body, scope)
                except Break:
                    break
                except Loop:
                    continue
        finally:
            left = self.maybe_left.pop()
        self.left_by_iteration([before, *left] if left else [], scope, self.place(node, scope))

    def left_by_iteration(self, left: Sequence[dict[str, Value]], scope: Scope, place: str) -> None:
        """After a loop that may have been left earlier, with these names: what they make different is not known."""
        for names in left:
            for name, value in names.items():
                now = scope.names.get(name)
                if not same(now, value) and not isinstance(now, (Function, Class)):
                    scope.names[name] = Unknown(f"{place}: which turn of the loop sets {name}")

    def assign(self, target: ast.expr, value: Value, scope: Scope) -> None:
        match target:
            case ast.Name():
                scope.names[target.id] = value
                if isinstance(value, CallResult) and value.of is not None and self.turn.depth == self.depth:
                    value.attributes["kept"] = Constant(True)
                self.note_length(target.id, value)
            case ast.Tuple() | ast.List():
                parts = values.unpacked(value, len(target.elts))
                for element, part in zip(target.elts, parts, strict=True):
                    self.assign(element.value if isinstance(element, ast.Starred) else element, part, scope)
            case ast.Attribute():
                owner = self.value(target.value, scope)
                if isinstance(owner, (CallResult, Instance)):
                    self.store(owner.attributes, target.attr, value, self.place(target, scope))
            case ast.Subscript():
                owner, key = self.value(target.value, scope), plain(self.value(target.slice, scope))
                if isinstance(owner, DictValue) and isinstance(key, str):
                    self.store(owner.entries, key, value, self.place(target, scope))

    def store(self, entries: dict[str, Value], key: str, value: Value, place: str) -> None:
        """Sets an entry; under an unknown condition a different value makes it unknown."""
        if self.uncertain and not (key in entries and same(entries[key], value)):
            value = Undecided(f"{place}: {key} is set under a condition that is not known")
        entries[key] = value

    def imported(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                module_scope = self.module(alias.name.replace(".", "/"))
                name = alias.asname or top
                path = alias.name if alias.asname else top
                scope.names[name] = ImportedName(path) if module_scope is None else Instance(module_scope.names)
            return
        module = node.module or ""
        path = module.replace(".", "/")
        if node.level:
            above = [posixpath.dirname(file_of(scope)), *[".."] * (node.level - 1)]
            path = posixpath.normpath(posixpath.join(*above, path))
        module_scope = self.module(path) if path != "." else None
        for alias in node.names:
            if alias.name == "*":
                public = self.copied(module_scope.names) if module_scope is not None else {}
                scope.names |= {name: value for name, value in public.items() if not name.startswith("_")}
                continue
            value = module_scope.names.get(alias.name) if module_scope is not None else None
            if value is None:
                inner = self.module(posixpath.normpath(posixpath.join(path, alias.name)))
                value = Instance(inner.names) if inner is not None else ImportedName(f"{module}.{alias.name}")
            scope.names[alias.asname or alias.name] = value

    def module(self, name: str) -> Scope | None:
        """A module or package ("a/b") beside the program, read once; None where there is none."""
        if name not in self.modules:
            self.modules[name] = None
            path = f"{name}.py"
            enough = len(self.modules) > 400 or len(self.program.sources) >= MAX_MODULES
            enough = enough or self.source_bytes > MAX_SOURCE_BYTES or name.partition("/")[0] in LIBRARIES
            text = None if enough else self.outside.read_relative(path)
            if text is None and not enough:
                path = f"{name}/__init__.py"
                text = self.outside.read_exact(path)
            if text is not None:
                self.source_bytes += len(text)
                self.program.differentiates += [path] if ".backward(" in text else []
                scope = Scope({"__name__": Constant(name), "__file__": Constant(path)}, file=path)
                try:
                    self.block(tree_of(parsable(text)).body, scope)
                except ControlFlow:
                    pass  # it ends itself: what it set until then counts
                except (SyntaxError, ValueError, RecursionError, MemoryError):
                    return None
                self.program.sources.append(path)
                self.modules[name] = scope
        return self.modules[name]


def _fits(pattern: ast.pattern, subject: Any) -> bool | None:
    """Whether a known value has a pattern, None where that is not followed."""
    if isinstance(pattern, ast.MatchAs) and pattern.pattern is None and pattern.name is None:
        return True
    if isinstance(subject, Unknown):
        return None
    match pattern:
        case ast.MatchValue(value=ast.Constant(value=value)) | ast.MatchSingleton(value=value):
            return bool(subject == value)
        case ast.MatchOr():
            fits = [_fits(alternative, subject) for alternative in pattern.patterns]
            return True if True in fits else None if None in fits else False
    return None


def _joined(first: dict[str, Value], other: dict[str, Value], place: str) -> dict[str, Value]:
    merged: dict[str, Value] = {}
    spend(len(first) + len(other))
    for name in {**first, **other}:
        if name in first and name in other and not same(first[name], other[name]):
            kept = (end[name] for end in (first, other) if isinstance(end[name], (CallResult, Function, Class)))
            keep = next(kept, None)
            different = join_values(first[name], other[name], f"{place} ({name})")
            # one object or another of the same kind: which of them is used is not known
            made = [value.name for value in (first[name], other[name]) if isinstance(value, CallResult)]
            merged[name] = different if keep is None or (len(made) == 2 and made[0] == made[1]) else keep
        else:
            merged[name] = first[name] if name in first else other[name]
    return merged


def _counters(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Names that a body makes of themselves: `step += 1`, `step = step + 1`."""
    for node in chain.from_iterable(map(ast.walk, body)):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif (
            isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and isinstance(node.targets[0], ast.Name)
        ):
            name = node.targets[0].id
            if any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node.value)):
                yield name
