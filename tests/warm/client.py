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
    job = json.dumps({"argv": sys.argv[2:], "cwd": os.getcwd(), "env": dict(os.environ)}).encode()
    files = array.array("i", [0, 1, 2])
    server.sendmsg([len(job).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
    server.sendall(job)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # before, they end this process: the server sees it
        signal.signal(number, lambda number, _: server.send(bytes([number])))
    end = server.recv(8)
    code = int(end) if end else 1  # nothing: the server died
    if code < 0:
        if -code != signal.SIGKILL:  # which has no handler, and none can be set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
