"""`python -m thinwire` is the `thinwire` command."""

from thinwire.tools.cli import main

if __name__ == "__main__":
    main()
