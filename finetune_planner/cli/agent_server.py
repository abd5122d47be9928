"""`plan mcp`: the answers of this program as tools of the Model Context Protocol, over stdio.

Each call is the command line in a child of its own, in an empty folder and with a time limit; what it prints as JSON
comes back short with a handle, under which `details` gives the rest. Paths are taken only within the folders that the
server was started for; no file is executed unless the server was started with `--allow-trace`.
"""

import functools
import itertools
import json
import os
import subprocess
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from platformdirs import user_cache_path, user_data_path
from pydantic import Field

from planner import __version__
from planner.core.children import ROOT, child_environment, python_argv
from planner.core.inputs import WITHIN, reason
from planner.core.install import DISTRIBUTION
from planner.core.redaction import without_secrets_in

MAX_ANSWER_BYTES = 2_000
HANDLE_BYTES = 30
MAX_KEPT = 64
"""Answers whose details can still be asked for."""
WITH_DRY_RUN = ("make", "estimate", "check")


class CommandRunner:
    """Runs commands for an agent and keeps their whole answers.

    Attributes:
        roots: folders within which a path may lie.
        limit_s: seconds that one command may take.
        dry_run: whether answers go beyond the formula where torch is installed.
    """

    def __init__(self, roots: list[Path], limit_s: float, *, dry_run: bool = True) -> None:
        self.roots = [root.resolve() for root in roots]
        self.limit_s = limit_s
        self._level = [] if dry_run else ["--no-dry-run"]
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._numbers = itertools.count(1)

    def ask(self, *words: str, files: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The command's JSON, cut, with a handle to the whole; `files`: name -> text of those that lie where it runs.

        Raises:
            ToolError: the command refused, with its own words and hint.
        """
        level = self._level if words[0] in WITH_DRY_RUN else []
        document = json.loads(self._run([words[0], "--json=full", *level, *words[1:]], files or {}))
        handle = f"answer-{next(self._numbers)}"
        self._kept[handle] = document = without_secrets_in(document)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return {**_short(document), "details": handle}

    def say(self, *words: str) -> str:
        return self._run(list(words), {}).strip()

    def details(self, handle: str, path: str = "") -> dict[str, Any]:
        """A part of a kept answer by its dotted path (`chosen.formula`, `alternatives.0`), cut likewise.

        Raises:
            ToolError: no such answer or part.
        """
        if handle not in self._kept:
            raise refusal(f"no answer {handle!r}: {', '.join(self._kept) or 'none was given yet'}")
        value = self._kept[handle]
        for name in [part for part in path.split(".") if part]:
            if isinstance(value, Mapping) and name in value:
                value = value[name]
            elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                names = list(value) if isinstance(value, Mapping) else []
                choices = (
                    f"one of {', '.join(names)}" if names else f"0 to {len(value) - 1}" if value else "nothing below"
                )
                raise refusal(f"no {name!r} there: {choices}")
        return _short(value, whole=True)

    def path(self, text: str) -> str:
        """An absolute path, where it lies within the roots.

        Raises:
            ToolError: it does not.
        """
        resolved = (self.roots[0] / Path(text).expanduser()).resolve()
        if not any(resolved.is_relative_to(root) for root in self.roots):
            raise refusal(f"{text}: outside the folders that this server was started for (plan mcp --root DIR)")
        return str(resolved)

    def name(self, text: str) -> str:
        """A hub id or spoken name as it is, a path within the roots absolute.

        Raises:
            ToolError: a path outside, or a word that would be an option.
        """
        if text.startswith("-"):
            raise refusal(f"{text!r} is no name")
        here = text.startswith((".", "/", "~")) or (os.sep in text and (self.roots[0] / text).exists())
        return self.path(text) if here else text

    def _run(self, words: list[str], files: Mapping[str, str]) -> str:
        with tempfile.TemporaryDirectory() as empty:
            for name, text in files.items():
                try:
                    Path(empty, name).write_text(text, encoding="utf-8")
                except (OSError, ValueError) as error:  # ValueError: half of a character
                    raise refusal(f"{name[:80]!r} cannot be a file with this text: {reason(error)}") from None
            try:
                done = subprocess.run(
                    [*python_argv("-c", "from finetune_planner.cli import main; main()"), *words],
                    cwd=empty,
                    env=child_environment() | self._within(words[0], empty),
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=self.limit_s,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise refusal(f"no answer within {self.limit_s:.0f} s (plan mcp --limit)") from None
        if not done.stdout:  # stdout is data, whatever the exit code makes of it: "uncertain" is an answer
            raise refusal(self._private(done.stderr.strip()[-1500:]) or f"no answer (exit code {done.returncode})")
        return self._private(done.stdout)

    def _within(self, command: str, empty: str) -> dict[str, str]:
        """The variable that keeps a command to the roots, its own folder, and what this program keeps for itself.

        A traced program (`--allow-trace`) reads what it likes.
        """
        if command == "trace":
            return {}
        from finetune_planner.app.machine import STORE_VARIABLE  # not at the start, which an agent waits for
        from planner.models import hub
        from planner.speed.roofline.calibration import VARIABLE as CALIBRATION_VARIABLE

        program_folders = [ROOT, hub.cache_directory(), user_cache_path(DISTRIBUTION), user_data_path(DISTRIBUTION)]
        named = (os.environ.get(name) for name in (STORE_VARIABLE, CALIBRATION_VARIABLE))
        places = [*self.roots, Path(empty), *program_folders, *(Path(path) for path in named if path)]
        return {WITHIN: json.dumps([os.path.realpath(place) for place in places])}

    def _private(self, text: str) -> str:
        """Without the home folder's name and secrets."""
        home, redacted = str(Path.home()), str(without_secrets_in(text))
        return redacted.replace(home, "~") if len(home) > 1 else redacted


def compact(tool: Callable[..., Any]) -> Callable[..., Any]:
    """The same tool; the text of its answer is JSON on one line, where the SDK would indent it."""

    @functools.wraps(tool)
    def answered(*args: Any, **kwargs: Any) -> Any:
        from mcp.types import CallToolResult, TextContent

        answer = tool(*args, **kwargs)
        text = json.dumps(answer, ensure_ascii=False, separators=(",", ":"))
        return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=answer)

    return answered


