"""`python -m jaxfb.cli`, the same as the command `jaxfb`."""

import sys

from jaxfb.cli import main

if __name__ == "__main__":
    sys.exit(main())
