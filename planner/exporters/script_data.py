"""The data part of the plain script: a dataset with chat, prompt-completion, instruction or text columns to tokens."""

ROWS = '''
def load_rows():
    """The training split: a hub id, a directory, or one .jsonl, .json or .parquet file."""
    kind = {"jsonl": "json", "json": "json", "parquet": "parquet"}.get(DATASET.rpartition(".")[2])
    if kind and os.path.isfile(DATASET):
        return load_dataset(kind, data_files=DATASET, split="train")
    return load_dataset(DATASET, split=SPLIT)
'''

SAMPLES = '''
def to_text(row):
    """One sample as text, by the columns it has."""
    if row.get("messages"):
        return tokenizer.apply_chat_template(row["messages"], tokenize=False)
    if "prompt" in row and "completion" in row:
        return row["prompt"] + row["completion"] + tokenizer.eos_token
    if "instruction" in row and "output" in row:
        question = row["instruction"] + ("\\n" + row["input"] if row.get("input") else "")
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
        if tokenizer.chat_template:
            return tokenizer.apply_chat_template(turns, tokenize=False)
        return question + "\\n" + row["output"] + tokenizer.eos_token
    return row[TEXT_FIELD] + tokenizer.eos_token


def tokenize(row):
    return {"input_ids": tokenizer(to_text(row), add_special_tokens=False)["input_ids"][:MAX_LENGTH]}
'''

PADDED = '''
def collate(samples):
    """Pads to the longest sample of the batch; the loss skips padding."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    pad = tokenizer.pad_token_id
    ids = [sample["input_ids"] + [pad] * (longest - len(sample["input_ids"])) for sample in samples]
    mask = [[1] * len(sample["input_ids"]) + [0] * (longest - len(sample["input_ids"])) for sample in samples]
    labels = [[token if keep else -100 for token, keep in zip(*row)] for row in zip(ids, mask)]
    return {name: torch.tensor(rows) for name, rows in
            (("input_ids", ids), ("attention_mask", mask), ("labels", labels))}
'''

CUT = '''
def collate(samples):
    """Pads to the longest sample of the batch, up to a length that can be cut over the GPUs; the loss skips padding."""
    longest = -(-max(len(sample["input_ids"]) for sample in samples) // PIECES) * PIECES
    pad = tokenizer.pad_token_id
    ids = [sample["input_ids"] + [pad] * (longest - len(sample["input_ids"])) for sample in samples]
    labels = [sample["input_ids"] + [-100] * (longest - len(sample["input_ids"])) for sample in samples]
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels),
            "position_ids": torch.arange(longest).repeat(len(samples), 1)}
'''
"""No attention mask: what is cut attends causally, and padding comes last."""

PACKED = '''
def pack(rows):
    """Samples one after another in blocks of MAX_LENGTH tokens; the last, shorter block is left out."""
    tokens = [token for sample in rows["input_ids"] for token in sample]
    return {"input_ids": [tokens[i : i + MAX_LENGTH] for i in range(0, len(tokens) - MAX_LENGTH + 1, MAX_LENGTH)]}


def collate(samples):
    ids = torch.tensor([sample["input_ids"] for sample in samples])
    return {"input_ids": ids, "labels": ids.clone()}
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
