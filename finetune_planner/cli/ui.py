"""`plan ui`: a page in which a person slides through the settings, served on this machine alone or written as files."""

import json
import re
import shutil
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from urllib.parse import unquote

import typer

from finetune_planner.app.cores import on_cores
from finetune_planner.app.progress import ProgressLine
from finetune_planner.cli import options
from finetune_planner.cli.answer import read_data, request_of
from finetune_planner.cli.output import write_text
from finetune_planner.cli.request_options import NO_DATA_OPTIONS, DataOptions, RequestOptions
from finetune_planner.cli.setup_flags import takes_options
from finetune_planner.cli.writing import write_out
from planner.core.errors import EnvironmentProblem, PlannerError, UsageError
from planner.hardware import gpus as table
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import find_gpu
from planner.memory.workload import Workload
from planner.models import catalogue
from planner.models.resolve import meant, resolve_model
from planner.models.spec import ModelSpec
from planner.options.objectives import DEFAULT as DEFAULT_OBJECTIVE
from planner.options.objectives import OBJECTIVES
from planner.options.stacks import DEFAULT, TARGET_ROWS
from planner.planning.answer import plan_workload
from planner.planning.grid import LENGTHS, Grid, grid_of
from planner.planning.option_values import positive
from planner.planning.plan import Plan
from planner.planning.space import dimension_values
from planner.samples.dataset import DatasetStats
from planner.setup import TrainSetup
from reports.ui import grid_name, grid_script, page

HOST = "127.0.0.1"
FIRST_GPU = "rtx-4090"
FIRST_MODEL = "meta-llama/Llama-3.1-8B"
STATIC_GPUS = ("t4", "rtx-3060", "rtx-3090", "rtx-4090", "l4", "a100-80gb", "h100-sxm", "h200")
"""Cards of a static site where none is named."""
MAX_FOUND, MAX_KEPT = 8, 4


@takes_options
def ui(
    *,
    model: Annotated[
        list[str] | None, typer.Option(help="Offer this model; repeatable. Default: the catalogue.")
    ] = None,
    gpu: Annotated[list[str] | None, typer.Option(help="Offer this GPU; repeatable. Default: all.")] = None,
    global_batch: options.GlobalBatch = None,
    headroom: options.Headroom = None,
    data: DataOptions,
    port: Annotated[int, typer.Option(help="0: any free one.", min=0, max=65535)] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page.")] = True,
    static: Annotated[
        Path | None, typer.Option(help="Write the page with its figures to this directory; no server.")
    ] = None,
) -> None:
    """A page on this machine: say what you call the model, find its fastest setup, move the sliders, see memory, speed,
    time and cost, take the launch files.

    It listens on 127.0.0.1 alone, until Ctrl-C.
    """
    plan_request = RequestOptions(global_batch=positive("global-batch", global_batch), headroom=headroom)
    shelf = Catalog(model, gpu, plan_request=plan_request, data=data.checked(), all_gpus=static is None)
    if static is not None:
        _write(shelf, static)
        return
    try:
        server = Server((HOST, port), shelf)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot listen on {HOST}:{port}: {error.strerror or error}", hint="leave --port out: any free one"
        ) from error
    address = f"http://{HOST}:{server.server_address[1]}/"
    print(f"{address}  (Ctrl-C ends it)", flush=True)
    if browser:
        import webbrowser

        webbrowser.open(address)
    with server:
        server.serve_forever()


NO_REQUEST = RequestOptions()


