"""Functions and classes of a program: what their calls give."""

import ast

from planner.frameworks.readers.program import files, objects, options
from planner.frameworks.readers.program.expressions import Expressions
from planner.frameworks.readers.program.reading import MAX_DEPTH, MAX_NESTED, Loop, Return, file_of
from planner.frameworks.readers.program.values import (
    Argument,
    Class,
    Dotted,
    Function,
    Instance,
    Items,
    Known,
    Made,
    Scope,
    Table,
    Undecided,
    Unknown,
    Value,
    plain,
    same,
)


class Functions(Expressions):
    """Follows calls into the program's own code."""

    def decorated(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> Function:
        function = Function(node, scope)
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Name) and decorator.id in ("classmethod", "staticmethod"):
                function.of = decorator.id
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
                inner.names |= self.copied(parent.attributes)
                made.parents += (parent,)
                fields += parent.fields
                made.base = made.base or parent.base
            elif isinstance(parent, Dotted):
                made.base = made.base or parent.path
        inner.names["__class__"] = made
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
            known = () if call.more else made_by.fields
            defaults = {name: made_by.attributes[name] for name in known if name in made_by.attributes}
            call.name, call.owner, call.made_by = made_by.base.rpartition(".")[2], made_by.name, made_by
            call.package = made_by.base.rpartition(".")[0].partition(".")[0]
            call.keywords = {**defaults, **call.keywords}
            self.program.made.append(call)
            return call
        if {made_by.name, made_by.base.rpartition(".")[2]} & {*options.PARSERS}:
            # its own code does what the base's does
            call.name = made_by.name if made_by.name in options.PARSERS else "HfArgumentParser"
            return call
        found = Instance(self.copied(made_by.attributes), made_by)
        for name, value in zip(made_by.fields, call.positional, strict=False):
            found.attributes[name] = value
        init = made_by.attributes.get("__init__")
        outer, self.uncertain = self.uncertain, 0  # a new object: what its own code sets on it, it has
        if isinstance(init, Function):
            self.called(Function(init.node, init.scope, found), call)
        else:
            if call.more:  # what is handed on may set any of them
                found.attributes |= dict.fromkeys(made_by.fields[len(call.positional) :], Unknown(call.more))
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
        result: Value = Known(None)
        outer = self.uncertain
        try:
            self.block(node.body, scope)
        except Return as leave:
            result = leave.value if leave.value is not None else Known(None)
        except Loop:
            pass
        finally:
            self.uncertain = outer
            self.depth -= 1
            self.running.pop()
            self.entered_at.pop()
        others = self.maybe_returned.pop()
        if isinstance(plain(result), Unknown) and _walks_modules(node):
            return Known("all-linear", f"{call.where}, {node.name}()")
        if any(not same(result, other) for other in others):
            made = next((one for one in (result, *others) if isinstance(one, (Made, Instance, Items))), None)
            return made if made is not None else Undecided(f"{call.where}: depends on a condition inside the function")
        return result

    def goes_down(self, node: ast.AST, call: Made) -> bool:
        """Whether a function that calls itself is followed once more: certainly, into settings that are at hand (a deep
        merge, an `extends:`), so far as people nest them."""
        last = max(at for at, one in enumerate(self.running) if one is node)
        given = (*call.positional, *call.keywords.values())
        at_hand = any(isinstance(one, (Known, Items, Table)) for one in given)
        return at_hand and self.entered_at[last] == self.uncertain and self.running.count(node) < MAX_NESTED

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
            elif call.more:  # what is handed on may set it
                value = Unknown(call.more)
            elif default is not None:
                value = options.option_default(self, name, self.value(default, function.scope))
            else:
                value = Argument(f"{call.where or file_of(function.scope)}: the argument {name} is not known", name)
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
                    bound = Instance(self.copied(value.attributes), value) if isinstance(value, Class) else None
                    self.called(Function(one.node, one.scope, bound, one.options), Made("", where=scope.file))


def _walks_modules(node: ast.AST) -> bool:
    """Whether a function collects names of a model's modules (every linear layer's, in the programs that do it)."""
    named = isinstance(node, ast.FunctionDef) and any(
        part in node.name.lower() for part in ("linear", "target", "module", "lora")
    )
    return named and any(isinstance(one, ast.Attribute) and one.attr == "named_modules" for one in ast.walk(node))
