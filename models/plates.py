# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Plates around and below a field, and dimensions of no plate, which Pyro counts repeatedly."""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import inf
from typing import Any

import pyro
import torch
from pyro.poutine import infer_config
from pyro.poutine.condition_messenger import ConditionMessenger
from pyro.poutine.enum_messenger import EnumMessenger
from pyro.poutine.indep_messenger import IndepMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.replay_messenger import ReplayMessenger
from pyro.poutine.runtime import _PYRO_STACK, get_plates
from pyro.poutine.util import site_is_subsample
from torch import Size, Tensor

from pyro_nmm import NeighborChoice, Neighborhood
from pyro_nmm.arguments import as_expected, check_each_call, check_integers, check_range, expect
from pyro_nmm.consumers import PREDICTIVE, consumer

#: Plates that Pyro makes for copies of a whole program.
COPIES = ("num_particles_vectorized", "num_sleep_particles_vectorized", "_num_predictive_samples")


class OneEvent(Messenger):
    """Refuses what would count the labels of all nodes, which are one event, several times."""

    fixed = False  #: whether ``Predictive`` gives the choices
    forgotten = False  #: whether the labels that they were drawn for are lost
    from_prior = False  #: whether choices or label distributions were drawn here
    drawn = False  #: whether the labels were drawn

    def __init__(self, rows: Neighborhood, batch_shape: Size) -> None:
        super().__init__()
        self.num_rows, self.batch_shape = rows.num_rows, batch_shape

    def __enter__(self):
        for handler in _PYRO_STACK:
            if _copies(handler):
                # This plate sees the sites below the field, too, and lives as long as the run.
                handler._postprocess_message = partial(_watched, handler)  # type: ignore[method-assign]
        return super().__enter__()

    def _pyro_post_sample(self, msg) -> None:
        name, site = msg["name"], kind_of(msg["name"])
        batch = msg["fn"].batch_shape
        for kind in ("scale", "mask"):
            shape = msg[kind].shape if isinstance(msg[kind], Tensor) else Size()
            sizes = zip(reversed(shape), reversed(batch), strict=False)
            if len(shape) > len(batch) or any(entries not in (1, size) for entries, size in sizes):
                raise ValueError(
                    f"poutine.{kind} of shape {tuple(shape)} around site {name!r} of batch "
                    f"shape {tuple(batch)} would count the joint log-probability of all nodes "
                    f"several times: leave nodes out with observed=, or give one number"
                )
        if site in ("c", "y") and msg["value"] is not None:
            size = msg["value"].shape[-max(1, msg["fn"].event_dim)]
            if size != self.num_rows:
                here = f"observed selects {self.num_rows} here: give model and guide the same mask"
                raise ValueError(f"site {name!r} has {size} nodes from the guide, but {here}")
        if site == "z":
            self.from_prior = not msg["is_observed"]
        if site == "c":
            self.from_prior |= not msg["is_observed"]
            self.fixed = msg["is_observed"] and msg["mask"] is False  # by Predictive
        self.drawn = site == "y" and not msg["is_observed"]
        if self.drawn and (self.forgotten or _given_choices(name)):
            raise ValueError(
                f"site {name!r} would be drawn given choices alone, without the labels that they "
                f"were drawn for: use Predictive with ordered_guide, or give collapsed=False to "
                f"model and guide"
            )
        # Elsewhere a batch is drawn, and its densities are not added up.
        counted = any(isinstance(h, ReplayMessenger) or _copies(h) for h in _PYRO_STACK)
        if counted and not msg["stop"]:
            _check_owned(msg, self.batch_shape)


def is_prediction() -> bool:
    """Whether ``Predictive`` runs the program with samples, after a run without any, and not an
    automatic guide, which asks for evidence."""
    given = any(isinstance(h, ConditionMessenger) for h in _PYRO_STACK)
    of_guide = any(isinstance(h, AgreedSubsamples) for h in _PYRO_STACK)
    return given and not of_guide and consumer(*PREDICTIVE) is not None


def kind_of(name: str) -> str:
    """A site's name without its scopes and the number that ``name_count`` gives it."""
    return re.sub(r"__\d+$", "", name.rpartition("/")[2])


def beside(name: str, kind: str) -> str:
    """The name of another site of the same field."""
    start = name.rfind("/") + 1
    return name[:start] + kind + name[start + len(kind_of(name)) :]


