"""Templates of chats, and tokens of texts by a child process."""

import json
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from planner.core.children import child_environment, python_argv
from planner.core.errors import ConfigError
from planner.core.inputs import read_bytes, read_text
from planner.samples import TEMPLATE, TEMPLATE_FILE
from planner.samples.chats import ChatTemplate
from planner.samples.rows import DataError, Row

MAX_CONFIG_BYTES = 32 << 20
"""Of a `tokenizer_config.json`, which may list every token: the largest known have some MB."""
MAX_TEMPLATE_BYTES = 1 << 20
_MARKERS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


def tokenizer_config(folder: Path) -> dict[str, Any] | None:
    """`tokenizer_config.json` of a model's folder; None where there is none that can be read.

    Its usual `model_max_length` is 10 to the power of 30, which `planner.core.inputs.parse_json` takes for no number.
    """
    try:
        config = json.loads(read_bytes(folder / "tokenizer_config.json", max_bytes=MAX_CONFIG_BYTES))
    except (ConfigError, ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def chat_template(folder: Path) -> ChatTemplate | None:
    """What writes chats as the tokenizer in a model's folder does, or as the launch files do where it has no template;
    None where that cannot be read.

    Source: transformers 5.23 `utils/chat_template_utils.py` (_cached_compile_jinja_template).
    """
    from jinja2 import TemplateError, TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if (config := tokenizer_config(folder)) is None:
        return None
    text, template_file = config.get("chat_template"), folder / TEMPLATE_FILE
    try:
        if template_file.is_file():
            text = read_text(template_file, max_bytes=MAX_TEMPLATE_BYTES)
    except ConfigError:
        return None
    if isinstance(text, list):  # several, by name
        text = next((entry.get("template") for entry in text if entry.get("name") == "default"), None)
    text = TEMPLATE if text is None else text
    if not isinstance(text, str):
        return None
    controls = ["jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=controls)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)

    environment.filters["tojson"] = tojson  # Jinja's own escapes what HTML does not take
    environment.globals |= {"raise_exception": refuse, "strftime_now": datetime(2026, 1, 1).strftime}
    try:
        template = environment.from_string(_MARKERS.sub("", text))
    except TemplateSyntaxError:
        return None
    tokens = {name: _text(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}

    def write(turns: Sequence[Row], tools: Any = None, add_generation_prompt: bool = False) -> str:
        return template.render(messages=turns, tools=tools, add_generation_prompt=add_generation_prompt, **tokens)

    return ChatTemplate(write, tokens["eos_token"])


def _text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


# Counts tokens with a stranger's tokenizer.json in a process that can be ended.


LOAD_LIMIT_S = 60
"""CPU seconds for reading the file."""
TEXT_LIMIT_S = 30
"""CPU seconds for one text."""
MEMORY_LIMIT_BYTES = 4 << 30


class TokenizerChild:
    """Counts the tokens of texts, without special ones.

    Raises:
        ConfigError: the file is no tokenizer that can be read; on a call: it cannot count that text.
    """

    def __init__(self, file: Path) -> None:
        self.name = file.name
        self.refused = ""  # what the first chat was that the template does not take
        self.process = subprocess.Popen(
            python_argv("-m", "planner.samples.tokenizing", str(file), str(TEXT_LIMIT_S)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
        )
        self._end = weakref.finalize(self, _close, self.process)
        self._answer("is no tokenizer that can be read")

    def __call__(self, text: str) -> int:
        return int(self._reply(text))

    def rows(self, chat: Row, loss_on: str) -> list[tuple[int, int, int]] | None:
        """(tokens, those of its answers, those before the first) of every row that a chat becomes as the template
        beside the file writes it (`planner.samples.chats`); None where none does."""
        rows = self._reply([chat, loss_on])
        if isinstance(rows, dict):
            self.refused = self.refused or rows["refused"]
            return None
        return [(whole, answers, before) for whole, answers, before in rows] if rows else None

    def _reply(self, question: Any) -> Any:
        assert self.process.stdin is not None
        with suppress(OSError):  # it has ended: `_answer` says so
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
            self.process.stdin.flush()
        return self._answer("cannot count a text")

    def _answer(self, what: str) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer = json.loads(line) if line.endswith(b"\n") else "it took too much time or memory"
        if not isinstance(answer, str):
            return answer
        self._end()
        raise ConfigError(f"{self.name} {what}: {answer}", hint="give the tokenizer.json that the model came with")


def _close(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


def _within(limit_s: float) -> None:
    """From now on so many CPU seconds; the system ends the process after that, whatever it is in."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, limit_s)


def _sizes(tokenizer: Any, text: str, learned: list[tuple[int, int]]) -> tuple[int, int, int]:
    """(tokens, those that are learned, those before the first of them) of a row."""
    made = tokenizer.encode(text, add_special_tokens=False)
    labels = ChatTemplate.labelled(made.ids, made.offsets, learned)
    places = [at for at, label in enumerate(labels) if label != -100]
    return len(labels), len(places), places[0] if places else len(labels)


def main() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError):
        pass  # native Windows; a lower limit that is there already
    try:
        from tokenizers import Tokenizer

        _within(LOAD_LIMIT_S)
        tokenizer = Tokenizer.from_file(sys.argv[1])
        print(0, flush=True)
        read_template = cache(lambda: chat_template(Path(sys.argv[1]).parent))
        for line in sys.stdin.buffer:
            _within(float(sys.argv[2]))
            question = json.loads(line)
            answer: Any = None
            if isinstance(question, str):
                answer = len(tokenizer.encode(question, add_special_tokens=False).ids)
            elif (template := read_template()) is not None:
                try:
                    answer = [_sizes(tokenizer, *row) for row in template.rows(*question)]
                except DataError as error:
                    answer = {"refused": str(error)[:300]}
            print(json.dumps(answer), flush=True)
    except BaseException as error:  # a panic of the library is no Exception
        print(json.dumps(str(error)[:200] or type(error).__name__), flush=True)


if __name__ == "__main__":
    main()
