"""What is known of the data: lengths, steps, useful tokens."""
