"""`python -m raysearch` is the `raysearch` command."""

from raysearch.cli.entry import main

if __name__ == "__main__":
    main()
