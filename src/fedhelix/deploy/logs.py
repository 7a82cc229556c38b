"""Log lines of a deployment's processes: sentences, or one JSON object per line."""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
import threading
import traceback
import warnings
from typing import Any

from fedhelix.core.errors import UserError

VARIABLE = "FEDHELIX_LOG_FORMAT"  # the processes that a command starts inherit it
FORMATS = ("text", "json")
WRITING = threading.Lock()  # the threads of a process, one line after the other


def choose_format(name: str) -> None:
    """Have this process and those that it starts log in a format."""
    if name not in FORMATS:
        raise UserError(f"--log-format is {' or '.join(FORMATS)}, not '{name}'.")
    os.environ[VARIABLE] = name


def in_json() -> bool:
    """Whether lines are JSON objects."""
    return os.environ.get(VARIABLE) == "json"


def say(line: str, level: str = "info") -> None:
    """One line to stderr; stdout of a site's worker carries its answers."""
    write(f"{line}.", level)


def write(text: str, level: str = "info") -> None:
    """Whole sentences to stderr."""
    line = as_json("fedhelix", level, text) if in_json() else f"fedhelix: {text}"
    _put(line)


def write_traceback(*problem: Any) -> None:
    """An exception to stderr, by default the one that is being handled."""
    text = "".join(traceback.format_exception(*problem or sys.exc_info())).rstrip()
    _put(as_json("python", "error", text) if in_json() else text)


def _put(line: str) -> None:
    with WRITING:
        sys.stderr.write(f"{line}\n")  # `print` would write the line's end by itself
        sys.stderr.flush()


def as_json(source: str, level: str, message: str) -> str:
    """A line for machines."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "level": level, "source": source, "message": message})


class JsonFormatter(logging.Formatter):
    """Records of other libraries in the same form."""

    def format(self, record: logging.LogRecord) -> str:
        """A record with its traceback, if it has one, on one line."""
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return as_json(record.name, record.levelname.lower(), text)


def format_all() -> None:
    """Have all loggers log in that format, where it is chosen, and Python itself; Flower's logger
    without colours where nobody sees them.
    """
    for handler in logging.getLogger("flwr").handlers:
        if isinstance(handler, logging.StreamHandler) and not handler.stream.isatty():
            handler.colored = False  # type: ignore[attr-defined]
    if not in_json():
        return
    known = [logging.getLogger(name) for name in logging.root.manager.loggerDict]
    for logger in (logging.root, *known):
        for handler in logger.handlers:
            # Flower's handler asks no formatter.
            handler.format = JsonFormatter().format  # type: ignore[method-assign]
    warnings.showwarning = lambda text, *_, **__: write(str(text), "warning")
    sys.excepthook = write_traceback
    threading.excepthook = lambda problem: write_traceback(*problem[:3])
