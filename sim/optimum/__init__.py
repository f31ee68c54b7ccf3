"""Spaces of strategies, and the exact best strategy of each."""
