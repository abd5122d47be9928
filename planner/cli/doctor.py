"""`plan doctor`: what this machine can do, and how to mend what is missing."""

from planner.cli import options
from planner.cli.output import console, print_json
from planner.errors import EXIT_ENVIRONMENT

_SIGNS = {"ok": "ok     ", "warning": "warning", "missing": "missing"}


def doctor(as_json: options.Json = False) -> int:
    """Check driver, GPUs, torch, bitsandbytes kernels, flash attention, versions, disk; 3 if probes cannot run."""
    from probes.doctor import can_probe, examine, findings_to_dict

    findings = examine()
    if as_json:
        print_json(findings_to_dict(findings))
    else:
        out = console()
        for one in findings:
            out.print(f"{_SIGNS[one.level]} {one.name}: {one.text}", markup=False, soft_wrap=True)
            if one.mend:
                out.print(f"        mend: {one.mend}", markup=False, soft_wrap=True)
        verdict = "GPU probes can run here" if can_probe(findings) else "GPU probes cannot run here; planning can"
        out.print(verdict, markup=False, soft_wrap=True)
    return 0 if can_probe(findings) else EXIT_ENVIRONMENT
