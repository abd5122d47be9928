"""Hostile inputs to the doors that came later: an agent's calls, failed runs, races, and plans whose files are run.

Beside what `fuzz` looks for in every input: nothing outside an agent's roots is opened, no answer to it holds the home
folder's name or a token, no pickle calls anything.
"""

import atexit
import io
import json
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tools.fuzz_inputs import (
    GPU,
    MODEL,
    NASTY,
    Case,
    as_json,
    as_yaml,
    damage,
    mutate,
    notebook,
    put,
    seeds,
    shell_script,
)

MARK = "what-lies-outside"
"""Stands in every file that an agent may not read."""
TOKEN = "hf_" + "Zq7" * 8
TRACEBACK = 'Traceback (most recent call last):\n  File "'
READ, FAULT = "read outside the roots: ", "ended with "


def mcp_case(folder: Path, dice: random.Random) -> Case:
    """One to three calls in one session: honest ones with one or two arguments that are not."""
    if find_spec("mcp") is None:  # an extra that is not installed
        return Case("mcp", [], call=lambda: None)
    _rooms(folder, dice)
    calls = [_call(folder, dice) for _ in range(dice.choice((1, 1, 2, 3)))]
    environment = {"HOME": str(folder / "home"), "HF_TOKEN": TOKEN}
    return Case("mcp", [json.dumps(calls)[:3000]], call=lambda: _session(folder, calls), environment=environment)


def _rooms(folder: Path, dice: random.Random) -> None:
    """The root, what lies outside, and a home."""
    root, outside = folder / "root", folder / "outside"
    config = json.dumps(seeds().configs[0] | {"architectures": [MARK], "vocab_size": 777_777})
    for place in (root / "m", root / "sub", outside / "m", folder / "home"):
        place.mkdir(parents=True)
    for path, text in {
        root / "m" / "config.json": json.dumps(seeds().configs[0]), outside / "m" / "config.json": config,
        root / "a.yaml": json.dumps({**seeds().trl, "hub_token": TOKEN, "output_dir": str(folder / "home" / "x")}),
        root / "train.py": seeds().script, root / "rows.jsonl": '{"text": "a b c"}\n',
        root / "chat.jsonl": json.dumps({"messages": [{"role": "user", "content": TOKEN}]}),
        outside / "ds.json": json.dumps({**seeds().deepspeed, "comment": MARK}),
        outside / "secret.yaml": f"{json.dumps(seeds().trl)[:-1]}, 'run_name': {MARK}}}",
        outside / "rows.jsonl": json.dumps({"text": MARK * 50}), outside / "log.txt": f"{MARK} CUDA out of memory",
        outside / "requirements.txt": "trl==0.1\n", outside / "args.json": json.dumps({"max_length": 333}),
        outside / "lib.py": f"LENGTH = 333\nMARK = {MARK!r}\n", folder / "home" / ".netrc": f"password {TOKEN}\n",
    }.items():  # fmt: skip
        path.write_text(text)
    (root / "link.yaml").symlink_to(outside / "secret.yaml")
    (root / "out").symlink_to(outside)
    (root / "b.yaml").write_bytes(as_yaml(mutate(seeds().axolotl, dice), dice))
    put(root / "odd.yaml", as_yaml(seeds().llamafactory, dice), dice)


