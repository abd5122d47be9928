"""`plan ui` without a browser: figures that are the formula's, a server that answers this machine alone."""

import json
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

import pytest

from finetune_planner.cli.app import run
from finetune_planner.cli.request_options import DataOptions
from finetune_planner.cli.ui import HOST, Catalog, Server, launch_zip
from planner.core.errors import UsageError
from planner.hardware.gpu import GpuSpec
from planner.models.spec import ModelSpec
from planner.planning.answer import plan_workload
from planner.planning.plan import NoPlan
from planner.planning.plan_request import PlanRequest
from planner.planning.predict import predict
from planner.planning.useful import job_s
from reports.rows import MIN_SHOWN_BYTES
from reports.terminal import GROUPS, group_bytes
from reports.text import memory_mark, speed_mark
from reports.ui import VERDICTS, grid_script
from tests.whole import WHOLE, some

MODEL, GPU = "openai-community/gpt2", "rtx-3060"
LARGE, SMALL = "EleutherAI/gpt-j-6b", "rtx-2060"
"""A model of 1,024 positions: few lengths, so that its grid costs half a second."""


@pytest.fixture(scope="module")
def shelf() -> Catalog:
    return Catalog([MODEL, "meta-llama/Llama-3.1-8B", LARGE], [GPU, SMALL])


def pair(shelf: Catalog, model: str, gpu: str) -> tuple[ModelSpec, GpuSpec]:
    return next(offer for offer in shelf.pairs() if (offer[0].model_id, offer[1].key) == (model, gpu))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "chats.jsonl"
    file.write_text("".join(f'{{"question": "why", "answer": "{"so " * (9 + at)}"}}\n' for at in range(300)))
    return file


