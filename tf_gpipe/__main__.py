"""`python -m tf_gpipe`."""

import sys

from tf_gpipe import cli

if __name__ == "__main__":
    sys.exit(cli.main(prog="python -m tf_gpipe"))
