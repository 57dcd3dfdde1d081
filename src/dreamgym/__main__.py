"""`python -m dreamgym` is the `dreamgym` command."""

from dreamgym.cli import main

if __name__ == "__main__":
    main()
