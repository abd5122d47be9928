"""`server.py SOCKET_NUMBER PROGRAMS LIBRARY...`: forks itself for every client of a socket that it was given, until its
input ends. See the package."""

import atexit
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import site
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any


def serve(number: int) -> tuple[dict[str, Any], list[int]] | None:
    """The job that this process, a fork, shall run, and its files; None in the server itself.

    The server passes a client's signals to its fork and the fork's end to the client; it ends the fork, and all that
    the fork started, when the client is gone.
    """
    running: dict[int, tuple[socket.socket, int]] = {}  # by a file that can be read when the process ended
    with socket.socket(fileno=number) as listener:
        while True:
            clients = [client for client, _ in running.values()]
            ready, _, _ = select.select([listener, sys.stdin, *running, *clients], [], [])
            for ended in [file for file in running if file in ready]:
                client, pid = running.pop(ended)
                with suppress(BrokenPipeError):
                    client.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                client.close()
                os.close(ended)
            for client, pid in running.values():
                if client in ready:
                    signals = client.recv(16)
                    for number in signals:
                        os.kill(pid, number)
                    if not signals:
                        with suppress(ProcessLookupError):  # no group yet: at the next turn
                            os.killpg(pid, signal.SIGKILL)
            if listener in ready:
                client, _ = listener.accept()
                job, files = receive(client)
                if not job:
                    client.close()
                    continue
                pid = os.fork()
                if not pid:
                    return job, files
                running[os.pidfd_open(pid)] = client, pid
                for file in files:
                    os.close(file)
            elif sys.stdin in ready:
                return None


def receive(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """What to run, and the client's files; nothing of a client that was killed meanwhile."""
    head, files, _, _ = socket.recv_fds(client, 8, 64)
    text = b""
    while len(text) < int.from_bytes(head, "big") and (part := client.recv(1 << 20)):
        text += part
    if head and len(text) == int.from_bytes(head, "big"):
        return json.loads(text), files
    for file in files:
        os.close(file)
    return {}, []


def become(numbers: list[int], files: list[int]) -> None:
    """A new process group whose files have the numbers that they have in the client."""
    os.setsid()
    for number, file in enumerate(files):
        files[number] = fcntl.fcntl(file, fcntl.F_DUPFD, 256)
        os.close(file)
    for number, file in zip(numbers, files, strict=True):
        os.dup2(file, number)
        os.close(file)


def run(programs: Path, job: dict[str, Any]) -> None:
    """What Python does when it starts with these arguments in this environment."""
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    os.getppid = lambda: int(job["parent"])
    sys.executable = str(programs / "python")
    program, *words = job["argv"]
    if program not in ("python", "python3"):
        words.insert(0, str(Path(sys.prefix) / "bin" / program))
    flags = []
    while words[0] in ("-u", "-P"):
        flags.append(words.pop(0))
    sys.path[:0] = [part for part in job["env"].get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.modules.pop("sitecustomize", None)  # Debian's Python has one of its own, which the server loaded
    site.execsitecustomize()
    is_module, is_text = words[0] == "-m", words[0] == "-c"
    sys.argv = words[is_module:] if not is_text else ["-c", *words[2:]]
    if "-P" not in flags and not job["env"].get("PYTHONSAFEPATH"):
        sys.path.insert(0, job["cwd"] if is_module or is_text else str(Path(words[0]).resolve().parent))
    if is_text:
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif is_module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


def end(job: dict[str, Any]) -> None:
    """Runs the job and ends as Python ends, but for taking its million objects apart, which belong to the server too:
    every one that is touched is copied."""
    code: Any = 0
    try:
        run(Path(sys.argv[2]), job)
    except SystemExit as exit_error:
        code = exit_error.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as Python does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    gc.disable()  # it would look through a million objects again and again: a fifth of the time
    for library in sys.argv[3:]:
        importlib.import_module(library)
    # else torchrun asks `inspect.stack` twice for each of its records: through the files of all that is loaded here
    sys.modules["torch.distributed.elastic.rendezvous.dynamic_rendezvous"].get_method_name = lambda depth=2: ""
    gc.freeze()
    gc.enable()
    given = serve(int(sys.argv[1]))
    if given:
        become(given[0]["files"], given[1])
        end(given[0])
