"""A strategy's layer in other frameworks: placements in their words, and the layer itself, run by their means."""