def _given_choices(labels: str) -> bool:
    """Whether labels are drawn after the choices of a trace, which were drawn for other labels."""
    choices = beside(labels, "c")
    for handler in _PYRO_STACK:
        trace = handler.trace if isinstance(handler, ReplayMessenger) else None
        if trace is not None and labels not in trace and choices in trace:
            independent = isinstance(trace.nodes[choices]["fn"], NeighborChoice)
            return not independent and beside(labels, "z") not in trace
    return False


def _copies(handler: Messenger) -> bool:
    return isinstance(handler, IndepMessenger) and handler.name in COPIES


def _watched(plate: IndepMessenger, msg: Any) -> None:
    type(plate)._postprocess_message(plate, msg)
    if msg["type"] == "sample" and not msg["stop"]:
        check_site(msg)


class AgreedSubsamples(Messenger):
    """Refuses a plate with a subsample of its own, where a guide has drawn another one."""

    def __init__(self, indices: dict[str, Tensor]) -> None:
        super().__init__()
        self.indices = indices

    def _pyro_sample(self, msg) -> None:
        name, own = msg["name"], msg["value"]
        if site_is_subsample(msg) and own is not None and name in self.indices:
            other = self.indices[name]
            if len(own) != len(other) or not torch.equal(torch.as_tensor(own).to(other), other):
                raise ValueError(
                    f"plate {name!r} of the model has a subsample= of its own, but the guide drew "
                    f"another one, so its parameters would be fitted to other elements: make one "
                    f"plate for both, in the guide by the same pyro.plate({name!r}, ..., "
                    f"subsample=...), in an autoguide by create_plates=, which returns it"
                )


def check_site(msg: Any, first: int | None = None) -> None:
    """Refuse a site with a dimension of no plate, which counts copies of the program repeatedly.

    :param first: the rightmost dimension of enumerated sites, if a run had any.
    """
    batch, value = getattr(msg["fn"], "batch_shape", None), msg["value"]
    if batch is None:
        return
    event_dim = msg["fn"].event_dim
    if isinstance(value, Tensor):
        batch = torch.broadcast_shapes(batch, value.shape[: max(0, value.dim() - event_dim)])
    _check_owned(msg, batch if first is None else batch[max(0, len(batch) + first + 1) :])


def _check_owned(msg: Any, batch: Size) -> None:
    """Refuse a batch shape with a dimension that belongs to no plate and is not enumerated."""
    frames = {frame.dim for frame in (*msg["cond_indep_stack"], *get_plates())}
    enums = [h.first_available_dim for h in _PYRO_STACK if isinstance(h, EnumMessenger)]
    first = max((-1 if dim is None else dim for dim in enums), default=-inf)
    dims = [d for d in range(-len(batch), 0) if batch[d] > 1 and d not in frames and d > first]
    if not dims:
        return
    plates = [f"{f.name!r} has {f.dim}" for f in msg["cond_indep_stack"] if f.dim is not None]
    owners = f" ({', '.join(plates)})" if plates else ""
    if any(isinstance(handler, OneEvent) for handler in _PYRO_STACK):
        what = "alpha, logits, labels or evidence"
        cure = "put the field or the dimension in its plate: kappa[..., None, None] * probs"
    else:
        what = "values or parameters"
        cure = (
            "move it to its plate, with one [..., None] for each plate to the right. Labels of nmm "
            "have their nodes right of all plates: replace a plate over nodes by .to_event(1), or "
            "by pyro_nmm.models.node_plate"
        )
    raise ValueError(
        f"site {msg['name']!r} has {what} of batch shape {tuple(batch)}, whose dimension "
        f"{dims[-1]} belongs to no plate{owners}: {cure}"
    )


def check_plates(rows: Neighborhood, batch_shape: Size, latent: bool = False) -> None:
    """Refuse plates in which arguments do not differ; of latent labels, plates of nodes alone."""
    for frame in get_plates():
        size = frame.full_size or frame.size
        if frame.dim is None or frame.name in COPIES or size == 1:
            continue
        if latent and size not in (rows.num_nodes, rows.num_rows):
            continue
        if -frame.dim > len(batch_shape) or batch_shape[frame.dim] < frame.size:
            arguments = "alpha, logits or evidence" if latent else "y, alpha or logits"
            raise ValueError(
                f"plate {frame.name!r} of size {size} surrounds one labelling of all nodes, whose "
                f"joint log-probability would be counted {size} times: use observed= or "
                f"poutine.scale. If it is a plate of {size} fields, give {arguments} a batch "
                f"dimension for it, such as by expand"
            )


