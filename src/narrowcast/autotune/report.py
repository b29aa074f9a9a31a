"""Where the controller reports to: a log, and files in a folder."""

import json
import logging
from pathlib import Path
from typing import Any

from narrowcast.util import write_text

logger = logging.getLogger(__name__)


class ReportWriter:
    """Logs, and writes files of one cluster of ranks that hold the same parameters.

    Args:
        folder: for the files; ``None``: nothing is written.
        leader: of the cluster; files of all but the cluster of rank 0 have it in their names.
    """

    def __init__(self, folder: Path | None, leader: int) -> None:
        self._folder = folder
        self._suffix = f"-rank-{leader}" if leader else ""

    def log(self, text: str) -> None:
        logger.info("narrowcast: %s", text)

    def save_json(self, name: str, content: dict[str, Any]) -> None:
        self._write(name, ".json", json.dumps(content, indent=1, allow_nan=False) + "\n")

    def save_text(self, name: str, text: str) -> None:
        self._write(name, ".txt", text + "\n")

    def _write(self, name: str, extension: str, text: str) -> None:
        """A report is not worth a training run: a file that cannot be written only gives a warning,
        once."""
        if self._folder is None:
            return
        try:
            write_text(self._folder / f"{name}{self._suffix}{extension}", text)
        except OSError as error:
            logger.warning(
                "narrowcast: the report is not written: %s. Give a folder that can be written",
                error,
            )
            self._folder = None
