"""A deployment under traffic: what is sent, what becomes of it, and whether its service level holds."""
