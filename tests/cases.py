# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Named cases: random rows with parameters, all that latent labels can be, edges that relabel."""

import networkx as nx
import torch
from graphs import house, labellings, parameters, random_sources, to_hood
from oracle import label_probs
from torch.nn.functional import one_hot

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.ops.enumeration import enumerate_choices


def random_case(seed, kind):
    """A graph, a subset, parameters with or without batch, and uniforms."""
    generator = torch.Generator().manual_seed(seed)

    def number(high):
        return int(torch.randint(high, (), generator=generator))

    n = 2 + number(12)
    if kind == "random":
        graph = nx.gnp_random_graph(n, 0.3, seed=seed)
    elif kind == "hubs":
        graph = nx.barabasi_albert_graph(n + 3, 1 + number(2), seed=seed)
    if kind == "grid":
        hood = Neighborhood.grid(1 + number(5), 1 + number(5), number(3))
    elif kind == "sources":
        hood = random_sources(n, 1 + number(6), generator)
    else:
        hood = to_hood(graph, directed=bool(number(2)), generator=generator)
    num_classes, n = 2 + number(3), hood.num_nodes
    scale = torch.rand((), generator=generator) * 4
    batch = [(), (1,), (3,)][number(3)]
    a, b, c = ((), ()), ((3,), ()), ((3,), (3,))
    (alpha_batch, y_batch) = [a, b, c][number(3)]
    logits_batch = [(), (3,)][number(2)]
    randn = {"generator": generator}
    alpha = (scale * torch.randn(*alpha_batch, hood.num_sources, num_classes, **randn)).exp()
    logits = scale * torch.randn(*logits_batch, hood.num_edges, **randn)
    y = torch.randint(num_classes, (*y_batch, n), **randn)
    observed = torch.rand(n, **randn) < 0.7
    observed[number(n)] = True
    nodes = observed.nonzero()[:, 0]
    order = nodes[torch.randperm(len(nodes), generator=generator)]
    shape = torch.broadcast_shapes(batch, alpha_batch, y_batch, logits_batch)
    uniforms = torch.rand(shape.numel(), len(nodes), **randn)
    return hood, alpha, logits, y, observed, order, shape, uniforms


def everything(rows, num_classes):
    """``(Q, 2, n)``: all choices with all labels."""
    choices = rows.source[enumerate_choices(rows)]
    labels = labellings(rows.num_rows, num_classes)
    pairs = torch.broadcast_tensors(choices[:, None], labels[None])
    return torch.stack(pairs, 2).flatten(0, 1)


def permutations(hood, size):
    """What a label becomes is certain."""
    return one_hot(torch.rand(hood.num_edges, size).argsort(-1), size).double()


def matrices(hood, size, batch=()):
    """Some entries are zero: what a label never becomes."""
    relabel = torch.rand(*batch, hood.num_edges, size, size)
    relabel[..., 0, 0, 0] = 0
    return relabel / relabel.sum(-1, keepdim=True)


KINDS = {"permutations": permutations, "matrices": matrices}


#: Labels of the house's nodes.
HOUSE_LABELS = torch.tensor([0, 1, 1, 0, 1])


def house_and_parameters(num_classes=2):
    """The house, with concentrations and attention scores of order one."""
    hood = house()
    return hood, *parameters(hood, num_classes, scale=1.0)


def sharing_house(share=0.3, sharpness=2.0, seed=0):
    """A mixture on the house whose labels are far from independent, and labels of its nodes."""
    torch.manual_seed(seed)
    hood, alpha, logits = house_and_parameters()
    return NeighborMixture(hood, share * alpha, sharpness * logits), HOUSE_LABELS.clone()


def mask(*nodes, size=5):
    """``(size,)``: true at some nodes."""
    return torch.isin(torch.arange(size), torch.tensor(nodes))


def table_of(posterior):
    """``(C^N,)``: the probability of every labelling."""
    labels = labellings(len(posterior.labels), posterior.num_classes)
    return posterior.log_marginal(torch.arange(len(posterior.labels)), labels).exp()


def enumerated(mix):
    """All labellings ``(Q, N)`` and their probabilities, of the oracle."""
    relabel = None if mix.relabel is None else mix.relabel.numpy()
    return tuple(map(torch.from_numpy, label_probs(mix.hood, mix.alpha, mix.logits, relabel)))


def joint_tables(labels, probs):
    """``(N, N, C, C)``: joint distributions of all pairs of nodes."""
    hot = one_hot(labels).double()
    return torch.einsum("q,qia,qjb->ijab", probs, hot, hot)


class There:
    """Moves values to a device; leaves, which have gradients, too."""

    def __init__(self, place):
        self.place = place
        self.leaves = []

    def __call__(self, *values):
        moved = [value.to(self.place) for value in values]
        return moved[0] if len(moved) == 1 else moved

    def leaf(self, *values):
        self.leaves += [value.detach().to(self.place).requires_grad_() for value in values]
        return self.leaves[-len(values) :]

    def gradients(self, loss):
        return torch.autograd.grad(loss, self.leaves, allow_unused=True)
