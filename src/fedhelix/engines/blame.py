"""Which hook of a method an exception came from, in words."""

from __future__ import annotations

import traceback

from fedhelix.core.method import Method
from fedhelix.engines.local import ClientTask


def culprit(problem: BaseException) -> str:
    """Method, hook and (if it is known) client in which an exception arose: `mine.upload of client
    3`; or nothing.
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
    """An exception in one sentence, with its culprit."""
    where, what = culprit(problem), f"{type(problem).__name__}: {problem}"
    return f"{where} failed with {what}" if where else what
