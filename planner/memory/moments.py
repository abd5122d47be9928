"""The moments behind the forward at which a micro-batch's memory can be largest: in the loss chain, and at either end
of the layers' backward."""

from dataclasses import dataclass, replace

from planner.memory.dtypes import SIZE_BYTES
from planner.memory.loss import LossChain, loss_chain
from planner.memory.micro_batch import ActivationParts, step_flow
from planner.memory.trained import Trained
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup


def loss_parts(model: ModelSpec, setup: TrainSetup) -> LossChain:
    """The loss chain of one micro-batch."""
    flow = step_flow(model, setup)
    return loss_chain(
        loss=setup.loss,
        tokens=setup.tokens_per_micro_batch,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        logits_dtype=flow.autocast or flow.table,
        hidden_dtype=flow.residual,
        head_trained=setup.method == "full",
        softcap=model.logit_softcap,
        head_cast=flow.autocast is not None and flow.table == "fp32",
        upcast=not model.is_encoder_decoder or flow.autocast is not None,
    )


def loss_parts_logits(model: ModelSpec, setup: TrainSetup) -> int:
    """Bytes of the logits' gradient in the head's type, alive beside the head's own gradient (full loss only)."""
    if setup.loss != "full":
        return 0
    flow = step_flow(model, setup)
    return SIZE_BYTES[flow.autocast or flow.table] * setup.tokens_per_micro_batch * model.vocab_size


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardPeak:
    """The largest moment of the layers' backward, beyond what is resident, in bytes by part."""

    where: str
    stored: int
    recomputed: int
    transient: int
    dequantized: int
    gradients: int

    @property
    def total(self) -> int:
        """All parts."""
        return self.stored + self.recomputed + self.transient + self.dequantized + self.gradients


def halves_stay_apart(model: ModelSpec, setup: TrainSetup) -> bool:
    """Whether the two halves of a tied embedding's gradient make a third tensor instead of being added in place.

    The engine adds into the first one where nothing else holds its storage; the head's own matrix multiplication gives
    it transposed, which does. A cast (autocast) or a fused loss gives a fresh tensor.

    Source: PyTorch `input_buffer.cpp` `can_accumulate_inplace`; tests/probes/test_dryrun_gradient_sums.py.
    """
    return model.tied and setup.method == "full" and setup.loss == "full" and setup.autocast_dtype is None


def backward_moments(
    model: ModelSpec, parts: ActivationParts, trained: Trained, *, accumulated: bool, apart: bool = False
) -> tuple[BackwardPeak, ...]:
    """The moments that can be the backward's largest: the first layer's backward, the last one's (all gradients there
    but the embedding's and this layer's), each at every moment of a layer, and the embedding's own gradient, when all
    activations are gone.

    In between, activations fall and gradients rise linearly with the layers, so the maximum is at an end. With
    accumulation the gradients of earlier micro-batches are alive all along, and a new one only until it is added. Each
    moment by itself is affine in the micro-batch. `apart`: see `halves_stay_apart`.
    """
    size = SIZE_BYTES[trained.dtype]
    head = 0 if accumulated else trained.head * size
    largest = trained.embeddings * size
    half = trained.head * size if model.tied else 0  # the head's, which waits for the embedding's
    stored = parts.stored_total + parts.weight_casts[1]
    if accumulated:
        gradients = half
    else:
        others = trained.size_bytes - (0 if half >= largest else largest)
        gradients = max(0, others - (others - head) // max(1, model.num_layers))
    found = []
    for moment in parts.layer_moments:
        of_layer = {
            "recomputed": moment.recomputed,
            "transient": moment.transient,
            "dequantized": moment.dequantized,
        }
        first = BackwardPeak(where="first layer", stored=stored + parts.final_norm, gradients=head, **of_layer)
        if parts.at_first_decoder_layer:
            first = _first_decoder_layer(model, parts, trained, first, accumulated=accumulated)
        left = stored // max(1, model.num_layers)
        found += [first, BackwardPeak(where="last layer", stored=left, gradients=gradients, **of_layer)]
    # beside the gradients kept: the other half of a tied one, their sum, and a new one about to be accumulated, of the
    # tied table or, while the head's half still waits, of a larger one (Gemma 4's inputs of each layer)
    more = half * (1 + int(apart))
    if accumulated:
        more = max(more + half, half + largest)
    end = BackwardPeak(
        where="embedding",
        stored=0,
        recomputed=0,
        transient=0,
        dequantized=0,
        gradients=(0 if accumulated else trained.size_bytes) + more,
    )
    return *found, end


def _first_decoder_layer(
    model: ModelSpec, parts: ActivationParts, trained: Trained, first: BackwardPeak, *, accumulated: bool
) -> BackwardPeak:
    """The moment of an encoder-decoder with checkpointing where its position biases meet their gradients: the decoder's
    activations are gone, its gradients are there."""
    biases = parts.stored["bias"] + parts.at_first_decoder_layer
    layers = [
        (model.layer_kinds[kind].cross_attention is not None, model.layer_kinds[kind]) for kind in model.layer_order
    ]
    decoder = sum(layer.num_params for crossed, layer in layers if crossed)
    share = decoder / max(1, sum(layer.num_params for _, layer in layers))
    others = (first.stored - parts.stored["bias"]) // 2
    layer_gradients = int(share * max(0, trained.size_bytes - first.gradients))
    return replace(
        first,
        where="first decoder layer",
        stored=others + biases,
        gradients=first.gradients + (0 if accumulated else layer_gradients),
    )


def backward_peak(
    model: ModelSpec, parts: ActivationParts, trained: Trained, *, accumulated: bool, apart: bool = False
) -> BackwardPeak:
    """The largest of the backward's moments."""
    moments = backward_moments(model, parts, trained, accumulated=accumulated, apart=apart)
    return max(moments, key=lambda peak: peak.total)


def loss_peak(chain: LossChain, parts: ActivationParts, trained: Trained, logits_bytes: int) -> tuple[int, int]:
    """The loss chain's largest moment as (bytes of the chain, bytes of autocast's cache alive with it).

    Its forward (autocast's cache still alive), its own backward, or the head's gradient beside 16-bit logits.
    """
    cache = parts.weight_casts[0] - parts.weight_casts[1] + parts.adapter_casts
    head = trained.head * SIZE_BYTES[trained.dtype]  # with accumulation too: it is made, then added
    after = max(chain.backward_bytes, head + logits_bytes)
    return (chain.loss_bytes, cache) if chain.loss_bytes + cache > after else (after, 0)
