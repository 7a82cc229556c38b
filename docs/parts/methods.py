"""What a method's page says about its options and results, and the table of hooks."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from typing import Any

import fedhelix
from fedhelix import METHODS, FedAvg, Method, Wrapper
from fedhelix.core.docs import summary
from fedhelix.core.method import HOOKS
from fedhelix.robust.defences import Defence
from parts.files import RESULTS, ROOT, fashion, percent, result, table

# Where the usual network of the data does not do.
NEEDED_MODELS = {"fedbn": "digits-bn-cnn"} | dict.fromkeys(
    ("fedit", "ffa-lora", "fedsa-lora", "flexlora"), "lora-mlp"
)
PAPERS = {"gene-fl": "GENE-FL", "genfed": "GenFed", "pfedgpa": "pFedGPA"}
TABLE1 = "../results.md#pfedgpas-table-1-the-methods-without-a-generator"


def options(name: str) -> str:
    """A method's options, from its fields."""
    kind = METHODS[name]
    hints = typing.get_type_hints(kind)
    rows = [
        _option(field, hints[field.name])
        for field in dataclasses.fields(kind)
        if field.init and field.name != "inner"
    ]
    return table(["option", "default ", "meaning "], rows) if rows else "It has no options.\n"


def _option(field: dataclasses.Field[Any], hint: Any) -> list[str]:
    literal = typing.get_origin(hint) is typing.Literal
    choices = f" (`{'`, `'.join(map(str, typing.get_args(hint)))}`)" if literal else ""
    default = "auto" if field.default is None else field.default
    return [f"`{field.name}`", f"`{default}`", field.metadata.get("meaning", "") + choices]


def results(name: str) -> str:
    """A method's measured accuracies beside the paper's."""
    rows = []
    if measured := fashion().get(name):
        ours = f"{measured['mean']:.1f} ± {measured['se']:.1f} %"
        link = f"[pFedGPA's Table 1, Fashion-MNIST]({TABLE1})"
        rows.append([link, ours, f"{measured['paper']:.2f} %"])
    for row in result("choosing")["table"]:
        if row["method"] == name:
            ours = f"{percent(row, 'personal_accuracy')} %"
            rows.append(["[digits, 20 clients](../choosing.md#measured)", ours, "–"])
    page = f"../results/{name}.md"
    links = _appearances(name)
    if (ROOT / "docs" / "methods" / page).exists():
        words = "What we measured" if name == "helix" else "Our results beside the paper's"
        links = f"[{words}]({page}).\n"
    headers = ["personal accuracy after the last round", "ours", "paper"]
    return "\n".join(filter(None, [links, table(headers, rows) if rows else ""])) or (
        "No results of its own yet.\n"
    )


def _appearances(name: str) -> str:
    """The papers in whose tables a method appears."""
    studies = {path.stem: result(path.stem) for path in sorted(RESULTS.glob("*-gpu.json"))}
    there = [
        stem
        for stem, study in studies.items()
        if any(cell["method"] == name and cell["runs"] for cell in study.get("cells", ()))
    ]
    links = [
        f"[{PAPERS[key]}](../results/{key}.md)"
        for key in PAPERS
        if any(stem.startswith(key) for stem in there)
    ]
    return f"Compared with others in the tables of {' and '.join(links)}.\n" if links else ""


def use(name: str) -> str:
    """How a method is called from the command line and from Python."""
    kind, model = METHODS[name].__name__, NEEDED_MODELS.get(name, "")
    flag, argument = (f" --model {model}", f', model="{model}"') if model else ("", "")
    return (
        f"Its class is `{kind}`; [the table of methods](../methods.md) says what it sends, keeps "
        "and costs, and [Which method?](../choosing.md) when to take it.\n\n"
        f"```bash\nfedhelix run {name}{flag}\n```\n\n"
        f"```python\nfrom fedhelix import Federation, {kind}\n\n"
        f'run = Federation("digits", method={kind}(){argument}).fit(rounds=10)\n```\n'
    )


def public() -> str:
    """Every public name with its signature and what it is."""
    rows = []
    for name in sorted(fedhelix.__all__, key=str.lower):
        value = getattr(fedhelix, name)
        call = f"`{name}{_signature(value)}`" if callable(value) else f"`{name}`"
        words = summary(value) if inspect.isclass(value) or callable(value) else ""
        rows.append([call.replace("|", "\\|"), words.replace("|", "\\|")])
    return table(["name", "what it is "], rows)


def _signature(value: Any) -> str:
    """The names of the arguments, with plain defaults."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:
        return "(...)"
    plain = (bool, int, float, str, type(None))
    shown = [
        f"{one.name}={one.default!r}" if isinstance(one.default, plain) else str(one.name)
        for one in parameters
    ]
    return f"({', '.join(shown)})"


def hooks() -> str:
    """The hooks of a method, what they return, and which methods override them."""
    rows = []
    for name, hook in HOOKS.items():
        arguments = ", ".join(list(inspect.signature(getattr(Method, name)).parameters)[1:])
        summary = hook.summary[:1].lower() + hook.summary[1:].rstrip(".")
        rows.append([hook.side, f"`{name}({arguments})`", summary, ", ".join(_overriding(name))])
    return table(["side", "hook ", "in one sentence ", "overridden by "], rows)


def _overriding(hook: str) -> list[str]:
    kinds = {name: kind for name, kind in sorted(METHODS.items()) if _overrides(kind, hook)}
    defences = [name for name, kind in kinds.items() if issubclass(kind, Defence)]
    return [f"`{name}`" for name in kinds if name not in defences] + (
        ["the defences"] if defences else []
    )


def _overrides(kind: type[Method], hook: str) -> bool:
    usual = Wrapper if issubclass(kind, Wrapper) else FedAvg
    return getattr(kind, hook) is not getattr(usual, hook)
