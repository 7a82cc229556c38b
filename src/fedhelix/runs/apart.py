"""Several runs at once, each in a process of its own: on the cores of a machine, or on one GPU."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait as wait_for
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from typing import Any

import torch

from fedhelix.core.interrupts import noted_ctrl_c
from fedhelix.runs.spec import RunSpec
from fedhelix.store.records import Record

STEP = 0.2  # seconds between two looks at what the processes have done

Work = Callable[[RunSpec, Path, Callable[[Record], None]], None]

_records: Queue[int]  # of a worker process: the bytes that were uploaded in every round
_stop = threading.Event()


def run_apart(
    runs: Mapping[Path, RunSpec], jobs: int, work: Work, watch: Callable[[int], None]
) -> None:
    """Do `work` on every run, so many at once; `watch` gets the uploaded bytes of every round.

    A failure ends all of them, and so does an exception of `watch`: those that are running stop
    after their round.
    """
    context = get_context("spawn")
    records: Queue[int] = context.Queue()
    stop = context.Event()
    others = active_children()
    pool = ProcessPoolExecutor(jobs, context, _begin, (records, stop, _threads(jobs)))
    # An exception at any moment could leave a lock of the pool taken.
    with noted_ctrl_c() as pressed:
        try:
            waiting: set[Future[None]] = {
                pool.submit(_run, work, spec, path) for path, spec in runs.items()
            }
            while waiting:
                done, waiting = wait(waiting, STEP, FIRST_COMPLETED)
                _drain(records, watch)
                for future in done:
                    future.result()
                if pressed.is_set():
                    raise KeyboardInterrupt
            _drain(records, watch)
        except BaseException:
            stop.set()
            raise
        finally:
            _end(pool, others)


def _end(pool: ProcessPoolExecutor, others: Sequence[BaseProcess]) -> None:
    """Wait for the runs to stop after their rounds; with one more Ctrl-C, kill their processes,
    for which Python itself would wait in the end.
    """
    try:
        pool.shutdown(cancel_futures=True)
    except KeyboardInterrupt:
        for process in active_children():
            if process not in others:
                process.kill()
        raise


def _threads(jobs: int) -> int:
    return max(1, torch.get_num_threads() // jobs)


def _drain(records: Queue[int], watch: Callable[[int], None]) -> None:
    try:
        while True:
            watch(records.get_nowait())
    except Empty:
        return


def _begin(records: Queue[int], stop: Any, threads: int) -> None:
    """In a new process: Ctrl-C is the first one's, and without that one there is nothing to do."""
    global _records, _stop
    _records, _stop = records, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "this is a worker process"
    wait_for([parent.sentinel])
    os._exit(1)


def _run(work: Work, spec: RunSpec, path: Path) -> None:
    def watch(record: Record) -> None:
        _records.put(record["uplink_bytes"])
        if _stop.is_set():
            raise KeyboardInterrupt  # which a run takes as the wish to stop after this round

    with suppress(KeyboardInterrupt):
        work(spec, path, watch)
