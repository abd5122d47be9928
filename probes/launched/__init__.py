"""A launch file's own run on this machine's device, watched from inside: the last level."""
