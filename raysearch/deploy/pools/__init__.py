"""Prompts and answers on one pool of GPUs or on two: the best of each way, and which wins from where."""
