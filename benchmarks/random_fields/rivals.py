# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Rivals that minimise a free energy, which approximates -log Z: from above by the structured mean
field [1], close to it by the Bethe approximation [2]. Then rivals that draw labels one by one, each
given earlier labels: a network [3] and windows [4].

[1] Saul and Jordan 1995, Exploiting tractable substructures in intractable networks.
[2] Yedidia, Freeman and Weiss 2005, Constructing free-energy approximations and generalized belief
propagation algorithms.
[3] Wu, Wang, Zhang 2019, Solving statistical mechanics using variational autoregressive networks.
[4] Chakraborty, Katzfuss and Guinness 2021, Ordered conditional approximation of Potts models.
"""

import itertools
from collections import defaultdict

import torch
from opt_einsum import contract
from torch import Tensor, nn

from benchmarks.random_fields.fields import Grid
from pyro_nmm.models import PairwiseMRF


@torch.enable_grad()
def chain_marginals(unary: Tensor, pairwise: Tensor) -> tuple[Tensor, Tensor]:
    """Marginals and log Z of chains, with terms ``(..., L, C)`` and ``(..., L - 1, C, C)``."""
    unary = unary.clone().requires_grad_()
    total, *rest = unary.unbind(-2)
    for each, table in zip(rest, pairwise.unbind(-3), strict=True):
        total = (total.unsqueeze(-1) + table).logsumexp(-2) + each
    log_z = total.logsumexp(-1)
    return torch.autograd.grad(log_z.sum(), unary)[0], log_z.detach()


@torch.no_grad()
def chain_mean_field(field: PairwiseMRF, pixels: Tensor, num_random: int = 4):
    """Marginals and E[log q - log p*] of the best product of exact chains, rows of ``pixels``."""
    place, (rows, width) = pixels.flatten().argsort(), pixels.shape
    edges, phi = place[field.edges], field.interaction.double()
    strength, unary = field.strength.expand(field.num_edges).double(), field.unary[pixels].double()
    inside = edges[0] // width == edges[1] // width
    tables = strength[inside][edges[0, inside].argsort()].view(rows, width - 1, 1, 1) * phi
    between = PairwiseMRF(edges[:, ~inside], 0 * unary.flatten(0, 1), strength[~inside], phi)

    def outside(q: Tensor) -> Tensor:
        """What the other rows add to the unary terms of each row."""
        return between.local_logits(q.flatten(1, 2)).view_as(q)

    def sweep(q: Tensor, share: float = 1.0) -> tuple[Tensor, Tensor]:
        """New marginals, and E[log q] of every row less its own terms of E[log p*]."""
        q, own = q.clone(), q.new_zeros(q.shape[:2])
        for part in slice(0, None, 2), slice(1, None, 2):
            used = share * outside(q)[:, part]
            q[:, part], log_z = chain_marginals(unary[part] + used, share * tables[part])
            own[:, part] = (q[:, part] * used).sum((-2, -1)) - log_z
        return q, own

    # The starts of pyro_nmm.guides.mean_field.
    labels = torch.eye(field.num_classes).to(unary)[:, None, None].expand(-1, rows, width, -1)
    noise = torch.randn(num_random, *unary.shape, dtype=unary.dtype)
    annealed = evidence = unary.softmax(-1)[None]
    for share in torch.linspace(0, 1, 101).tolist():
        annealed = sweep(annealed, share)[0]
    q = torch.cat([evidence, labels, (4 * noise).softmax(-1), annealed])
    for _ in range(2000):
        before, (q, own) = q, sweep(q)
        if (q - before).abs().max() < 1e-8:
            break
    losses = own.sum(-1) - (q * outside(q)).sum((-3, -2, -1)) / 2
    return q[losses.argmin()].flatten(0, 1)[place], losses.min().item()


@torch.no_grad()
def loopy(field: PairwiseMRF, tolerance: float = 1e-4) -> tuple[Tensor, float]:
    r"""
    Marginals ``(N, C)`` by belief propagation, until messages change by less than the tolerance.
    With pseudo-marginals :math:`\tau` and mutual information :math:`I` of the ends of edges, the
    Bethe approximation is :math:`\log Z \approx \langle \tau, \theta \rangle + \sum_s H(\tau_s) -
    \sum_{st} I(\tau_{st})`.
    """
    unary, phi = field.unary.double(), field.interaction.double()
    strength, count = field.strength.expand(field.num_edges).double(), field.num_edges
    tables = strength[:, None, None] * phi  # symmetric, so both directions have the same
    tail, head = torch.cat([field.edges, field.edges.flip(0)], 1)
    both, change = tables.repeat(2, 1, 1), torch.inf
    messages = unary.new_zeros(2 * count, field.num_classes)
    for _ in range(5000):
        logits = unary.index_add(0, head, messages)
        ends = logits[tail] - messages.roll(count, 0)  # without the message of the edge's head
        if change < tolerance:
            break
        new = (messages + (both + ends.unsqueeze(-1)).logsumexp(-2).log_softmax(-1)) / 2
        change, messages = (new - messages).abs().max().item(), new
    single = logits.softmax(-1)
    pair = tables + ends[:count].unsqueeze(-1) + ends[count:].unsqueeze(-2)
    pair = pair.flatten(1).log_softmax(-1).view_as(tables)
    # With a pair's own marginals, mutual information is not negative even before convergence.
    apart = pair.logsumexp(-1, keepdim=True) + pair.logsumexp(-2, keepdim=True)
    energy = (single * unary).sum() + (pair.exp() * tables).sum()
    entropy = torch.special.entr(single).sum() - (pair.exp() * (pair - apart)).sum()
    return single, (energy + entropy).item()


@torch.no_grad()
def gibbs(field: PairwiseMRF, num_sweeps: int = 100, num_chains: int = 16) -> Tensor:
    """``(N, C)``: means of the conditional distributions over the last half of the sweeps."""
    colors, classes = field.colors(), torch.eye(field.num_classes).to(field.unary)
    y = drawn(field.unary.expand(num_chains, -1, -1))
    total = torch.zeros_like(field.unary)
    for sweep in range(num_sweeps):
        for nodes in colors:
            logits = field.local_logits(classes[y])[:, nodes]
            y[:, nodes] = drawn(logits)
            if sweep >= num_sweeps // 2:
                total[nodes] += logits.softmax(-1).sum(0)
    return total / total.sum(-1, keepdim=True)


def drawn(logits: Tensor) -> Tensor:
    """A label for each row of logits ``(..., C)``; faster than ``Categorical`` on small tables."""
    return (torch.rand_like(logits[..., :1]) > logits.softmax(-1)[..., :-1].cumsum(-1)).sum(-1)


class Autoregressive(nn.Module):
    r"""
    Logits :math:`b_i + A_i x + V_i \tanh(W_i x + d_i)` of a label given the ``memory``
    labels :math:`x` before it. The biases start at the target's ``unary`` ``(N, C)``.
    """

    def __init__(self, unary: Tensor, memory: int, hidden: int) -> None:
        super().__init__()
        (nodes, classes), width = unary.shape, memory * (unary.shape[1] - 1)
        self.memory, self.classes = memory, classes
        noise = torch.randn(nodes, width, hidden, dtype=unary.dtype)
        self.inner = nn.Parameter(noise / width**0.5)
        self.shift = nn.Parameter(unary.new_zeros(nodes, hidden))
        self.outer = nn.Parameter(unary.new_zeros(nodes, hidden, classes))
        self.straight = nn.Parameter(unary.new_zeros(nodes, width, classes))
        self.bias = nn.Parameter(unary.clone())

    def encode(self, y: Tensor) -> Tensor:
        """``(..., C - 1)``: all labels but the first, centred."""
        return (y[..., None] == torch.arange(1, self.classes)).to(self.bias) - 1 / self.classes

    def log_prob(self, y: Tensor) -> Tensor:
        """``(S,)`` of labels ``(S, N)``, differentiable."""
        before = nn.functional.pad(self.encode(y), (0, 0, self.memory, 0))[:, :-1]
        x = before.unfold(1, self.memory, 1).permute(1, 0, 3, 2).flatten(2)  # (N, S, memory (C-1))
        hidden = (x @ self.inner + self.shift.unsqueeze(1)).tanh()
        logits = hidden @ self.outer + x @ self.straight + self.bias.unsqueeze(1)
        return logits.log_softmax(-1).gather(-1, y.T.unsqueeze(-1))[..., 0].sum(0)

    @torch.no_grad()
    def sample(self, count: int) -> Tensor:
        """``(count, N)``."""
        nodes, y = len(self.bias), torch.empty(count, len(self.bias), dtype=torch.long)
        seen = self.bias.new_zeros(count, self.memory + nodes, self.classes - 1)
        for n in range(nodes):
            x = seen[:, n : n + self.memory].flatten(1)
            hidden = torch.addmm(self.shift[n], x, self.inner[n]).tanh()
            logits = torch.addmm(self.bias[n], x, self.straight[n]) + hidden @ self.outer[n]
            y[:, n] = drawn(logits)
            seen[:, self.memory + n] = self.encode(y[:, n])
        return y


def surrogate(network: Autoregressive, field: PairwiseMRF, y: Tensor) -> Tensor:
    """A scalar whose gradient is the score estimate of the free energy's, from draws ``(S, N)``."""
    log_q = network.log_prob(y)
    loss = log_q.detach() - field.log_potential(y)
    return ((loss - loss.mean()) * log_q).sum() / (len(y) - 1)


