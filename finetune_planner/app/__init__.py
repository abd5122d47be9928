"""Use cases: what a command and the Python interface do alike, apart from flags and printing. With
`finetune_planner/cli` the composition root: the only rooms that know `probes`, `search` and `reports`, imported late.
"""
