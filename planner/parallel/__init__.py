"""The speed of several GPUs: what crosses the links, how much of it compute hides, and what waiting costs.

| module | what it answers |
|---|---|
| `collectives` | seconds and bytes of all-reduce, all-gather, reduce-scatter, point to point over a `Cluster` |
| `schedule` | seconds of a pipeline's step, and how much of it is bubble |
| `traffic` | bytes of weights and gradients on the wire, and the data types that a rank really computes with |
| `compute`, `exchange`, `offload` | one rank's micro-batch, what it waits for, and what the host's memory costs |
| `speed` | the step time of a layout: compute of the slowest rank, communication that is not hidden, bubble, offload |

What a rank holds is `planner.engines`'. Pure Python like the rest of `planner`. One GPU never comes here.
"""
