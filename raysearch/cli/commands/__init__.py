"""The subcommands of `raysearch`, one per file: options in, one call of the library, what it returns out."""
