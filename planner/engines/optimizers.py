"""Which optimizers step the tensors that engines make of parameters."""

ADAMW = ("adamw", "adamw-fused")
"""What DeepSpeedCPUAdam and PyTorch's CPU AdamW can step."""
DTENSOR_OPTIMIZERS = (*ADAMW, "sgd")
"""Optimizers that step DTensors; others mix them with plain state tensors and raise.
Measured: one-process `fully_shard` on CPU, PyTorch 2.13 (tests/planner/parallel/test_support.py)."""
