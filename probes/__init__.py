"""Dry run, GPU probe and confirmation: the only package that imports torch, transformers, peft, bitsandbytes."""
