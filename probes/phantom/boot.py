"""Puts the phantom GPU into a Python process before the user's program starts. Imported by `sitecustomize`; no torch
is imported before the program does it.

If anything goes wrong here the process ends at once: the program must never run for real.
"""

import atexit
import errno
import importlib
import ipaddress
import json
import os
import socket
import sys
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from probes.phantom import copies
from probes.phantom.imports import Watcher, is_another_rank

VARIABLE = "FINETUNE_PLANNER_TRACE"
FAILED_EXIT = 97
_keep = ExitStack()


def begin() -> None:
    """Reads the order from the environment and waits for the program to import torch."""
    text = os.environ.get(VARIABLE)
    if not text:
        return
    if is_another_rank():
        os._exit(0)
    try:
        order = json.loads(text)
        if not order["network"]:
            _cut_network()
        if order.get("tree"):
            copies.redirect(copies.Tree(order["tree"]))
        watcher = Watcher()
        watcher.add({"torch": [lambda module: _guarded(order, watcher)]}, {})
        # what a library is told must be there before the program binds the library's functions
        watcher.first = lambda: importlib.import_module("torch")
        watcher.watch()
    except BaseException:
        _give_up(text)
    hook = sys.excepthook

    def remember_what_is_absent(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Also where PyTorch was not imported."""
        if isinstance(error, ModuleNotFoundError) and error.name:
            Path(order["results"], f"{os.getpid()}.absent").write_text(error.name.partition(".")[0])
        hook(kind, error, trace)

    sys.excepthook = remember_what_is_absent


def _guarded(order: dict[str, Any], watcher: Watcher) -> None:
    try:
        _start(order, watcher)
    except BaseException:
        _give_up(json.dumps(order))


def _give_up(text: str) -> None:
    traceback.print_exc()
    try:
        Path(json.loads(text)["results"], f"{os.getpid()}.error").write_text(traceback.format_exc())
    finally:
        os._exit(FAILED_EXIT)


class _Report:
    """How the program ends, and the result that is written then, once and by this process alone."""

    def __init__(self, results: str, in_copies: bool) -> None:
        self._in_copies = in_copies
        self._path = Path(results, f"{os.getpid()}.json")
        self._began = time.monotonic()
        self._owner: int | None = os.getpid()
        self._status = "ended"
        self._error = ""

    def write(self, phantom: Any) -> None:
        from probes.phantom.cuda import Refused
        from probes.phantom.summary import summary

        if os.getpid() != self._owner:
            return
        self._owner = None
        if Refused.messages:  # also where the program caught it and took another path
            self._status, self._error = "refused", Refused.messages[0]
        summary(phantom, self._status, self._error, time.monotonic() - self._began).write(self._path)

    def finished(self, phantom: Any) -> None:
        self._status = "done"
        self.write(phantom)

    def failed(self, phantom: Any, error: BaseException, trace: TracebackType | None) -> None:
        import torch

        from probes.phantom.failures import error_text, of_copies, status_of

        if self._in_copies:
            of_copies.update((errno.EACCES, errno.EPERM))
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        self._status = "out of memory" if out_of_memory else status_of(error, trace, phantom.stand_in_rows)
        if not isinstance(error, SystemExit):
            self._error = error_text(error, phantom.stand_in_rows)


def _start(order: dict[str, Any], watcher: Watcher) -> None:
    from planner.setup.codec import decode
    from probes.phantom.card import Card, TraceOptions
    from probes.phantom.session import phantom_gpu
    from probes.phantom.steps import Done

    report = _Report(order["results"], in_copies=bool(order.get("tree")))
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    phantom = _keep.enter_context(
        phantom_gpu(
            decode(Card, order["card"]),
            decode(TraceOptions, order["options"]),
            expandable_segments="expandable_segments:True" in settings,
            finished=report.finished,
            watcher=watcher,
        )
    )
    hook = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, Done):  # the result is written; a launcher that waits must not see a failure
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        report.failed(phantom, error, trace)
        hook(kind, error, trace)

    sys.excepthook = excepthook
    atexit.register(report.write, phantom)


def _cut_network() -> None:
    true = socket.socket.connect
    true_ex = socket.socket.connect_ex

    def outside(connection: socket.socket, address: Any) -> bool:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        try:
            return not ipaddress.ip_address(address[0]).is_loopback
        except ValueError:
            return bool(address[0] != "localhost")

    def connect(connection: socket.socket, address: Any) -> None:
        if outside(connection, address):
            raise ConnectionRefusedError("plan trace: no network (allow it with --network)")
        true(connection, address)

    def connect_ex(connection: socket.socket, address: Any) -> int:
        return 111 if outside(connection, address) else true_ex(connection, address)

    socket.socket.connect = connect  # type: ignore[method-assign, assignment]
    socket.socket.connect_ex = connect_ex  # type: ignore[method-assign, assignment]
