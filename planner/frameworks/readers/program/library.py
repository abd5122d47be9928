"""Foreign code that settings pass through on their way: what calls and attributes of it are known to give.

Everything else becomes a `Made`: the call itself, to be looked at by whoever knows the library.
"""

import posixpath
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

from planner.frameworks.readers.program.embedding import fitted
from planner.frameworks.readers.program.files import to_value
from planner.frameworks.readers.program.modules import above, command_line, of_module, parameters
from planner.frameworks.readers.program.objects import (
    argument_defaults,
    as_table,
    is_followed,
    is_trainer,
    items_of,
    trainer_of,
)
from planner.frameworks.readers.program.options import PARSERS, of_parser
from planner.frameworks.readers.program.reading import Reading
from planner.frameworks.readers.program.values import (
    Class,
    Dotted,
    Function,
    Instance,
    Items,
    Known,
    Made,
    Parent,
    Scope,
    Table,
    Unknown,
    Value,
    plain,
)

MAX_PARENTS = 8


PATH_PARTS: dict[str, Callable[[str], str]] = {
    "parent": above,
    "name": posixpath.basename,
    "stem": lambda path: posixpath.splitext(posixpath.basename(path))[0],
    "suffix": lambda path: posixpath.splitext(path)[1],
}
"""Attributes of a `Path`, which is read as its text."""
SAME_PATH = ("resolve", "absolute", "expanduser", "as_posix")
THERE = ("exists", "is_file")
"""What is asked of a path; of a file that is not at hand nothing is known."""
BF16_QUESTIONS = ("is_bf16_supported", "is_torch_bf16_gpu_available", "is_bfloat16_supported")
"""Of torch, of transformers (which asks torch) and of Unsloth."""
SAME_OBJECT = (
    "to", "cuda", "train", "eval", "half", "bfloat16", "float", "requires_grad_", "for_training", "for_inference",
    "gradient_checkpointing_enable", "gradient_checkpointing_disable", "enable_input_require_grads", "add_callback",
    "freeze_encoder",
)  # fmt: skip
"""Methods that change a model or trainer and give it back, or nothing."""
OF_SETTINGS = ("get", "pop", "setdefault", "items", "keys", "values", "copy", "lower", "strip")
"""Methods that hand on what settings hold."""
PREPARED = ("prepare", "prepare_model", "compile")
TEXT_METHODS = (
    "lower", "upper", "strip", "rstrip", "lstrip", "replace", "startswith", "endswith", "split", "rsplit", "title",
    "removeprefix", "removesuffix",
)  # fmt: skip


def attribute(reader: Reading, value: Value, name: str, place: str) -> Value:
    """value.name"""
    if name == "do_train" and reader.outside.arguments is not None:
        reader.program.do_train_decides = True
    match value:
        case Dotted():
            return _of_dotted(reader, value, name, place)
        case Instance() | Class():
            if name in value.attributes:
                found = value.attributes[name]
                if isinstance(found, Function) and isinstance(value, Instance) and value.made_by is not None:
                    return found.bound_to(value, value.made_by)
                if isinstance(found, Function) and isinstance(value, Class):
                    return found.bound_to(None, value)
                return found
            if isinstance(value, Instance) and value.more:
                return Unknown(value.more)
            if name == "__dict__" and isinstance(value, Instance):
                return Table(reader.copied(value.attributes), place)
            kind = value.made_by if isinstance(value, Instance) else value
            if kind is None or not kind.base:  # foreign code may have it
                return Unknown(f"{place}: {name} is not set in the program")
        case Parent():
            found_in = next((one for one in value.kind.parents if name in one.attributes), None)
            inherited = found_in.attributes[name] if found_in is not None else None
            if isinstance(inherited, Function):
                kind = value.of.made_by if isinstance(value.of, Instance) else value.of
                return inherited.bound_to(value.of, kind)
            return inherited or Made(name, receiver=value, where=place)
        case Table() if name in value.entries:  # of OmegaConf: settings are its attributes
            return value.entries[name]
        case Known(data=str()) if name in PATH_PARTS:
            return Known(PATH_PARTS[name](value.data), place)
        case Known(data=str()) if name == "parents":
            folders = list(accumulate(range(MAX_PARENTS), lambda path, _: above(path), initial=value.data))
            return Items([Known(path, place) for path in folders[1:]], place)
        case Made():
            if name in value.attributes:
                return value.attributes[name]
            if name in value.keywords:
                return value.keywords[name]
            if value.more and is_followed(value.name):
                return Unknown(value.more)
            own = argument_defaults(value)
            return own[name] if name in own else Made(name, owner=value.name, receiver=value, where=place)
        case Unknown():
            return value
    return Made(name, receiver=value, where=place)


def _of_dotted(reader: Reading, value: Dotted, name: str, place: str) -> Value:
    """An attribute of something imported or built in."""
    if name == "is_floating_point" and value.path.startswith("torch."):
        return Known("float" in value.name, place)
    if name in ("__dataclass_fields__", "__annotations__"):
        return parameters(reader, value, place)
    return command_line(reader) if (value.path, name) == ("sys", "argv") else Dotted(f"{value.path}.{name}")


