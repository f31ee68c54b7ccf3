"""A searcher that knows other workloads before its first call: a network trained on them, corrected by what it sees."""
