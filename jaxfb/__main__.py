"""`python -m jaxfb`, the same as the command `jaxfb`."""

import sys

from jaxfb.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
