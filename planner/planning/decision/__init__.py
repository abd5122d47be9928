"""How a plan decides: the layouts that are walked, what the walk learned, the questions, and what else there was.

| module | what it answers |
|---|---|
| `layouts` | the ways of putting the job on its GPUs, in the order in which they are tried; one GPU is one of them |
| `results` | what the walk learned, by layout and by node of the tree; which point is best |
| `candidates` | a setup with its prediction, against the budget |
| `policy`, `choosing` | the stated policy (docs/choices.md); what it takes of what fits |
| `tree` | which method, then (several GPUs: `layout_tree`) which layout, then attention, checkpointing, micro-batch |
| `alternatives` | what stands beside a plan; what would make something fit where nothing does |
| `clusters` | which GPUs, and how many, for a piece of work |

`planner.planning.answer` puts them together.
"""