def refusal(words: str) -> Exception:
    from mcp.server.mcpserver.exceptions import ToolError

    return ToolError(words)


def _short(document: Any, *, whole: bool = False) -> dict[str, Any]:
    """A document within MAX_ANSWER_BYTES with its handle, as an object; `whole`: also the parts that a brief answer
    never has."""
    from reports.brief_json import brief

    short = brief(document, max_bytes=MAX_ANSWER_BYTES - HANDLE_BYTES, heavy=whole)
    return short if isinstance(short, dict) else {"value": short}


Model = Annotated[str, Field(description="hub id, what people call it ('llama 3.1 8b'), or a folder")]
Gpu = Annotated[str, Field(description="'RTX 3060 12GB', '8xH100', 'local', or NAME:12GiB:360GB/s:29TFLOPS")]
Method = Annotated[str | None, Field(description="full, lora or qlora")]
Tokens = Annotated[int | None, Field(description="tokens per sequence; default 2048", ge=1)]
Rank = Annotated[int | None, Field(description="lora_r", ge=1)]
Count = Annotated[int | None, Field(ge=1)]


def words_of(**settings: Any) -> list[str]:
    """Options of the command line: `seq_len=2048` is `--seq-len=2048`, True a flag, None nothing."""
    flags = {name.replace("_", "-"): value for name, value in settings.items() if value is not None}
    return [
        (f"--{name}" if value else f"--no-{name}") if isinstance(value, bool) else f"--{name}={value}"
        for name, value in flags.items()
    ]


