"""Exact optima of workloads: computed once, kept on disk, certified."""
