"""A profiled step condensed: which operator of which shapes took how long on the device and on the host.

    python -m benchmarks.contact.operators TRACE.json TABLE.json NAME

Reads PyTorch's chrome trace of one step and writes one JSON object:

    kernels   [[operator, input shapes, input types, kernel, launches, device microseconds], ...], those that took
              longest first; of a launch that no operator made (Triton from Python) the operator is ""
    host      {operator: [calls, microseconds of its own]}, and of each CUDA call
    spans     wall, device busy, operators outermost (the rest of the wall is Python), per thread
    copies    [[kind, bytes, count, microseconds], ...]
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

LONGEST_NAME = 140
Event = dict[str, Any]


def condensed(events: list[Event]) -> dict[str, Any]:
    complete = [event for event in events if event.get("ph") == "X"]
    operators = [event for event in complete if event.get("cat") == "cpu_op"]
    device = [event for event in complete if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    calls = [event for event in complete if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    by_id = {event["args"].get("External id"): event for event in operators}
    kernels: dict[tuple[str, ...], list[float]] = defaultdict(lambda: [0, 0.0])
    copies: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0, 0.0])
    for event in device:
        if event["cat"] != "kernel":
            row = copies[(event["name"], int(event["args"].get("bytes", 0)))]
        else:
            operator = by_id.get(event["args"].get("External id"))
            args = operator["args"] if operator else {}
            row = kernels[(
                operator["name"] if operator else "",
                json.dumps(args.get("Input Dims", []) if operator else event["args"].get("grid", [])),
                json.dumps(args.get("Input type", [])),
                event["name"][:LONGEST_NAME],
            )]  # fmt: skip
        row[0] += 1
        row[1] += event["dur"]
    return {
        "kernels": sorted(
            ([*key, count, round(micros, 2)] for key, (count, micros) in kernels.items()), key=lambda row: -row[5]
        ),
        "copies": [[*key, count, round(micros, 2)] for key, (count, micros) in copies.items()],
        "host": own_times(operators, calls),
        "spans": spans(operators, device, calls),
    }


def own_times(operators: list[Event], calls: list[Event]) -> dict[str, list[float]]:
    """Calls of every operator and CUDA call, and the microseconds that none of what it called took."""
    times: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in [*operators, *calls]:
        threads[event["tid"]].append(event)
    for thread_events in threads.values():
        thread_events.sort(key=lambda event: (event["ts"], -event["dur"]))
        stack: list[Event] = []
        for event in thread_events:
            while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
                stack.pop()
            if stack:
                times[stack[-1]["name"]][1] -= event["dur"]
            row = times[event["name"]]
            row[0] += 1
            row[1] += event["dur"]
            stack.append(event)
    return {name: [count, round(micros, 1)] for name, (count, micros) in sorted(times.items())}


def spans(operators: list[Event], device: list[Event], calls: list[Event]) -> dict[str, Any]:
    """Where the step's wall went, in microseconds."""
    everything = [*operators, *device, *calls]
    if not everything:
        return {}
    begin = min(event["ts"] for event in everything)
    end = max(event["ts"] + event["dur"] for event in everything)
    threads: dict[str, float] = {}
    for tid in sorted({str(event["tid"]) for event in operators}):
        threads[tid] = round(covered([event for event in operators if str(event["tid"]) == tid]), 1)
    return {
        "wall_us": round(end - begin, 1),
        "device_busy_us": round(covered(device), 1),
        "num_kernels": sum(event["cat"] == "kernel" for event in device),
        "num_operators": len(operators),
        "outermost_us": threads,
    }


def covered(events: list[Event]) -> float:
    """Microseconds in which at least one of the events runs."""
    total, reached = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event["ts"]):
        end = event["ts"] + event["dur"]
        total += max(0.0, end - max(event["ts"], reached))
        reached = max(reached, end)
    return total


def main(arguments: list[str]) -> int:
    trace, table, name = Path(arguments[0]), Path(arguments[1]), arguments[2]
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    part_file = table.with_suffix(".part")
    part_file.write_text(json.dumps({"case": name, **condensed(events)}), encoding="utf-8")
    part_file.replace(table)
    trace.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
