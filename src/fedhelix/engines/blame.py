"""Names the hook of a method that raised an exception."""

from __future__ import annotations

import traceback

from fedhelix.core.method import Method
from fedhelix.engines.local import ClientTask


def culprit(problem: BaseException) -> str:
    """Method, hook and client that raised an exception, such as `mine.upload of client 3`.

    The client is left out where it is unknown; the text is empty if no hook was involved.
    """
    frames = [frame for frame, _ in traceback.walk_tb(problem.__traceback__)]
    hooks = [
        f"{method.label}.{frame.f_code.co_name}"
        for frame in frames
        if isinstance(method := frame.f_locals.get("self"), Method)
        and hasattr(Method, frame.f_code.co_name)
    ]
    clients = [
        f" of client {task.client}"
        for frame in frames
        if isinstance(task := frame.f_locals.get("task"), ClientTask)
    ]
    return f"{hooks[-1]}{clients[-1] if clients else ''}" if hooks else ""


def described(problem: BaseException) -> str:
    """An exception in one sentence, with the hook that raised it."""
    where, what = culprit(problem), f"{type(problem).__name__}: {problem}"
    return f"{where} failed with {what}" if where else what
