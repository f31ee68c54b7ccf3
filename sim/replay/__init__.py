"""A deployment under traffic, event by event: requests that come, an engine's scheduler, steps of the step model."""
