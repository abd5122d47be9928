"""The speed of several GPUs: what crosses the links, how much of it compute hides, and what waiting costs.

| module | what it answers |
|---|---|
| `collectives` | seconds and bytes of collectives over a `Cluster`, of a pipeline's step, of the host's link |
| `traffic` | bytes of weights and gradients on the wire, and the data types that a rank really computes with |
| `compute`, `exchange` | one rank's micro-batch, and what it waits for |
| `speed` | the step time of a layout: compute of the slowest rank, communication that is not hidden, bubble, offload |

What a rank holds is `planner.memory.engines`'. Pure Python like the rest of `planner`. One GPU never comes here.
"""
