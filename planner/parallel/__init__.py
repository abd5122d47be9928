"""Several GPUs: what one rank holds, what crosses the links, and which ways of spreading a job the engines support.

| module | what it answers |
|---|---|
| `support` | can this setup run under this spread at all, and why not |
| `rank` | which part of the model the GPUs of one kind hold (pipeline stage, tensor shard, device-map part) |
| `memory` | the memory of every distinct rank: sharded states, gathered weights, buckets, micro-batches in flight |
| `share`, `held` | in which types an engine computes, and what a rank holds at which moment |
| `fsdp`, `gather`, `zero` | the same for FSDP2 and for DeepSpeed's ZeRO |
| `walk` | every setup under every spread, with the figures of `memory` and `speed` |
| `collectives` | seconds and bytes of all-reduce, all-gather, reduce-scatter, point to point over a `Cluster` |
| `schedule` | seconds of a pipeline's step, and how much of it is bubble |
| `traffic` | bytes of weights and gradients on the wire, and the data types that a rank really computes with |
| `compute`, `exchange`, `offload` | one rank's micro-batch, what it waits for, and what the host's memory costs |
| `speed` | the step time of a spread: compute of the slowest rank, communication that is not hidden, bubble, offload |
| `strategies` | the spreads a plan chooses from for a number of GPUs, with the reason for those left out |

Pure Python like the rest of `planner`. One GPU never comes here.
"""
