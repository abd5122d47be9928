"""One pipeline stage of a built model under PyTorch's own schedule, set up as torchtitan 0.2.2 sets its stages up.

The stage is transformers' model without the parts that other stages hold. `torch.distributed.pipelining` runs it:
`PipelineStage` with `ScheduleGPipe` or `Schedule1F1B`. The default process group exists before.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from planner.setup import TrainSetup
from probes.stack.batch import Batch
from probes.stack.configs import layers_of
from probes.stack.dtypes import DTYPES
from probes.stack.heads import backbone_of
from probes.stack.parallelize import Layout
from probes.stack.step import Mark

PIPELINE_DIM = "pp"


class StageModule(nn.Module):  # type: ignore[misc]
    """The stage's forward: ids or hidden states in, hidden states or logits out.

    Shapes: [seqs, tokens] ids for the first stage, [seqs, tokens, hidden] between stages, [seqs, tokens, vocabulary].
    """

    def __init__(self, model: Any, *, first: bool, last: bool) -> None:
        super().__init__()
        self.model = model
        self.first, self.last = first, last
        self.tell: Mark = lambda phase, layer: None
        self.in_backward = False

    def forward(self, inputs: torch.Tensor) -> Any:
        self.in_backward = False
        self.tell("forward", None)
        named = {"input_ids" if self.first else "inputs_embeds": inputs}
        if self.last:
            return self.model(**named, use_cache=False).logits
        return backbone_of(self.model)(**named, use_cache=False)[0]


def cut_stage(model: Any, *, first: bool, last: bool) -> StageModule:
    """Takes away from `model`, which has the stage's layers only, what other stages hold: the embeddings after the
    first, final norm and head before the last.

    Source: torchtitan 0.2.2 `pipeline_module_split`, `generate_llm_fqn_per_model_part`.

    Raises:
        ValueError: a model whose backbone has no parts of these names.
    """
    backbone = backbone_of(model)
    if not (hasattr(backbone, "embed_tokens") and hasattr(backbone, "norm")):
        raise ValueError(f"{model.config.model_type}: no embed_tokens and norm to leave out of a stage")
    if not first:
        backbone.embed_tokens = nn.Identity()
    if not last:
        backbone.norm = nn.Identity()
        model.set_output_embeddings(nn.Identity())
    return StageModule(model, first=first, last=last)


def pipeline_layout(model: Any, setup: TrainSetup, stage: int, *, device: torch.device) -> Layout:
    """The stage `stage` of the job of `setup`; `model` has its layers only.

    Activations' shapes are given to the stage, so that it need not run once to find them.

    Source: torchtitan 0.2.2 `build_pipeline_schedule`, `Trainer.forward_backward_step` (no outputs returned).
    """
    from torch.distributed.pipelining import PipelineStage

    degree = setup.pipeline_degree
    module = cut_stage(model, first=stage == 0, last=stage == degree - 1)
    group = _sharded(module, setup, device) if setup.data_degree > 1 else None
    boundaries = {
        "input_args": _example(setup, model, ids=module.first),
        "output_args": _example(setup, model, logits=module.last),
    }
    runner = PipelineStage(module, stage, degree, device, **boundaries, group=group)
    return Layout(module=module, autocast=False, run=_Run(module, runner, setup))


def _example(setup: TrainSetup, model: Any, *, ids: bool = False, logits: bool = False) -> torch.Tensor:
    """What passes a boundary of the stage, on meta."""
    shape: tuple[int, ...] = (setup.micro_batch_seqs, setup.seq_len_tokens)
    if ids:
        return torch.empty(shape, dtype=torch.int64, device="meta")
    text = model.config.get_text_config()
    width = text.vocab_size if logits else text.hidden_size
    dtype = DTYPES[setup.compute_dtype]
    return torch.empty((*shape, width), dtype=dtype, device="meta").requires_grad_()


def _sharded(module: StageModule, setup: TrainSetup, device: torch.device) -> Any:
    """FSDP2 around the stage, and the group of the pipeline's ranks.

    Source: torchtitan 0.2.2 models/llama3/infra/parallelize.py `apply_fsdp`: mixed precision by policy, reduction in
    fp32; table, blocks and tail are groups; weights stay gathered within the schedule's step (`PipelineStage`).
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    hybrid = setup.shards < setup.data_degree
    names = (PIPELINE_DIM, *(("dp_replicate",) if hybrid else ()), "dp_shard")
    copies = (setup.data_degree // setup.shards, setup.shards) if hybrid else (setup.shards,)
    mesh = init_device_mesh(device.type, (setup.pipeline_degree, *copies), mesh_dim_names=names)
    half = DTYPES[setup.compute_dtype]
    if setup.autocast_dtype is not None:  # training.dtype of the launch files: fp32 under mixed precision
        for parameter in module.parameters():
            parameter.data = parameter.data.float()
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    shard: Callable[..., Any] = partial(fully_shard, mesh=mesh[names[1:]], mp_policy=policy)
    reshard = setup.reshard_after_forward
    backbone = backbone_of(module.model)
    if module.first:
        shard(backbone.embed_tokens, reshard_after_forward=reshard)
    for layer in layers_of(module.model):
        shard(layer, reshard_after_forward=reshard)
    if module.last:
        shard([backbone.norm, module.model.get_output_embeddings()], reshard_after_forward=reshard)
    shard(module)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
    return mesh[PIPELINE_DIM].get_group()


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Source: torchtitan 0.2.2 components/loss.py `cross_entropy_loss`."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum")


