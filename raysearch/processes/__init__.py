"""What is started, watched and ended: the command itself, Ray, and code of others that must not outlive us."""
