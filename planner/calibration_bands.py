"""Error bands of the rungs: fitted on measurements, dated; the accuracy report says on which."""

MEMORY_BAND_FRACTION = 0.08
"""Half-width of the formula's memory band. Set from docs/accuracy/formula.md (90th percentile of the error)."""
