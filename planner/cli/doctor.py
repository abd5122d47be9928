"""`plan doctor`: what this machine can do, and how to mend what is missing."""

from planner.cli import options
from planner.cli.output import tell
from planner.errors import EXIT_ENVIRONMENT

_SIGNS = {"ok": "ok     ", "warning": "warning", "missing": "missing"}


def doctor(as_json: options.Json = False) -> int:
    """Check driver, GPUs, torch, bitsandbytes kernels, flash attention, versions, disk; 3 if probes cannot run."""
    from probes.doctor import can_probe, examine, findings_to_dict

    findings = examine()
    lines = []
    for one in findings:
        lines.append(f"{_SIGNS[one.level]} {one.name}: {one.text}")
        lines += [f"        mend: {one.mend}"] if one.mend else []
    lines.append("GPU probes can run here" if can_probe(findings) else "GPU probes cannot run here; planning can")
    tell(findings_to_dict(findings), lines, as_json=as_json)
    return 0 if can_probe(findings) else EXIT_ENVIRONMENT
