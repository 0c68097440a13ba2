# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What a tensor, a number or a set of nodes must be; errors name argument, value and cure."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import StrEnum
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np
import torch
from pyro.distributions import is_validation_enabled
from torch import Size, Tensor

from pyro_nmm.labels import check_same_order
from pyro_nmm.provenance import untracked

Member = TypeVar("Member", bound=StrEnum)
#: Types of arguments that become tensors, and of sets of nodes, which are masks or node ids.
Array = Tensor | np.ndarray
NodeSet = Tensor | np.ndarray | Sequence[int]
Device = torch.device | str | int

#: A size, the name of a free size, a name with the least size, or "..." for batch dimensions.
Dim = int | str | tuple[str, int]
#: Unsigned integers that PyTorch stores and does not compute with.
UNSIGNED = torch.uint16, torch.uint32, torch.uint64
#: Kinds of tensors, in words.
KINDS = {
    "tensor": "be a tensor",
    "float": "be a floating-point tensor",
    "integers": "hold integers (torch.long)",
    "labels": "hold integer labels (torch.long)",
    "ids": "hold node ids (torch.long)",
    "mask": "be a boolean mask (torch.bool; PyG's index_to_mask makes one of node ids)",
}


def as_tensor(
    name: str, value: Any, device: torch.device | None = None, *, masked: int | None = None
) -> Tensor:
    """A tensor as it is, or an array or a list as one; ``masked`` stands for masked entries."""
    if isinstance(value, Tensor):
        return value.long() if value.dtype in UNSIGNED else value
    check_same_order(name, value)
    if isinstance(value, np.ma.MaskedArray) and (masked is not None or value.mask.any()):
        if masked is None:
            number, cure = np.ma.count_masked(value), f"pass {name}.filled(...)"
            raise ValueError(f"{name} has {number} masked entries, which have no value: {cure}")
        signed = value.data.astype(np.int64) if value.dtype.kind == "u" else value.data
        value = np.where(np.ma.getmaskarray(value), masked, signed)
    try:
        if not isinstance(value, list | tuple):
            value = np.array(value)  # a copy, because PyTorch takes no negative strides
            value = np.array(value.tolist()) if value.dtype == object else value
            value = value.astype(value.dtype.newbyteorder("="), copy=False)
        tensor = torch.as_tensor(value, device=device)
        return tensor.long() if tensor.dtype in UNSIGNED else tensor
    except (KeyError, TypeError, ValueError, RuntimeError):
        of = "a tensor, an array or a nested list of numbers"
        got = f"{type(value)}{f' of {value.dtype}' if hasattr(value, 'dtype') else ''}"
        raise ValueError(f"{name} must be {of}, got {got}") from None


def expect(
    name: str,
    value: Any,
    shape: tuple[Dim, ...] | None = None,
    *,
    kind: str = "tensor",
    like: Any = None,
    note: str = "",
) -> Tensor:
    """A tensor of a kind, of a shape and on the device of ``like``, or an error with a ``note``."""
    sizes = [dim[0] if isinstance(dim, tuple) else str(dim) for dim in shape or ()]
    text = f"shape ({', '.join(sizes)}{',' * (len(sizes) == 1)})" + (f", {note}" if note else "")
    if not isinstance(value, Tensor) or not is_kind(value, kind):
        got = value.dtype if isinstance(value, Tensor) else type(value)
        raise ValueError(f"{name} must {KINDS[kind]}{f' of {text}' if shape else ''}, got {got}")
    if shape is not None and not _fits(tuple(value.shape), shape):
        raise ValueError(f"{name} must have {text}, got {tuple(value.shape)}")
    if like is not None:
        expect_device(name, value, like.device)
    return value.long() if value.dtype in UNSIGNED else value


def as_expected(
    name: str, value: Any, shape: tuple[Dim, ...] | None = None, *, like: Any = None, **how: str
) -> Tensor:
    """:func:`expect` of arrays and lists too, which are put on the device of ``like``."""
    value = as_tensor(name, value, None if like is None else like.device)
    return expect(name, value, shape, like=like, **how)


def expect_device(name: str, value: Any, device: torch.device) -> None:
    """Refuse an argument on another device than those before."""
    if value.device != device:
        where = f"{name} is on {value.device} and other arguments on {device}"
        raise ValueError(f"{where}: move one with .to(device)")