class Catalog:
    """The models and GPUs on offer, and their grids by name.

    Raises:
        PlannerError: a name that is not known.
    """

    def __init__(
        self,
        models: Sequence[str] | None,
        gpus: Sequence[str] | None,
        *,
        plan_request: RequestOptions = NO_REQUEST,
        data: DataOptions = NO_DATA_OPTIONS,
        all_gpus: bool = True,
    ) -> None:
        if models:
            self.models = [resolve_model(name) for name in models]
        else:
            self.models = [spec for name in catalogue.names() if (spec := catalogue.load(name)) is not None]
        named = gpus or ([] if all_gpus else STATIC_GPUS)
        self.gpus = [find_gpu(name) for name in named] or list(table.all_gpus())
        self.data = data
        self._request = plan_request
        self._stats: dict[str, DatasetStats | None] = {}
        self._grids: dict[tuple[str, str, int | None], Grid] = {}
        first = next(model for model in self.models if model.model_id == self.first()[0])
        self.sized = self._read(first) is not None  # says at once what is wrong with it

    def first(self) -> tuple[str, str]:
        model = next((spec for spec in self.models if spec.model_id == FIRST_MODEL), self.models[0])
        gpu = next((card for card in self.gpus if card.key == FIRST_GPU), self.gpus[0])
        return model.model_id, gpu.key

    def pairs(self) -> list[tuple[ModelSpec, GpuSpec]]:
        return [(model, gpu) for model in self.models for gpu in self.gpus]

    def search(self, text: str) -> list[str]:
        """Ids on offer that a name may mean: as `plan` understands it, then those that have its words."""
        offered = {spec.model_id.lower(): spec.model_id for spec in self.models}
        words = text.lower().split()
        ids = [*meant(text), *(name for name in offered if all(word in name for word in words))]
        return list(dict.fromkeys(offered[name] for name in ids if name in offered))[:MAX_FOUND]

    def grid(self, model: ModelSpec, gpu: GpuSpec, tokens: int | None = None) -> Grid:
        """The figures of one pair; `tokens`: of one epoch, where the page says so. The last ones are kept."""
        key = (model.model_id, gpu.key, tokens)
        if key not in self._grids:
            while len(self._grids) >= MAX_KEPT:
                del self._grids[next(iter(self._grids))]
            self._grids[key] = self._grid(model, gpu, tokens)
        return self._grids[key]

    def _grid(self, model: ModelSpec, gpu: GpuSpec, tokens: int | None) -> Grid:
        plan_request, stats = replace(self._request, dataset_tokens=tokens), self._read(model)

        def of_length(length: int | None) -> Workload:
            return request_of(model, replace(plan_request, seq_len=length), self.data, stats).workload(model, gpu)

        usual = of_length(None)
        most = model.max_position_embeddings
        lengths = {length for length in LENGTHS if most is None or length <= most} | {usual.seq_len_tokens}
        by_length = {length: of_length(length) for length in sorted(lengths)} | {usual.seq_len_tokens: usual}
        return grid_of(
            [by_length[length] for length in sorted(by_length)], sorted(by_length).index(usual.seq_len_tokens)
        )

    def _read(self, model: ModelSpec) -> DatasetStats | None:
        if model.model_id not in self._stats:
            self._stats[model.model_id] = read_data(self.data, model, OBJECTIVES[DEFAULT_OBJECTIVE])
        return self._stats[model.model_id]

    def named(self, name: str, tokens: int | None = None) -> Grid | None:
        """The figures of the pair with this name, None where it is not on offer."""
        for model, gpu in self.pairs():
            if grid_name(model.model_id, gpu.key) == name:
                return self.grid(model, gpu, tokens)
        return None

    def page(self, *, writes: bool) -> str:
        return page(self.models, self.gpus, writes=writes, first=self.first(), data=self.data.words, sized=self.sized)


def launch_zip(grid: Grid, at: int) -> bytes:
    """plan.json, reports and launch files of one cell, as a zip file.

    Raises:
        UsageError: a cell that cannot run or does not fit.
    """
    cell = grid.cells[at] if 0 <= at < len(grid.cells) else None
    if cell is None or not cell.fits:
        raise UsageError("this setup has no launch files: it does not fit", hint="choose a smaller one")
    setup, plan_request = cell.setup, grid.workload_of(at)
    if Path(plan_request.data.file).exists():  # its place as seen from where the files are unpacked nobody knows
        plan_request = replace(plan_request, data=replace(plan_request.data, file=""))
    plan = plan_workload(_exactly(setup, plan_request))
    if not isinstance(plan, Plan) or plan.chosen.setup != setup:
        raise UsageError("this setup cannot be planned alone", hint="use the command below it")
    with TemporaryDirectory() as parent:
        folder, command = Path(parent, "plan"), [plan_request.model.model_id, "--gpu", plan_request.gpu.key]
        write_out(plan, folder, targets=None, command=command)
        return Path(shutil.make_archive(str(folder), "zip", folder)).read_bytes()


