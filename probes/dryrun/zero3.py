"""A rank of a DeepSpeed ZeRO-3 job: the real step on meta tensors, the engine's hooks, gathers and buffers modelled.

Two parts. While the step runs, `zero3_hooks` hooks every module as the engine does: a weight has a storage of its own
from the fetch to the release of the module that uses it (so that a view which autograd keeps shows), and every fetch
and release is noted in the events. Afterwards `zero3_engine.Engine` walks over the full model's events, decides with
`probes.dryrun.zero_gather` what is really gathered and when, and puts that memory in, with the partitions, the reduce
bucket and the step. Deciding on the full model's events makes a truncated run exact: how far the engine gathers ahead
and what it keeps depends on the depth.

Source: DeepSpeed 0.19.8 runtime/zero/stage3.py, parameter_offload.py, partition_parameters.py, linear.py, with the
settings that the launch files write (planner/exporters/deepspeed.py); compared with the engine itself on two CPU ranks
(benchmarks/zero_dry_run_check.py).

Left out: the Trainer's second parameter group (norms and biases), whose partition is a few kilobytes; the order in
which the engine's side streams give memory back to the allocator.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from planner.setup import TrainSetup
from probes.dryrun.splice import Block, splice
from probes.dryrun.trace import Trace, load
from probes.dryrun.tracker import Tracker
from probes.dryrun.zero3_engine import Engine
from probes.dryrun.zero3_hooks import Hooked, Run, linear, watched
from probes.dryrun.zero3_modules import Modules
from probes.dryrun.zero_events import cast_to_half
from probes.stack.spread import Spread


class Zero3World:
    """A job of ZeRO-3 ranks."""

    tracker = Tracker

    def __init__(self, setup: TrainSetup) -> None:
        self._setup = setup
        self._found = Modules()

    @contextmanager
    def prepared(
        self, tracker: Tracker, model: Any, setup: TrainSetup
    ) -> Iterator[tuple[Spread, dict[int, tuple[str, str]]]]:
        """See `probes.dryrun.trace.World`. Weights are cut before they are counted: those that stay frozen each into a
        part of their own, the trained ones into one flat tensor (`zero3_engine`)."""
        cast_to_half(model, setup)
        self._found = found = Modules.of(model)
        run = Run(tracker, model, found)
        parts = []
        for name, tensor in run.tensors.items():
            one = found.parameters[name]
            here = 0 if one.trained or (setup.offload == "parameters" and not one.weight().persistent) else one.num
            tensor.data = torch.empty(-(-here // setup.shards), dtype=one.dtype, device="meta")
            parts.append(tensor.data)
        owners = load(tracker, model)
        for name in run.tensors:
            run.cut(name)

        def arrived(name: str, parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                number = tracker.identity(parameter.grad)
                if number is not None:
                    owners[number] = ("gradients", name)
                parameter.grad = None

        def arrived_together(names: list[str], *_: Any) -> None:
            """A leaf's gradients wait for all of them."""
            for name in names:
                arrived(name, run.tensors[name])

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch.nn.functional, "linear", linear))
            stack.enter_context(watched(run))
            hooks = [model.register_forward_pre_hook(run.begins)]
            together: set[str] = set()
            for path in found.modules:
                module = model.get_submodule(path)
                hooks += Hooked(run, path).attach(module)
                if path in found.leaves:
                    own = [name for name in found.modules[path] if found.parameters[name].trained]
                    together.update(own)
                    hooks.append(module.register_full_backward_hook(partial(arrived_together, own)))
            for name, tensor in run.tensors.items():
                if tensor.requires_grad and name not in together:
                    hooks.append(tensor.register_post_accumulate_grad_hook(partial(arrived, name)))
            for hook in hooks:
                stack.callback(hook.remove)
            yield Spread(module=model, autocast=False, before_step=run.before_step), owners

    def splice(self, trace: Trace, block: Block, setup: TrainSetup) -> Trace:
        """See `probes.dryrun.trace.World`."""
        return splice(trace, block, setup)

    def finish(self, trace: Trace, block: Block | None) -> Trace:
        """The full model's trace with the engine's allocations."""
        return Engine(trace, block, self._setup, self._found).run()
