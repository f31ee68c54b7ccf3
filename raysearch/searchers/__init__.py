"""One searcher per file; `raysearch.searchers.registry` knows them by name."""
