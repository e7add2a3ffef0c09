"""`python -m asapc`."""

import sys

from asapc.cli import main

if __name__ == "__main__":
    sys.exit(main())
