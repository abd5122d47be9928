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
    """The tables of one trace."""
    complete = [one for one in events if one.get("ph") == "X"]
    operators = [one for one in complete if one.get("cat") == "cpu_op"]
    device = [one for one in complete if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    calls = [one for one in complete if one.get("cat") in ("cuda_runtime", "cuda_driver")]
    by_id = {one["args"].get("External id"): one for one in operators}
    kernels: dict[tuple[str, ...], list[float]] = defaultdict(lambda: [0, 0.0])
    copies: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0, 0.0])
    for one in device:
        if one["cat"] != "kernel":
            row = copies[(one["name"], int(one["args"].get("bytes", 0)))]
        else:
            operator = by_id.get(one["args"].get("External id"))
            args = operator["args"] if operator else {}
            row = kernels[(
                operator["name"] if operator else "",
                json.dumps(args.get("Input Dims", []) if operator else one["args"].get("grid", [])),
                json.dumps(args.get("Input type", [])),
                one["name"][:LONGEST_NAME],
            )]  # fmt: skip
        row[0] += 1
        row[1] += one["dur"]
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
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    threads: dict[Any, list[Event]] = defaultdict(list)
    for one in [*operators, *calls]:
        threads[one["tid"]].append(one)
    for own in threads.values():
        own.sort(key=lambda one: (one["ts"], -one["dur"]))
        stack: list[Event] = []
        for one in own:
            while stack and stack[-1]["ts"] + stack[-1]["dur"] <= one["ts"]:
                stack.pop()
            if stack:
                found[stack[-1]["name"]][1] -= one["dur"]
            row = found[one["name"]]
            row[0] += 1
            row[1] += one["dur"]
            stack.append(one)
    return {name: [count, round(micros, 1)] for name, (count, micros) in sorted(found.items())}


def spans(operators: list[Event], device: list[Event], calls: list[Event]) -> dict[str, Any]:
    """Where the step's wall went, in microseconds."""
    everything = [*operators, *device, *calls]
    if not everything:
        return {}
    begin = min(one["ts"] for one in everything)
    end = max(one["ts"] + one["dur"] for one in everything)
    threads: dict[str, float] = {}
    for tid in sorted({str(one["tid"]) for one in operators}):
        threads[tid] = round(covered([one for one in operators if str(one["tid"]) == tid]), 1)
    return {
        "wall_us": round(end - begin, 1),
        "device_busy_us": round(covered(device), 1),
        "num_kernels": sum(one["cat"] == "kernel" for one in device),
        "num_operators": len(operators),
        "outermost_us": threads,
    }


def covered(events: list[Event]) -> float:
    """Microseconds in which at least one of the events runs."""
    total, reached = 0.0, float("-inf")
    for one in sorted(events, key=lambda one: one["ts"]):
        end = one["ts"] + one["dur"]
        total += max(0.0, end - max(one["ts"], reached))
        reached = max(reached, end)
    return total


def main(arguments: list[str]) -> int:
    """Condenses one trace and removes it."""
    trace, table, name = Path(arguments[0]), Path(arguments[1]), arguments[2]
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    beside = table.with_suffix(".part")
    beside.write_text(json.dumps({"case": name, **condensed(events)}), encoding="utf-8")
    beside.replace(table)
    trace.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
