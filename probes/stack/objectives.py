"""The losses of other objectives than supervised training, as their trainers compute them: which tensors live when."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from planner.setup import TrainSetup
from probes.stack.batch import Batch
from probes.stack.heads import head_loss, headless, pooled

BETA = 0.1
SCALE = 20.0
"""Of cosine similarities. Source: sentence-transformers 6.2 `MultipleNegativesRankingLoss`."""
_log_sigmoid = torch.nn.functional.logsigmoid


class LossInputs(NamedTuple):
    """One micro-batch and the models that its loss asks.

    Attributes:
        model, inner: with and without peft's wrapper; `forward` is the model's under the trainer's autocast.
        reference: inner model and forward of a frozen copy, None for the model with its adapters off.
        begin_forward: tells that another forward begins.
    """

    setup: TrainSetup
    batch: Batch
    model: Any
    inner: Any
    forward: Any
    reference: tuple[Any, Any] | None
    begin_forward: Callable[[], None]

    def outputs(self, inner: Any, forward: Any) -> Any:
        """What a model returns under TRL's fused head."""
        scored = self.setup.rollout_settings.completion_tokens if self.setup.objective_spec.rolls_out else None
        with headless(inner, partial(head_loss, inner, self.setup.loss, scored=scored)):
            return forward(**self.batch.model_inputs, labels=self.batch.labels)

    def log_probs(self, inner: Any, forward: Any) -> torch.Tensor:
        """The log-probability of every sequence, without gradients and with nothing left but it."""
        with torch.no_grad():
            log_probs: torch.Tensor = self.outputs(inner, forward)["log_probs"]
            return log_probs.sum(dim=1)

    def precomputed(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A reference's log-probabilities that came with the batch, of both halves."""
        return torch.zeros_like(like), torch.zeros_like(like)

    @contextmanager
    def before_training(self) -> Iterator[tuple[Any, Any]]:
        """The reference's inner model and forward. Source: TRL 1.16 `use_adapter`, `disable_gradient_checkpointing`."""
        if self.reference is not None:
            yield self.reference
            return
        with self.model.disable_adapter(), without_checkpointing(self.inner):
            yield self.inner, self.forward


def dpo(inputs: LossInputs) -> torch.Tensor:
    """The sigmoid loss of pairs: the policy's forward, then the reference's. Source: TRL 1.16 `DPOTrainer`."""
    if inputs.setup.loss == "full":
        return _dpo_whole(inputs)
    outputs = inputs.outputs(inputs.inner, inputs.forward)  # alive to the end, as the trainer's are
    chosen, rejected = outputs["log_probs"].sum(dim=1).chunk(2)
    if inputs.setup.precomputed_reference:
        ref_chosen, ref_rejected = inputs.precomputed(chosen)
    else:
        inputs.begin_forward()
        with inputs.before_training() as reference:
            ref_chosen, ref_rejected = inputs.log_probs(*reference).chunk(2)
    return -_log_sigmoid(BETA * ((chosen - ref_chosen) - (rejected - ref_rejected))).mean()


def _dpo_whole(inputs: LossInputs) -> torch.Tensor:
    """DPO on whole logits, which live until the loss is made. Source: TRL 1.14 `DPOTrainer._compute_loss`;
    LLaMA-Factory 0.9.5 `train/dpo/trainer.py`."""
    outputs = inputs.forward(**inputs.batch.model_inputs, use_cache=False)  # alive to the end
    chosen, rejected = _sequence_log_probs(inputs, outputs["logits"]).chunk(2)
    likelihood = _chosen_likelihood(inputs, outputs["logits"]) if inputs.setup.before_trl(0, 12) else None
    if inputs.setup.before_trl(0, 29) and likelihood is None:
        del outputs  # a function's own, gone when that returned
    if inputs.setup.precomputed_reference:
        ref_chosen, ref_rejected = inputs.precomputed(chosen)
    else:
        inputs.begin_forward()
        with inputs.before_training() as (_, forward), torch.no_grad():
            reference = forward(**inputs.batch.model_inputs, use_cache=False)
            ref_chosen, ref_rejected = _sequence_log_probs(inputs, reference["logits"]).chunk(2)
            if likelihood is not None:
                _chosen_likelihood(inputs, reference["logits"])
    return -_log_sigmoid(BETA * ((chosen - ref_chosen) - (rejected - ref_rejected))).mean()


def _chosen_likelihood(inputs: LossInputs, logits: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the chosen halves. Source: trl 0.9 to 0.11 `DPOTrainer.concatenated_forward`, in whose loss it
    is where `rpo_alpha` is given; TRL 1.16 `ORPOTrainer`."""
    labels = inputs.batch.labels
    half = labels.shape[0] // 2
    shifted = logits[:half][..., :-1, :].contiguous()
    return torch.nn.functional.cross_entropy(shifted.view(-1, shifted.shape[-1]), labels[:half, 1:].reshape(-1))


def _sequence_log_probs(inputs: LossInputs, logits: torch.Tensor) -> torch.Tensor:
    labels = inputs.batch.labels[:, 1:].clone()
    if inputs.setup.stack == "llamafactory":
        normal = logits.to(torch.float32)[:, :-1].log_softmax(-1)
        return torch.gather(normal, dim=2, index=labels.unsqueeze(2)).squeeze(2).sum(-1)
    if inputs.setup.log_probs:
        return _older_log_probs(inputs.setup, logits, inputs.batch.labels)
    log_probs: torch.Tensor = SelectedLogProbs.apply(logits[:, :-1, :], labels)
    return log_probs.sum(-1)


def _older_log_probs(setup: TrainSetup, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The log-probability of every sequence (GRPO: of its tokens) as TRL took it without a kernel of its own.

    Source: `TrainSetup.log_probs`.
    """
    if setup.log_probs == "copied":
        logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    elif setup.objective == "kto" or setup.before_trl(0, 14):
        logits, labels = logits[:, :-1, :], labels[:, 1:]
    if setup.log_probs.startswith("gathered"):
        log_probs = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    elif logits.dtype == torch.float32:
        selected = torch.gather(logits, dim=-1, index=labels.unsqueeze(-1)).squeeze(-1)
        log_probs = selected - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    else:
        rows = zip(logits, labels, strict=True)
        log_probs = torch.stack([
            torch.nn.functional.log_softmax(row, dim=-1).gather(dim=-1, index=label.unsqueeze(-1)).squeeze(-1)
            for row, label in rows
        ])  # fmt: skip
    for half in logits.detach().chunk(2) if setup.objective == "dpo" else ():
        half.reshape(-1, half.shape[-1]).clone().mean()  # what it logs: a mask's copy
    return log_probs if setup.objective_spec.rolls_out else log_probs.sum(-1)


def kto(inputs: LossInputs) -> torch.Tensor:
    """The loss of single completions, half of them good: the policy on other prompts' completions, then on its own,
    then the reference on both. Source: TRL 1.16 `KTOTrainer`."""
    if inputs.setup.loss == "full":
        return _kto_whole(inputs)
    policy_kl = inputs.log_probs(inputs.inner, inputs.forward)
    inputs.begin_forward()
    outputs = inputs.outputs(inputs.inner, inputs.forward)
    good, bad = outputs["log_probs"].sum(dim=1).chunk(2)
    if inputs.setup.precomputed_reference:
        (ref_good, ref_bad), (reference_kl, _) = inputs.precomputed(good), inputs.precomputed(policy_kl)
    else:
        inputs.begin_forward()
        with inputs.before_training() as reference:
            reference_kl = inputs.log_probs(*reference)
            inputs.begin_forward()
            ref_good, ref_bad = inputs.log_probs(*reference).chunk(2)
    return _kto_loss(good, bad, policy_kl, ref_good, ref_bad, reference_kl)


def _kto_loss(*values: torch.Tensor) -> torch.Tensor:
    good, bad, policy_kl, ref_good, ref_bad, reference_kl = values
    kl = (policy_kl - reference_kl).mean().clamp(min=0)
    losses = (1 - torch.sigmoid(BETA * (good - ref_good - kl)), 1 - torch.sigmoid(BETA * (kl - (bad - ref_bad))))
    return torch.cat(losses).mean()


def _kto_whole(inputs: LossInputs) -> torch.Tensor:
    """KTO on whole logits, of which its forward hands back copies. Source: trl 0.12 to 1.5 `KTOTrainer.forward`."""

    def run(forward: Any, *, first: bool = False) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        if not first:
            inputs.begin_forward()
        with torch.no_grad():
            other = forward(**inputs.batch.model_inputs, use_cache=False)["logits"]
        kl = _older_log_probs(inputs.setup, other, inputs.batch.labels)
        if inputs.setup.log_probs == "rows apart":
            del other
        inputs.begin_forward()
        logits = forward(**inputs.batch.model_inputs, use_cache=False)["logits"]
        sequence_log_probs = _older_log_probs(inputs.setup, logits, inputs.batch.labels)
        return sequence_log_probs, kl, [half.clone() for half in logits.chunk(2)]

    log_probs, policy_kl, copies = run(inputs.forward, first=True)
    if inputs.setup.precomputed_reference:
        ref, reference_kl = torch.zeros_like(log_probs), torch.zeros_like(policy_kl)
    else:
        with inputs.before_training() as (_, forward), torch.no_grad():
            ref, reference_kl, _ = run(forward)
    del copies
    good, bad = log_probs.chunk(2)
    ref_good, ref_bad = ref.chunk(2)
    return _kto_loss(good, bad, policy_kl, ref_good, ref_bad, reference_kl)


def reward(inputs: LossInputs) -> torch.Tensor:
    """The loss of scores of pairs. Source: TRL 1.16 `RewardTrainer.compute_loss`."""
    outputs = inputs.forward(**inputs.batch.model_inputs, use_cache=False)
    chosen, rejected = torch.chunk(outputs["logits"].squeeze(-1), chunks=2)
    return -_log_sigmoid(chosen - rejected).mean()


def classification(inputs: LossInputs) -> torch.Tensor:
    """The cross-entropy of one label a sequence. Source: transformers 5.23 `ForSequenceClassificationLoss`."""
    outputs = inputs.forward(**inputs.batch.model_inputs, use_cache=False)
    labels = torch.zeros(inputs.batch.labels.shape[0], dtype=torch.int64, device=inputs.batch.labels.device)
    return torch.nn.functional.cross_entropy(outputs["logits"], labels)


def embedding(inputs: LossInputs) -> torch.Tensor:
    """The contrastive loss of pairs: a forward for the anchors, one for what belongs to them, and for each anchor the
    others' as negatives. Source: sentence-transformers 6.2 `MultipleNegativesRankingLoss`."""
    num = inputs.setup.seqs_per_sample
    columns = [  # the micro-batch's anchors, what belongs to them, and their hard negatives
        {name: tensor.chunk(num)[place] for name, tensor in inputs.batch.model_inputs.items()} for place in range(num)
    ]
    if inputs.setup.cached_seqs:
        return _cached(inputs, columns)
    vectors = []
    with pooled(inputs.inner):
        for place, column in enumerate(columns):
            if place:
                inputs.begin_forward()
            vectors.append(inputs.forward(**column)["sentence_embedding"])
    return _contrast(vectors)


def _contrast(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The cross-entropy of each anchor's own text among all others of the batch."""
    anchors, others = (
        torch.nn.functional.normalize(matrix, p=2, dim=1) for matrix in (vectors[0], torch.cat(vectors[1:]))
    )
    scores = torch.mm(anchors, others.transpose(0, 1)) * SCALE
    loss: torch.Tensor = -(torch.diagonal(scores) - torch.logsumexp(scores, dim=1)).mean()
    return loss


def _cached(inputs: LossInputs, columns: Sequence[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The loss with a gradient cache: all pieces without gradients, the loss's backward to their vectors, and in the
    backward each piece once more, with its own.

    Source: sentence-transformers 6.2 `base/losses/gradcache.py` CachedLossMixin.forward_cached, _backward_hook.
    Not run: pieces between the first and the last of a column, which are like the first (`forward_repeats`).
    """
    size = inputs.setup.cached_seqs
    starts = range(0, inputs.setup.micro_batch_seqs, size)
    pieces = [
        [{name: tensor[start : start + size] for name, tensor in column.items()} for start in _run_of(starts)]
        for column in columns
    ]

    def embedded(piece: dict[str, torch.Tensor]) -> torch.Tensor:
        inputs.begin_forward()
        with pooled(inputs.inner):
            embeddings: torch.Tensor = inputs.forward(**piece)["sentence_embedding"]
            return embeddings

    with torch.no_grad():
        vectors = [[embedded(piece) for piece in column] for column in pieces]
    vectors = [[vector.detach().requires_grad_() for vector in column] for column in vectors]
    loss = _contrast([torch.cat(column) for column in vectors])
    loss.backward()
    gradients = [vector.grad for column in vectors for vector in column]
    loss = loss.detach().requires_grad_()

    def backward(_: torch.Tensor) -> None:
        with torch.enable_grad():
            for piece, gradient in zip([part for column in pieces for part in column], gradients, strict=True):
                embeddings = embedded(piece)
                torch.dot(embeddings.flatten().float(), gradient.flatten().float()).backward()

    loss.register_hook(backward)
    return loss


def _run_of(starts: Sequence[int]) -> Sequence[int]:
    """Of a column's pieces, those that are run: the first, and the last, which may be smaller."""
    return (starts[0], starts[-1]) if len(starts) > 1 else starts


def forward_repeats(setup: TrainSetup) -> tuple[int, ...]:
    """For how many forwards of a micro-batch each one that `_cached` runs stands; () where all are run. In the second
    pass the first column's first piece finds no gradients to add its own to: the second column's stands for the others.
    """
    if not setup.cached_seqs:
        return ()
    starts, columns = range(0, setup.micro_batch_seqs, setup.cached_seqs), setup.seqs_per_sample
    alike, last = max(1, len(starts) - 1), (1,) * (len(_run_of(starts)) - 1)
    return (alike, *last) * columns + (1, *last, 2 * alike - 1, *last) + (alike, *last) * (columns - 2)


def grpo(inputs: LossInputs) -> torch.Tensor:
    """The clipped loss of completions under their advantages. Source: TRL 1.16 `GRPOTrainer._compute_loss`, dapo; it
    asks the reference as it generates, where nothing of this forward is there."""
    reference = _rolled_out_reference(inputs)
    log_probs = _scored(inputs, inputs.inner, inputs.forward)
    loss = _clipped(log_probs)
    if reference is not None:
        apart = reference - log_probs
        loss = loss + BETA * (torch.exp(apart) - apart - 1) * torch.exp(log_probs - log_probs.detach())
    return loss.sum() / inputs.setup.scored_tokens


def rloo(inputs: LossInputs) -> torch.Tensor:
    """The same of whole completions; the reference is in their rewards. Source: TRL 1.16 `RLOOTrainer._compute_loss`.
    The policy's own forward without gradients is smaller than the one with them, and is left out."""
    _rolled_out_reference(inputs)
    return _clipped(inputs.outputs(inputs.inner, inputs.forward)["log_probs"].sum(dim=1, keepdim=True)).mean()


def _rolled_out_reference(inputs: LossInputs) -> torch.Tensor | None:
    """The reference's log-probabilities of what was generated, None without one."""
    if not inputs.setup.has_reference:
        return None
    with inputs.before_training() as models, torch.no_grad():
        reference = _scored(inputs, *models)
    inputs.begin_forward()
    return reference


def _clipped(log_probs: torch.Tensor) -> torch.Tensor:
    advantages = torch.ones((log_probs.shape[0], 1), device=log_probs.device)
    ratio = torch.exp(log_probs - log_probs.detach())
    return -torch.min(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)


def _scored(inputs: LossInputs, inner: Any, forward: Any) -> torch.Tensor:
    """The log-probabilities of the completions' tokens: TRL's fused head's, or of whole logits.

    Source: trl 0.15 to 1.14 `GRPOTrainer._get_per_token_logps`.
    """
    if inputs.setup.loss != "full":
        log_probs: torch.Tensor = inputs.outputs(inner, forward)["log_probs"]
        return log_probs
    num = inputs.setup.rollout_settings.completion_tokens
    logits = forward(**inputs.batch.model_inputs, use_cache=False, logits_to_keep=num + 1)["logits"][:, :-1, :]
    logits = logits / 1.0
    return _older_log_probs(inputs.setup, logits, inputs.batch.labels[:, -num:])


def orpo(inputs: LossInputs) -> torch.Tensor:
    """Cross-entropy of the chosen halves and the odds ratio of both. Source: TRL 1.16 `ORPOTrainer`."""
    labels = inputs.batch.labels
    logits = inputs.forward(**inputs.batch.model_inputs, use_cache=False)["logits"]
    if inputs.setup.stack == "llamafactory":
        chosen, rejected = (_sequence_log_probs(inputs, logits) / labels.shape[1]).chunk(2)
        return (-chosen - BETA * _log_sigmoid(_log_odds(chosen, rejected))).mean()
    likelihood = _chosen_likelihood(inputs, logits)
    chosen, rejected = SelectedLogProbs.apply(logits[:, :-1, :], labels[:, 1:].clone()).mean(-1).chunk(2)
    loss: torch.Tensor = likelihood - (BETA * _log_sigmoid(_log_odds(chosen, rejected))).mean()
    return loss


def _log_odds(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    return (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))


class SelectedLogProbs(torch.autograd.Function):  # type: ignore[misc]
    """The labels' log-probabilities of whole logits, with one gradient of their size.

    Source: TRL 1.16 `kernels/logprob_entropy.py`: four fp32 values per row; the kernels allocate nothing.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = [torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device) for _ in range(4)]
        if logits.device.type != "meta":
            rows[0].copy_(torch.log_softmax(logits.float(), -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1))
        ctx.save_for_backward(logits, labels, rows[2], rows[3])
        return rows[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, labels, *_ = ctx.saved_tensors
        gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
        if logits.device.type != "meta":
            hot = torch.nn.functional.one_hot(labels, logits.shape[-1])
            gradient.copy_(grads[0].unsqueeze(-1) * (hot - torch.softmax(logits.float(), -1)))
        return gradient, None


LOSSES: Mapping[str, Callable[[LossInputs], torch.Tensor]] = {
    "dpo": dpo,
    "kto": kto,
    "reward": reward,
    "orpo": orpo,
    "grpo": grpo,
    "rloo": rloo,
    "classification": classification,
    "embedding": embedding,
}
"""Objective -> its loss; one that is not here has supervised training's."""


Tell = Callable[[str, int | None], None]


def generate(setup: TrainSetup, inner: Any, forward: Any, tell: Tell) -> None:
    """Completions as transformers' `generate` makes them: its first forward, and its last with the whole cache; what
    lies between is smaller. Every generation of an optimizer step is the same: one is run.

    Args:
        forward: the model's under the trainer's autocast, which peft's `generate` goes around.

    Source: trl 1.16 `GRPOTrainer._generate_single_turn`; transformers 5.23 `GenerationMixin._sample` without
    processors of logits (top_k 0, top_p 1).
    """
    from transformers import DynamicCache

    if setup.rollout_settings.generator != "transformers":
        return
    device = next(inner.parameters()).device
    vocab = int(inner.config.get_text_config().vocab_size)
    run = forward if setup.method == "full" else inner.__call__
    with torch.no_grad(), without_checkpointing(inner):
        ids = torch.randint(0, vocab, (setup.local_generation_seqs, setup.seq_len_tokens), device=device)
        cache = DynamicCache(config=inner.config)
        tell("forward", None)
        _next_token(run, ids[:, : setup.prompt_tokens], cache)
        for index, layer in enumerate(cache.layers):
            tell("forward", index)
            tokens, window = setup.seq_len_tokens - 2, getattr(layer, "sliding_window", None)
            length = min(tokens, window - 1) if window else tokens  # a layer with a window keeps that
            if hasattr(layer, "cumulative_length"):  # and its mask is of so many as it has seen
                layer.cumulative_length = tokens
            for name in ("keys", "values"):
                old = getattr(layer, name, None)
                if isinstance(old, torch.Tensor):
                    setattr(layer, name, old.new_zeros((*old.shape[:-2], length, old.shape[-1])))
                del old
        tell("forward", None)
        _next_token(run, ids[:, -1:], cache)


def _next_token(run: Any, ids: torch.Tensor, cache: Any) -> None:
    """One forward and the draw from its last token's logits."""
    seen = cache.get_seq_length()
    positions = torch.arange(seen, seen + ids.shape[1], device=ids.device).repeat(ids.shape[0], 1)
    outputs = run(
        input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1, return_dict=True
    )
    logits = outputs["logits"][:, -1, :].to(copy=True, dtype=torch.float32)
    del outputs
    torch.multinomial(torch.nn.functional.softmax(logits, dim=-1), num_samples=1)


@contextmanager
def without_checkpointing(inner: Any) -> Any:
    """Source: TRL 1.16 `disable_gradient_checkpointing`, `unwrap_model_for_generation`."""
    with ExitStack() as stack:
        for module in inner.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False
                stack.callback(setattr, module, "gradient_checkpointing", True)
        yield
