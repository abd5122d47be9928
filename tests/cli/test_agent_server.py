"""`plan mcp`: what an agent asks, through the SDK's own client; and the cut that makes its answers short."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from finetune_planner.cli.agent_server import MAX_ANSWER_BYTES, CommandRunner, build_server
from finetune_planner.cli.app import run
from finetune_planner.cli.serve import SKILL
from planner.planning.check import Verdict
from planner.setup.outcome import Fit
from reports.brief_json import LEFT_OUT, brief
from tests.whole import WHOLE, some

pytest.importorskip("mcp")
pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

ROOT = Path(__file__).parents[2]
TASKS = [json.loads(line) for line in (Path(__file__).parent / "agent_tasks.jsonl").read_text().splitlines()]
TOOLS = ["check", "details", "estimate", "explain", "oom", "plan", "which_gpu", "which_model"]


def ask(desk: CommandRunner, *calls: tuple[str, dict[str, Any]], allow_trace: bool = False) -> list[Any]:
    """What the client gets, call after call in one session."""
    from mcp import Client

    async def session() -> list[Any]:
        async with Client(build_server(desk, allow_trace=allow_trace)) as client:
            return [await client.call_tool(name, arguments) for name, arguments in calls]

    return asyncio.run(session())


def at(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = value[int(name)] if isinstance(value, list) else value[name]
    return value


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> CommandRunner:
    return CommandRunner([tmp_path_factory.mktemp("root")], 300.0, dry_run=False)


def schemas(allow_trace: bool) -> list[Any]:
    from mcp import Client

    async def session() -> list[Any]:
        async with Client(build_server(CommandRunner([Path.cwd()], 1.0), allow_trace=allow_trace)) as client:
            return list((await client.list_tools()).tools)

    return asyncio.run(session())


def test_every_tool_has_a_typed_schema_and_none_executes_unless_started_with_it() -> None:
    tools = schemas(allow_trace=False)
    assert sorted(tool.name for tool in tools) == TOOLS
    for tool in tools:
        assert tool.description
        for name, field in tool.input_schema["properties"].items():
            assert "type" in field or "anyOf" in field, (tool.name, name)
    assert sorted(tool.name for tool in schemas(allow_trace=True)) == sorted([*TOOLS, "trace"])


def test_an_agent_is_answered_over_stdio(tmp_path: Path) -> None:
    """Fifty questions in one session with `plan mcp` as an agent starts it: the call that a schema suggests, and what
    the answer must hold."""
    from mcp import Client
    from mcp.client.stdio import StdioServerParameters

    words = [
        "-P",
        "-c",
        "from finetune_planner.cli import main; main()",
        "mcp",
        "--root",
        str(tmp_path),
        "--no-dry-run",
    ]

    # a table of all cards takes 11 CPU seconds
    chosen = [task for task in some(TASKS, 17) if WHOLE or task["tool"] != "which_gpu"]

    async def session() -> list[Any]:
        server = StdioServerParameters(command=sys.executable, args=words, env={"PYTHONPATH": str(ROOT)})
        async with Client(server) as client:
            return [await client.call_tool(task["tool"], task["arguments"]) for task in chosen]

    wrong = {}
    for task, result in zip(chosen, asyncio.run(session()), strict=True):
        if unmet := _unmet(task["expect"], result):
            wrong[task["question"]] = unmet
    assert wrong == {}


def _unmet(expect: dict[str, Any], result: Any) -> Any:
    """What of an answer is not as expected."""
    text, answer = result.content[0].text, result.structured_content
    if "error" in expect or result.is_error:
        return None if result.is_error and expect.get("error", "\0") in text else text
    if "text" in expect:
        return None if expect["text"] in text else text
    if len(text.encode()) > MAX_ANSWER_BYTES or json.loads(text) != answer:
        return len(text)
    return [(path, at(answer, path)) for path, value in expect.items() if at(answer, path) != value]


def test_an_argument_that_no_tool_has_is_refused(desk: CommandRunner) -> None:
    """Not dropped: an agent that misspells the rank must not get a plan of another."""
    (answer,) = ask(desk, ("plan", {"model": "llama 3.1 8b", "gpu": "rtx-4090", "lora_rank": 64}))
    assert answer.is_error
    assert "lora_rank" in answer.content[0].text
    assert all(tool.input_schema["additionalProperties"] is False for tool in schemas(allow_trace=True))


@pytest.mark.parametrize("missing", ["pydantic", "mcp"])
def test_without_its_sdk_the_server_says_how_to_install_it(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "finetune_planner.cli.agent_server")
    monkeypatch.setitem(sys.modules, missing, None)
    assert run(["mcp", "--skill"]) == 0
    assert run(["mcp"]) == 3
    assert "[mcp]" in capsys.readouterr().err


def test_details_give_what_was_left_out(desk: CommandRunner) -> None:
    arguments = {"model": "gpt2", "gpu": "t4", "seq_len": 512, "method": "full"}
    (first,) = ask(desk, ("plan", arguments))
    handle = first.structured_content["details"]
    paths = ("", "chosen.formula.terms", "alternatives.0", "chosen.nothing")
    *parts, wrong = ask(desk, *(("details", {"handle": handle, "path": path}) for path in paths))
    for result in (first, *parts):  # the text itself is short, not indented
        assert json.loads(result.content[0].text) == result.structured_content
        assert len(result.content[0].text.encode()) <= MAX_ANSWER_BYTES
    assert parts[0].structured_content["memory"] == first.structured_content["memory"]
    assert parts[1].structured_content["weights"] > 2**28
    assert "label" in parts[2].structured_content
    assert wrong.is_error
    assert "one of setup, fits" in wrong.content[0].text


def test_nothing_outside_the_roots_is_read_and_nothing_inside_is_executed(desk: CommandRunner, tmp_path: Path) -> None:
    root = desk.roots[0]
    (tmp_path / "outside.yaml").write_text("model_name_or_path: gpt2\nmax_length: 64\n")
    (root / "link.yaml").symlink_to(tmp_path / "outside.yaml")
    mark = tmp_path / "ran"
    script = f"open({str(mark)!r}, 'w')\nfrom trl import SFTTrainer\nSFTTrainer('gpt2').train()\n"
    (root / "train.py").write_text(script)
    (root / "torch.py").write_text(f"open({str(mark)!r}, 'w')\n")
    calls = [{"path": "link.yaml"}, {"path": str(tmp_path / "outside.yaml")}, {"path": "train.py"}]
    *refusals, inside = ask(desk, *(("check", {"gpu": "t4", **call}) for call in calls))
    assert all(refusal.is_error and "outside the folders" in refusal.content[0].text for refusal in refusals)
    assert not mark.exists()
    assert "outside" not in inside.content[0].text
    (refused,) = ask(desk, ("plan", {"model": "gpt2", "gpu": "t4", "out": "../elsewhere"}))
    assert "outside the folders" in refused.content[0].text


OUTSIDE = {
    "a.yaml": ("model_name_or_path: {there}\nmax_length: 64\n", "outside the folders"),
    "b.yaml": ("model_name_or_path: gpt2\nmax_length: 64\ndeepspeed: {outside}/ds.json\n", "ds.json"),
    "t.py": (
        "import json\nfrom trl import SFTConfig, SFTTrainer\n"
        "n = json.load(open('{outside}/args.json'))['max_length']\n"
        "SFTTrainer('gpt2', args=SFTConfig(max_length=n)).train()\n",
        "",
    ),
}
"""File -> a text of it that names a file elsewhere, and what is said of that file."""


@pytest.mark.parametrize("name", OUTSIDE)
def test_nothing_that_a_sent_text_names_outside_the_roots_is_read(
    desk: CommandRunner, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the folder beside which a relative path leads out
    folder = tmp_path / "outside"
    folder.mkdir()
    config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 77}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 77}')
    (folder / "args.json").write_text('{"max_length": 77}')
    text, expected = OUTSIDE[name]
    text = text.format(outside="../outside", there=folder)
    (result,) = ask(desk, ("check", {"gpu": "t4", "text": text, "file_name": name}))
    assert "77" not in result.content[0].text.replace(str(tmp_path), ""), result.content[0].text
    assert expected in result.content[0].text


def test_answers_hold_no_home_and_no_token(desk: CommandRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    token = "hf_" + "a1" * 12
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setenv("HOME", str(desk.roots[0]))
    (desk.roots[0] / "t.yaml").write_text(f"model_name_or_path: ./nowhere\nhub_token: {token}\n")
    (result,) = ask(desk, ("check", {"gpu": "t4", "path": "t.yaml"}))
    assert token not in result.content[0].text
    assert str(desk.roots[0]) not in result.content[0].text


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    (result,) = ask(CommandRunner([tmp_path], 0.01), ("plan", {"model": "gpt2", "gpu": "t4"}))
    assert "no answer within" in result.content[0].text


def test_an_uncertain_verdict_is_an_answer(desk: CommandRunner) -> None:
    """`plan check` ends with 3 then: of one file, and of a folder whose worst file is uncertain."""
    (desk.roots[0] / "uncertain").mkdir()
    config = "model_name_or_path: gpt2\nmax_length: 64\nper_device_train_batch_size: 1\n"
    (desk.roots[0] / "uncertain" / "trl.yaml").write_text(config)
    calls = [{"gpu": "x:3.4GiB:360GB/s:29TFLOPS", "path": path} for path in ("uncertain/trl.yaml", "uncertain")]
    of_file, of_folder = ask(desk, *(("check", call) for call in calls))
    assert of_file.structured_content["verdict"] == "uncertain"
    assert of_folder.structured_content["value"][0]["verdict"] == "uncertain"


def test_the_skill_names_the_tools_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["mcp", "--skill"]) == 0
    text = capsys.readouterr().out
    assert text == SKILL.read_text()
    assert all(f"`{name}`" in text for name in (*TOOLS, *Verdict, *get_args(Fit)))


def test_what_is_cut_is_counted() -> None:
    short = brief([{"a": "x" * 250, "walk": [1]} for _ in range(100)])
    assert short[-1] == {LEFT_OUT: 100 - (len(short) - 1)}
    assert "walk" not in short[0]
    assert brief({"deep": [["x" * 299] * 30] * 30}, max_bytes=100) == {"deep": [{LEFT_OUT: 30}]}
    # which-cluster: what is recommended stands, without its details, before the options and the first of them
    option = {"gpu": "h100", "cost_usd": 5.0, "setup": dict.fromkeys("abcdefgh", "x" * 90)}
    short = brief({"kind": "k", "picks": {"lora": dict.fromkeys("abcdefghij", option)}, "options": [option] * 569})
    assert short["picks"]["lora"]["j"] == {"gpu": "h100", "cost_usd": 5.0, "setup": {LEFT_OUT: 8}}
    assert short["options"][0]["gpu"] == "h100"
