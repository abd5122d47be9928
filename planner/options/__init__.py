"""What can be chosen, one row per choice with everything that belongs to it.

Every field of a row that a formula counts with has to be given: forgetting one is an error when the module is imported,
and a name that is in no row is an error where it is asked for.
"""