def _exactly(setup: TrainSetup, plan_request: Workload) -> Workload:
    if setup.stack != DEFAULT and setup.stack in TARGET_ROWS:
        plan_request = replace(plan_request, targets=(setup.stack,))
    names = ("micro_batch_seqs", "compile", *dimension_values(plan_request))
    of_lora = ("lora_rank", "lora_targets") if setup.method == "full" else ()
    fixed: dict[str, tuple[Any, ...]] = {name: (getattr(setup, name),) for name in names if name not in of_lora}
    return replace(
        plan_request,
        fixed=fixed,
        seq_len_tokens=setup.seq_len_tokens,
        global_batch_seqs=setup.global_batch_seqs,
        min_rank=setup.lora_rank or plan_request.min_rank,
    )


class Server(ThreadingHTTPServer):
    """Serves one shelf; a request takes names from it and nothing else."""

    daemon_threads = True
    request_queue_size = 64  # a burst waits here, not a second and more for its next try

    def __init__(self, address: tuple[str, int], shelf: Catalog) -> None:
        super().__init__(address, Handler)
        self.shelf = shelf
        port = self.server_address[1]
        self.hosts = {f"{HOST}:{port}", f"localhost:{port}"}
        self.turn = threading.Lock()
        """Held while figures are computed: the formula remembers between calls, for one thread."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who closes the page before it is there is no fault."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """GET alone: /, /search/WORDS, /grid/NAME.js and /launch/NAME/CELL.zip; NAME/TOKENS where the page says how much is
    trained on."""

    server: Server
    timeout = 30.0
    """Seconds; who sends nothing for so long is let go."""

    def do_GET(self) -> None:
        # another site's name that was pointed at this machine, or another site's page that asks in its reader's name
        foreign = self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
        if foreign or self.headers.get("Host") not in self.server.hosts:
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        path = unquote(self.path.partition("?")[0])
        try:
            response = self._content(path)
        except PlannerError as error:
            self.send_error(HTTPStatus.BAD_REQUEST, explain=error.message)
            return
        if response is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        kind, content = response
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.end_headers()
        self.wfile.write(content)

    def _content(self, path: str) -> tuple[str, bytes] | None:
        shelf = self.server.shelf
        if match := re.fullmatch(r"/search/(.{0,100})", path):
            return "application/json; charset=utf-8", json.dumps(shelf.search(match[1])).encode()
        with self.server.turn:
            if path == "/":
                return "text/html; charset=utf-8", shelf.page(writes=True).encode()
            if match := re.fullmatch(r"/grid/([\w.-]{1,300})(?:/([0-9]{1,15}))?\.js", path):
                grid = shelf.named(match[1], _tokens(match[2]))
                script = "" if grid is None else grid_script(grid, path.removeprefix("/grid/").removesuffix(".js"))
                return None if grid is None else ("text/javascript; charset=utf-8", script.encode())
            if match := re.fullmatch(r"/launch/([\w.-]{1,300})(?:/([0-9]{1,15}))?/([0-9]{1,6})\.zip", path):
                grid = shelf.named(match[1], _tokens(match[2]))
                return None if grid is None else ("application/zip", launch_zip(grid, int(match[3])))
        return None

    def log_message(self, format: str, *values: object) -> None:
        """Requests are not news; faults are, on stderr by the server itself."""


def _tokens(digits: str | None) -> int | None:
    return int(digits) or None if digits else None


def _write(shelf: Catalog, folder: Path) -> None:
    """The page and every grid as files that need no server, on all cores."""
    num = len(shelf.models) * len(shelf.gpus)
    print(f"{num} pair{'s' * (num > 1)} of model and GPU", file=sys.stderr)
    line = ProgressLine(total=num)
    # a data set is counted once, by one process
    for model_id in on_cores(partial(_write_grids, shelf, folder), shelf.models, alone=shelf.sized):
        for _ in shelf.gpus:
            line.advance()
        if len(shelf.models) > 1:
            line.say(f"written: {model_id}")
    line.close()
    write_text(folder / "index.html", shelf.page(writes=False), inside=folder)
    print(f"wrote {folder / 'index.html'}", file=sys.stderr)


def _write_grids(shelf: Catalog, folder: Path, model: ModelSpec) -> str:
    for gpu in shelf.gpus:
        name = f"{grid_name(model.model_id, gpu.key)}.js"
        write_text(folder / "grid" / name, grid_script(shelf.grid(model, gpu)), inside=folder)
    return model.model_id
