"""Placements, and which of them an operation takes and leaves; how to move a tensor from one to another."""
