"""A finished run: its records, and the models that came out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn

from fedhelix.core.errors import UserError
from fedhelix.core.hooks import checked
from fedhelix.core.objective import Metric, check_metric
from fedhelix.core.options import convert
from fedhelix.core.parts import Inputs
from fedhelix.core.shift import shifted, unshifted
from fedhelix.core.tree import State
from fedhelix.core.trial import measured
from fedhelix.engines.local import samples_of
from fedhelix.federation import description, newcomers
from fedhelix.federation.devices import check_level
from fedhelix.federation.export import (
    Format,
    check_formats,
    export,
    model_card,
    network_of,
)
from fedhelix.federation.predictions import number_of, outputs_for, predicted, prepared_inputs
from fedhelix.federation.setup import FederationSetup
from fedhelix.federation.state import FederationState
from fedhelix.report.wording import budget
from fedhelix.store import RunFolder, notebook
from fedhelix.store.progress import human_bytes, human_seconds
from fedhelix.store.records import Record, summarise, time_to

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(repr=False)
class Run:
    """What `Federation.fit` returns."""

    federation: FederationSetup
    records: list[Record]
    state: FederationState
    folder: RunFolder | None = None
    clients: int = field(init=False)  # without those who join later
    # In a run from a folder: the engine that did the work, and why.
    made_by: str | None = field(init=False)

    def __post_init__(self) -> None:
        self.clients, self.made_by = self.federation.clients, None

    @property
    def metrics(self) -> pd.DataFrame:
        """One row per round."""
        import pandas as pd  # slow to import, and worker processes have no use for it

        return pd.DataFrame(self.records).set_index("round")

    @property
    def summary(self) -> dict[str, Any]:
        """The figures of the whole run."""
        facts, name = description.facts(self.federation), self.federation.objective.name
        if self.made_by is not None:
            facts["engine"] = self.made_by
        agreement = description.cluster_agreement(self.federation, self.records)
        summary = summarise(self.records, facts | {"clients": self.clients} | agreement, name)
        helps = description.advice(self.federation) if summary["diverged"] else None
        return summary | {"advice": helps}

    def _repr_html_(self) -> str:
        """The result as a small table, where a notebook shows the run."""
        summary, name = self.summary, self.federation.objective.name
        metrics = {
            f"global {name}": f"final_{name}",
            f"personal {name}": f"personal_{name}",
            "10th percentile of the clients": "personal_p10",
        }
        shown = {
            words: _as_text(summary[key], name)
            for words, key in metrics.items()
            if summary[key] is not None
        }
        shown |= {
            "uploaded": human_bytes(summary["uplink_bytes"]),
            "time": human_seconds(summary["seconds"]),
            "engine": summary["engine"].partition(" (")[0],
        }
        if "epsilon" in summary:
            shown["epsilon"] = budget(
                summary["epsilon"], summary["delta"], summary["privacy_level"]
            )
        if summary["diverged"]:
            shown["diverged"] = f"since round {summary['diverged']}"
        if summary["untrained"]:
            shown["nothing was learned"] = summary["untrained"]
        return notebook.table(self._title(), shown)

    def __repr__(self) -> str:
        name = self.federation.objective.name
        value = self.summary[f"personal_{name}"] or self.summary[f"final_{name}"]
        return f"<Run of {self._title()}{'' if value is None else f': {_as_text(value, name)}'}>"

    def _title(self) -> str:
        """Which method, how long and on which data."""
        summary = self.summary
        rounds = f"{summary['rounds']} round{'s' * (summary['rounds'] != 1)}"
        return f"{summary['method']}, {rounds} on {summary['data']}, {summary['clients']} clients"

    def time_to(self, level: float) -> float | None:
        """The simulated seconds until the accuracy (or score) reaches a level; None if it never
        does. Needs simulated devices.
        """
        if self.federation.devices is None:
            raise UserError("time_to needs simulated devices; set devices, such as uniform.")
        check_level("level", convert("level", level, float), self.federation.objective.name)
        return time_to(self.records, convert("level", level, float))

    def plot(self, path: str | Path | None = None) -> Figure:
        """How fast it learned, what it sent, and how each client fares; with a path also as a file.

        The ending says what kind of file: .png, .svg or .pdf. `fedhelix plot RUN` draws more: who
        has what, and what the method recorded.
        """
        from fedhelix.report import plots, results, style

        config = description.config(self.federation, len(self.records))
        census = description.census(self.federation)
        result = results.make("this run", config, self.summary, self.records, census)
        figure = plots.overview(results.grouped([result]))
        if path is not None:
            style.save(figure, path)
        return figure

    def model(self) -> nn.Module | None:
        """The server's model, if the method has one."""
        fed = self.federation
        ctx = fed.context(self.state.round, self.state.round)
        state = checked(fed.method).model(self.state.server, ctx)
        return None if state is None else self._module(state)

    def onboard(self, data: Any, name: str | int | None = None) -> int:
        """An unseen client with its own data joins (see `Federation.onboard`); its number.

        The run folder does not keep it: for that, build a `Federation` with all clients.
        """
        number, self.state = newcomers.onboard(self.federation, data, self.state, name)
        return number

    def inherit(self, module: nn.Module, data: Any) -> nn.Module:
        """A copy of a network that begins with what an unseen client with these data would receive.

        The network may be wider or narrower than that of the run, or have fewer or more residual
        blocks: of a layer's channels the strongest are inherited. With `gene-fl` that is the gene;
        the rest keeps its own weights.
        """
        return newcomers.inherit(self.federation, data, self.state, module)

    def personal(self, client: int | str) -> nn.Module:
        """The model that one client would use, by its number or its name; also `personal_model`."""
        fed = self.federation
        ctx = fed.context(self.state.round, self.state.round)
        number = number_of(client, fed.clients, fed.names)
        return self._module(fed.engine.personal(fed.tasks(self.state, [number], ctx))[0].state)

    personal_model = personal

    def network(self, client: int | str | None = None) -> nn.Module:
        """The personal model of a client, or the server's."""
        module = self.model() if client is None else self.personal(client)
        if module is None:
            raise UserError(
                f"{self.federation.method.label} has no global model; say which client's, such as "
                "client=0."
            )
        return module

    def predict(self, x: Any, client: int | str | None = None, raw: bool = False) -> np.ndarray:
        """What a client's model (without one: the server's) says about samples.

        `x` is an array, a data frame or a tensor such as the training samples, not yet prepared.
        The result are classes (by name, where the data have names), labels or values; with `raw`
        the network's outputs. The padding of shorter sequences has the class -100, or no name.
        """
        module, setup = self.network(client), self.federation.engine.setup
        return outputs_for(module, setup, x).numpy() if raw else predicted(module, setup, x)

    def prepare(self, x: Any, padded: bool = False) -> Inputs:
        """New samples as `model` and `personal` take them: scaled and normalised as in training,
        and a tuple or dictionary of tensors where samples have several parts.

        Sequences are padded to the longest of them, or, where the network may look at the padding
        (and with `padded` in any case), to the longest of the training.
        """
        return prepared_inputs(self.federation.engine.setup, x, padded)

    def evaluate(self, metrics: Mapping[str, Metric]) -> pd.DataFrame:
        """Several metrics at once: clients' personal models on their own test samples, one row
        per client that has some. A metric takes outputs and targets and returns one number.
        """
        import pandas as pd

        if not isinstance(metrics, Mapping) or not metrics:
            raise UserError(
                f"metrics is a dictionary such as {{'auc': fedhelix.metrics.auc}}, not {metrics!r}."
            )
        for name, metric in metrics.items():
            check_metric(f"metric '{name}'", metric)
        fed, rows = self.federation, {}
        ctx = fed.context(self.state.round, self.state.round)
        tested = [client for client in range(fed.clients) if len(fed.splits[client].test)]
        for client in tested:
            state = fed.engine.personal(fed.tasks(self.state, [client], ctx))[0].state
            indices = torch.from_numpy(fed.splits[client].test)
            outputs = shifted(state, fed.engine.outputs(unshifted(state), "test", indices)).cpu()
            targets = samples_of(fed.engine.setup, "test")[1].cpu()[indices]
            rows[fed.names[client] if fed.names else client] = {
                name: measured(
                    f"metric '{name}'", replace(fed.objective, metric=metric), outputs, targets
                )
                for name, metric in metrics.items()
            }
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("client")

    def export(
        self,
        folder: str | Path,
        formats: Format | Sequence[Format] = ("safetensors",),
        client: int | str | None = None,
    ) -> Path:
        """Write a model for others, with a card: safetensors, torch (`torch.export`) or onnx."""
        fed = self.federation
        chosen = cast("list[Format]", [formats] if isinstance(formats, str) else list(formats))
        check_formats(chosen)
        card = model_card(fed, self.summary, self.records, chosen, client)
        return export(self.network(client), fed, Path(folder), chosen, card)

    def _module(self, state: State) -> nn.Module:
        return network_of(self.federation.engine.setup, state)


def _as_text(value: float, metric: str) -> str:
    return f"{100 * value:.1f} %" if metric == "accuracy" else f"{value:.4g}"
