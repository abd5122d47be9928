"""The interpreter: a program's statements in the order in which it would run them, its expressions as far as they are
known without running it, what its functions and classes give.

Both sides of a branch whose condition is not known are read; a name that they leave different is `Unknown` afterwards.
A loop of unknown length is read once. Nothing is imported or executed; modules beside the program are read likewise.
"""

import ast
import posixpath
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from planner.core.errors import ConfigError
from planner.frameworks.readers import versions
from planner.frameworks.readers.program import library, loops, options, values
from planner.frameworks.readers.program.reading import (
    CUT_NAMES,
    LIBRARIES,
    MAX_DEPTH,
    MAX_LISTED,
    MAX_LOOP,
    MAX_MODULES,
    MAX_NESTED,
    MAX_SOURCE_BYTES,
    PARTS_OF_LENGTH,
    Break,
    ControlFlow,
    Loop,
    Program,
    Raise,
    Reading,
    Return,
    changes,
    counters,
    file_of,
)
from planner.frameworks.readers.program.source import parsable, tree_of
from planner.frameworks.readers.program.values import (
    SLICE,
    Argument,
    CallResult,
    Class,
    Constant,
    DictValue,
    Function,
    ImportedName,
    Instance,
    ListValue,
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


VALIDATES = ("BaseModel", "BaseSettings")
"""Classes of pydantic, which make an object of a table that a field's class describes."""


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


class Reader(Reading):
    """Reads a whole program: statements, then expressions, then calls into its own code."""

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
            case ast.AnnAssign(value=ast.expr() as assigned):
                self.assign(node.target, self.value(assigned, scope), scope)
            case ast.AugAssign():
                sides = self.value(node.target, scope), self.value(node.value, scope)
                self.assign(node.target, values.binary(node.op, *sides, self.place(node, scope)), scope)
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
            case ast.Global() | ast.Nonlocal():
                scope.declare(node)
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
        scope.names = ends[0] if len(ends) == 1 else values.joined(ends[0], ends[1], place)

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
            if scope.imports(package):  # it is there, with the names of its version
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
            fits = values.fits(case.pattern, subject) if case.guard is None else None
            if fits is None:
                condition = f"{ast.unparse(node.subject)} is {ast.unparse(case.pattern)}"
                test = ast.copy_location(ast.Name(condition, ast.Load()), node)
                body = [ast.copy_location(ast.If(test, case.body, body), node)]
            elif fits:
                body = case.body
        self.block(body, scope)

    def once(self, body: Sequence[ast.stmt], scope: Scope) -> None:
        """A body that may run any number of times."""
        for name in filter(scope.names.__contains__, counters(body)):  # any value in it, not its first
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
                scope.put(target.id, value, unsure=self.uncertain > 0)
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
            top, below, _ = name.partition("/")
            enough = enough or top in LIBRARIES or (bool(below) and top in sys.stdlib_module_names)
            enough = enough or self.source_bytes > MAX_SOURCE_BYTES
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

    def value(self, node: ast.expr, scope: Scope) -> Value:
        """The value of an expression."""
        self.step()
        if isinstance(node, ast.Name):
            return scope.find(node.id) or ImportedName(node.id)
        value = self.computed(node, scope)
        match value:
            case ListValue():
                spend(len(value.items))
            case DictValue():
                spend(len(value.entries))
            case Constant(data=str()):
                spend(len(value.data))
            case Constant(data=int()) if abs(value.data) > values.MAX_NUMBER:
                return Unknown(f"{self.place(node, scope)}: too large")
        return value

    def computed(self, node: ast.expr, scope: Scope) -> Value:
        """The value of an expression that is no name."""
        match node:
            case ast.Constant():
                return Constant(node.value, self.place(node, scope))
            case ast.Attribute():
                return library.attribute(self, self.value(node.value, scope), node.attr, self.place(node, scope))
            case ast.Call():
                return self.call(node, scope)
            case ast.Dict():
                return self.table(node, scope)
            case ast.List() | ast.Tuple() | ast.Set():
                return self.items(node.elts, scope, self.place(node, scope))
            case ast.JoinedStr():
                return values.formatted([self.value(part, scope) for part in node.values], self.place(node, scope))
            case ast.FormattedValue():
                spec = self.value(node.format_spec, scope) if node.format_spec is not None else Constant("")
                return values.in_format(self.value(node.value, scope), spec, self.place(node, scope))
            case ast.BinOp():
                left, right = self.value(node.left, scope), self.value(node.right, scope)
                return values.binary(node.op, left, right, self.place(node, scope))
            case ast.UnaryOp():
                return values.unary(node.op, self.value(node.operand, scope), self.place(node, scope))
            case ast.BoolOp():
                return self.boolean(node, scope)
            case ast.Compare():
                return self.comparison(node, scope)
            case ast.IfExp():
                return self.conditional(node, scope)
            case ast.Subscript():
                return self.element(node, scope)
            case ast.Lambda():
                return Function(node, scope)
            case ast.NamedExpr():
                value = self.value(node.value, scope)
                self.assign(node.target, value, scope)
                return value
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                return self.comprehension(node, scope)
            case ast.DictComp():
                return self.table_of(node, scope)
            case ast.Await() | ast.Starred():
                return self.value(node.value, scope)
        return Unknown(f"{self.place(node, scope)}: computed while the program runs")

    def conditional(self, node: ast.IfExp, scope: Scope) -> Value:
        """`a if test else b`: both where the test is not known."""
        truth = values.truth(self.value(node.test, scope))
        if truth is None:
            truth = self.decided(node.test, self.place(node, scope))
        if truth is not None:
            return self.value(node.body if truth else node.orelse, scope)
        first, other = self.value(node.body, scope), self.value(node.orelse, scope)
        return join_values(first, other, f"{self.place(node, scope)}: depends on a condition")

    def element(self, node: ast.Subscript, scope: Scope) -> Value:
        """`owner[key]`, the environment's variables too."""
        key = self.value(node.slice, scope) if not isinstance(node.slice, ast.Slice) else SLICE
        if isinstance(node.slice, ast.Slice):
            self.cut(node.value, node.slice, scope)
        owner, place = self.value(node.value, scope), self.place(node, scope)
        if isinstance(owner, ImportedName) and owner.path == "os.environ":
            return options.environment(self, CallResult("", positional=[key], where=place))
        return values.element(owner, key, place)

    def cut(self, node: ast.expr, by: ast.Slice, scope: Scope) -> None:
        """Remembers the length to which a list of tokens is cut."""
        name = _last(node)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            name = str(node.slice.value)
        upper = self.value(by.upper, scope) if by.upper is not None and by.lower is None else None
        number = isinstance(upper, Constant) and type(upper.data) is int and upper.data >= 16
        if isinstance(upper, Constant) and number and name.endswith(CUT_NAMES):
            self.program.cuts.append(upper)

    def table(self, node: ast.Dict, scope: Scope) -> DictValue:
        table = DictValue({}, self.place(node, scope))
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                inner = values.as_table(self.value(value, scope))
                table.take(inner, f"{self.place(value, scope)}: ** of what is not known")
                continue
            name = plain(self.value(key, scope))
            if isinstance(name, str):
                table.entries[name] = self.value(value, scope)
            else:
                self.value(value, scope)
        return table

    def items(self, nodes: Sequence[ast.expr], scope: Scope, place: str) -> Value:
        items: list[Value] = []
        for node in nodes:
            value = self.value(node, scope)
            if isinstance(node, ast.Starred):
                inner = values.items_of(value)
                if inner is None:
                    return Unknown(f"{place}: * of what is not known")
                items += inner
            else:
                items.append(value)
        return ListValue(items, place)

    def boolean(self, node: ast.BoolOp, scope: Scope) -> Value:
        stops_at = isinstance(node.op, ast.Or)
        value: Value = Constant(None)
        unknown: Value | None = None
        for part in node.values:
            value = self.value(part, scope)
            truth = values.truth(value)
            if truth is None and (truth := self.decided(part)) is False:
                value = Constant(False, self.place(part, scope))
            if truth is None:
                unknown = unknown or Undecided(f"{self.place(node, scope)}: depends on a condition")
            elif truth == stops_at:
                certain = isinstance(value, Constant) and isinstance(value.data, bool)
                return value if unknown is None or certain else unknown
        return unknown if unknown is not None else value

    def comparison(self, node: ast.Compare, scope: Scope) -> Value:
        left = self.value(node.left, scope)
        result: Value = Constant(True)
        for op, right_node in zip(node.ops, node.comparators, strict=True):
            right = self.value(right_node, scope)
            result = values.compare(op, left, right, self.place(node, scope))
            if values.truth(result) is not True:
                return result
            left = right
        return result

    def comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp, scope: Scope) -> Value:
        generator = node.generators[0]
        over = values.items_of(self.value(generator.iter, scope))
        inner = Scope(parent=scope, file=file_of(scope))
        if over is None or len(node.generators) > 1 or len(over) > MAX_LISTED:
            unknown = Unknown(f"{self.place(node, scope)}: a list over what is not known")
            for clause in node.generators:
                self.assign(clause.target, unknown, inner)
            self.uncertain += 1
            self.value(node.elt, inner)  # once, for the calls in it
            self.uncertain -= 1
            return unknown
        items: list[Value] = []
        for item in over:
            self.assign(generator.target, item, inner)
            tests = [values.truth(self.value(test, inner)) for test in generator.ifs]
            if None in tests:
                return Undecided(f"{self.place(node, scope)}: a list with conditions that are not known")
            if all(tests):
                items.append(self.value(node.elt, inner))
        return ListValue(items, self.place(node, scope))

    def table_of(self, node: ast.DictComp, scope: Scope) -> Value:
        """A dictionary made in a comprehension: that of its pairs."""
        pairs = ast.copy_location(ast.Tuple([node.key, node.value], ast.Load()), node)
        listed = self.comprehension(ast.copy_location(ast.ListComp(pairs, node.generators), node), scope)
        if not isinstance(listed, ListValue):
            return listed
        entries = [(plain(pair.items[0]), pair.items[1]) for pair in listed.items if isinstance(pair, ListValue)]
        if not all(isinstance(key, str) for key, _ in entries):
            return Unknown(f"{self.place(node, scope)}: a dictionary not known")
        return DictValue(dict(entries), self.place(node, scope))

    def call(self, node: ast.Call, scope: Scope) -> Value:
        callee = self.value(node.func, scope)
        call = CallResult(_last(node.func), where=self.place(node, scope))
        for argument in node.args:
            value = self.value(argument, scope)
            if isinstance(argument, ast.Starred):
                call.positional += values.items_of(value) or [Unknown(f"{call.where}: * of what is not known")]
            else:
                call.positional.append(value)
        keywords = DictValue(call.keywords)
        for keyword in node.keywords:
            value = self.value(keyword.value, scope)
            if keyword.arg is not None:
                keywords.entries[keyword.arg] = value
            else:
                keywords.take(values.as_table(value), f"{call.where}: ** of what is not known", over=False)
        call.more = keywords.more
        # lengths handed to the program's own code and to data sets
        if isinstance(callee, (Function, Class)) or call.name.endswith(("Dataset", "Collator")):
            for name, value in call.keywords.items():
                self.note_length(name, value, call.name)
        for first, other in PARTS_OF_LENGTH:
            parts = (plain(call.keywords.get(first)), plain(call.keywords.get(other)))
            if all(type(part) is int for part in parts):
                self.program.cuts.append(Constant(sum(parts), f"{call.where}, {first} + {other}"))
        if isinstance(callee, Function):
            return self.called(callee, call)
        if isinstance(callee, Class):
            return self.instance(callee, call)
        return library.call(self, callee, call, scope)

    def decorated(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> Function:
        function = Function(node, scope)
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Name) and decorator.id in ("classmethod", "staticmethod"):
                function.of = decorator.id
            if isinstance(decorator, ast.Call):
                made = self.value(decorator, scope)
                if isinstance(made, CallResult) and made.name in ("option", "argument"):
                    option = options.Option.of(made)
                    function.options[option.name] = option.value(self.outside)
                if isinstance(made, CallResult) and (made.owner, made.name) == ("hydra", "main") and node.args.args:
                    function.options[node.args.args[0].arg] = options.hydra_settings(self, made)
        return function

    def class_of(self, node: ast.ClassDef, scope: Scope) -> Class:
        inner = Scope(parent=scope, file=scope.file)
        made = Class(node.name, inner.names, where=self.place(node, scope))
        fields: list[str] = []
        for base in node.bases:
            parent = self.value(base, scope)
            if isinstance(parent, Class):
                inner.names |= self.copied(parent.attributes)
                made.parents += (parent,)
                fields += parent.fields
                made.kinds |= parent.kinds
                made.base = made.base or parent.base
            elif isinstance(parent, ImportedName):
                made.base = made.base or parent.path
        inner.names["__class__"] = made
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                fields.append(statement.target.id)
                kind = self.value(statement.annotation, scope) if isinstance(statement.annotation, ast.Name) else None
                made.kinds |= {statement.target.id: kind} if isinstance(kind, Class) else {}
                if statement.value is None:
                    inner.names[statement.target.id] = Unknown(
                        f"{self.place(statement, scope)}: {statement.target.id} has no default"
                    )
            self.statement(statement, inner)
        made.fields = tuple(dict.fromkeys(fields))
        for name, value in inner.names.items():
            inner.names[name] = options.field_default(self, value)
        return made

    def instance(self, made_by: Class, call: CallResult) -> Value:
        """An object of a class of the program; one that extends foreign code is a call of that with its defaults."""
        if made_by.base and values.is_followed(made_by.base):
            fields = () if call.more else made_by.fields
            defaults = {name: made_by.attributes[name] for name in fields if name in made_by.attributes}
            call.name, call.owner, call.made_by = made_by.base.rpartition(".")[2], made_by.name, made_by
            call.package = made_by.base.rpartition(".")[0].partition(".")[0]
            call.keywords = {**defaults, **call.keywords}
            self.program.calls.append(call)
            return call
        if {made_by.name, made_by.base.rpartition(".")[2]} & {*options.PARSERS}:
            # its own code does what the base's does
            call.name = made_by.name if made_by.name in options.PARSERS else "HfArgumentParser"
            return call
        instance = Instance(self.copied(made_by.attributes), made_by)
        for name, value in zip(made_by.fields, call.positional, strict=False):
            instance.attributes[name] = value
        init = made_by.attributes.get("__init__")
        outer, self.uncertain = self.uncertain, 0  # a new object: what its own code sets on it, it has
        if isinstance(init, Function):
            self.called(Function(init.node, init.scope, instance), call)
        else:
            if call.more:  # what is handed on may set any of them
                instance.attributes |= dict.fromkeys(made_by.fields[len(call.positional) :], Unknown(call.more))
            instance.attributes |= call.keywords
            instance.more = call.more
            for name, kind in made_by.kinds.items() if made_by.base.rpartition(".")[2] in VALIDATES else ():
                if isinstance(block := instance.attributes.get(name), DictValue):
                    given = CallResult("", keywords=dict(block.entries), more=block.more, where=block.where)
                    instance.attributes[name] = self.instance(kind, given)
            after = made_by.attributes.get("__post_init__")
            if isinstance(after, Function):
                self.called(Function(after.node, after.scope, instance), CallResult("", where=call.where))
        self.uncertain = outer
        return instance

    def called(self, function: Function, call: CallResult) -> Value:
        """What a function of the program returns for these arguments."""
        node = function.node
        if self.depth >= MAX_DEPTH or (node in self.running and not self.goes_down(node, call)):
            return Unknown(f"{call.where}: calls nested too deep")
        self.entered.add(id(node))
        scope = Scope(parent=function.scope, file=file_of(function.scope))
        self.bind(function, call, scope)
        if isinstance(node, ast.Lambda):
            return self.value(node.body, scope)
        self.depth += 1
        self.running.append(node)
        self.entered_at.append(self.uncertain)
        self.maybe_returned.append([])
        result: Value = Constant(None)
        outer = self.uncertain
        try:
            self.block(node.body, scope)
        except Return as leave:
            result = leave.value if leave.value is not None else Constant(None)
        except Loop:
            pass
        finally:
            self.uncertain = outer
            self.depth -= 1
            self.running.pop()
            self.entered_at.pop()
        others = self.maybe_returned.pop()
        collects = any(part in node.name.lower() for part in ("linear", "target", "module", "lora"))
        none = isinstance(result, ListValue) and not result.items  # where no module is taken for one
        if (none or isinstance(plain(result), Unknown)) and isinstance(node, ast.FunctionDef) and collects:
            walked = (child for child in ast.walk(node) if isinstance(child, ast.Attribute))
            if any(child.attr == "named_modules" for child in walked):  # names of every linear layer
                return Constant("all-linear", f"{call.where}, {node.name}()")
        if any(not same(result, other) for other in others):
            made = (value for value in (result, *others) if isinstance(value, (CallResult, Instance, ListValue)))
            return next(made, Undecided(f"{call.where}: depends on a condition inside the function"))
        return result

    def goes_down(self, node: ast.AST, call: CallResult) -> bool:
        """Whether a function that calls itself is followed once more: certainly, into settings that are at hand (a deep
        merge, an `extends:`), so far as people nest them."""
        last = max(at for at, function in enumerate(self.running) if function is node)
        given = (*call.positional, *call.keywords.values())
        at_hand = any(isinstance(argument, (Constant, ListValue, DictValue)) for argument in given)
        return at_hand and self.entered_at[last] == self.uncertain and self.running.count(node) < MAX_NESTED

    def bind(self, function: Function, call: CallResult, scope: Scope) -> None:
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
            elif call.more:  # what is handed on may set it
                value = Unknown(call.more)
            elif default is not None:
                value = options.option_default(self, name, self.value(default, function.scope))
            else:
                value = Argument(f"{call.where or file_of(function.scope)}: the argument {name} is not known", name)
            scope.names[name] = value
            self.note_length(name, value, getattr(function.node, "name", ""))
        if arguments.vararg is not None:
            scope.names[arguments.vararg.arg] = ListValue(given[len(positional) :])
        if arguments.kwarg is not None:
            scope.names[arguments.kwarg.arg] = DictValue(keywords, more=call.more)

    def uncalled(self, scope: Scope) -> None:
        """Functions that nothing calls, where the program trains nothing otherwise: a script may be all functions."""
        if any(values.is_trainer(made) for made in self.program.calls):
            return
        for value in list(scope.names.values()):
            methods = value.attributes.values() if isinstance(value, Class) else ()
            for candidate in (value, *methods):
                if isinstance(candidate, Function) and id(candidate.node) not in self.entered:
                    bound = Instance(self.copied(value.attributes), value) if isinstance(value, Class) else None
                    self.called(
                        Function(candidate.node, candidate.scope, bound, candidate.options),
                        CallResult("", where=scope.file),
                    )


def _last(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""
