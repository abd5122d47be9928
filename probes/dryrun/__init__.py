"""The dry run: the real training step on meta tensors."""

from probes.dryrun.api import dry_run, dry_run_report, report_for_config
from probes.dryrun.report import DryRunReport

__all__ = ["DryRunReport", "dry_run", "dry_run_report", "report_for_config"]
