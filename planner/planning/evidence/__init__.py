"""What predictions are held against, and the bands that came of it."""
