"""Inference engines as strategy spaces: what each can be told to run, one module per engine, in an open registry."""
