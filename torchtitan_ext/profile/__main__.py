"""``python -m torchtitan_ext.profile``, ``torchrun ... -m torchtitan_ext.profile``."""

import sys

from torchtitan_ext.profile.command import main

if __name__ == "__main__":
    sys.exit(main())
