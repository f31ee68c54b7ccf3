"""Pre-training of a search's prior: random workloads, what the simulator says of them, and a network that learns it."""