class Tools:
    """What an agent may ask, at one desk."""

    def __init__(self, desk: CommandRunner) -> None:
        self._desk = desk

    def plan(
        self,
        model: Model,
        gpu: Gpu,
        seq_len: Tokens = None,
        global_batch: Annotated[int | None, Field(description="sequences per optimizer step", ge=1)] = None,
        method: Method = None,
        rank: Rank = None,
        objective: Annotated[str | None, Field(description="sft, pretrain, dpo, kto, grpo, reward, ...")] = None,
        dataset: Annotated[str | None, Field(description="file of samples, or hub id")] = None,
        target: Annotated[str | None, Field(description="trl, hf, axolotl, llamafactory, unsloth, ...")] = None,
        out: Annotated[str | None, Field(description="new folder for launch files and reports")] = None,
    ) -> dict[str, Any]:
        """The fastest fine-tuning setup that fits a GPU: verdict, setup, memory, speed, and why not another one."""
        data = None if dataset is None else self._desk.name(dataset)
        folder = None if out is None else self._desk.path(out)
        more = words_of(seq_len=seq_len, global_batch=global_batch, method=method, rank=rank, objective=objective)
        more += words_of(gpu=gpu, dataset=data, target=target, out=folder)
        return self._desk.ask("make", self._desk.name(model), *more)

    def estimate(
        self,
        model: Model,
        gpu: Gpu,
        method: Method = None,
        seq_len: Tokens = None,
        micro_batch: Annotated[int | None, Field(description="per_device_train_batch_size", ge=1)] = None,
        accumulation: Annotated[int | None, Field(description="gradient_accumulation_steps", ge=1)] = None,
        rank: Rank = None,
        quantization: Annotated[str | None, Field(description="none, int8, nf4 or nf4-double")] = None,
        checkpointing: Annotated[bool | None, Field(description="gradient_checkpointing")] = None,
        optimizer: Annotated[str | None, Field(description="adamw, adamw-8bit, paged-adamw-8bit, ...")] = None,
        attention: Annotated[str | None, Field(description="eager, sdpa or flash-attention-2")] = None,
        num_gpus: Count = None,
    ) -> dict[str, Any]:
        """Memory and speed of one setup as it stands."""
        setup = words_of(method=method, seq_len=seq_len, micro_batch=micro_batch, accumulation=accumulation, rank=rank)
        setup += words_of(quantization=quantization, checkpointing=checkpointing, optimizer=optimizer)
        setup += words_of(gpu=gpu, attention=attention, gpus=num_gpus)
        return self._desk.ask("estimate", self._desk.name(model), *setup)

    def check(
        self,
        gpu: Gpu,
        path: Annotated[str | None, Field(description="training config, script, notebook or launch script")] = None,
        text: Annotated[str | None, Field(description="its text instead", max_length=1_000_000)] = None,
        file_name: Annotated[
            str, Field(description="of the text: its ending decides", pattern=r"^[\w.-]+$")
        ] = "a.yaml",
        model: Annotated[str | None, Field(description="where the file does not name it")] = None,
        dataset: Annotated[str | None, Field(description="file of the samples that it trains on")] = None,
        settings: Annotated[list[str] | None, Field(description="NAME=VALUE of what the file leaves open")] = None,
    ) -> dict[str, Any]:
        """Whether an existing config fits, and which single changes would make it fit or faster. Executes nothing."""
        if (path is None) == (text is None):
            raise refusal("either path or text")
        data = None if dataset is None else self._desk.name(dataset)
        more = words_of(gpu=gpu, model=None if model is None else self._desk.name(model), dataset=data)
        more += [word for setting in settings or () for word in words_of(set=setting)]
        if path is not None:
            return self._desk.ask("check", self._desk.path(path), *more)
        return self._desk.ask("check", f"./{file_name}", *more, files={file_name: text or ""})

    def which_gpu(
        self, model: Model, seq_len: Tokens = None, method: Method = None, num_gpus: Count = None, fitting: bool = True
    ) -> dict[str, Any]:
        """The cards that can fine-tune a model, the smallest first, with speed and price."""
        more = words_of(seq_len=seq_len, method=method, gpus=num_gpus)
        return self._desk.ask("which-gpu", self._desk.name(model), *more, *(["--fitting"] if fitting else []))

    def which_model(
        self,
        gpu: Gpu,
        match: Annotated[str | None, Field(description="only models whose names contain this")] = None,
        seq_len: Tokens = None,
    ) -> dict[str, Any]:
        """What a card can fine-tune, up to which length, how fast."""
        named = [self._desk.name(match)] if match else []
        return self._desk.ask("which-model", *named, *words_of(gpu=gpu, seq_len=seq_len))

    def oom(
        self,
        text: Annotated[str, Field(description="traceback or log with the out-of-memory error", max_length=2_000_000)],
        gpu: Annotated[str | None, Field(description="its card, where the message does not tell")] = None,
        config: Annotated[str | None, Field(description="the run's config or script, a path")] = None,
    ) -> dict[str, Any]:
        """Why a run ran out of memory, and the smallest change."""
        more = words_of(gpu=gpu, config=None if config is None else self._desk.path(config))
        return self._desk.ask("oom", "log.txt", *more, files={"log.txt": text})

    def explain(self, word: Annotated[str, Field(description="a word of a plan: chunked loss, LoRA, ...")]) -> str:
        """What a word of a plan means."""
        return self._desk.say("explain", *(["--"] if word.startswith("-") else []), word)

    def details(
        self,
        handle: Annotated[str, Field(description="of an earlier answer")],
        path: Annotated[str, Field(description="dotted: chosen.formula, alternatives.0; empty: the top")] = "",
    ) -> dict[str, Any]:
        """A part of an earlier answer that was left out of it."""
        return self._desk.details(handle, path)

    def trace(
        self,
        gpu: Gpu,
        script: Annotated[str, Field(description="a Python program; it IS EXECUTED, on copies of the files")],
        arguments: Annotated[list[str] | None, Field(description="its command line")] = None,
    ) -> dict[str, Any]:
        """Runs a training program on a GPU that computes nothing, and says what it needs and why."""
        file = self._desk.path(script)
        return self._desk.ask("trace", *words_of(gpu=gpu), "--", "python", file, *(arguments or []))


