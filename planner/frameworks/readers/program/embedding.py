"""Programs of sentence-transformers: what their trainer's call says of model, loss and data.

Source: sentence-transformers 6.2 `SentenceTransformer`, `SentenceTransformerTrainer`, `fit_mixin.py`.
"""

from collections.abc import Iterable

from planner.core.errors import NotPlanned
from planner.frameworks.readers.program.values import CallResult, Constant, Value, as_table, items_of, plain

TRAINER = "SentenceTransformerTrainer"
LOSS = "MultipleNegativesRankingLoss"
CACHED_LOSS = f"Cached{LOSS}"
DEFAULT_CACHED = 32
"""Sequences at once of the cached loss, where it is given no `mini_batch_size`."""
DEFAULT_LOSS = "CoSENTLoss"
"""What the trainer takes where it is given none."""
PAIRS = "samples are taken to be pairs: a third column (hard negatives) is one more forward (hard_negatives)"
NO_COLUMNS = {"label", "labels", "score", "scores"}


def loader_of(model: CallResult) -> CallResult:
    """The call of `SentenceTransformer` as one that loads its model, with what `model_kwargs` says as keywords."""
    source = model
    modules = model.argument("modules")
    first = next(iter(items_of(modules) or ()), None) if modules is not None else None
    if isinstance(first, CallResult):  # modules=[Transformer(name, max_seq_length=...), Pooling(...)]
        source = first
    named = source.argument("model_name_or_path", 0)
    inner = model.argument("model_kwargs") or source.argument("model_args")
    table = as_table(inner) if inner is not None else None
    keywords = dict(table.entries) if table is not None else {}
    length = model.attributes.get("max_seq_length") or source.argument("max_seq_length")
    return CallResult(
        "from_pretrained",
        owner="SentenceTransformer",
        positional=[named] if named is not None else [],
        keywords=keywords | ({"max_seq_length": length} if length is not None else {}),
        where=model.where,
        more=table.more if table is not None else "" if inner is None else f"{model.where}: model_kwargs is not known",
    )


def fitted(model: CallResult, fit: CallResult) -> CallResult:
    """`model.fit(train_objectives=...)` as the trainer that it makes: its loader's batch, AdamW, fp16 with AMP."""
    given = fit.argument("train_objectives", 0)
    pair = next(iter(items_of(given) or ()), None) if given is not None else None
    parts = items_of(pair) if pair is not None else None
    data, loss = parts if parts is not None and len(parts) == 2 else (None, None)
    batch = data.argument("batch_size", 1) if isinstance(data, CallResult) else None
    arguments = CallResult(
        "SentenceTransformerTrainingArguments",
        keywords={
            "per_device_train_batch_size": batch or Constant(8 if data is not None else None, fit.where),
            "fp16": fit.argument("use_amp") or Constant(False, fit.where),
            "optim": Constant("adamw_torch", fit.where),
        },
        where=fit.where,
    )
    keywords: dict[str, Value] = {"model": model, "args": arguments}
    return CallResult(TRAINER, keywords=keywords | ({"loss": loss} if loss is not None else {}), where=fit.where)


def open_loss(trainer: CallResult, name: str) -> str:
    """Why the loss is not known, "" where it is the planned one."""
    loss = trainer.argument("loss")
    if loss is not None and not isinstance(loss, CallResult) and not (isinstance(loss, Constant) and loss.data is None):
        return f"{trainer.where}: which loss it is, or several"
    loss_name = loss.name if isinstance(loss, CallResult) else DEFAULT_LOSS
    if loss_name not in (LOSS, CACHED_LOSS) or (
        isinstance(loss, CallResult) and loss.argument("mini_batch_num_tokens")
    ):
        raise NotPlanned(
            f"{name} trains embeddings with {loss_name}: not planned, its memory is not modelled",
            hint=f"{LOSS} is; plan trace -- python FILE runs it on a phantom GPU and says what it needs",
        )
    return ""


def contrast(trainer: CallResult, calls: Iterable[CallResult]) -> dict[str, int | None]:
    """Fields of the setup: hard negatives by the data's columns, and what a cached loss runs at once; None where it is
    not known."""
    fields: dict[str, int | None] = {}
    if negatives := max([0, *(_columns(made) - 2 for made in calls)]):
        fields["hard_negatives"] = negatives
    loss = trainer.argument("loss")
    if isinstance(loss, CallResult) and loss.name == CACHED_LOSS:
        size = loss.argument("mini_batch_size")
        given = plain(size) if size is not None else DEFAULT_CACHED
        fields["cached_seqs"] = given if isinstance(given, int) else None
    return fields


def _columns(made: CallResult) -> int:
    """Columns of texts that a call gives its samples, 0 where it gives none."""
    if made.name == "mine_hard_negatives":
        return 3
    first = made.argument("texts") if made.name == "InputExample" else made.positional[0] if made.positional else None
    if made.name not in ("InputExample", "from_dict", "select_columns") or first is None:
        return 0
    return len([column for column in items_of(first) or () if plain(column) not in NO_COLUMNS])
