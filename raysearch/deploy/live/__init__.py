"""Measuring on a real machine: which strategy next, what the measurements say of the others, when to stop."""
