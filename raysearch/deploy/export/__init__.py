"""A strategy in the words of what runs it: commands, engine configurations, Kubernetes resources, sharding code."""
