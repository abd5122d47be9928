"""The data part of the plain script: tokens with labels as `launch/prepare_data.py` makes them, padded or packed."""

ROWS = '''
def load_rows():
    """The training split: a hub id, a directory, or one .jsonl, .json or .parquet file."""
    kind = {"jsonl": "json", "json": "json", "parquet": "parquet"}.get(DATASET.rpartition(".")[2])
    if kind and os.path.isfile(DATASET):
        return load_dataset(kind, data_files=DATASET, split="train")
    return load_dataset(DATASET, split=SPLIT)
'''

PADDED = '''
def collate(samples):
    """Pads to the longest sample of the batch; the loss skips padding, and questions where it is on answers alone."""
    longest = min(MAX_LENGTH, max(len(sample["input_ids"]) for sample in samples))
    ids, labels = (
        [sample[name][:longest] + [fill] * (longest - len(sample[name])) for sample in samples]
        for name, fill in (("input_ids", tokenizer.pad_token_id), ("labels", -100))
    )
    mask = [[int(place < len(sample["input_ids"])) for place in range(longest)] for sample in samples]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "labels": torch.tensor(labels)}
'''

CUT = '''
def collate(samples):
    """Pads to the longest sample of the batch, up to a length that can be cut over the GPUs; the loss skips padding."""
    longest = -(-min(MAX_LENGTH, max(len(sample["input_ids"]) for sample in samples)) // PIECES) * PIECES
    ids, labels = (
        [sample[name][:longest] + [fill] * (longest - len(sample[name])) for sample in samples]
        for name, fill in (("input_ids", tokenizer.pad_token_id), ("labels", -100))
    )
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels),
            "position_ids": torch.arange(longest).repeat(len(samples), 1)}
'''
"""No attention mask: what is cut attends causally, and padding comes last."""

PACKED = '''
def pack(rows):
    """Samples one after another in blocks of MAX_LENGTH tokens; the last, shorter block is left out."""
    return {
        name: [row[i : i + MAX_LENGTH] for i in range(0, len(row) - MAX_LENGTH + 1, MAX_LENGTH)]
        for name in ("input_ids", "labels")
        for row in [[token for sample in rows[name] for token in sample]]
    }
'''

COUNTS = """\
counts = {
    "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
    "micro_batch_seqs": arguments.per_device_train_batch_size,
    "accumulation_steps": arguments.gradient_accumulation_steps,
    "global_batch_seqs": trainer.get_total_train_batch_size(arguments),
}
"""

LABELLED = '''
def tokenize(row):
    return {"input_ids": tokenizer(row[TEXT_FIELD], truncation=True, max_length=MAX_LENGTH)["input_ids"]}


def collate(samples):
    """Pads to the longest sample of the batch; the last token that is no padding gets the score."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    pad = tokenizer.pad_token_id
    ids = [sample["input_ids"] + [pad] * (longest - len(sample["input_ids"])) for sample in samples]
    mask = [[1] * len(sample["input_ids"]) + [0] * (longest - len(sample["input_ids"])) for sample in samples]
    labels = [LABELS.index(sample["label"]) for sample in samples]
    return {name: torch.tensor(rows) for name, rows in
            (("input_ids", ids), ("attention_mask", mask), ("labels", labels))}


rows = load_rows()
LABELS = sorted(set(rows["label"]))
rows = rows.map(tokenize, remove_columns=[name for name in rows.column_names if name != "label"])
'''
