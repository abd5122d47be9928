"""How long a replay of 100,000 events takes, against the aim of 0.3 s on one core.

Run: `python -m benchmarks.bench_allocator`; prints one JSON line, exit code 1 when the aim is missed.
"""

import json
import random
import sys
import time

from probes.allocator import Alloc, Event, Free, Phase, replay

NUM_EVENTS = 100_000
AIM_S = 0.3
REPEATS = 3


def random_step(num_events: int, seed: int = 0) -> list[Event]:
    """Sizes from 32 bytes to 256 MiB, evenly by order of magnitude; about 4,000 storages alive at the end."""
    chance = random.Random(seed)
    events: list[Event] = []
    live: list[int] = []
    for number in range(num_events):
        if number % (num_events // 10) == 0:
            events.append(Phase(f"phase {number}"))
        elif live and chance.random() < 0.48:
            events.append(Free(live.pop(chance.randrange(len(live)))))
        else:
            events.append(Alloc(number, int(2 ** chance.uniform(5, 28))))
            live.append(number)
    return events


def main() -> int:
    """Processor time of the fastest of `REPEATS` replays, both segment kinds."""
    events = random_step(NUM_EVENTS)
    times_s = {}
    for expandable in (False, True):
        samples = []
        for _ in range(REPEATS):
            start = time.process_time()
            replay(events, expandable_segments=expandable)
            samples.append(time.process_time() - start)
        times_s["expandable" if expandable else "default"] = round(min(samples), 4)
    passed = max(times_s.values()) <= AIM_S
    print(json.dumps({"benchmark": "allocator replay", "events": NUM_EVENTS, "cpu_s": times_s, "aim_s": AIM_S}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
