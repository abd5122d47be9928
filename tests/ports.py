"""Ports that a test may hand to a server it starts."""

import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def own_port(candidates: Iterable[int] = (0,), *, option: int = socket.SO_REUSEADDR) -> Iterator[int]:
    """The first of `candidates` that is free, 0 for any; it stays ours until a server listens on it.

    Asking for a free port and giving it back leaves it to whoever comes first. Here a socket that does not listen keeps
    it: the system gives it to nobody, only a server that asks for it by number and sets the same option may have it
    (PyTorch's TCPStore: SO_REUSEADDR; gRPC: SO_REUSEPORT).

    Raises:
        OSError: none is free.
    """
    with _bound(candidates, option) as holder:
        yield int(holder.getsockname()[1])


def _bound(candidates: Iterable[int], option: int) -> socket.socket:
    error = OSError("no candidates")
    for port in candidates:
        holder = socket.socket()
        if option != socket.SO_REUSEADDR:  # the kernel wants it before; the other would share another's port with us
            holder.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            holder.bind(("", port))
        except OSError as refused:
            holder.close()
            error = refused
            continue
        holder.setsockopt(socket.SOL_SOCKET, option, 1)
        return holder
    raise error
