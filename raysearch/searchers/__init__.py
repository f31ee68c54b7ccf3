"""One searcher per file; `raysearch.registry` knows them by name."""
