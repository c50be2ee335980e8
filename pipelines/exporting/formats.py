"""The two formats of an exported decision: ONNX, and a package that torch compiles ahead of time for C++."""

import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from pipelines.exporting.decision import Decision

OPSET = 20  # the first with GELU as one operator; onnxruntime has it since 1.17


def require_tools() -> None:
    """Raise ValueError if the extra or a C++ compiler is missing."""
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(f"exporting needs {error.name}: run `pip install -c constraints.txt -e '.[export]'`") from None
    if shutil.which("g++") is None:
        raise ValueError("there is no g++, which compiles the policy for C++: install it, as by `apt-get install g++`")


@torch.no_grad()
def trace(decision: Decision) -> ExportedProgram:
    """The operations of a decision for one state."""
    inputs = tuple(decision.example().values())
    decision(*inputs)  # fills the models' caches of constants, which tracing would fill with placeholders
    return torch.export.export(decision, inputs)


@torch.no_grad()
def write_onnx(program: ExportedProgram, decision: Decision, path: Path) -> None:
    """Write a traced decision as an ONNX model, whose inputs and outputs have names."""
    with _quiet():
        torch.onnx.export(
            program,
            f=path,
            input_names=list(decision.example()),
            output_names=decision.outputs,
            opset_version=OPSET,
            dynamo=True,
            external_data=False,
            custom_translation_table=_translations(),
            verbose=False,
        )


@torch.no_grad()
def write_package(program: ExportedProgram, path: Path) -> None:
    """Compile a traced decision for this machine's processor, and write it as a package for AOTIModelPackageLoader."""
    with _quiet():
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))


def _translations() -> dict[Any, Any]:
    """Operations that torch's exporter does not know, in operators of ONNX; onnxscript is imported here, as an extra's."""
    from onnxscript import INT64
    from onnxscript import opset20 as op

    def searchsorted(sorted_sequence: Any, self: Any, **options: Any) -> Any:
        compare = op.LessOrEqual if options.get("right") else op.Less
        below = compare(op.Unsqueeze(sorted_sequence, [-2]), op.Unsqueeze(self, [-1]))
        return op.ReduceSum(op.Cast(below, to=INT64.dtype), [-1], keepdims=0)

    def prod(inp: Any, dims: Any) -> Any:
        return op.ReduceProd(inp, list(dims), keepdims=0)

    return {torch.ops.aten.searchsorted.Tensor: searchsorted, torch.ops.prims.prod.default: prod}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch's exporter reports about itself, such as that torchvision is not installed."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
