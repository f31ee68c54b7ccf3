"""Inference engines as strategy spaces: what each supports, one module per engine, in an open registry."""
