"""What the child's main and the measuring code share: the pipe to the runner, the memory limit on the CPU."""

import json
import os


class StatusPipe:
    """One JSON line per event to the runner; silent when nobody listens.

    Args:
        rank: of the job's process that speaks; None where there is but one.
    """

    def __init__(self, descriptor: int | None, rank: int | None = None) -> None:
        self._descriptor = descriptor
        self._rank = rank

    def send(self, kind: str, value: object) -> bool:
        """Whether the line was delivered."""
        if self._descriptor is None:
            return False
        event = {kind: value} if self._rank is None else {kind: value, "rank": self._rank}
        line = (json.dumps(event, separators=(",", ":")) + "\n").encode()
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError:
            return False
        return True

    def progress(self, text: str) -> None:
        """What is being done now, for a person's progress bar."""
        self.send("progress", text)

    def starting(self, begins: bool) -> None:
        """What every probe needs before its own work begins or ends: imports, the device. It has a limit of its own."""
        self.send("starting", begins)

    def waiting(self, begins: bool) -> None:
        """Waiting for another probe's device begins or ends; the runner's clock stands still meanwhile."""
        self.send("waiting", begins)


def limit_cpu_memory(extra_bytes: int) -> None:
    """Lets this process map at most `extra_bytes` more than it has mapped now."""
    import resource  # not on native Windows, where no probe runs

    with open("/proc/self/statm", encoding="utf-8") as handle:
        mapped = int(handle.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = mapped + extra_bytes
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
