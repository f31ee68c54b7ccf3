"""The model's layers as data: fused ops, the tensors between them, their sizes, and the choices a strategy has."""
