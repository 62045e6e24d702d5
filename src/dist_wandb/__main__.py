"""``python -m dist_wandb`` is the command ``dist-wandb``."""

import sys

from dist_wandb.cli import main

if __name__ == "__main__":
    sys.exit(main())