def expect_all(name: str, value: Tensor, good: Tensor, must: str, cure: str = "") -> None:
    """Refuse values that are not all good; the error names the first bad one and its place."""
    if not good.all():
        where = (~good).nonzero()[0].tolist()
        first = value[tuple(where)].detach().cpu()
        first = first.float() if first.dtype == torch.bfloat16 else first  # unknown to NumPy
        got = np.array2string(first.numpy(), separator=", ")
        raise ValueError(f"{name} must {must}, got {got}{f' at {where}' if where else ''}{cure}")


def is_kind(value: Tensor, kind: str) -> bool:
    """Whether a tensor is of a kind."""
    types = {"ids": torch.long, "mask": torch.bool}
    if kind in types:
        return value.dtype == types[kind]
    if kind in ("integers", "labels"):
        return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    return kind == "tensor" or value.is_floating_point()


def _fits(sizes: tuple[int, ...], shape: tuple[Dim, ...]) -> bool:
    if shape[:1] == ("...",):
        shape = shape[1:]
        sizes = sizes[max(0, len(sizes) - len(shape)) :]
    return len(sizes) == len(shape) and all(
        size == dim if isinstance(dim, int) else isinstance(dim, str) or size >= dim[1]
        for size, dim in zip(sizes, shape, strict=True)
    )


def out_of_range(ids: Tensor, size: int) -> int | None:
    """An integer that is not in ``0..size - 1``, if there is one."""
    if ids.numel() == 0:
        return None
    low, high = torch.stack(ids.long().aminmax()).tolist()  # a GPU waits once
    return low if low < 0 else high if high >= size else None


def check_range(name: str, ids: Tensor, size: int, kind: str = "node", cure: str = "") -> None:
    """Refuse ids that are not in ``0..size - 1``."""
    if (bad := out_of_range(ids, size)) is not None:
        raise ValueError(f"{name} holds {kind} id {bad}, but ids lie in 0..{size - 1}{cure}")


def check_ids(name: str, ids: Tensor, shape: tuple, num_nodes: int, **expected: Any) -> None:
    """Refuse node ids out of range, or that :func:`expect` refuses."""
    expect(name, ids, shape, kind="ids", **expected)
    check_range(name, ids, num_nodes)


def as_edges(name: str, edges: Any, like: Any = None) -> Tensor:
    """Integers ``(2, num_edges)``, of a dense tensor, an array or a list, as ``torch.long``."""
    if hasattr(edges, "to_directed"):
        cure = "as_neighborhood takes it"
        raise ValueError(f"{name} must hold pairs of node ids, got {edges}: {cure}")
    if getattr(edges, "layout", torch.strided) != torch.strided:
        cure = "take PyG's to_edge_index(adj)[0], whose rows are sources"
        raise ValueError(f"{name} must hold pairs of node ids, got a sparse matrix: {cure}")
    note = "sources and targets (PyG's dense_to_sparse(adj)[0] of a matrix)"
    edges = as_expected(name, edges, (2, "num_edges"), like=like, note=note)
    return expect(name, edges, kind="integers").long()


def as_edge_index(
    edge_index: Any, num_nodes: int, num_sources: int | None = None, like: Any = None
) -> Tensor:
    """Pairs of node ids, as PyG has them, or of a source and a node, as ``torch.long``."""
    nodes = "node", num_nodes
    ends = nodes if num_sources is None else ("source", num_sources), nodes
    for kind, size in ends:
        check_integers(1, **{f"num_{kind}s": size})
    edge_index = as_edges("edge_index", edge_index, like)
    for ids, (kind, size) in zip(edge_index, ends, strict=True):
        cure = f": renumber the {kind}s or raise num_{kind}s (now {size})"
        check_range("edge_index", ids, size, kind, cure)
    return edge_index


def check_mask(mask: Tensor, num_nodes: int, device: torch.device, name: str = "observed") -> None:
    """Refuse all but a boolean mask of some nodes on the device of ``hood``."""
    expect(name, mask, (num_nodes,), kind="mask", note="one entry per node")
    expect_device(name, mask, device)
    if not mask.any():
        raise ValueError(f"{name} selects no node: at least one entry must be True")