def test_every_cell_is_the_formula_s(shelf: Catalog) -> None:
    model, gpu = pair(shelf, LARGE, SMALL)
    grid = shelf.grid(model, gpu)
    document = json.loads(grid_script(grid).partition(",")[2].rstrip().removesuffix(");"))
    shape = [len(document[name]) for name in ("methods", "lengths", "batches", "checkpointing")]
    assert len(document["cells"]) == shape[0] * shape[1] * shape[2] * shape[3]
    assert {VERDICTS[cell[0]] for cell in document["cells"] if cell} >= {"fits", "over"}
    for at in range(0, len(document["cells"]), 37):
        cell, candidate = document["cells"][at], grid.cells[at]
        if candidate is None:  # checkpointing of every n-th layer, where no plan takes it
            assert document["checkpointing"][at % shape[3]] > 1
            continue
        steps = (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1)
        places = [at // step % size for step, size in zip(steps, shape, strict=True)]
        setup = candidate.setup
        assert (setup.method, setup.lora_rank) == grid.methods[places[0]]
        assert setup.seq_len_tokens == document["lengths"][places[1]]
        assert setup.micro_batch_seqs == document["batches"][places[2]]
        assert setup.checkpointing == document["checkpointing"][places[3]]
        prediction = predict(model, gpu, setup, planned=True)
        assert cell[1:4] == [prediction.peak_device_bytes, *[round(prediction.tokens_per_s or 0)] * 2]
        assert [document["marks"][mark] for mark in cell[4:6]] == [memory_mark(prediction), speed_mark(prediction)]
        sizes = group_bytes(candidate, grid.workload.memory_bytes)
        assert cell[6:] == [sizes[label] for label, _ in GROUPS]
        assert 0 <= cell[1] - sum(cell[6:]) < len(GROUPS) * MIN_SHOWN_BYTES


@pytest.mark.parametrize(("name", "card", "usual"), some([(MODEL, GPU, 1024), (LARGE, SMALL, 2048)], 2))
def test_the_fastest_is_what_plan_chooses_at_each_length(shelf: Catalog, name: str, card: str, usual: int) -> None:
    model, gpu = pair(shelf, name, card)
    grid = shelf.grid(model, gpu)
    assert grid.lengths[grid.usual] == usual
    for length in (512, usual) if WHOLE else (usual,):
        at = grid.fastest()[grid.lengths.index(length)]
        plan = plan_workload(PlanRequest(seq_len=length).workload(model, gpu))
        if at is None:
            assert isinstance(plan, NoPlan)
            continue
        cell = grid.cells[at]
        assert (cell.setup, cell.formula) == (plan.chosen.setup, plan.chosen.formula)
    assert (None in grid.fastest()) == (name == LARGE)
    assert len(grid.fastest()) == len(grid.lengths)


def test_a_model_is_found_by_what_people_call_it(shelf: Catalog) -> None:
    """As `plan` understands it, of what is on offer."""
    llama = "meta-llama/Llama-3.1-8B"
    for query in ("llama 3.1 8b", "lama 3.1 8b", "llama3.1:8b", "unsloth/Meta-Llama-3.1-8B", "8B", "LLAMA"):
        assert shelf.search(query) == [llama], query
    assert shelf.search("gpt 2") == [MODEL]
    assert shelf.search("qwen3 8b") == []
    assert set(shelf.search("")) == {llama, MODEL, LARGE}


def test_a_data_set_gives_length_time_and_no_path_in_the_zip(chats: Path) -> None:
    shelf = Catalog([MODEL], [GPU], data=DataOptions(dataset=str(chats)))
    grid = shelf.grid(*shelf.pairs()[0])
    document = json.loads(grid_script(grid).partition(",")[2].rstrip().removesuffix(");"))
    usual, at = document["usual"], document["fastest"][document["usual"]]
    workload, cell = grid.workloads[usual], grid.cells[at]
    assert cell is not None
    assert document["lengths"][usual] < 1024
    tokens = f"{document['tokens'][usual] / 1e3:.3g} k"
    assert document["jobs"][usual] == f"chats.jsonl, {workload.epochs:g} epochs of {tokens} tokens"
    page_s = document["epochs"][usual] * document["tokens"][usual] / document["cells"][at][3]
    assert page_s == pytest.approx(job_s(workload, cell), rel=1e-3)
    with ZipFile(BytesIO(launch_zip(grid, at))) as file:
        assert not any(b"chats.jsonl" in file.read(name) for name in file.namelist())


def test_the_launch_files_are_those_of_the_cell(shelf: Catalog) -> None:
    model, gpu = pair(shelf, MODEL, GPU)
    grid = shelf.grid(model, gpu)
    ranked = [
        at
        for at, candidate in enumerate(grid.cells)
        if candidate is not None and candidate.fits and candidate.setup.lora_rank == 32
    ]
    at = ranked[len(ranked) // 2]
    packed = launch_zip(grid, at)
    with ZipFile(BytesIO(packed)) as file:
        assert {"plan.json", "report.md", "launch/run.sh"} <= set(file.namelist())
        plan = json.loads(file.read("plan.json"))
    cell = grid.cells[at]
    assert plan["chosen"]["setup"]["lora_rank"] == 32
    assert plan["chosen"]["setup"]["micro_batch_seqs"] == cell.setup.micro_batch_seqs
    assert plan["chosen"]["formula"]["peak_device_bytes"] == cell.formula.peak_device_bytes
    with pytest.raises(UsageError, match="no launch files"):
        launch_zip(grid, 10**6)


@pytest.fixture(scope="module")
def server(shelf: Catalog) -> Iterator[Server]:
    with Server((HOST, 0), shelf) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def ask(server: Server, path: str, *, host: str = "", method: str = "GET", **headers: str) -> tuple[int, bytes]:
    connection = HTTPConnection(HOST, server.server_address[1])
    try:
        connection.request(method, path, headers={**headers, **({"Host": host} if host else {})})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_the_server_gives_what_is_on_offer_and_nothing_else(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    status, content = ask(server, "/")
    assert status == 200
    assert MODEL.encode() in content
    name = f"{MODEL}--{GPU}".replace("/", "--")
    status, content = ask(server, f"/grid/{name}.js")
    assert status == 200
    assert content.startswith(b"take(")
    for path in (
        "/grid/nothing.js",
        "/../pyproject.toml",
        "/grid/%2e%2e%2fx.js",
        "/etc/passwd",
        f"/launch/{name}/x.zip",
    ):
        assert ask(server, path)[0] == 404, path
    assert ask(server, f"/launch/{name}/999999.zip")[0] == 400
    assert json.loads(ask(server, "/search/gpt%202")[1]) == [MODEL]
    assert ask(server, f"/search/{'a' * 101}")[0] == 404
    status, content = ask(server, f"/grid/{name}/20000000.js")
    assert status == 200
    assert b'"tokens":[20000000,' in content
    assert content.startswith(f'take("{name}/20000000"'.encode())
    assert ask(server, "/", method="POST")[0] == 501


def test_another_site_s_name_is_refused(server: Server) -> None:
    assert ask(server, "/", host="evil.example")[0] == 403
    assert ask(server, "/", host=f"localhost:{server.server_address[1]}")[0] == 200


def test_another_site_s_page_is_refused(server: Server) -> None:
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
        assert ask(server, "/", **{"Sec-Fetch-Site": site})[0] == status, site


def test_a_page_that_is_closed_early_is_no_fault(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        raise ConnectionResetError
    except ConnectionResetError:
        server.handle_error(None, (HOST, 1))
    assert capfd.readouterr().err == ""
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        server.handle_error(None, (HOST, 1))
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_no_request_gets_more_than_an_answer(server: Server) -> None:
    host = f"Host: {HOST}:{server.server_address[1]}\r\n".encode()
    for line, status in (
        (b"GET //[ HTTP/1.1", 404), (b"GET http://[ HTTP/1.1", 404), (b"GET /%00 HTTP/1.1", 404),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1", 414),
        (b"GET /launch/x/\xd9\xa3.zip HTTP/1.1", 404), (b"GET /?" + b"a" * 60_000 + b" HTTP/1.1", 200),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200, 431), (b"GET / HTTP/1.1\r\nHost: evil.example", 403),
    ):  # fmt: skip
        with socket.create_connection(server.server_address[:2]) as connection:
            connection.sendall(line + b"\r\n" + host + b"\r\n")
            with connection.makefile("rb") as answer:
                assert answer.readline().split()[1] == str(status).encode(), line[:40]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("cores", [1, 2])
def test_a_static_site_is_the_same_on_any_cores(cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setattr("finetune_planner.cli.ui.Catalog.grid", lambda self, model, gpu: f"{model.model_id} {gpu.key}")
    monkeypatch.setattr("finetune_planner.cli.ui.grid_script", lambda grid: grid)
    models = ["openai-community/gpt2", "HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-0.5B"]
    command = ["ui", "--static", str(tmp_path), "--gpu", "t4", "--gpu", "l4"]
    command += [word for name in models for word in ("--model", name)]
    assert run(command) == 0
    files = sorted((tmp_path / "grid").glob("*.js"))
    assert {file.read_text() for file in files} == {f"{name} {gpu}" for name in models for gpu in ("l4", "t4")}
