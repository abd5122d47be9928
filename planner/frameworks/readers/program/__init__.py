"""Training programs read without running them: a small abstract interpreter over Python's own syntax tree.

`interpret.run` follows what training scripts do with their settings (constants, dictionaries, functions, defaults of a
command line, simple branches) up to the call that trains. What only running them would tell is `Unknown`, with the
reason.
"""
