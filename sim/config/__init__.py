"""Configuration files in, frozen values in SI units out."""
