"""The connection to a Ray cluster, and whether its nodes run the same versions."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedhelix.core.errors import UserError
from fedhelix.core.imports import from_extra
from fedhelix.core.interrupts import noted_ctrl_c
from fedhelix.core.version import __version__
from fedhelix.engines.parallel.pool import cores

ANSWER_SECONDS = 5.0
VERSION_SECONDS = 60.0  # a node may have to start a process first
# The beginning of a conversation with a gRPC server, which answers with its settings.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
SETTINGS_FRAME = 4

HOLDERS: weakref.WeakSet[Any] = weakref.WeakSet()
"""The engines of this program that may hold actors."""

IDLE: list[Any] = []
"""Actors of engines that are closed or gone, for the next engine of this program."""

_ours: list[tuple[str | None, int]] = []
"""Address and size of the cluster that this module has connected to, if it has."""


def connect(address: str | None, workers: int | None) -> Any:
    """Ray, connected: to the cluster at an address, or to one of this machine's own.

    A script that has called `ray.init` keeps its connection.
    """
    ray = from_extra("ray", "ray")
    size = wanted(address, workers)
    if ray.is_initialized() and all(place == address and size <= had for place, had in _ours):
        return ray
    if address is not None:
        check_answers(address)
    if ray.is_initialized():
        for holder in list(HOLDERS):
            holder.close()
        IDLE.clear()
        ray.shutdown()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")  # see the parallel engine
    more: dict[str, Any] = {"address": address}
    if address is None:
        more = {"address": "local", "num_cpus": size, "include_dashboard": False}
    try:
        # A process that leaves `ray.init` half-way may end with a segmentation fault.
        with noted_ctrl_c() as pressed, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(**more, logging_level=logging.ERROR, log_to_driver=False)
            _ours[:] = [(address, size)]
    except (ConnectionError, RuntimeError, ValueError, OSError) as problem:
        where = f"at '{address}'" if address else "on this machine"
        raise UserError(f"Ray {where} cannot be used: {first_line(problem)}") from None
    if pressed.is_set():
        signal.raise_signal(signal.SIGINT)
    return ray


def wanted(address: str | None, workers: int | None) -> int:
    """How many actors a cluster of this machine's own must be able to hold."""
    return max(cores(), workers or 0) if address is None else 0


def check_answers(address: str) -> None:
    """Refuse an address where no Ray answers; Ray itself would try for minutes."""
    if address.startswith("ray://"):
        raise UserError(
            "an address is HOST:PORT or auto, not ray://...; start the run on a node of the "
            "cluster, for example with `ray job submit`."
        )
    where = running_here() if address == "auto" else address
    host, _, port = where.rpartition(":")
    if address != "auto" and not (host and re.fullmatch(r"\d{1,5}", port)):
        raise UserError(f"an address is HOST:PORT or auto, not '{address}'.")
    if not where:
        raise UserError("no Ray runs on this machine; start one with `ray start --head`.")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS) as line:
            line.settimeout(ANSWER_SECONDS)
            line.sendall(GREETING)
            answer = line.recv(9)
    except (OSError, OverflowError) as problem:
        raise UserError(
            f"no Ray answers at '{address}' ({problem}); is the cluster running?"
        ) from None
    if len(answer) < 4 or answer[3] != SETTINGS_FRAME:
        raise UserError(f"what answers at '{address}' is not Ray; give the head's HOST:PORT.")


def running_here() -> str:
    """The address of the Ray that runs on this machine; empty if there is none."""
    services = from_extra("ray._private.services", "ray")
    try:
        return str(services.canonicalize_bootstrap_address("auto") or "")
    except ConnectionError:
        return ""


def first_line(problem: BaseException) -> str:
    """What Ray says, in one line that ends with a full stop."""
    text = " ".join(str(problem).split())
    return f"{text[:300].rstrip('.')}."


def versions() -> dict[str, str]:
    """What must be the same on all nodes; builds of one version of PyTorch may differ."""
    return {"fedhelix": __version__, "torch": public(torch.__version__)}


def public(version: str) -> str:
    """A version without the name of its build."""
    return version.partition("+")[0]


def alive_nodes(ray: Any) -> dict[str, Mapping[str, Any]]:
    """The nodes that are there now, by their names."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


def equal_nodes(ray: Any) -> list[str]:
    """The nodes that are there now; UserError if one of them has other versions than we."""
    nodes = alive_nodes(ray)
    for sentence in unlike(ray, list(nodes.values())).values():
        raise UserError(sentence)
    return list(nodes)


def unlike(ray: Any, nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The nodes with other versions of what computes, each with a sentence."""

    # A function inside of a function: Ray sends its code, so that a node without fedhelix answers.
    def installed(names: list[str]) -> dict[str, str]:
        from importlib.metadata import PackageNotFoundError, version

        found = {}
        for name in names:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = "none"
        return found

    ours, ask = versions(), ray.remote(num_cpus=0, max_retries=0)(installed)
    asked = {
        ask.options(scheduling_strategy=on_node(ray, node["NodeID"])).remote(list(ours)): node
        for node in nodes
    }
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=VERSION_SECONDS)
    sentences: dict[str, str] = {}
    for question in ready:
        node = asked[question]
        try:
            theirs = ray.get(question)
        except ray.exceptions.RayError:  # the node has left again
            continue
        for name, version in ours.items():
            if public(theirs[name]) != version:
                sentences[node["NodeID"]] = (
                    f"the Ray node {node['NodeManagerAddress']} has {name} {theirs[name]}, and "
                    f"this machine {version}; install the same version on all of them."
                )
    return sentences


def on_node(ray: Any, node: str) -> Any:
    """Ray's way to say: on this node and no other."""
    affinity = from_extra("ray.util.scheduling_strategies", "ray")
    return affinity.NodeAffinitySchedulingStrategy(node, soft=False)