def _call(folder: Path, dice: random.Random) -> tuple[str, dict[str, Any]]:
    outside = str(folder / "outside")
    inside = ("a.yaml", "b.yaml", "train.py", "m", "odd.yaml", "rows.jsonl", "sub", ".", f"{folder}/root/a.yaml")
    beyond = (
        "../outside/secret.yaml", "link.yaml", "out/secret.yaml", "sub/../../outside/secret.yaml", "~/.netrc", "~root",
        f"{outside}/secret.yaml", f"{outside}/m", "../outside/m", f"file://{outside}/m", "/etc/passwd", "/dev/zero",
        "/proc/self/environ", "//etc//passwd", "", "..", "/", "a.yaml/../../outside/rows.jsonl",
        f"{outside}/rows.jsonl",
        "m/../../outside/m/config.json", f"{outside}/lib.py", "\x00", "a" * 5000, "-x", "--help", "~\x00", "../outside",
    )  # fmt: skip

    def path() -> str:
        return dice.choice(beyond if dice.random() < 0.6 else inside)

    text, name = _naming(outside, dice)
    tools: tuple[tuple[str, dict[str, Any]], ...] = (
        ("plan", {"model": MODEL, "gpu": GPU, "seq_len": 512, "method": "lora", "dataset": path()}),
        ("plan", {"model": path(), "gpu": GPU, "out": path(), "target": "trl", "objective": "dpo"}),
        ("estimate", {"model": path(), "gpu": GPU, "method": "qlora", "seq_len": 64, "micro_batch": 2, "rank": 8}),
        ("check", {"gpu": GPU, "path": path()}), ("check", {"gpu": GPU, "path": path(), "model": path()}),
        *[("check", {"gpu": GPU, "text": text, "file_name": name})] * 2,
        ("which_gpu", {"model": path(), "seq_len": 128}), ("which_model", {"gpu": GPU, "match": path() or "smol"}),
        ("oom", {"text": _log(dice), "gpu": GPU, "config": path()}), ("oom", {"text": _log(dice)}),
        ("explain", {"word": path()}), ("details", {"handle": "answer-1", "path": dice.choice(("", "0", "a.b", "-1"))}),
        ("trace", {"gpu": GPU, "script": path()}), ("plan", {"model": MODEL, "gpu": path()}),
    )  # fmt: skip
    tool, arguments = dice.choice(tools)
    for _ in range(dice.choice((0, 0, 1, 2))):
        what = dice.random()
        if not arguments:
            break
        if what < 0.7:
            arguments[dice.choice(sorted(arguments))] = dice.choice(NASTY)
        elif what < 0.85:
            arguments.pop(dice.choice(sorted(arguments)), None)
        else:
            arguments[dice.choice(("gpu", "method", "target", "optimizer", "x"))] = dice.choice(
                ("$(id)", "x" * 3000, 7)
            )
    return tool, arguments


def _naming(outside: str, dice: random.Random) -> tuple[str, str]:
    """A text that names what lies outside, and its file's name."""
    place = dice.choice((outside, "../outside", "../../outside", f"../{Path(outside).parent.name}/outside", "../root"))
    trl = seeds().trl
    texts = (
        (json.dumps(trl | {"model_name_or_path": f"{place}/m"}), "a.yaml"),
        (json.dumps(trl | {"deepspeed": f"{place}/ds.json"}), "a.yaml"),
        (json.dumps(trl | {"dataset_name": f"{place}/rows.jsonl", "tokenizer_name": f"{place}/m"}), "a.yaml"),
        (json.dumps(seeds().axolotl | {"base_model": f"{place}/m", "deepspeed": f"{place}/ds.json"}), "a.yaml"),
        (f"import json\nx = json.load(open('{place}/args.json'))['max_length']\n{seeds().script.replace('512', 'x')}",
         "train.py"),
        (f"import sys\nsys.path.insert(0, '{place}')\nfrom lib import LENGTH, MARK\nprint(MARK)\n"
         + seeds().script.replace("512", "LENGTH"), "train.py"),
        (f"source {place}/lib.sh\ncd {place}\npython {place}/lib.py --config {place}/secret.yaml\n", "run.sh"),
        (f"accelerate launch --config_file {place}/secret.yaml {place}/lib.py --deepspeed {place}/ds.json\n", "run.sh"),
        (as_json(notebook(dice), dice).decode("utf-8", "replace"), "a.ipynb"),
        (shell_script(dice).decode("utf-8", "replace"), "run.sh"), ("x" * 900_000, "a.yaml"),
        (seeds().script, dice.choice(("..", "con", ".yaml", "a" * 300, "x.exe", "../a.yaml", "a.py\n"))),
    )  # fmt: skip
    return dice.choice(texts)


