"""Reports of studies: scores, statistics over seeds, pictures."""
