"""Model architectures: what a `config.json` says about weights and shapes, without building the model."""
