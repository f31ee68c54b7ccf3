"""From steps to service: phases, continuous batching, an inference engine's own time and memory policy."""
