"""`plan oom FILE|-`: why a run ran out of memory, from its traceback, log or memory snapshot; with its config, what
would fit."""

import codecs
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from finetune_planner.cli import options
from finetune_planner.cli.output import tell
from planner.core.errors import ConfigError, PlannerError, UsageError
from planner.core.redaction import without_secrets
from planner.core.units import gib
from planner.hardware.gpus import find_gpu
from planner.planning.failures.diagnosis import Diagnosis, diagnose, diagnose_message
from planner.planning.failures.message import EXPANDABLE, GRADIENT_CHECKPOINTING, MICRO_BATCH
from planner.planning.failures.snapshot import Snapshot, is_snapshot, read_snapshot
from planner.setup.interchange import SCHEMA_VERSION, to_jsonable

MAX_TEXT_BYTES = 4 * 1024**2
"""Of a longer log the end is read: the error stands there."""
CHUNK_BYTES = 1024**2
CONFIG_ENDINGS = (".yaml", ".yml", ".sh", ".py")
MAX_BESIDE = 40
NUM_CHANGES = 4


def oom(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="Traceback, log or memory snapshot; - reads stdin.")],
    config: Annotated[
        Path | None, typer.Option("--config", help="The run's config or script. Default: the only one beside the log.")
    ] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="Its card, where the memory's size does not tell.")] = None,
    as_json: options.Json = False,
) -> int:
    """Why a run ran out of memory, and the smallest change. Nothing is executed.

    Exit codes: 0 a cause is named, 1 none is (what is missing is said), 2 it cannot be read.
    """
    if gpu is not None:
        find_gpu(gpu)  # an unknown card is the person's mistake, not a reason why the config was not checked
    diagnosis, snapshot = _read(file)
    if not diagnosis.message.where:
        raise ConfigError(
            "no out-of-memory error in this text",
            hint="paste it from 'Traceback' to 'CUDA out of memory. Tried to allocate ...'",
        )
    config_path = config or (_only_config_in(Path(file)) if file != "-" else None)
    card = gpu or (diagnosis.cards[0] if len(diagnosis.cards) == 1 else None)
    checked, refused = _checked(config_path, card, diagnosis) if config_path else (None, "")
    document = {
        "schema_version": SCHEMA_VERSION,
        "kind": "oom",
        **to_jsonable(diagnosis),
        "holders": to_jsonable(snapshot.holders) if snapshot else [],
        "config": str(config_path) if config_path else None,
        "check": checked,
        "not_checked": refused,
    }
    tell(document, lines(diagnosis, snapshot, config_path, checked, refused), as_json=as_json)
    return 0 if diagnosis.causes else 1


