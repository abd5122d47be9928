"""What can be chosen, one row per choice with everything that belongs to it; a name that is in no row is an error where
it is asked for."""
