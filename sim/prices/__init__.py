"""Seconds of one kernel or collective on a hardware: fitted curves, medians, links, and how far to trust them."""
