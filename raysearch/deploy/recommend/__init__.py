"""From a demand, a model on so many GPUs under a service-level objective, to what to run and what it will give."""
