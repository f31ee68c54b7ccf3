"""Measures the kernels and collectives of one's own GPUs through PyTorch, as CSV files to fit."""