def _session(folder: Path, calls: list[tuple[str, dict[str, Any]]]) -> None:
    """The calls through the SDK's own client; then nothing may have been said, read or written that must not.

    Raises:
        AssertionError: it was.
    """
    import asyncio
    import logging

    from mcp import Client

    from finetune_planner.cli.agent_server import build_server

    logging.disable()  # the SDK tells its log what arguments it refused
    root, outside, home = folder / "root", folder / "outside", folder / "home"
    before = _state(outside)
    desk = _in_forks(root)

    async def asked() -> list[Any]:
        responses = list[Any]()
        async with Client(build_server(desk)) as client:
            for name, arguments in calls:
                try:
                    responses.append(await client.call_tool(name, arguments))
                except (ValueError, TypeError, UnicodeError) as error:  # the client itself cannot send it
                    responses.append(error)
        return responses

    answers = asyncio.run(asked())
    text = "\n".join(str(answer) for answer in answers)
    assert not desk.faults, desk.faults
    for secret in (TOKEN, str(home), MARK):
        assert secret not in text, f"{secret} is told: {text[max(0, text.find(secret) - 300) :][:600]}"
    assert TRACEBACK not in text, text
    assert _state(outside) == before, "changed outside the roots"


def _state(folder: Path) -> list[tuple[str, bytes]]:
    return [(str(path), path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file()]


def _in_forks(root: Path) -> Any:
    """A desk whose commands run in forks of this process, each of which tells what it opened outside."""
    from finetune_planner.cli.agent_server import CommandRunner, refusal

    class ForkDesk(CommandRunner):
        faults: list[str]

        def _finished(self, words: list[str], empty: str) -> tuple[int, str, str]:
            output, errors = (Path(f"{empty}.{name}") for name in ("out", "errors"))
            child = os.fork()
            if child == 0:
                _command(words, empty, (output, errors), self._within(words[0], empty), root.parent / "outside")
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            text = errors.read_text("utf-8", "replace")
            if (
                words[0] == "which-model" and code == -signal.SIGXCPU
            ):  # the whole catalogue: longer than an input may take
                raise refusal("no answer")
            if code == 70 or code < 0 or READ in text or TRACEBACK in text:
                self.faults.append(f"{FAULT}{code}: {words}: {text[-3000:]}")
            return code, output.read_text("utf-8", "replace"), text

    desk = ForkDesk([root], 60.0, dry_run=False)
    desk.faults = []
    return desk


def _command(
    words: list[str], empty: str, output_paths: tuple[Path, Path], variables: dict[str, str], outside: Path
) -> None:  # never returns
    from finetune_planner.cli.app import run

    code = 70
    try:
        for path, number in zip(output_paths, (1, 2), strict=True):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
        sys.stdout, sys.stderr = io.TextIOWrapper(io.FileIO(1, "w")), io.TextIOWrapper(io.FileIO(2, "w"))
        os.environ.update(variables)
        os.chdir(empty)
        tempfile.tempdir = empty

        def heard(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and isinstance(arguments[0], str) and "/outside" in os.path.realpath(arguments[0]):
                os.write(2, f"{READ}{arguments[0]}\n".encode("utf-8", "replace"))

        sys.addaudithook(heard)
        code = run(words)
        for file in Path(empty).glob("finetune-planner-fault-*.txt"):
            sys.stderr.write(file.read_text("utf-8", "replace"))
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 2
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _log(dice: random.Random) -> str:
    """A failed run's text, near enough to a real one."""
    size = dice.choice(
        ("1.50 GiB", "9" * 30 + " GiB", "0 bytes", "1e9 MiB", "nan GiB", "-1.00 GiB", "1.5.5 GiB", "20 MiB")
    )
    line, call = dice.choice(("7", "9" * 30, "-1")), dice.choice(("f", "<x>"))
    frames = "".join(
        f'  File "/opt/x/site-packages/{name}", line {line}, in {call}\n'
        for name in dice.choices(("transformers/trainer.py", "torch/optim/adamw.py", "a" * 3000, "\u202ex.py"), k=3)
    )
    text = (
        f"Traceback (most recent call last):\n{frames}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate "
        f"{size}. GPU 0 has a total capacity of {size} of which 0.50 GiB is free. Process 1 has {size} memory in use. "
        f"Including non-PyTorch memory, this process has 23.10 GiB memory in use. Of the allocated memory {size} is "
        "allocated by PyTorch, and 0.30 GiB is reserved by PyTorch but unallocated.\n"
    )
    extra = dice.choice((
        "", "> " * 20_000, "\n" * 50_000, "[rank0]: " * 5_000, "│ " * 50_000, "File " * 50_000, "a.py:1 " * 20_000,
        "Process 1 has " * 20_000, "\x1b[2J" * 100, TOKEN, "\r" * 30_000, "Traceback (most recent call last)\n" * 5_000,
        " " * 100_000, "1.5 GiB already allocated; " * 5_000, '  File "' * 20_000, "----> 1 " * 20_000, "\ud800",
    ))  # fmt: skip
    return dice.choice((text, text + extra, extra + text, extra, text * dice.choice((1, 50))))


class _Calls:
    """Pickled as a call."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.call = call, arguments

    def __reduce__(self) -> Any:
        return self.call


_BLOCK: dict[str, Any] = {
    "size": 1024, "state": "active_allocated",
    "frames": [{"filename": "/home/x/train.py", "line": 3, "name": "forward"}],
}  # fmt: skip
_EVENT = {"action": "oom", "size": 99, "frames": _BLOCK["frames"]}
_SNAPSHOT = {"segments": [{"total_size": 4096, "blocks": [_BLOCK, _BLOCK]}], "device_traces": [[_EVENT]]}


def _pickled(folder: Path, dice: random.Random) -> bytes:
    """A memory snapshot, or what looks like one."""
    victim, what = str(folder / "victim"), dice.randrange(6)
    document: Any = _SNAPSHOT
    if what == 0:
        calls = (
            _Calls(os.system, f"touch {victim}"),
            _Calls(open, victim, "w"),
            _Calls(eval, f"open({victim!r}, 'w')"),
        )
        document = dice.choice(
            (dice.choice(calls), {"segments": dice.choice(calls)}, {**_SNAPSHOT, "x": [dice.choice(calls)]})
        )
    elif what == 1:
        huge = dice.choice((
            b"\x80\x04r\xff\xff\xff\x7f.", b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f", b"\x80\x04]" + b"(" * 99_999,
            b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".", b"\x80\x04]q\x00h\x00a.", b"\x80\x04cos\nsystem\n.",
            b"\x80\x04Ptouch\n.", b"\x80\x04\x82\x01.", b"\x80\x05\x97.", b"\x80\x04}}s.", b"\x80\x04ios\nsystem\n.",
            b"\x80\x02I" + b"9" * 9000 + b"\n.", b"\x80\x04]" + b"2" * 60 + b"e" * 60 + b".",
            b"\x80\x04B\xff\xff\xff\x7fx.",
        ))  # fmt: skip
        return huge if dice.random() < 0.6 else huge + pickle.dumps(document)
    elif what == 2:
        nested: Any = {**_SNAPSHOT}
        field = dice.choice(("size", "state", "frames"))
        value: Any = dice.choice(
            (10**400, -5, True, float("nan"), float("inf"), 2**70, "9" * 5000, [], {}, None, b"x", {"a": [1]})
        )
        nested["segments"] = [{"total_size": dice.choice((4096, value)), "blocks": [_BLOCK | {field: value}]}]
        document = nested
    elif what == 3:
        frame = {
            "filename": dice.choice(("\ud800", "\x1b[2J", "x" * 10_000, 7, [1], "\u202e.py")),
            "line": dice.choice((3, 10**5000, "x")), "name": dice.choice(("f", TOKEN, "\ud800", None)),
        }  # fmt: skip
        blocks = [_BLOCK | {"frames": [frame] * dice.choice((1, 500))}]
        document = {
            "segments": [{"total_size": 1, "blocks": blocks}],
            "device_traces": [[_EVENT | {"frames": [frame]}]],
        }
    else:
        document = dice.choice((mutate(_SNAPSHOT, dice), [_SNAPSHOT] * 3, {**_SNAPSHOT, "device_traces": 7}))
    content = pickle.dumps(document, dice.choice((2, 4, 5)))
    return damage(content, dice) if dice.random() < 0.4 else content


def oom_case(folder: Path, dice: random.Random) -> Case:
    """Texts, snapshots, archives and configs beside them."""
    what, words = dice.random(), list[str]()
    if what < 0.5:
        content, name = _pickled(folder, dice), "snapshot.pickle"
    elif what < 0.55:
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr("archive/data.pkl", _pickled(folder, dice))
        content, name = packed.getvalue(), "model.pt"
    else:
        text = _log(dice).encode("utf-8", "replace")
        content, name = (
            dice.choice((text, b"\xff\xfe" + text.decode().encode("utf-16-le"), damage(text, dice))),
            "log.txt",
        )
    if dice.random() < 0.4:
        put(folder / "run.yaml", as_yaml(mutate(seeds().trl, dice), dice), dice)
        words += dice.choice(([], ["--config", str(folder / "run.yaml")]))
    words += dice.choice(([], ["--gpu", GPU], ["--gpu", "x"])) + dice.choice(([], ["--json"], ["--json=brief"]))
    if dice.random() < 0.15:
        return Case("oom", ["oom", "-", *words], stdin=content)
    return Case("oom", ["oom", str(put(folder / name, content, dice)), *words])


def race_case(folder: Path, dice: random.Random) -> Case:
    """Files that race, some of which cannot; predicted only."""
    raw, files = seeds(), list[str]()
    for number in range(dice.choice((1, 1, 2, 3))):
        name, content = dice.choice((
            ("a.yaml", as_yaml(mutate(raw.trl, dice), dice)), ("a.yaml", as_yaml(mutate(raw.axolotl, dice), dice)),
            ("a.yaml", as_yaml(mutate(raw.llamafactory, dice), dice)), ("train.py", damage(raw.script.encode(), dice)),
            ("a.toml", damage(raw.toml.encode(), dice)), ("run.sh", shell_script(dice)),
            ("train.py", raw.script.encode()),
        ))  # fmt: skip
        files.append(str(put(folder / str(number) / name, content, dice)))
    words = list[str]()
    for option, *values in (
        ("--defaults", "trl", "axolotl", "x", ""), ("--model", MODEL, "x/../y", "\x1b[2J"), ("--same-adapter",),
        ("--seq-len", "0", "99999999", "64"), ("--target", "trl", "x"), ("--memory-gib", "nan", "1", "-1"),
        ("--steps", "0", "9"), ("--device", "cpu"), ("--headroom", "1e9"), ("--out", str(folder / "o")),
    ):  # fmt: skip
        if dice.random() < 0.15:
            words += [option, *([dice.choice(values)] if values else [])]
    if "--out" in words and dice.random() < 0.5:
        (folder / "o").mkdir()
        (folder / "o" / "report.html").symlink_to(folder / "victim")
    return Case("race", ["race", *files, "--gpu", GPU, "--no-dry-run", *dice.choice(([], ["--json"])), *words])


TOOLS = ("python", "python3", "trl", "accelerate", "torchrun", "axolotl", "llamafactory-cli", "unsloth")
_SEEN = {
    "device": "cpu", "step_s": [0.5] * 8, "between_s": [0.1] * 7, "peak_resident_bytes": 10**9, "loaded_bytes": 10**8,
    "cuda": "", "python": "3.11", "libraries": {"torch": "2.13.0"}, "processes": [[1, 10**8]], "num_alloc_retries": 0,
}  # fmt: skip


@cache
def planned() -> Path:
    """A plan's folder whose model and data are here, made once."""
    from finetune_planner.cli.app import run

    folder = Path(tempfile.mkdtemp(prefix="fuzz-plan-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "m").mkdir()
    (folder / "m" / "config.json").write_text(json.dumps(seeds().configs[0]))
    (folder / "m" / "model.safetensors").write_bytes(b"")
    (folder / "rows.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]}\n' * 9
    )
    words = [str(folder / "m"), *f"--gpu {GPU} --no-dry-run --seq-len 64 --dataset".split(), str(folder / "rows.jsonl")]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        code = run([*words, "--target", "trl", "--target", "hf", "--target", "axolotl", "--out", str(folder / "p")])
    assert code == 0, code
    return folder


def confirm_case(folder: Path, dice: random.Random) -> Case:
    """A plan's folder that somebody changed, and a training tool that does what it likes."""
    place, target = folder / "p", dice.choice(("trl", "trl", "hf", "hf", "axolotl", "llamafactory"))
    shutil.copytree(planned() / "p", place)
    launch = [path for path in sorted((place / "launch").rglob("*")) if path.is_file()]
    if dice.random() < 0.25:
        plan = place / "plan.json"
        document = as_json(mutate(json.loads(plan.read_text()), dice), dice)
        plan.unlink()
        put(plan, document, dice)
    if dice.random() < 0.25:
        changed = dice.choice(launch)
        content = damage(changed.read_bytes(), dice)
        changed.unlink()
        put(changed, content, dice)
    if dice.random() < 0.2:
        (place / "launch" / "more").symlink_to(dice.choice(("/etc", "/dev/zero", "..", "more")))
    if dice.random() < 0.2:
        (place / "report.md").unlink()
        (place / "report.md").symlink_to(folder / "victim")
    seen = as_json(mutate(_SEEN, dice), dice) if dice.random() < 0.7 else json.dumps(_SEEN).encode()
    (folder / "seen.json").write_bytes(seen)
    ends = dice.choice(
        ("exit 0", "exit 0", "exit 3", "kill -9 $$", "rm -rf seen; exit 0", "chmod 0 .", "rm -rf ../plan-run*")
    )
    says = dice.choice(
        ("", "echo $HF_TOKEN", "head -c 3000000 /dev/zero", "printf '\\377\\376\\033[2J'", "mkfifo seen/seen-2.json")
    )
    program = (
        f"#!/bin/sh\ncp {folder}/seen.json seen/seen-1.json\nln -s {folder}/victim seen/progress\n{says}\n{ends}\n"
    )
    tools = place / f".venv-{target}" / "bin"
    tools.mkdir(parents=True)
    for name in TOOLS:
        (tools / name).write_text(program)
        (tools / name).chmod(0o755)
    words = [
        "confirm",
        str(place),
        *f"--run {target} --device cpu --limit".split(),
        "2" if dice.random() < 0.9 else "nan",
    ]
    words += ["--steps", "9" if dice.random() < 0.9 else "3", "--store", str(folder / "s.jsonl")]
    return Case("confirm", [*words, *dice.choice(([], ["--json"]))], environment={"HF_TOKEN": TOKEN})


def table_case(folder: Path, dice: random.Random) -> Case:
    """Configurations of strangers in a folder or a Parquet file, a folder of rows where other things lie."""
    configs = [mutate(seeds().configs[0], dice) for _ in range(dice.choice((1, 1, 2)))]  # others: `config_case`
    names = ("a/b", "", "..", "\u4e00" * 200, "x" * 3000, "\x1b[2J", "a/../../b", None, 7, "\ud800")
    place = folder / "c"
    if dice.random() < 0.5:
        for number, config in enumerate(configs):
            name = dice.choice(("m", "\u4e00" * 80, " ", "\x1b[2J"))
            put(place / f"{name}{number}" / "config.json", as_json(config, dice), dice)
    else:
        place = folder / "c.parquet"
        texts: list[Any] = [as_json(config, dice).decode("utf-8", "replace") for config in configs]
        columns: dict[str, Any] = {"model_id": [dice.choice(names) for _ in texts], "config": texts}
        what = dice.random()
        if what < 0.1:
            columns["config"] = [dice.choice((None, 7, [1], "[" * 5000, "7")) for _ in texts]
        elif what < 0.2:
            columns.pop(dice.choice(("model_id", "config")))
        content = _parquet({name: list(map(str, values)) if name == "model_id" else values
                            for name, values in columns.items()})  # fmt: skip
        put(place, damage(content, dice) if dice.random() < 0.3 else content, dice)
    out = folder / "o"
    words = ["--configs", str(place), "--out", str(out)]
    for option, honest, *others in (
        ("--gpus", GPU, "t4,t4", "", "x", ","), ("--seq-lens", "64", "9" * 30, "0", "a", "", "1024,,64"),
        ("--methods", "lora", "full,lora,qlora", "x", ""),
    ):  # fmt: skip
        words += [option, honest if dice.random() < 0.95 else dice.choice(others)]
    words += dice.choice(([], [], [], ["--global-batch", "0"], ["--match", "m"], ["--match", "\ud800"]))
    if dice.random() < 0.1:
        put(out, b"x", dice)
    return Case("table", ["table", *words, *dice.choice(([], ["--json"]))])


def _parquet(columns: dict[str, Any]) -> bytes:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:  # an extra that is not installed
        return b"PAR1"
    packed = io.BytesIO()
    with suppress(pyarrow.ArrowException, UnicodeEncodeError):  # values of several types
        parquet.write_table(pyarrow.table(columns), packed)
    return packed.getvalue()


def callback_case(folder: Path, dice: random.Random) -> Case:
    """A trainer whose configuration, adapters, arguments, rows and counts are a stranger's, around one run."""
    if find_spec("transformers") is None:
        return Case("callback", [], call=lambda: None)
    config, stop = mutate(dice.choice(seeds().configs), dice), dice.random() < 0.1
    config = config if isinstance(config, dict) else {}
    row = mutate({"input_ids": [1] * 64, "labels": [1] * 64}, dice)
    rows = dice.choice(([row] * 4, [], row, None, 7, "text"))
    settings = mutate({"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "use_dora": False}, dice)
    changed = {
        dice.choice(("per_device_train_batch_size", "optim", "max_steps", "learning_rate", "gradient_checkpointing",
                     "gradient_checkpointing_kwargs", "bf16", "deepspeed", "fsdp", "lr_scheduler_kwargs")):
        dice.choice(NASTY) for _ in range(dice.choice((0, 1, 2)))
    }  # fmt: skip
    counts = [dice.choice((0, 6, 6, -1, 10**400, None, "6", float("nan"))) for _ in range(2)]
    adapted = dice.random() < 0.5 and isinstance(settings, dict)

    def call() -> None:
        _trained(folder, config, settings if adapted else None, changed, rows, counts, stop=stop)

    return Case("callback", [json.dumps([config, settings, counts], default=str)[:3000]], call=call)


def _trained(
    folder: Path, written: Any, settings: Any, changed: dict[str, Any], rows: Any, counts: list[Any], *, stop: bool
) -> None:
    """The events of a run of six steps: nothing but `stop` may end it."""
    import torch
    from transformers import TrainingArguments

    from finetune_planner.callback import PlanCallback
    from planner.core.errors import UsageError

    class Kept(SimpleNamespace):
        def save_pretrained(self, place: Path) -> None:
            place.mkdir()
            (place / "config.json").write_text(json.dumps(self.written))

    class LlamaForCausalLM:
        config = Kept(written=written, dtype=torch.float32, _attn_implementation="sdpa", model_type="llama")

        def parameters(self) -> Any:
            return iter([torch.empty(1)])

    model: Any = LlamaForCausalLM()
    if settings is not None:
        model.peft_config = {"default": type("LoraConfig", (), {"to_dict": lambda self: settings})()}
        model.get_base_model = lambda: model
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none")
    for name, value in changed.items():
        setattr(args, name, value)
    state = SimpleNamespace(is_world_process_zero=True, num_input_tokens_seen=0, global_step=0)
    callback = PlanCallback(GPU, store=folder / "s.jsonl", stop=stop, report_to="wandb")
    loader = SimpleNamespace(dataset=rows)
    try:
        callback.on_train_begin(args, state, None, model=model, train_dataloader=loader)
    except UsageError:
        assert stop
    for _ in range(6):
        callback.on_step_begin(args, state, None)
        callback.on_step_end(args, state, None)
    state.num_input_tokens_seen, state.global_step = counts
    callback.on_train_end(args, state, None)


DOORS = (mcp_case, oom_case, race_case, confirm_case, table_case, callback_case)
