"""Predictions against measured rows: families, figures, tables and plots."""
