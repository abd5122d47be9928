"""What an out-of-memory error says: a pasted traceback, a log, or PyTorch's own memory snapshot."""