def fit_van(field: PairwiseMRF, memory: int, num_steps: int, hidden=8, lr=0.005):
    """The fitted network: interactions rise over half of the steps, then Adam's rate falls."""
    network = Autoregressive(field.unary, memory, hidden)
    optimizer = torch.optim.Adam(network.parameters(), lr=lr)
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = lr * max(min(1.0, 2 - 2 * step / num_steps), 1e-3)
        target = field.scaled(min(1.0, 2 * (step + 1) / num_steps))
        optimizer.zero_grad()
        surrogate(network, target, network.sample(128)).backward()
        optimizer.step()
    return network


class Windowed:
    """
    Ordered conditionals by the idea of [4]: every pixel given at most ``neighbors`` nearest earlier
    ones, exactly, in the target cut down to a window around the pixel. Nothing is fitted.
    """

    def __init__(self, field: PairwiseMRF, windows: Grid, neighbors: int) -> None:
        self.field, self.order = field, windows.order.tolist()
        self.given: dict[int, list[int]] = {}
        self.tables: dict[int, Tensor] = {}
        self.edge = {tuple(ends): number for number, ends in enumerate(field.edges.T.tolist())}
        place, sizes = windows.order.argsort(), windows.hood.ptr.diff().tolist()
        parts = windows.hood.source.split(sizes), windows.distance.split(sizes)
        # Windows of the same form are summed out at once, as many as the memory allows.
        alike: dict[tuple, list[int]] = defaultdict(list)
        for node, (window, distance) in enumerate(zip(*parts, strict=True)):
            before = place[window] < place[node]
            given = window[before][distance[before].argsort(stable=True)[:neighbors]]
            self.given[node] = given.tolist()
            alike[tuple((window - node).tolist()), tuple((given - node).tolist())].append(node)
        for form, nodes in alike.items():
            for members in torch.tensor(nodes).split(64 if field.num_classes == 2 else 8):
                self.sum_out(members, *form)

    def sum_out(self, nodes: Tensor, steps: tuple[int, ...], near: tuple[int, ...]) -> None:
        """Make tables ``(C, ..., C)`` of log conditionals, the nearest neighbour's label first."""
        unary, phi = self.field.unary.double(), self.field.interaction.double()
        unary = (unary - unary.amax(-1, keepdim=True)).exp()  # against overflow
        strength = self.field.strength.double().expand(self.field.num_edges)
        axis = {step: k + 1 for k, step in enumerate(steps)}  # the first is of nodes
        operands = [each for step in steps for each in (unary[nodes + step], [0, axis[step]])]
        first, *_ = members = nodes.tolist()
        for a, b in itertools.product(steps, steps):
            if (first + a, first + b) in self.edge:
                weight = strength[[self.edge[node + a, node + b] for node in members]]
                operands += [(weight[:, None, None] * phi).exp(), [0, axis[a], axis[b]]]
        joint = contract(*operands, [0, *(axis[step] for step in (*near, 0))])
        self.tables |= zip(members, joint.log().log_softmax(-1), strict=True)

    def rows(self, y: Tensor, node: int) -> Tensor:
        """``(S, C)``: log conditionals of a node given the earlier labels in ``y``."""
        earlier = tuple(y[:, n] for n in self.given[node])
        return self.tables[node][earlier].expand(len(y), -1)

    def log_prob(self, y: Tensor) -> Tensor:
        """``(S,)`` of labels ``(S, N)``."""
        each = [self.rows(y, n).gather(1, y[:, n, None])[:, 0] for n in self.order]
        return torch.stack(each).sum(0)

    def sample(self, count: int) -> Tensor:
        """``(count, N)``."""
        y = torch.zeros(count, len(self.order), dtype=torch.long)
        for node in self.order:
            y[:, node] = drawn(self.rows(y, node))
        return y
