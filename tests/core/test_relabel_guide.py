# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The ordered guide where edges relabel: its gradient. test_predictive.py has its predictions."""

import networkx as nx
import pyro
import pytest
import torch
from bounds import check_gradient, mean_over_orders
from cases import everything
from graphs import parameters, to_hood
from pyro.infer import Trace_ELBO, TraceGraph_ELBO

from pyro_nmm import NeighborMixture
from pyro_nmm.guides import ordered_guide
from pyro_nmm.models import nmm


class Program:
    """Observed labels of a path of three nodes, and leaf parameters."""

    def __init__(self):
        self.hood = to_hood(nx.path_graph(3))
        alpha, self.logits = parameters(self.hood, 2, scale=1.0)
        self.log_alpha, self.y = alpha.log(), torch.tensor([0, 1, 1])
        self.weight = torch.randn(self.hood.num_edges)
        self.leaves = [self.log_alpha, self.logits, self.weight]
        for leaf in self.leaves:
            leaf.requires_grad_()

    def arguments(self):
        keep = self.weight.sigmoid().view(-1, 1, 1)
        relabel = keep * torch.eye(2) + (1 - keep) * torch.eye(2).flip(0)
        return self.hood, self.log_alpha.exp(), self.logits, relabel

    def model(self, **options):
        pyro.param("known", torch.zeros(()))  # Trace_ELBO looks for a parameter before it derives
        *arguments, relabel = self.arguments()
        nmm(*arguments, self.y, relabel=relabel, **options)

    def guide(self, **options):
        *arguments, relabel = self.arguments()
        ordered_guide(*arguments, self.y, relabel=relabel, **options)

    def loss(self):
        """The negative bound: a mean over orders, a sum over choices and borrowed labels."""
        value, mix = everything(self.hood, 2), NeighborMixture(*self.arguments())

        def bound(order):
            q = mix.in_order(self.y, order=order)
            return (q.log_prob(value).exp() * q.log_terms(value).sum(-1)).sum()

        return -mean_over_orders(torch.arange(3), bound)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "estimator", "collapsed"),
    [
        (TraceGraph_ELBO, "reward_to_go", False),
        (TraceGraph_ELBO, "reinforce", True),
        (Trace_ELBO, "reward_to_go", True),
    ],
)
def test_gradient(loss, estimator, collapsed):
    """20,000 draws notice a gradient that is off by 4 % of its length."""
    check_gradient(Program(), loss, estimator, collapsed)
