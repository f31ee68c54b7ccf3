"""What the Python interface returns: results that print themselves, in a terminal and in a notebook, and as data."""
