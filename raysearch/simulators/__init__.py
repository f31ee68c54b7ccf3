"""Black boxes to search: ours or a plugged-in one, in this process or in workers of their own."""