def _parent(scope: Scope | None) -> Parent | None:
    """What `super()` is in a method, None outside of one."""
    kind = scope.find("__class__") if scope is not None else None
    first = next(iter(scope.names.values()), None) if scope is not None else None
    return Parent(first, kind) if isinstance(first, (Instance, Class)) and isinstance(kind, Class) else None


def call(reader: Reading, callee: Value, made: Made, scope: Scope | None = None) -> Value:
    """What a call of foreign code gives; `scope`: where it stands."""
    outside = reader.outside
    if isinstance(callee, Dotted):
        if callee.path == "super" and (parent := _parent(scope)) is not None:
            return parent
        made.name, made.owner = callee.name, callee.path.rpartition(".")[0].rpartition(".")[2]
        made.package = callee.path.partition(".")[0]
        known = _by_others(reader, callee, made) or of_module(reader, callee, made)
        if known is not None:
            return known
    elif isinstance(callee, Made):
        made.receiver, made.owner = callee.receiver, callee.owner
        if callee.receiver is not None:
            _note_step(reader, made)
            known = _of_object(reader, callee.receiver, made)
            if known is not None:
                return known
        else:
            made.name, made.of = made.name or callee.name, callee
            reader.program.steps.goes_forward(made, reader.turn)
    elif isinstance(callee, Unknown):
        if made.name in OF_SETTINGS:  # of settings that are not known: for the same reason
            return Unknown(callee.reason)
        made.more = made.more or callee.reason
    if made.name == "ScalingConfig":
        reader.program.workers = made.argument("num_workers", 1) or Known(1, made.where)
    _run_handed_functions(reader, made)
    reader.program.made.append(made)
    if made.name in BF16_QUESTIONS:
        return Known(outside.bf16 or _counts_emulation(reader, made), "the card")
    return made


def _note_step(reader: Reading, made: Made) -> None:
    """Remembers what differentiates, and what steps."""
    if made.name == "backward":
        given = made.positional[0] if made.positional else made.receiver
        reader.program.steps.backwards.setdefault(made.where, (given or Known(None), reader.turn))
    elif made.name == "step":
        reader.program.steps.updates.append((made, reader.turn))


def _counts_emulation(reader: Reading, made: Made) -> bool:
    """Whether the question about bf16 is answered yes by a card that emulates it (Turing, Volta): torch's is, unless
    told; Unsloth's is not, and importing Unsloth changes torch's.

    Source: torch 2.9 `torch.cuda.is_bf16_supported`; unsloth/models/_utils.py.
    """
    told = made.argument("including_emulation", 0)
    if isinstance(told, Known):
        return bool(told.data)
    names = reader.program.module.names.values()
    unsloth = any(isinstance(one, Dotted) and one.path.split(".")[0].startswith("unsloth") for one in names)
    return made.name != "is_bfloat16_supported" and not unsloth


def _by_others(reader: Reading, callee: Dotted, made: Made) -> Value | None:
    """What asks an object for an attribute or sets one, copies it, or makes one by its name in settings."""
    if callee.path == "getattr" and len(made.positional) >= 2:
        return _getattr(reader, made)
    if callee.path == "setattr" and len(made.positional) == 3:
        owner, name, value = made.positional
        if isinstance(owner, (Made, Instance)) and isinstance(plain(name), str):
            reader.store(owner.attributes, str(plain(name)), value, made.where)
            return Known(None, made.where)
    if callee.name in ("replace", "copy", "deepcopy") and callee.path.startswith(("dataclasses.", "copy.")):
        return _copied(reader, made)
    if callee.path in ("hydra.utils.instantiate", "hydra.utils.call") and made.positional:
        return _instantiated(reader, made.positional[0], made)
    return None


def _run_handed_functions(reader: Reading, made: Made) -> None:
    """Functions handed to foreign code (`dataset.map(tokenize)`) will be called with what is not known, and with what
    `fn_kwargs` or `partial` say."""
    named = made.keywords.get("fn_kwargs")
    said = dict(named.entries) if isinstance(named, Table) else made.keywords if made.name == "partial" else {}
    first = made.positional[1:] if made.name == "partial" else []
    if (config := made.argument("train_loop_config")) is not None:  # Ray hands it to each worker
        first = [config]
    for value in (*made.positional, *made.keywords.values()):
        if isinstance(value, Function) and id(value.node) not in reader.entered:
            reader.uncertain += 1
            try:
                reader.called(value, Made("", positional=list(first), keywords=dict(said), where=made.where))
            finally:
                reader.uncertain -= 1


