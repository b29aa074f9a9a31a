"""Trains from a TOML file: `torchrun ... -m torchtitan_ext.train --job.config_file x.toml`.

Any flag of torchtitan may follow and overrides the file. `--print-config` prints the result as
TOML instead of training, with or without torchrun. With `--module M --config fn` a Python config
function takes the file's place.
"""

import sys
from typing import Any


def main() -> None:
    """Run torchtitan's training on the file and the flags in `sys.argv`.

    Exits with code 2 and a short message, on every rank, where one of them is wrong on any.
    """
    from torchtitan_ext import compat, cpu

    compat.apply()
    cpu.apply()

    import torchtitan.train
    from torchtitan.config import ConfigManager

    from torchtitan_ext.checking import check_alone
    from torchtitan_ext.launch import is_first_rank, prepared
    from torchtitan_ext.toml.load import to_toml

    args = [arg for arg in sys.argv[1:] if arg != "--print-config"]
    print_config = len(args) < len(sys.argv) - 1
    if not any(arg.partition("=")[0] == "--module" for arg in args):
        args = ["--module", "torchtitan_ext", "--config", "from_toml", *args]
    sys.argv[1:] = args

    def prepare() -> Any:
        # torchtitan parses once more; only here is a wrong job told from a failed training.
        config = ConfigManager().parse_args()
        check_alone(config, is_first_rank=is_first_rank())
        return config

    config = prepared("torchtitan_ext.train", prepare)
    if not print_config:
        torchtitan.train.main()
    elif is_first_rank():
        print(to_toml(config), end="")


if __name__ == "__main__":
    main()
