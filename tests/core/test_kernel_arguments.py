"""Names of the arguments of Triton kernels, which no interpreter checks."""

import ast
from pathlib import Path

import fedhelix

# Triton generates a function with the arguments of the kernel and these names of its own.
TAKEN = {"params", "specialization", "options"}


def kernels():
    for path in Path(fedhelix.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "triton.jit" in text else ():
            if isinstance(node, ast.FunctionDef) and any(
                "triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list
            ):
                yield f"{path.name}: {node.name}", {argument.arg for argument in node.args.args}


def test_no_kernel_has_an_argument_that_triton_overwrites():
    found = dict(kernels())
    assert len(found) > 5
    assert {name: names & TAKEN for name, names in found.items() if names & TAKEN} == {}
