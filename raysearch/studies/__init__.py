"""Studies, many runs in parallel on Ray Tune: files, trials, results, status."""
