"""The interpreter: statements and expressions of a program, in the order in which it would run them.

Both sides of a branch whose condition is not known are read; a name that they leave different is `Unknown` afterwards.
A loop of unknown length is read once. Nothing is imported or executed; modules beside the program are read likewise.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from planner.readers.program import files, library, objects, options
from planner.readers.program.operators import binary, compare, unary
from planner.readers.program.source import parsable
from planner.readers.program.values import (
    Class,
    Dotted,
    Function,
    Instance,
    Items,
    Known,
    Made,
    Scope,
    Table,
    Unknown,
    Value,
    either,
    plain,
    same,
)

MAX_STEPS = 200_000
MAX_DEPTH = 24
MAX_LOOP = 64
MAX_MODULES = 40
MAX_SOURCE_BYTES = 600_000
"""Of modules beside the program: what lies behind is taken for foreign code."""
LENGTH_NAMES = frozenset({
    "max_length", "max_seq_length", "max_seq_len", "max_len", "seq_len", "seq_length", "sequence_length", "cutoff_len",
    "block_size", "context_length", "model_max_length", "max_token_length", "max_tokens_length",
})  # fmt: skip
"""Names (in lower case) under which programs keep the length to which they cut sequences."""
PARTS_OF_LENGTH = (
    ("source_max_len", "target_max_len"),
    ("max_input_length", "max_output_length"),
    ("max_source_length", "max_target_length"),
)
"""Two lengths that one sequence is put together from."""
CUT_NAMES = ("input_ids", "ids", "labels", "attention_mask", "tokens")
NOT_DATA = ("generat", "predict", "infer", "eval", "chat", "test", "sample", "plot", "print")
"""Parts of the names of functions whose lengths are not the training data's."""


@dataclass(frozen=True, kw_only=True)
class Outside:
    """What is known from outside the program.

    Attributes:
        arguments: the words after the program's name on its command line; None: nobody said.
        environment: variables that the launcher sets.
        open_switches: whether flags that nobody gave are not known (else they are off).
        bf16: whether the card computes in bf16; capability: its compute capability.
        read: the text of a file named by the program (relative to it), None where it may not or cannot be read;
            exactly: by no other path than that.
    """

    arguments: Sequence[str] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    open_switches: bool = False
    bf16: bool = True
    capability: tuple[int, int] = (8, 0)
    read: Callable[[str], str | None] = field(default=lambda _: None)
    exactly: Callable[[str], str | None] = field(default=lambda _: None)


@dataclass(slots=True)
class Program:
    """What was found while reading.

    Attributes:
        trained: objects whose `train` was called, in order, and whether only under an unknown condition.
        made: every call of foreign code, in order.
        module: the names of the main module at the end.
        sources: files read beside the program.
        do_train_decides: whether it trains only where its command line, which was said, asks for it.
        cuts: lengths to which lists of tokens are cut by slices; lengths: values of names that say a length.
    """

    trained: list[tuple[Made, bool]] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    module: Scope = field(default_factory=Scope)
    sources: list[str] = field(default_factory=list)
    do_train_decides: bool = False
    cuts: list[Known] = field(default_factory=list)
    lengths: list[Known] = field(default_factory=list)


class _Leave(Exception):
    """A return, break or continue on the way that is certainly taken."""

    def __init__(self, value: Value | None = None) -> None:
        self.value = value


class _Return(_Leave):
    """Leaves the function."""


class _Raise(_Return):
    """Ends in an error: a way that a program which runs does not take."""


class _Loop(_Leave):
    """Leaves this turn of the loop."""


class _Break(_Loop):
    """Leaves the loop."""


class _TooLong(Exception):
    """The budget of steps is spent."""


def run(text: str, name: str, outside: Outside, label: Callable[[int], str] | None = None) -> Program:
    """Reads a program; `label` names a line of it ("cell 3, line 5") where line numbers are not the reader's.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: as `ast.parse`.
    """
    tree = ast.parse(text)
    reader = Reader(name, outside, label)
    reader.whole(tree)
    if "store_true" in text and outside.arguments is None and not reader.makes_trainer():
        again = Reader(name, replace(outside, open_switches=True), label)
        again.whole(tree)
        if again.makes_trainer():
            return again.program
    with suppress(_TooLong, _Leave):
        reader.uncalled(reader.program.module)
    return reader.program


