"""Fits the simulator's curves to measured kernels, and predicts measured rows with them."""