if TYPE_CHECKING:
    from mcp.server import MCPServer

INSTRUCTIONS = """Plans LLM fine-tuning: whether a setup fits a GPU, the fastest that does, its speed, and launch
configs. Every figure says its level (formula, profile, dry_run, ...) and band. Nothing is executed. `details` with a
call's handle gives what was left out of its answer."""


def build_server(desk: CommandRunner, *, allow_trace: bool = False) -> "MCPServer[Any]":
    """The server with its tools; the schema of each follows from its signature."""
    from mcp.server import MCPServer
    from mcp.server.mcpserver.tools import Tool

    tools = Tools(desk)
    answers = (tools.plan, tools.estimate, tools.check, tools.oom, tools.which_gpu, tools.which_model, tools.details)
    served = [Tool.from_function(compact(tool)) for tool in ((*answers, tools.trace) if allow_trace else answers)]
    served.append(Tool.from_function(tools.explain))
    for tool in served:  # an argument that a tool has not is an error: the SDK would drop it in silence
        arguments = tool.fn_metadata.arg_model
        arguments.model_config["extra"] = "forbid"
        arguments.model_rebuild(force=True)
        tool.parameters = arguments.model_json_schema(by_alias=True)
    return MCPServer(
        "finetune-planner", instructions=INSTRUCTIONS, version=__version__, log_level="ERROR", tools=served
    )
