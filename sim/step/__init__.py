"""One step of a deployment: what every GPU computes, holds and sends under a strategy's choices."""
