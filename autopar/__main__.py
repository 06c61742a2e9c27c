"""The command line under `python -m autopar`, for where the script `autopar` is not on the path."""

from autopar.cli import main

if __name__ == "__main__":
    main(prog_name="python -m autopar")
