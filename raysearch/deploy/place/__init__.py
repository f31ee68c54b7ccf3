"""Several models on one cluster: which GPUs form groups, which models share a group, and how many requests are in time.

Source: Li et al., "AlpaServe: Statistical Multiplexing with Model Parallelism for Deep Learning Serving", OSDI 2023.
"""
