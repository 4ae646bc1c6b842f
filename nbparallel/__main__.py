"""``python -m nbparallel run --nproc 4 script.py``."""

import sys

from nbparallel.session.command_line import main

if __name__ == "__main__":
    sys.exit(main())