def as_set(
    nodes: Any, num_nodes: int, device: torch.device, name: str, *, empty: bool = False
) -> Tensor:
    """A mask of nodes, from a mask, ``N`` zeros and ones that repeat, or distinct node ids."""
    from torch_geometric.utils import index_to_mask

    nodes = as_tensor(name, nodes, device)
    none = nodes.numel() == 0 and nodes.dtype != torch.bool
    ids = nodes.dim() == 1 and (none or is_kind(nodes, "integers"))
    repeats = ids and len(nodes.unique()) < len(nodes)
    if repeats and len(nodes) == num_nodes and out_of_range(nodes, 2) is None:
        nodes = nodes.bool()
    elif ids and not repeats:
        check_range(name, nodes, num_nodes)
        nodes = index_to_mask(nodes.long(), num_nodes)
    elif nodes.dtype != torch.bool or nodes.shape != (num_nodes,):
        raise ValueError(
            f"{name} must be a boolean mask (N,) or node ids (K,), N = {num_nodes}, got "
            f"{nodes.dtype} of shape {tuple(nodes.shape)}{' that repeat' * repeats}"
        )
    if not (empty or nodes.any()):
        raise ValueError(f"{name} selects no node: at least one entry must be True")
    expect_device(name, nodes, device)
    return nodes


def _check_each(values: dict[str, Any], good: Callable[[Any], Any], must: str) -> None:
    for name, value in values.items():
        if not isinstance(value, Real | Tensor) or not good(value):
            raise ValueError(f"{name} must {must}, got {value!r}")


def as_labels(name: str, y: Any, known: Tensor, num_classes: int, where: str) -> Tensor:
    """Labels ``(N,)``, masked or of any number outside of the mask ``known``, as ``torch.long``."""
    shape, y = tuple(known.shape), as_tensor(name, y, known.device, masked=-1)
    y = expect(name, y, shape, kind="labels", like=known, note="one label per node").long()
    good = ~known | (y >= 0) & (y < num_classes)
    expect_all(name, y, good, f"hold labels 0..{num_classes - 1} where {where}")
    return y


def check_integers(least: int, **values: int) -> None:
    """Refuse numbers of steps, samples and the like below ``least``."""
    must = f"be an integer of at least {least}"
    _check_each(values, lambda value: _is_whole(value) and int(value) >= least, must)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_positive(**values: float) -> None:
    """Refuse rates and the like that are not positive and finite."""
    _check_each(values, lambda value: 0 < value < math.inf, "be positive and finite")


def check_finite(**values: float) -> None:
    """Refuse what is no finite number."""
    _check_each(values, math.isfinite, "be a finite number")


def as_shape(sample_shape: Any) -> Size:
    """A shape of draws."""
    sizes: list = list(sample_shape) if isinstance(sample_shape, Iterable) else [None]
    if not all(isinstance(size, Integral) and int(size) >= 0 for size in sizes):
        raise ValueError(f"sample_shape must hold integers of at least 0, got {sample_shape!r}")
    return Size(map(int, sizes))


def check_plain(method: str, batch_shape: Size) -> None:
    """Refuse a batch."""
    if batch_shape:
        raise ValueError(f"{method} needs a mixture without batch, got {batch_shape}")


def as_member(kind: type[Member], **value: str) -> Member:
    """The member of an enum that an argument names."""
    ((name, text),) = value.items()
    try:
        return kind(text)
    except ValueError:
        known = tuple(str(member) for member in kind)
        raise ValueError(f"{name} must be one of {known}, got {text!r}") from None


def check_each_call(
    name: str, value: Tensor, good: Callable = torch.isfinite, must: str = "be finite"
) -> None:
    """Refuse bad values while ``pyro.enable_validation`` is on; a GPU waits for the check."""
    # What is traced, compiled, captured or on the meta device is not read.
    if torch.compiler.is_compiling() or value.is_meta or not is_validation_enabled():
        return
    if value.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    with suppress(RuntimeError):  # a traced value cannot be read
        # A finite sum has finite terms, in one pass instead of several.
        if not good(value.detach().sum() if good is torch.isfinite else value).all():
            (plain,), _ = untracked(value)
            expect_all(name, plain, good(plain), must)
