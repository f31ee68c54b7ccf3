"""`python -m raysearch` is the `raysearch` command."""

from raysearch.cli.main import main

if __name__ == "__main__":
    main()
