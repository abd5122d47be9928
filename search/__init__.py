"""The search: dimensions, samplers, the Optuna study, stop rules. Never imports `probes`."""
