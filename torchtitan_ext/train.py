"""Trains from a TOML file: ``torchrun ... -m torchtitan_ext.train --job.config_file x.toml``.

Any flag of torchtitan may follow and overrides the file. ``--print-config`` prints the result as
TOML instead of training, with or without torchrun. With ``--module M --config fn`` a Python config
function replaces the file.
"""

import sys
from typing import Any

import torchtitan.train
from torchtitan.config import ConfigManager

from torchtitan_ext import compat
from torchtitan_ext.checking import check_alone
from torchtitan_ext.launch import is_first_rank, prepared
from torchtitan_ext.toml.load import to_toml


def main() -> None:
    """Run torchtitan's training on the file and the flags in ``sys.argv``.

    Where one of them is wrong on any rank, all ranks print a short message and exit with code 2.
    """
    compat.apply()
    args = [arg for arg in sys.argv[1:] if arg != "--print-config"]
    print_config = len(args) < len(sys.argv) - 1
    if not any(arg.partition("=")[0] == "--module" for arg in args):
        args = ["--module", "torchtitan_ext", "--config", "from_toml", *args]
    sys.argv[1:] = args

    def prepare() -> Any:
        # torchtitan parses again. Only here can a wrong job be distinguished from a failed one.
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