def _of_object(reader: Reading, owner: Value, made: Made) -> Value | None:
    """Methods of objects."""
    name = made.name
    first = made.positional[0] if made.positional else None
    if isinstance(owner, Known) and isinstance(owner.data, str):
        return _of_text(reader, owner, made)
    if isinstance(owner, Table):
        return _of_table(reader, owner, made)
    if isinstance(owner, Items):
        if name == "append" and first is not None:
            owner.items.append(first)
        elif name == "extend" and first is not None:
            owner.items += items_of(first) or [Unknown(f"{made.where}: a list not known")]
        elif name in ("keys", "copy"):
            return owner
        elif name == "index" and first is not None:
            data = [plain(one) for one in owner.items]
            return Known(data.index(plain(first)), made.where) if plain(first) in data else None
        return None
    if not isinstance(owner, Made):
        return None
    if owner.name == "ArgumentParser" or owner.name in PARSERS:
        return of_parser(reader, owner, made)
    if name == "train" and is_trainer(trainer_of(owner)):
        reader.program.trained.append((trainer_of(owner), reader.uncertain > 0))
        return made
    if name == "fit" and owner.name == "SentenceTransformer":
        trainer = fitted(owner, made)
        reader.program.made.append(trainer)
        reader.program.trained.append((trainer, reader.uncertain > 0))
        return made
    if owner.name == "open" and name in ("read", "readline"):
        return owner
    if name in PREPARED and made.positional:
        return made.positional[0] if len(made.positional) == 1 else Items(made.positional, made.where)
    if name in SAME_OBJECT:
        owner.called[name] = made
        return owner
    return None


def _of_text(reader: Reading, owner: Known, made: Made) -> Value | None:
    if made.name in SAME_PATH:
        return owner
    if made.name in THERE and reader.outside.exactly(owner.data) is not None:
        return Known(True, made.where)
    if made.name == "is_absolute":
        return Known(owner.data.startswith("/"), made.where)
    if made.name in ("open", "read_text"):
        return Made("open", positional=[owner], where=made.where)
    arguments = [plain(one) for one in made.positional]
    if any(isinstance(one, Unknown) for one in arguments):
        return Unknown(f"{made.where}: text put together while the program runs")
    if made.name == "joinpath" and all(isinstance(one, str) for one in arguments):
        return Known("/".join([owner.data, *arguments]), made.where)
    if made.name == "join" and arguments and isinstance(arguments[0], list):
        return Known(owner.data.join(str(one) for one in arguments[0])[:10_000], made.where)
    if made.name not in TEXT_METHODS or len(owner.data) > 10_000:
        return Unknown(f"{made.where}: text put together while the program runs")
    try:
        result = getattr(owner.data, made.name)(*arguments)
    except (TypeError, ValueError):
        return Unknown(f"{made.where}: text put together while the program runs")
    return to_value(result, made.where)


def _of_table(reader: Reading, owner: Table, made: Made) -> Value | None:
    first = made.positional[0] if made.positional else None
    match made.name:
        case "get" | "pop" | "setdefault" if first is not None:
            key = plain(first)
            if isinstance(key, str) and key in owner.entries:
                gone = made.name == "pop" and not reader.uncertain
                return owner.entries.pop(key) if gone else owner.entries[key]
            if owner.more:
                return Unknown(owner.more)
            return made.positional[1] if len(made.positional) > 1 else Known(None, made.where)
        case "update":
            other = as_table(first) if first is not None else Table({})
            owner.take(other, f"{made.where}: updated with what is not known")
            owner.entries |= made.keywords
            return Known(None)
        case "items" | "keys" | "values" if owner.more:
            return Unknown(owner.more)
        case "items":
            return Items([Items([Known(key), value]) for key, value in owner.entries.items()])
        case "keys":
            return Items([Known(key) for key in owner.entries])
        case "values":
            return Items(list(owner.entries.values()))
        case "copy":
            return Table(dict(owner.entries), owner.where, owner.more)
    return None


def _getattr(reader: Reading, made: Made) -> Value:
    owner, name = made.positional[0], plain(made.positional[1])
    if isinstance(name, str):
        if isinstance(owner, Instance) and name not in owner.attributes and not owner.more and len(made.positional) > 2:
            return made.positional[2]
        if isinstance(owner, (Instance, Dotted, Class)):
            return attribute(reader, owner, name, made.where)
    return Unknown(f"{made.where}: computed while the program runs")


def _copied(reader: Reading, made: Made) -> Value | None:
    """A copy of settings, with what is said anew; None of what holds none, such as a model."""
    match made.argument("obj", 0):
        case Made() as one if is_followed(one.name) and not is_trainer(one):
            again = replace(one, keywords={**one.keywords, **made.keywords}, attributes=reader.copied(one.attributes))
            again.more = one.more or made.more
            return again
        case Instance() as one:
            return Instance({**reader.copied(one.attributes), **made.keywords}, one.made_by, one.more or made.more)
        case Table() as table:
            return Table(reader.copied(table.entries), table.where, table.more)
        case Items() as items:
            return Items(list(items.items), items.where)
    return None


def _instantiated(reader: Reading, settings: Value, made: Made) -> Value:
    """What Hydra makes of settings with a `_target_`: the call of that."""
    table = as_table(settings)
    target = plain(table.entries.get("_target_")) if table is not None else None
    if table is None or not isinstance(target, str):
        return Unknown(f"{made.where}: made from settings that are not known")
    keywords = {key: value for key, value in table.entries.items() if not key.startswith("_")}
    call_ = Made(target.rpartition(".")[2], keywords={**keywords, **made.keywords}, where=made.where, more=table.more)
    return call(reader, Dotted(target), call_)
