"""A Hugging Face configuration as a model file: reading of keys, families, quantisation, and the groups they make."""