def _read(file: str) -> tuple[Diagnosis, Snapshot | None]:
    if file == "-":
        return diagnose(_text(sys.stdin.buffer)), None
    path = Path(file)
    if not path.exists() or path.is_dir():
        raise UsageError(
            f"{file}: no such file", hint="a log, a traceback or a memory snapshot; - reads what you paste"
        )
    # O_NONBLOCK: a named pipe into which nobody writes is empty, not waited for; what <(...) gives has its writer
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(descriptor, "rb") as opened:
        if not opened.seekable():
            if hasattr(os, "O_NONBLOCK"):
                os.set_blocking(descriptor, True)
            return diagnose(_text(opened)), None
        if is_snapshot(opened.read(4)):
            snapshot = read_snapshot(path)
            return diagnose_message(snapshot.message), snapshot
        opened.seek(0)
        head = opened.read(2)
        end = path.stat().st_size
        opened.seek(max(0, end - MAX_TEXT_BYTES) // 2 * 2)
        return diagnose(_decoded(opened.read(MAX_TEXT_BYTES + 1), head)), None


def _text(stream: BinaryIO) -> str:
    tail, head = b"", b""
    while chunk := stream.read(CHUNK_BYTES):
        head = head or chunk[:2]
        tail = (tail + chunk)[-MAX_TEXT_BYTES:]
    return _decoded(tail, head)


def _decoded(data: bytes, head: bytes) -> str:
    """A log as text: PowerShell's > writes two bytes a letter, after a mark."""
    two = head in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return data.decode(("utf-16-le" if head == codecs.BOM_UTF16_LE else "utf-16-be") if two else "utf-8", "replace")


def _only_config_in(log: Path) -> Path | None:
    from planner.frameworks.readers.read import read_config

    configs = []
    for path in sorted(log.resolve().parent.iterdir())[:MAX_BESIDE]:
        if path.suffix not in CONFIG_ENDINGS or not path.is_file():
            continue
        try:
            read_config(path)
        except PlannerError:
            continue
        configs.append(path)
    return configs[0] if len(configs) == 1 else None


def _checked(config: Path, card: str | None, diagnosis: Diagnosis) -> tuple[dict[str, Any] | None, str]:
    from finetune_planner.cli.checking import CheckRequest, as_document, checked

    if card is None:
        named = ", ".join(diagnosis.cards[:8])
        return None, f"the card is not known: --gpu NAME{f' (with this memory: {named})' if named else ''}"
    try:
        result, _, _ = checked(config, card, CheckRequest.of(sets=(), model=None), dry_run=False)
    except PlannerError as error:
        return None, f"{error.message} ({error.hint})" if error.hint else error.message
    return as_document(result, None), ""


def lines(
    diagnosis: Diagnosis, snapshot: Snapshot | None, config: Path | None, checked: dict[str, Any] | None, refused: str
) -> Iterator[str]:
    """The answer as a person reads it."""
    message = diagnosis.message
    what = (
        diagnosis.causes[0].words
        if diagnosis.causes
        else "out of memory; the text does not tell in which part of the run"
    )
    yield f"Ran out of memory: {what}."
    figures = [
        ("asked for", message.tried_bytes),
        ("held by PyTorch", message.allocated_bytes),
        ("cached, unusable", message.unallocated_bytes),
        ("other processes", message.other_bytes),
        ("card", message.total_bytes),
    ]
    shown = [f"{label} {gib(size)}" for label, size in figures if size]
    if shown:
        yield " · ".join(shown)
    for holder in snapshot.holders if snapshot else ():
        part = f", {holder.phase}" if holder.phase else ""
        yield f"  {gib(holder.size_bytes)} by {without_secrets(holder.place)}{part}"
    for cause in diagnosis.causes[1:]:
        yield f"Also: {cause.words}."
    changes = list(dict.fromkeys(change for cause in diagnosis.causes for change in cause.changes))
    if not diagnosis.causes:  # what holds of any part of a run
        pieces = 0 < (message.tried_bytes or 0) <= (message.unallocated_bytes or 0)
        changes = [*[EXPANDABLE] * pieces, MICRO_BATCH, GRADIENT_CHECKPOINTING]
    if changes and (checked is None or checked["verdict"] == "fits"):  # else its own changes that fit say more
        yield "What helps, smallest change first"
        yield from (f"→ {change}" for change in changes[: NUM_CHANGES + len(diagnosis.causes) - 1])
    if checked is not None and config is not None:
        yield from _of_config(config, checked)
    elif refused:
        yield f"{config.name if config else 'config'}: not checked: {refused}"
    else:
        yield "With the run's config this says what would fit: plan oom FILE --config CONFIG --gpu GPU"
    for unknown in diagnosis.unknown:
        yield f"Not known: {unknown}"


def _of_config(config: Path, checked: dict[str, Any]) -> Iterator[str]:
    prediction, budget, card = checked["prediction"], checked["budget_bytes"], checked["gpu"]
    words = {"fits": "fits", "does_not_fit": "does not fit", "cannot_run": "cannot run"}
    verdict = words.get(checked["verdict"], "may or may not fit")
    peak = f"{gib(prediction['peak_device_bytes'])} of {gib(budget)}"
    yield f"{config.name}: {verdict}: {peak} ({checked['level']}, peak in {prediction['peak_phase']})"
    if checked["verdict"] == "fits":
        yield "The config alone does not explain it: other processes, longer samples, or code that it does not show"
    least = prediction["peak_device_bytes"]  # a faster change that needs more is no help
    helping = [change for change in checked["changes"] if change["peak_device_bytes"] < least]
    fitting = [change for change in helping if change["verdict"] == "fits"]
    fitting.sort(key=lambda change: change["changes_training"])
    if fitting:
        yield "Changes of the config that need less and fit, those that train the same first"
        for change in fitting[:NUM_CHANGES]:
            speed = f", {100 * (change['speedup'] - 1):+.0f} % speed" if change.get("speedup") else ""
            yield f"→ {change['label']}: {gib(change['peak_device_bytes'])}{speed}"
    elif checked["verdict"] != "fits":
        yield f"No single change fits: plan check {config.name} --gpu {card} --fix"
        yield f"or plan anew: plan {checked['model']} --gpu {card}"
