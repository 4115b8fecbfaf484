"""The command. A module of its own: each worker of the machine would import the main module again,
and this is quick.
"""

import sys

from tools.reliability import main

if __name__ == "__main__":
    sys.exit(main())
