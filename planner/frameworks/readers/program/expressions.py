"""Expressions of a program: their values, as far as they are known without running it."""

import ast
from collections.abc import Sequence

from planner.frameworks.readers.program import files, library, objects
from planner.frameworks.readers.program.reading import CUT_NAMES, MAX_LISTED, PARTS_OF_LENGTH, Reading, file_of
from planner.frameworks.readers.program.values import (
    SLICE,
    Class,
    Dotted,
    Function,
    Items,
    Known,
    Made,
    Scope,
    Table,
    Undecided,
    Unknown,
    Value,
    either,
    plain,
    spend,
)


class Expressions(Reading):
    """Reads expressions."""

    def value(self, node: ast.expr, scope: Scope) -> Value:
        """The value of an expression."""
        self.step()
        if isinstance(node, ast.Name):
            return scope.find(node.id) or Dotted(node.id)
        value = self.computed(node, scope)
        match value:
            case Items():
                spend(len(value.items))
            case Table():
                spend(len(value.entries))
            case Known(data=str()):
                spend(len(value.data))
            case Known(data=int()) if abs(value.data) > objects.MAX_NUMBER:
                return Unknown(f"{self.place(node, scope)}: too large")
        return value

    def computed(self, node: ast.expr, scope: Scope) -> Value:
        """The value of an expression that is no name."""
        match node:
            case ast.Constant():
                return Known(node.value, self.place(node, scope))
            case ast.Attribute():
                return library.attribute(self, self.value(node.value, scope), node.attr, self.place(node, scope))
            case ast.Call():
                return self.call(node, scope)
            case ast.Dict():
                return self.table(node, scope)
            case ast.List() | ast.Tuple() | ast.Set():
                return self.items(node.elts, scope, self.place(node, scope))
            case ast.JoinedStr() | ast.FormattedValue():
                return self.text(node, scope)
            case ast.BinOp() | ast.UnaryOp() | ast.BoolOp() | ast.Compare():
                return self.operation(node, scope)
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

    def text(self, node: ast.JoinedStr | ast.FormattedValue, scope: Scope) -> Value:
        """An f-string, or one of its parts in braces."""
        if isinstance(node, ast.JoinedStr):
            return objects.formatted([self.value(part, scope) for part in node.values], self.place(node, scope))
        spec = self.value(node.format_spec, scope) if node.format_spec is not None else Known("")
        return objects.in_format(self.value(node.value, scope), spec, self.place(node, scope))

    def operation(self, node: ast.BinOp | ast.UnaryOp | ast.BoolOp | ast.Compare, scope: Scope) -> Value:
        """What an operator makes of its operands."""
        match node:
            case ast.BinOp():
                left, right = self.value(node.left, scope), self.value(node.right, scope)
                return objects.binary(node.op, left, right, self.place(node, scope))
            case ast.UnaryOp():
                return objects.unary(node.op, self.value(node.operand, scope), self.place(node, scope))
            case ast.BoolOp():
                return self.boolean(node, scope)
        return self.comparison(node, scope)

    def conditional(self, node: ast.IfExp, scope: Scope) -> Value:
        """`a if test else b`: both where the test is not known."""
        truth = objects.truth(self.value(node.test, scope))
        if truth is None:
            truth = self.decided(node.test, self.place(node, scope))
        if truth is not None:
            return self.value(node.body if truth else node.orelse, scope)
        one, other = self.value(node.body, scope), self.value(node.orelse, scope)
        return either(one, other, f"{self.place(node, scope)}: depends on a condition")

    def element(self, node: ast.Subscript, scope: Scope) -> Value:
        """`owner[key]`, the environment's variables too."""
        key = self.value(node.slice, scope) if not isinstance(node.slice, ast.Slice) else SLICE
        if isinstance(node.slice, ast.Slice):
            self.cut(node.value, node.slice, scope)
        owner, place = self.value(node.value, scope), self.place(node, scope)
        if isinstance(owner, Dotted) and owner.path == "os.environ":
            return files.environment(self, Made("", positional=[key], where=place))
        return objects.element(owner, key, place)

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
                found.take(inner, f"{self.place(value, scope)}: ** of what is not known")
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
            if truth is None and (truth := self.decided(part)) is False:
                value = Known(False, self.place(part, scope))
            if truth is None:
                unknown = unknown or Undecided(f"{self.place(node, scope)}: depends on a condition")
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
            result = objects.compare(op, left, right, self.place(node, scope))
            if objects.truth(result) is not True:
                return result
            left = right
        return result

    def comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp, scope: Scope) -> Value:
        generator = node.generators[0]
        over = objects.items_of(self.value(generator.iter, scope))
        inner = Scope(parent=scope, file=file_of(scope))
        if over is None or len(node.generators) > 1 or len(over) > MAX_LISTED:
            unknown = Unknown(f"{self.place(node, scope)}: a list over what is not known")
            for one in node.generators:
                self.assign(one.target, unknown, inner)
            self.uncertain += 1
            self.value(node.elt, inner)  # once, for the calls in it
            self.uncertain -= 1
            return unknown
        found: list[Value] = []
        for item in over:
            self.assign(generator.target, item, inner)
            tests = [objects.truth(self.value(test, inner)) for test in generator.ifs]
            if None in tests:
                return Undecided(f"{self.place(node, scope)}: a list with conditions that are not known")
            if all(tests):
                found.append(self.value(node.elt, inner))
        return Items(found, self.place(node, scope))

    def table_of(self, node: ast.DictComp, scope: Scope) -> Value:
        """A dictionary made in a comprehension: that of its pairs."""
        pairs = ast.copy_location(ast.Tuple([node.key, node.value], ast.Load()), node)
        found = self.comprehension(ast.copy_location(ast.ListComp(pairs, node.generators), node), scope)
        if not isinstance(found, Items):
            return found
        entries = [(plain(one.items[0]), one.items[1]) for one in found.items if isinstance(one, Items)]
        if not all(isinstance(key, str) for key, _ in entries):
            return Unknown(f"{self.place(node, scope)}: a dictionary not known")
        return Table(dict(entries), self.place(node, scope))

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
        keywords = Table(call.keywords)
        for keyword in node.keywords:
            value = self.value(keyword.value, scope)
            if keyword.arg is not None:
                keywords.entries[keyword.arg] = value
            else:
                keywords.take(objects.as_table(value), f"{call.where}: ** of what is not known", over=False)
        call.more = keywords.more
        self.note_lengths(callee, call)
        if isinstance(callee, Function):
            return self.called(callee, call)
        if isinstance(callee, Class):
            return self.instance(callee, call)
        return library.call(self, callee, call, scope)


def _last(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""
