"""The search of the formula: the space, the walk over it, and the answer made of it."""
