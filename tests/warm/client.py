"""`client.py SOCKET PROGRAM [ARGUMENT...]`: runs PROGRAM in a fork of the server, and ends as it ends.

Stands in the place of the program: its signals are passed on, and when it is killed the fork is too.
"""

import array
import json
import os
import signal
import socket
import sys


def main() -> None:
    server = socket.socket(socket.AF_UNIX)
    server.connect(sys.argv[1])
    further = sorted(int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2)
    numbers = [0, 1, 2]
    for number in further:
        try:
            if os.get_inheritable(number):
                numbers.append(number)
        except OSError:
            pass  # the directory that was listed
    job = json.dumps(
        {"argv": sys.argv[2:], "cwd": os.getcwd(), "env": dict(os.environ), "files": numbers, "parent": os.getppid()}
    ).encode()
    files = array.array("i", numbers)
    server.sendmsg([len(job).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
    server.sendall(job)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # before, they end this process: the server sees it
        signal.signal(number, lambda number, _: server.send(bytes([number])))
    end = server.recv(8)
    if not end:
        with open(f"{os.path.dirname(sys.argv[1])}/log", encoding="utf-8") as log:
            print("the server of warm programs died:", log.read(), file=sys.stderr, flush=True)
    code = int(end) if end else 1
    if code < 0:
        if -code != signal.SIGKILL:  # which has no handler, and none can be set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
