"""A person's own training file as one that its tool can run (`plan race --run`): the program that starts it, and what
must stand where it names data. It is run as it was written."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_planner.app.running import STAND_IN, columns_of, program_folder, weights_here
from planner.core.errors import UsageError
from planner.core.records import dataclass
from planner.frameworks.readers import ReadConfig
from planner.frameworks.readers.loading import read_bounded

if TYPE_CHECKING:
    from probes.launched.run import LaunchedFile

PROGRAMS = {
    "trl": "python -m trl.scripts.{command} --config {file}",
    "axolotl": "axolotl train {file} --launcher python",
    "llamafactory": "llamafactory-cli train {file}",
    "hf-script": "python {file}",
}
"""Format -> what starts such a file."""
BESIDE = (".py", ".yaml", ".yml", ".json", ".jinja")
MAX_BESIDE, MAX_BESIDE_BYTES = 100, 1 << 18
"""Files beside it that are copied with it: its imports, templates, DeepSpeed configs."""
AXOLOTL_TYPES = {"alpaca": "alpaca", "chat_template": "messages", "completion": "text"}


@dataclass(frozen=True, kw_only=True)
class _Data:
    """What stands for a file's data sets: where, the columns of a row, the splits, and files that describe them."""

    names: tuple[str, ...] = ()
    columns: str = ""
    splits: tuple[str, ...] = ("train",)
    files: Mapping[str, str]


def training_file(path: Path, config: ReadConfig, arguments: Sequence[str] = ()) -> "LaunchedFile":
    """A training file that was read; `arguments`: words behind it on its command line.

    Raises:
        UsageError: what starts it is not known or cannot be watched, or what its data look like.
    """
    from probes.launched.run import LaunchedFile

    if config.format not in PROGRAMS:
        hint = f"--run takes {', '.join(PROGRAMS)}; without --run every file is predicted"
        raise UsageError(f"{path.name}: a {config.format} file is not run", hint=hint)
    text, model, here = read_bounded(path), config.model_id or "", weights_here(config.model_id or "")
    if model not in text:
        raise UsageError(
            f"{path.name} does not name {model or 'its model'}",
            hint="write the model into the file: it is run as it is",
        )
    data = _DATA.get(config.format, _own_data)(path.name, config)
    texts = {path.name: text, **dict(_siblings(path)), **data.files}
    if Path(model).exists():  # a folder: the run stands elsewhere
        name = str(Path(model).resolve()) if here else STAND_IN
        texts, model = {**texts, path.name: text.replace(model, name)}, name
    command = PROGRAMS[config.format].format(
        command=config.setup.objective_spec.targets.get("trl", "sft"), file=shlex.quote(path.name)
    )
    return LaunchedFile(
        target={"hf-script": "hf"}.get(config.format, config.format),
        command=shlex.join([*shlex.split(command), *arguments]),
        files=texts,
        model_name=model,
        dataset_names=data.names,
        columns=data.columns,
        splits=data.splits,
        program_folder=program_folder(path.parent, config.format),
        model_here=here,
        data_here=not data.names,
    )


def _siblings(path: Path) -> Iterator[tuple[str, str]]:
    """The small text files in the file's folder."""
    for file in sorted(path.parent.iterdir())[: 10 * MAX_BESIDE]:
        if file.suffix in BESIDE and file.is_file() and file.stat().st_size <= MAX_BESIDE_BYTES and file != path:
            try:
                yield file.name, file.read_text("utf-8")
            except (OSError, UnicodeDecodeError):
                continue


def _own_data(name: str, config: ReadConfig) -> _Data:
    """A program reads what it reads."""
    return _Data(files={})


def _of_trl(name: str, config: ReadConfig) -> _Data:
    mixed = config.values.get("datasets") or ()
    names = [config.dataset] if config.dataset else [entry.get("path") for entry in _mappings(mixed)]
    splits = [config.values.get("dataset_train_split", "train")]
    if config.values.get("eval_strategy", "no") != "no":
        splits.append(config.values.get("dataset_test_split", "test"))
    columns = columns_of(config.setup.objective)
    return _Data(names=_named(name, names), columns=columns, splits=tuple(map(str, splits)), files={})


def _of_axolotl(name: str, config: ReadConfig) -> _Data:
    listed = list(_mappings(config.values.get("datasets") or ()))
    kinds = {str(entry.get("type")) for entry in listed}
    column_kinds = (
        {AXOLOTL_TYPES.get(kind.partition(".")[0]) for kind in kinds} if config.setup.objective == "sft" else {None}
    )
    columns = column_kinds.pop()
    if columns is None or column_kinds:
        raise UsageError(
            f"{name}: no rows can stand in for data sets of type {', '.join(sorted(kinds)) or 'none'}",
            hint=f"--run makes rows of one type: {', '.join(AXOLOTL_TYPES)}",
        )
    return _Data(names=_named(name, [entry.get("path") for entry in listed]), columns=columns, files={})


def _of_llamafactory(name: str, config: ReadConfig) -> _Data:
    folder = str(config.values.get("dataset_dir", "data"))
    names = _named(name, [part.strip() for part in str(config.dataset or "").split(",")])
    columns, more = "alpaca", dict[str, Any]()
    if config.setup.objective == "pretrain":
        columns, more = "text", {"columns": {"prompt": "text"}}
    elif config.setup.objective != "sft":
        columns = "preference"
        more = {"ranking": True, "columns": {column: column for column in ("prompt", "chosen", "rejected")}}
    info = json.dumps({dataset: {"file_name": dataset, **more} for dataset in names})
    described = {f"{folder}/dataset_info.json": info}
    return _Data(names=tuple(f"{folder}/{dataset}" for dataset in names), columns=columns, files=described)


def _mappings(listed: Any) -> Iterator[Mapping[str, Any]]:
    return (entry for entry in listed if isinstance(entry, dict))


def _named(file: str, names: list[Any]) -> tuple[str, ...]:
    """The names of data sets.

    Raises:
        UsageError: none, or what is no name of a data set.
    """
    datasets = tuple(dict.fromkeys(name for name in names if isinstance(name, str) and name))
    if not datasets or any("://" in name for name in datasets):
        raise UsageError(f"{file} names no data set that rows could stand in for", hint="name a hub id or a local path")
    return datasets


_DATA = {"trl": _of_trl, "axolotl": _of_axolotl, "llamafactory": _of_llamafactory}
