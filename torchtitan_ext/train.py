"""Trains from a TOML file: `torchrun ... -m torchtitan_ext.train --job.config_file x.toml`.

Any flag of torchtitan may follow and overrides the file. `--print-config` prints the result as
TOML instead of training, with or without torchrun. With `--module M --config fn` a Python config
function takes the file's place.
"""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator

_SECONDS_FOR_THE_FIRST_RANK = 30.0


def main() -> None:
    """Run torchtitan's training on the file and the flags in `sys.argv`.

    Exits with code 2 and a short message where one of them is wrong.
    """
    from torchtitan_ext import compat, cpu

    compat.apply()
    cpu.apply()

    import torchtitan.train
    from torchtitan.config import ConfigManager

    from torchtitan_ext.toml import to_toml

    args = [arg for arg in sys.argv[1:] if arg != "--print-config"]
    print_config = len(args) < len(sys.argv) - 1
    if not any(arg.partition("=")[0] == "--module" for arg in args):
        args = ["--module", "torchtitan_ext", "--config", "from_toml", *args]
    sys.argv[1:] = args

    # torchtitan parses once more; only here is a wrong configuration told from a failed training.
    with once():
        try:
            config = ConfigManager().parse_args()
        except (ValueError, ImportError) as error:
            print(f"torchtitan_ext.train: {error}", file=sys.stderr)
            sys.exit(2)
    if not print_config:
        torchtitan.train.main()
    elif os.environ.get("RANK", "0") == "0":
        print(to_toml(config), end="")


@contextlib.contextmanager
def once() -> Iterator[None]:
    """Messages come from the first rank of each node alone, and without torchtitan's log lines."""
    logging.disable(logging.WARNING)
    try:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            yield
        else:
            with _silent():
                yield
    finally:
        logging.disable(logging.NOTSET)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        try:
            yield
        except SystemExit as ended:
            # torchrun ends every rank once one has failed: let that be the one that says why.
            if ended.code:
                time.sleep(_SECONDS_FOR_THE_FIRST_RANK)
            raise


if __name__ == "__main__":
    main()
