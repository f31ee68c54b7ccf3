"""Prompts and answers on GPUs of their own or on the same: pools at one rate, or one that re-shards in between."""
