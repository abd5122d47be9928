"""Training programs read without running them: a small abstract interpreter over Python's own syntax tree follows them
up to the call that trains. What only running them would tell is `Unknown`, with the reason."""