def node_plate(
    hood: Neighborhood,
    y: Tensor,
    observed: Tensor | None = None,
    *,
    index: Tensor | None = None,
    name: str = "nodes",
    subsample_size: int | None = None,
    dim: int | None = None,
) -> AbstractContextManager[tuple[Tensor, Tensor]]:
    r"""A ``pyro.plate`` over nodes, for sites :math:`x_i \sim p(x_i \mid y_i)` below their labels.

    Labels of :func:`~pyro_nmm.models.nmm` are one event: their nodes are the last dimension, right
    of all plates. This plate yields them with the nodes in the dimension of the plate. An ordinary
    ``pyro.plate`` is right without vectorized particles only.

    >>> import pyro.distributions as dist
    >>> from pyro_nmm.models import nmm
    >>> hood, x = Neighborhood.grid(2, 2), torch.tensor([-1.2, 0.3, 1.0, 0.2])
    >>> def model():
    ...     y = nmm(hood, torch.ones(4, 2), torch.zeros(hood.num_edges), collapsed=True)
    ...     with node_plate(hood, y, subsample_size=2) as (nodes, y):
    ...         pyro.sample("x", dist.Normal(2.0 * y - 1, 1.0), obs=x[nodes])
    >>> pyro.poutine.trace(model).get_trace().nodes["x"]["value"].shape
    torch.Size([2])

    **Long format.** With an ``index`` it is a plate over :math:`M` measurements, some nodes with
    several and some with none: :math:`x_m \sim p(x_m \mid y_{i(m)})`.

    >>> index, x = torch.tensor([0, 0, 3]), torch.tensor([-1.2, -0.8, 1.1])
    >>> def model():
    ...     y = nmm(hood, torch.ones(4, 2), torch.zeros(hood.num_edges), collapsed=True)
    ...     with node_plate(hood, y, index=index) as (rows, y):
    ...         pyro.sample("x", dist.Normal(2.0 * y - 1, 1.0), obs=x[rows])
    >>> pyro.poutine.trace(model).get_trace().nodes["x"]["value"].shape
    torch.Size([3])

    :param Tensor y: ``(..., n)`` labels, as ``nmm`` returns them.
    :param Tensor observed: ``(N,)`` boolean mask of their nodes, as for ``nmm``.
    :param Tensor index: ``(M,)`` node ids of measurements, default one of each node.
    :param str name: of the plate, another one for each plate of a program.
    :param int subsample_size: number ``k`` of nodes or measurements in a subsample, default all.
    :param int dim: of the plate, as for ``pyro.plate``.
    :return: node ids ``(k,)`` in the plate, or numbers of measurements with an ``index``; and their
        labels, with the nodes in the plate's dimension.
    :raises ValueError: for labels of other nodes, an index of nodes that ``observed`` leaves out,
        or labels with a batch where the plate stands.
    """
    rows = hood.restrict(observed)
    expect("y", y, ("...", rows.num_rows), kind="labels", like=hood, note="one label per node")
    check_each_call("y", y, lambda value: value >= 0, "hold labels from 0 on")
    places, numbers = torch.arange(rows.num_rows, device=hood.device), rows.nodes
    if index is not None:
        index = as_expected("index", index, ("M",), kind="ids", like=hood)
        if not len(index):
            raise ValueError("index must have at least one measurement: leave the plate out")
        check_range("index", index, hood.num_nodes)
        row_of = torch.full((hood.num_nodes,), -1, device=hood.device)
        places = row_of.index_copy(0, rows.nodes, places).index_select(0, index)
        if (places < 0).any():
            node = int(index[places < 0][0])
            raise ValueError(f"index has node {node}, which observed leaves out: select it there")
        numbers = torch.arange(len(index), device=hood.device)
    if subsample_size is not None:
        check_integers(1, subsample_size=subsample_size)
        if subsample_size > len(places):
            what = f"the {len(places)} {'nodes' if index is None else 'measurements'}"
            raise ValueError(f"subsample_size must be at most {what}, got {subsample_size}")
    plate: Any = pyro.plate(name, len(places), subsample_size, dim=dim)

    def config(site: Any) -> Any:  # for guides that compute the evidence of labels
        return {"nodes": {**site["infer"].get("nodes", {}), plate.name: places}}

    @contextmanager
    def labels_in_plate(y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        with plate as part:
            place = plate.dim - 1
            y = y.reshape(*[1] * (-place - y.dim()), *y.shape)
            if y.shape[place] != 1:
                raise ValueError(
                    f"y has {y.shape[place]} elements in dimension {plate.dim}, the dimension of "
                    f"plate {plate.name!r}: give this plate a dimension of its own by dim="
                )
            with infer_config(config_fn=config):
                y = y.squeeze(place).index_select(-1, places[part]).movedim(-1, plate.dim)
                yield numbers[part], y

    return labels_in_plate(y)
