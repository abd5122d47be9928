"""Measuring setups on GPUs: a child process for each, its ranks, its clock, its memory."""