class _Run:
    """A step's micro-batches under the schedule, with the phases told."""

    def __init__(self, module: StageModule, stage: Any, setup: TrainSetup) -> None:
        from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

        self._module, self._stage = module, stage
        schedule = ScheduleGPipe if setup.pipeline_schedule == "gpipe" else Schedule1F1B
        self.schedule: Any = schedule(stage, setup.accumulation_steps, loss_fn=_loss, scale_grads=False)
        self._backward = stage.backward_one_chunk
        stage.backward_one_chunk = self._marked_backward
        for index, layer in enumerate(layers_of(module.model)):
            layer.register_forward_pre_hook(partial(self._before, index), prepend=True)
            layer.register_forward_hook(partial(self._after, index), prepend=True)
        if module.last:
            backbone_of(module.model).register_forward_hook(self._backbone_ends)

    def __call__(self, batches: list[Batch], mark: Mark) -> None:
        module, stage = self._module, self._stage
        module.tell = mark
        module.in_backward = False
        mark("forward", None)
        ids = [(batch.model_inputs["input_ids"],) if module.first else () for batch in batches]
        labels = [batch.labels for batch in batches] if module.last else None
        stage.has_backward = True
        stage.clear_runtime_states()  # as `PipelineScheduleSingle.step`, whose cutting of one large batch is spared
        self.schedule._step_microbatches(ids, [{}] * len(batches), labels, None, return_outputs=False)

    def _marked_backward(self, chunk: int, **kwargs: Any) -> Any:
        self._module.in_backward = True
        self._module.tell("loss" if self._module.last else "backward", None)
        return self._backward(chunk, **kwargs)

    def _before(self, index: int, layer: Any, inputs: Any) -> None:
        if not self._module.in_backward:
            self._module.tell("forward", index)

    def _after(self, index: int, layer: Any, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if not self._module.in_backward and hidden.requires_grad:
            hidden.register_hook(partial(self._gradient, index))

    def _backbone_ends(self, backbone: Any, inputs: Any, output: Any) -> None:
        if output[0].requires_grad:
            output[0].register_hook(partial(self._gradient, None))
        self._module.tell("loss", None)

    def _gradient(self, layer: int | None, gradient: torch.Tensor) -> None:
        self._module.tell("backward", layer)
