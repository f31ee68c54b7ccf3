"""One layer as a picture: its ops, the tensors between them, and the collectives on the edges."""
