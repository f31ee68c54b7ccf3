"""`python -m raysearch` is the `raysearch` command."""

from raysearch.cli.entry import start_command

if __name__ == "__main__":
    start_command()
