"""How a `TrainSetup` becomes a model, adapters, an optimizer, a batch and one training step.

Shared by the dry run (meta tensors), the CPU check and the GPU probe, so that all three run the same step.
"""
