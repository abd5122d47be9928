"""Launch files: one module per target tool. Pure: plan in, text out."""