class Reader:
    """One reading of one program."""

    def __init__(self, name: str, outside: Outside, label: Callable[[int], str] | None = None) -> None:
        self.outside = outside
        self.name, self.label = name, label
        self.program = Program()
        self.modules: dict[str, Scope | None] = {}
        self.steps = 0
        self.source_bytes = 0
        self.depth = 0
        self.uncertain = 0
        self.running: list[Any] = []
        self.entered: set[int] = set()
        self.maybe_returned: list[list[Value]] = []
        self.maybe_left: list[bool] = []

    def whole(self, tree: ast.Module) -> None:
        """The main module, as far as it can be read."""
        scope = self.program.module
        scope.file = self.name
        scope.names["__name__"] = Known("__main__")
        with suppress(_TooLong, _Leave):
            self.block(tree.body, scope)

    def makes_trainer(self) -> bool:
        """Whether a trainer or its arguments were made so far."""
        return any(objects.is_trainer(made) or objects.holds_arguments(made) for made in self.program.made)

    # statements

    def block(self, body: Sequence[ast.stmt], scope: Scope) -> None:
        """Statements in order."""
        for statement in body:
            self.steps += 1
            if self.steps > MAX_STEPS:
                raise _TooLong
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
                value = binary(node.op, left, self.value(node.value, scope), self.place(node, scope))
                self.assign(node.target, value, scope)
            case ast.If():
                self.branch(node, scope)
            case ast.For() | ast.AsyncFor():
                self.loop(node, scope)
            case ast.While():
                self.once(node.body, scope)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    value = self.value(item.context_expr, scope)
                    if item.optional_vars is not None:
                        self.assign(item.optional_vars, value, scope)
                self.block(node.body, scope)
            case ast.Try():
                self.block([*node.body, *node.orelse, *node.finalbody], scope)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                scope.names[node.name] = self.decorated(node, scope)
            case ast.ClassDef():
                scope.names[node.name] = self.class_of(node, scope)
            case ast.Import() | ast.ImportFrom():
                self.imported(node, scope)
            case ast.Return():
                value = self.value(node.value, scope) if node.value is not None else Known(None)
                if self.uncertain and self.maybe_returned:
                    self.maybe_returned[-1].append(value)
                raise _Return(value)
            case ast.Break():
                raise _Break
            case ast.Continue():
                raise _Loop
            case ast.Raise():
                raise _Raise(Known(None))
            case ast.Match():
                for case in node.cases:
                    self.once(case.body, scope)
            case ast.Delete():
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        scope.names.pop(target.id, None)

    def branch(self, node: ast.If, scope: Scope) -> None:
        truth = objects.truth(self.value(node.test, scope))
        if truth is not None:
            try:
                self.block(node.body if truth else node.orelse, scope)
            except _Raise:
                self.block(node.orelse if truth else node.body, scope)
            return
        place = f"{self.place(node, scope)}: depends on a condition"
        before = dict(scope.names)
        left_by: list[_Leave] = []
        ends: list[dict[str, Value]] = []
        for body in (node.body, node.orelse):
            scope.names = dict(before)
            self.uncertain += 1
            try:
                self.block(body, scope)
                ends.append(scope.names)
            except _Leave as leave:
                left_by.append(leave)
                if isinstance(leave, _Loop) and self.maybe_left:
                    self.maybe_left[-1] = True
            finally:
                self.uncertain -= 1
        if not ends:  # both sides leave
            scope.names = before
            raise left_by[0]
        scope.names = ends[0] if len(ends) == 1 else _joined(ends[0], ends[1], place)

    def once(self, body: Sequence[ast.stmt], scope: Scope) -> None:
        """A body that may run any number of times."""
        before = dict(scope.names)
        self.uncertain += 1
        try:
            self.block(body, scope)
        except _Leave:
            pass
        finally:
            self.uncertain -= 1
        for name, value in scope.names.items():
            if name in before and isinstance(value, Known) and not same(before[name], value):
                scope.names[name] = Unknown(f"{scope.file}: {name} changes in a loop")

    def loop(self, node: ast.For | ast.AsyncFor, scope: Scope) -> None:
        over = self.value(node.iter, scope)
        items = objects.items_of(over)
        if items is None or len(items) > MAX_LOOP:
            self.assign(node.target, Unknown(f"{self.place(node, scope)}: a loop over what is not known"), scope)
            self.once(node.body, scope)
            return
        before = dict(scope.names)
        self.maybe_left.append(False)
        try:
            for item in items:
                self.assign(node.target, item, scope)
                try:
                    self.block(node.body, scope)
                except _Break:
                    break
                except _Loop:
                    continue
        finally:
            skipped = self.maybe_left.pop()
        for name, value in scope.names.items() if skipped else ():
            if not same(before.get(name), value) and not isinstance(value, (Function, Class)):
                scope.names[name] = Unknown(f"{self.place(node, scope)}: which turn of the loop sets {name}")

    def assign(self, target: ast.expr, value: Value, scope: Scope) -> None:
        match target:
            case ast.Name():
                scope.names[target.id] = value
                self.note_length(target.id, value)
            case ast.Tuple() | ast.List():
                parts = objects.unpacked(value, len(target.elts))
                for one, part in zip(target.elts, parts, strict=True):
                    self.assign(one.value if isinstance(one, ast.Starred) else one, part, scope)
            case ast.Attribute():
                owner = self.value(target.value, scope)
                if isinstance(owner, (Made, Instance)):
                    self.store(owner.attributes, target.attr, value, self.place(target, scope))
            case ast.Subscript():
                owner, key = self.value(target.value, scope), plain(self.value(target.slice, scope))
                if isinstance(owner, Table) and isinstance(key, str):
                    self.store(owner.entries, key, value, self.place(target, scope))

    def note_length(self, name: str, value: Value, called: str = "") -> None:
        """Remembers what a name for a length stands for; `called` is the function that it is handed to."""
        if name.lower() not in LENGTH_NAMES or not isinstance(value, Known) or type(value.data) is not int:
            return
        running = [node.name for node in self.running if isinstance(node, ast.FunctionDef)]
        inside = [name.lower() for name in (*running, called)]
        if value.data >= 16 and not any(part in name for name in inside for part in NOT_DATA):
            self.program.lengths.append(value)

    def store(self, entries: dict[str, Value], key: str, value: Value, place: str) -> None:
        """Sets an entry; under an unknown condition a different value makes it unknown."""
        if self.uncertain and not (key in entries and same(entries[key], value)):
            value = Unknown(f"{place}: {key} is set under a condition that is not known")
        entries[key] = value

    def imported(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                found = self.module(alias.name)
                name = alias.asname or top
                path = alias.name if alias.asname else top
                scope.names[name] = Dotted(path) if found is None else Instance(found.names)
            return
        module = node.module or ""
        found = self.module(module) if module else None
        for alias in node.names:
            if alias.name == "*":
                scope.names |= found.names if found is not None else {}
                continue
            value = found.names.get(alias.name) if found is not None else None
            if value is None:
                inner = self.module(f"{module}.{alias.name}".strip(".")) if node.level or found is None else None
                value = Instance(inner.names) if inner is not None else Dotted(f"{module}.{alias.name}")
            scope.names[alias.asname or alias.name] = value

    def module(self, name: str) -> Scope | None:
        """A module beside the program, read once; None where there is none."""
        if name not in self.modules:
            self.modules[name] = None
            path = name.replace(".", "/") + ".py"
            enough = len(self.modules) > 400 or len(self.program.sources) >= MAX_MODULES
            text = None if enough or self.source_bytes > MAX_SOURCE_BYTES else self.outside.read(path)
            if text is not None:
                self.source_bytes += len(text)
                scope = Scope({"__name__": Known(name)}, file=path)
                try:
                    self.block(ast.parse(parsable(text)).body, scope)
                except _Leave:
                    pass  # it ends itself: what it set until then counts
                except (SyntaxError, ValueError, RecursionError, MemoryError):
                    return None
                self.program.sources.append(path)
                self.modules[name] = scope
        return self.modules[name]

    # functions and classes

    def decorated(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> Function:
        function = Function(node, scope)
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call):
                made = self.value(decorator, scope)
                if isinstance(made, Made) and made.name in ("option", "argument"):
                    option = options.Option.of(made)
                    function.options[option.name] = option.value(self.outside)
                if isinstance(made, Made) and (made.owner, made.name) == ("hydra", "main") and node.args.args:
                    function.options[node.args.args[0].arg] = files.hydra_settings(self, made)
        return function

    def class_of(self, node: ast.ClassDef, scope: Scope) -> Class:
        inner = Scope(parent=scope, file=scope.file)
        made = Class(node.name, inner.names, where=self.place(node, scope))
        fields: list[str] = []
        for base in node.bases:
            parent = self.value(base, scope)
            if isinstance(parent, Class):
                inner.names |= parent.attributes
                fields += parent.fields
                made.base = made.base or parent.base
            elif isinstance(parent, Dotted):
                made.base = made.base or parent.path
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                fields.append(statement.target.id)
                if statement.value is None:
                    inner.names[statement.target.id] = Unknown(
                        f"{self.place(statement, scope)}: {statement.target.id} has no default"
                    )
            self.statement(statement, inner)
        made.fields = tuple(dict.fromkeys(fields))
        for name, value in inner.names.items():
            inner.names[name] = options.field_default(self, value)
        return made

    def instance(self, made_by: Class, call: Made) -> Value:
        """An object of a class of the program; one that extends foreign code is a call of that with its defaults."""
        if made_by.base and objects.is_followed(made_by.base):
            defaults = {name: made_by.attributes[name] for name in made_by.fields if name in made_by.attributes}
            call.name, call.owner = made_by.base.rpartition(".")[2], made_by.name
            call.keywords = {**defaults, **call.keywords}
            self.program.made.append(call)
            return call
        found = Instance(dict(made_by.attributes), made_by)
        for name, value in zip(made_by.fields, call.positional, strict=False):
            found.attributes[name] = value
        init = made_by.attributes.get("__init__")
        outer, self.uncertain = self.uncertain, 0  # a new object: what its own code sets on it, it has
        if isinstance(init, Function):
            self.called(Function(init.node, init.scope, found), call)
        else:
            found.attributes |= call.keywords
            found.more = call.more
            after = made_by.attributes.get("__post_init__")
            if isinstance(after, Function):
                self.called(Function(after.node, after.scope, found), Made("", where=call.where))
        self.uncertain = outer
        return found

    def called(self, function: Function, call: Made) -> Value:
        """What a function of the program returns for these arguments."""
        node = function.node
        if self.depth >= MAX_DEPTH or node in self.running:
            return Unknown(f"{call.where}: calls nested too deep")
        self.entered.add(id(node))
        scope = Scope(parent=function.scope, file=_file(function.scope))
        self.bind(function, call, scope)
        if isinstance(node, ast.Lambda):
            return self.value(node.body, scope)
        self.depth += 1
        self.running.append(node)
        self.maybe_returned.append([])
        result: Value = Known(None)
        outer = self.uncertain
        try:
            self.block(node.body, scope)
        except _Return as leave:
            result = leave.value if leave.value is not None else Known(None)
        except _Loop:
            pass
        finally:
            self.uncertain = outer
            self.depth -= 1
            self.running.pop()
        others = self.maybe_returned.pop()
        if plain(result) is not result and isinstance(plain(result), Unknown) and _walks_modules(node):
            return Known("all-linear", f"{call.where}, {node.name}()")
        if isinstance(result, Unknown) and _walks_modules(node):
            return Known("all-linear", f"{call.where}, {node.name}()")
        if any(not same(result, other) for other in others):
            made = next((one for one in (result, *others) if isinstance(one, (Made, Instance, Items))), None)
            return made if made is not None else Unknown(f"{call.where}: depends on a condition inside the function")
        return result

    def bind(self, function: Function, call: Made, scope: Scope) -> None:
        arguments = function.node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        given = list(call.positional)
        if function.bound is not None:
            given.insert(0, function.bound)
        defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
        pairs = [
            *zip(positional, defaults, strict=True),
            *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
        ]
        keywords = dict(call.keywords)
        for index, (argument, default) in enumerate(pairs):
            name = argument.arg
            if index < len(given) and index < len(positional):
                value = given[index]
            elif name in keywords:
                value = keywords.pop(name)
            elif name in function.options:
                value = function.options[name]
            elif default is not None:
                value = options.option_default(self, name, self.value(default, function.scope))
            else:
                value = Unknown(f"{call.where or _file(function.scope)}: the argument {name} is not known")
            scope.names[name] = value
            self.note_length(name, value, getattr(function.node, "name", ""))
        if arguments.vararg is not None:
            scope.names[arguments.vararg.arg] = Items(given[len(positional) :])
        if arguments.kwarg is not None:
            scope.names[arguments.kwarg.arg] = Table(keywords, more=call.more)

    def uncalled(self, scope: Scope) -> None:
        """Functions that nothing calls, where the program trains nothing otherwise: a script may be all functions."""
        if any(objects.is_trainer(made) for made in self.program.made):
            return
        for value in list(scope.names.values()):
            methods = value.attributes.values() if isinstance(value, Class) else ()
            for one in (value, *methods):
                if isinstance(one, Function) and id(one.node) not in self.entered:
                    bound = Instance(dict(value.attributes), value) if isinstance(value, Class) else None
                    self.called(Function(one.node, one.scope, bound, one.options), Made("", where=scope.file))

    # expressions

    def place(self, node: ast.AST, scope: Scope) -> str:
        """ "file:line" of a node."""
        file, line = _file(scope), getattr(node, "lineno", 0)
        return f"{file}:{line}" if self.label is None or file != self.name else f"{file}:{self.label(line)}"

    def value(self, node: ast.expr, scope: Scope) -> Value:
        """The value of an expression."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise _TooLong
        match node:
            case ast.Constant():
                return Known(node.value, self.place(node, scope))
            case ast.Name():
                return scope.find(node.id) or Dotted(node.id)
            case ast.Attribute():
                return library.attribute(self, self.value(node.value, scope), node.attr, self.place(node, scope))
            case ast.Call():
                return self.call(node, scope)
            case ast.Dict():
                return self.table(node, scope)
            case ast.List() | ast.Tuple() | ast.Set():
                return self.items(node.elts, scope, self.place(node, scope))
            case ast.JoinedStr():
                return objects.formatted([self.value(part, scope) for part in node.values], self.place(node, scope))
            case ast.FormattedValue():
                spec = self.value(node.format_spec, scope) if node.format_spec is not None else Known("")
                return objects.in_format(self.value(node.value, scope), spec, self.place(node, scope))
            case ast.BinOp():
                left, right = self.value(node.left, scope), self.value(node.right, scope)
                return binary(node.op, left, right, self.place(node, scope))
            case ast.UnaryOp():
                return unary(node.op, self.value(node.operand, scope), self.place(node, scope))
            case ast.BoolOp():
                return self.boolean(node, scope)
            case ast.Compare():
                return self.comparison(node, scope)
            case ast.IfExp():
                truth = objects.truth(self.value(node.test, scope))
                if truth is not None:
                    return self.value(node.body if truth else node.orelse, scope)
                one, other = self.value(node.body, scope), self.value(node.orelse, scope)
                return either(one, other, f"{self.place(node, scope)}: depends on a condition")
            case ast.Subscript():
                key = self.value(node.slice, scope) if not isinstance(node.slice, ast.Slice) else Unknown("a slice")
                if isinstance(node.slice, ast.Slice):
                    self.cut(node.value, node.slice, scope)
                return objects.element(self.value(node.value, scope), key, self.place(node, scope))
            case ast.Lambda():
                return Function(node, scope)
            case ast.NamedExpr():
                value = self.value(node.value, scope)
                self.assign(node.target, value, scope)
                return value
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                return self.comprehension(node, scope)
            case ast.Await() | ast.Starred():
                return self.value(node.value, scope)
        return Unknown(f"{self.place(node, scope)}: computed while the program runs")

    def cut(self, node: ast.expr, by: ast.Slice, scope: Scope) -> None:
        """Remembers the length to which a list of tokens is cut."""
        name = _last(node) or (
            node.slice.value if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) else ""
        )
        upper = self.value(by.upper, scope) if by.upper is not None and by.lower is None else None
        if isinstance(upper, Known) and type(upper.data) is int and upper.data >= 16 and str(name).endswith(CUT_NAMES):
            self.program.cuts.append(upper)

    def table(self, node: ast.Dict, scope: Scope) -> Table:
        found = Table({}, self.place(node, scope))
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                inner = objects.as_table(self.value(value, scope))
                if inner is None:
                    found.more = f"{self.place(value, scope)}: ** of what is not known"
                else:
                    found.entries |= inner.entries
                    found.more = found.more or inner.more
                continue
            name = plain(self.value(key, scope))
            if isinstance(name, str):
                found.entries[name] = self.value(value, scope)
            else:
                self.value(value, scope)
        return found

    def items(self, nodes: Sequence[ast.expr], scope: Scope, place: str) -> Value:
        found: list[Value] = []
        for node in nodes:
            value = self.value(node, scope)
            if isinstance(node, ast.Starred):
                inner = objects.items_of(value)
                if inner is None:
                    return Unknown(f"{place}: * of what is not known")
                found += inner
            else:
                found.append(value)
        return Items(found, place)

    def boolean(self, node: ast.BoolOp, scope: Scope) -> Value:
        stops_at = isinstance(node.op, ast.Or)
        value: Value = Known(None)
        unknown: Value | None = None
        for part in node.values:
            value = self.value(part, scope)
            truth = objects.truth(value)
            if truth is None:
                unknown = unknown or Unknown(f"{self.place(node, scope)}: depends on a condition")
            elif truth == stops_at:
                return (
                    value if unknown is None or (isinstance(value, Known) and isinstance(value.data, bool)) else unknown
                )
        return unknown if unknown is not None else value

    def comparison(self, node: ast.Compare, scope: Scope) -> Value:
        left = self.value(node.left, scope)
        result: Value = Known(True)
        for op, right_node in zip(node.ops, node.comparators, strict=True):
            right = self.value(right_node, scope)
            result = compare(op, left, right, self.place(node, scope))
            if objects.truth(result) is not True:
                return result
            left = right
        return result

    def comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp, scope: Scope) -> Value:
        generator = node.generators[0]
        over = objects.items_of(self.value(generator.iter, scope))
        if over is None or len(node.generators) > 1 or len(over) > MAX_LOOP:
            return Unknown(f"{self.place(node, scope)}: a list over what is not known")
        inner = Scope(parent=scope, file=_file(scope))
        found: list[Value] = []
        for item in over:
            self.assign(generator.target, item, inner)
            tests = [objects.truth(self.value(test, inner)) for test in generator.ifs]
            if None in tests:
                return Unknown(f"{self.place(node, scope)}: a list with conditions that are not known")
            if all(tests):
                found.append(self.value(node.elt, inner))
        return Items(found, self.place(node, scope))

    def note_lengths(self, callee: Value, call: Made) -> None:
        """Remembers lengths handed to the program's own code and to data sets."""
        if isinstance(callee, (Function, Class)) or call.name.endswith(("Dataset", "Collator")):
            for name, value in call.keywords.items():
                self.note_length(name, value, call.name)
        for one, other in PARTS_OF_LENGTH:
            parts = (plain(call.keywords.get(one)), plain(call.keywords.get(other)))
            if all(type(part) is int for part in parts):
                self.program.cuts.append(Known(sum(parts), f"{call.where}, {one} + {other}"))

    def call(self, node: ast.Call, scope: Scope) -> Value:
        callee = self.value(node.func, scope)
        call = Made(_last(node.func), where=self.place(node, scope))
        for one in node.args:
            value = self.value(one, scope)
            if isinstance(one, ast.Starred):
                call.positional += objects.items_of(value) or [Unknown(f"{call.where}: * of what is not known")]
            else:
                call.positional.append(value)
        for keyword in node.keywords:
            value = self.value(keyword.value, scope)
            if keyword.arg is not None:
                call.keywords[keyword.arg] = value
                continue
            inner = objects.as_table(value)
            if inner is None:
                call.more = f"{call.where}: ** of what is not known"
            else:
                call.keywords |= inner.entries
                call.more = call.more or inner.more
        self.note_lengths(callee, call)
        if isinstance(callee, Function):
            return self.called(callee, call)
        if isinstance(callee, Class):
            return self.instance(callee, call)
        return library.call(self, callee, call)


def _walks_modules(node: ast.AST) -> bool:
    """Whether a function collects names of a model's modules (every linear layer's, in the programs that do it)."""
    named = isinstance(node, ast.FunctionDef) and any(
        part in node.name.lower() for part in ("linear", "target", "module", "lora")
    )
    return named and any(isinstance(one, ast.Attribute) and one.attr == "named_modules" for one in ast.walk(node))


def _joined(one: dict[str, Value], other: dict[str, Value], place: str) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for name in {**one, **other}:
        if name in one and name in other and not same(one[name], other[name]):
            keep = next((end[name] for end in (one, other) if isinstance(end[name], (Made, Function, Class))), None)
            different = either(one[name], other[name], f"{place} ({name})")
            # one object or another of the same kind: what was made last stands for both, its settings are compared
            found[name] = different if keep is None or _kinds(one[name], other[name]) else keep
        else:
            found[name] = one[name] if name in one else other[name]
    return found


def _kinds(one: Value, other: Value) -> bool:
    """Whether two objects were made by different calls of one name: which of them is used is not known."""
    return isinstance(one, Made) and isinstance(other, Made) and one.name == other.name


def _file(scope: Scope | None) -> str:
    while scope is not None:
        if scope.file:
            return scope.file
        scope = scope.parent
    return ""


def _last(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""
