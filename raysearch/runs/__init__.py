"""One run, a searcher on a workload from a seed: its records, rows and checkpoints."""
