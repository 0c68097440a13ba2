# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Rivals of StackedNMM. Each makes marginals ``(N, C)`` of a graph with ``logits`` and ``hood``: the
labels of ``train_mask`` are observed, and the parameters are fitted to the labels of ``val_mask``.
"""

import contextlib
import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import OneHotCategorical
from torch.nn import functional as F
from torch.optim import LBFGS, Adam, RMSprop
from torch_geometric.data import Data
from torch_geometric.nn import (
    GCN,
    CorrectAndSmooth,
    GATConv,
    GCNConv,
    LabelPropagation,
    Linear,
    MaskLabel,
    TransformerConv,
)
from torch_geometric.utils import index_to_mask, remove_self_loops, scatter, softmax

from benchmarks.nodes import Field, Messages
from benchmarks.on_top.data import (
    NUM_EPOCHS,
    epochs,
    held_out_losses,
    network,
    shuffled,
    stopped_early,
    trained,
)
from benchmarks.shared import graphs
from benchmarks.shared.training import steps
from pyro_nmm.models import PooledScores, StackedNMM, temperature_scaling

Fitted = tuple[Tensor, float]  #: marginals and their loss
#: Weight decay of GATS where it is not 5e-3: the configuration files of its authors.
DECAY = {"cora gat": 1e-2, "citeseer gat": 1e-2, "pubmed gcn": 0.0, "pubmed gat": 0.2}
#: Settings of Correct and Smooth.
PAIRS = [(first, second) for first in (0.5, 0.9) for second in (0.5, 0.8, 0.9)]


def fit(loss: Callable[[], Tensor], values: list[Tensor], steps: int = 200) -> None:
    """Set values to the best that L-BFGS meets on the way, which may end in an overflow."""
    met: list[tuple[float, list[Tensor]]] = []
    optimizer = LBFGS(values, max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        cost = loss()
        cost.backward()
        met.append((cost.item(), [value.detach().clone() for value in values]))
        return cost

    with contextlib.suppress(RuntimeError):
        optimizer.step(closure)
    for value, best in zip(values, min(met, key=lambda found: found[0])[1], strict=True):
        value.data = best


def by_likelihood(marginals: Callable, start: Sequence, data: Data, steps: int = 200) -> Fitted:
    """Marginals under which the held-out labels are the most likely, and their loss."""
    values = [torch.tensor(value, requires_grad=True) for value in start]

    def loss() -> Tensor:
        probs = marginals(*values)[data.val_mask].clamp(min=1e-12)
        return F.nll_loss(probs.log(), data.y[data.val_mask])

    fit(loss, values, steps)
    return marginals(*values).detach(), loss().item()


def scaled(logits: Tensor, log_scale: Tensor) -> Tensor:
    return (logits * log_scale.exp()).softmax(-1)


def temperature(data: Data) -> Tensor:
    return by_likelihood(partial(scaled, data.logits), [0.0], data)[0]


def vector(data: Data) -> Tensor:
    """A slope and an offset for every label (Guo et al. 2017), by maximum likelihood."""
    x, k = data.logits, data.logits.shape[1]
    return by_likelihood(lambda w, b: (x * w + b).softmax(-1), [[1.0] * k, [0.0] * k], data)[0]


def shrunk_vector(data: Data) -> Tensor:
    """Slopes and offsets around temperature scaling, with a penalty chosen by five folds."""
    x, y, nodes = temperature(data).clamp(min=1e-9).log(), data.y, shuffled(data.val_mask)
    folds = [nodes[fold::5] for fold in range(5)]

    def at(penalty: float, part: Tensor) -> Tensor:
        w, b = (make(x.shape[1], requires_grad=True) for make in (torch.ones, torch.zeros))

        def loss() -> Tensor:
            cost = F.cross_entropy(x[part] * w + b, y[part], reduction="sum")
            return cost + penalty * ((w - 1).square().sum() + b.square().sum())

        fit(loss, [w, b])
        return (x * w + b).detach()

    def left_out(penalty: float) -> float:
        rests = (torch.cat([other for other in folds if other is not fold]) for fold in folds)
        found = [at(penalty, rest)[fold] for fold, rest in zip(folds, rests, strict=True)]
        return F.cross_entropy(torch.cat(found), y[torch.cat(folds)], reduction="sum").item()

    return at(min([0.3, 1.0, 3.0, 10.0, 30.0, 100.0], key=left_out), nodes).softmax(-1)


def floored(probs: Tensor, floor: Tensor) -> Tensor:
    """A mixture with uniform labels."""
    return probs.lerp(torch.full_like(probs, 1 / probs.shape[1]), floor.sigmoid())


def three_numbers(data: Data) -> Tensor:
    """A temperature, the weight of the neighbours' mean, and the weight of uniform labels."""
    source, target = remove_self_loops(torch.stack([data.hood.source, data.hood.target]))[0]
    alone = (data.hood.ptr.diff() == 1)[:, None]

    def marginals(log_scale: Tensor, share: Tensor, floor: Tensor) -> Tensor:
        probs = scaled(data.logits, log_scale)
        around = scatter(probs[source], target, dim_size=len(probs), reduce="mean")
        return floored(probs.lerp(probs.where(alone, around), share.sigmoid()), floor)

    return by_likelihood(marginals, [0.0, -1.0, -4.0], data)[0]


def recalibrated(make: Callable[[Tensor], Tensor], data: Data) -> Fitted:
    """Marginals of ``make`` given the training labels, with a temperature and a uniform floor."""
    logits = make(data.train_mask).clamp(min=1e-6).log()
    return by_likelihood(lambda t, f: floored(scaled(logits, t), f), [0.0, -4.0], data)


def smoothed(data: Data, start: Tensor, known: Tensor, first: float, second: float) -> Tensor:
    """Correct and Smooth of some probabilities, given known labels."""
    smoother = CorrectAndSmooth(50, first, 50, second, autoscale=True)
    probs = graphs.correct_and_smooth(smoother, start, data.y, known, data.edge_index)
    probs = probs.clamp(min=1e-9)
    return probs / probs.sum(-1, keepdim=True)


def correct_and_smooth(data: Data, fitted: Callable[..., Fitted] = recalibrated) -> Tensor:
    """Correct and Smooth with the best of six pairs of settings."""
    start = temperature(data)
    every = [fitted(lambda known, p=pair: smoothed(data, start, known, *p), data) for pair in PAIRS]
    return min(every, key=lambda found: found[1])[0]


def by_folds(make: Callable[[Tensor], Tensor], data: Data) -> Fitted:
    """Marginals given all labels, recalibrated on each fold of the new ones given all others."""
    known, new, num_nodes = data.train_mask, data.val_mask, len(data.y)
    whole = make(known | new)
    left_out = whole.clone()
    for fold in range(5):
        out = index_to_mask(shuffled(new)[fold::5], num_nodes)
        left_out[out] = make(known | (new & ~out))[out]
    twice = Data(y=data.y.repeat(2), train_mask=known, val_mask=F.pad(new, (0, num_nodes)))
    found, loss = recalibrated(lambda known: torch.cat([left_out, whole]), twice)
    return found[num_nodes:], loss


def propagation(data: Data) -> Tensor:
    """PyG's label propagation, which has no classifier."""

    def make(known: Tensor) -> Tensor:
        spread = LabelPropagation(50, 0.9)(data.y, data.edge_index, known) + 1e-3
        return spread / spread.sum(-1, keepdim=True)

    return by_folds(make, data)[0]


def fitted_potts(data: Data, probs: Tensor) -> Callable[[Tensor], Tensor]:
    """
    A Potts field on ``probs``, by twenty steps of loopy belief propagation: marginals given known
    labels, which are clamped. The held-out labels given the training labels fit both parameters.
    """
    ends = torch.stack([data.hood.source, data.hood.target])
    edges, logits = ends[:, ends[0] < ends[1]], probs.clamp(min=1e-6).log()
    values = [torch.tensor(0.0, requires_grad=True), torch.tensor(-1.0, requires_grad=True)]

    def make(known: Tensor, steps: int = 20) -> Tensor:
        log_scale, coupling = values
        same = F.softplus(coupling) * torch.eye(logits.shape[1])
        nodes = (logits * log_scale.exp()).log_softmax(-1)
        field = Field(edges, nodes, same.expand(edges.shape[1], -1, -1))
        return Messages(field.clamped(data.y, known), steps=steps).marginals()

    def loss() -> Tensor:
        held = make(data.train_mask)[data.val_mask].clamp(min=1e-12)
        return F.nll_loss(held.log(), data.y[data.val_mask])

    fit(loss, values, steps=30)
    return torch.no_grad()(make)


def potts(data: Data, probs: Tensor) -> Tensor:
    return fitted_potts(data, probs)(data.train_mask)


def fitted_pool(data: Data) -> Callable[[Tensor], Tensor]:
    """StackedNMM's pool without an NMM, by maximum a posteriori: marginals given known labels."""
    logits, y, held, size = data.logits, data.y, data.val_mask, data.logits.shape[1]
    pool, unit, prior = PooledScores(size), logits.std(), StackedNMM(size).prior
    pool.temperature.fill_(unit * temperature_scaling(logits / unit, y, held))
    terms = pool.terms(data.hood, logits, y, data.train_mask)

    def loss() -> Tensor:
        cost = F.nll_loss(pool(terms)[held].log(), y[held], reduction="sum")
        numbers = ((value, *prior[f"pool.{name}"]) for name, value in pool.named_parameters())
        penalty = sum(((value - mean) / sd).square().sum() for value, mean, sd in numbers)
        return (cost + penalty / 2) / int(held.sum())

    fit(loss, list(pool.parameters()))
    return lambda known: pool(pool.terms(data.hood, logits, data.y, known)).detach()


def pool_alone(data: Data) -> Tensor:
    return fitted_pool(data)(data.train_mask)


class CaGCN(nn.Module):
    """Temperatures by a GCN of the logits (Wang et al. 2021)."""

    def __init__(self, data: Data) -> None:
        super().__init__()
        self.edges, self.decay = torch.stack([data.hood.source, data.hood.target]), 5e-3
        self.network = GCN(data.logits.shape[1], 16, 2, out_channels=1, dropout=0.5)

    def forward(self, logits: Tensor) -> Tensor:
        return logits * F.softplus(self.network(logits, self.edges))


class GATS(nn.Module):
    """Temperatures by attention among logits (Hsu et al. 2022), equations 7 to 10."""

    def __init__(self, data: Data, heads: int = 8) -> None:
        super().__init__()
        hood, known = data.hood, data.train_mask
        self.source, self.target, self.size = hood.source, hood.target, hood.num_nodes
        self.decay = DECAY.get(f"{data.graph} {data.backbone}", 5e-3)
        next_to = scatter(known[hood.source].long(), hood.target, dim_size=self.size, reduce="max")
        self.distance = torch.where(known, 0, 2 - next_to)
        self.ranks = Linear(data.logits.shape[1], heads, False, weight_initializer="glorot")
        self.coefficient = nn.Parameter(torch.zeros(()))
        self.bias, self.of_near = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(2))

    def forward(self, logits: Tensor) -> Tensor:
        low, high = logits.aminmax(dim=1, keepdim=True)
        ranked = self.ranks(((logits - low) / (high - low)).sort(-1).values)
        near = torch.cat([self.of_near, self.of_near.new_ones(1)])[self.distance][:, None]
        sharp, sure = logits / near, logits.softmax(-1).amax(-1)
        weight = (sharp[self.source] * sharp[self.target]).sum(-1)
        weight = softmax(F.leaky_relu(weight, 0.2), self.target, num_nodes=self.size)[:, None]
        mean = scatter(weight * (ranked * near)[self.source], self.target, dim_size=self.size)
        gap = scatter(sure[self.target] - sure[self.source], self.target, 0, self.size, "mean")
        found = F.softplus(mean + self.coefficient * gap[:, None]).mean(-1, keepdim=True)
        return logits / (found + self.bias)


def calibrated(make: type[CaGCN] | type[GATS], data: Data) -> Tensor:
    """The protocol's fit to the held-out nodes, stopped early by the training nodes."""
    module, known, y = make(data), data.train_mask, data.y
    optimizer = Adam(module.parameters(), lr=0.01, weight_decay=module.decay)
    outputs = epochs(module, optimizer, ((data.logits,), y, data.val_mask), 2000)
    best = stopped_early(outputs, lambda out: (F.cross_entropy(out[known], y[known]).item(),))
    return best.softmax(-1)


def gmnn(data: Data, num_epochs: int = 100) -> Tensor:
    """
    One published round of GMNN (Qu et al. 2019, https://github.com/DeepGraphLearning/GMNN) at the
    better of two rates: networks of features and of labels teach each other. And a temperature.
    """
    every, seen = torch.ones_like(data.train_mask), data.train_mask[:, None]
    true = F.one_hot(data.y, data.logits.shape[1]).to(data.x.dtype)

    def learned(pair: tuple, x: Tensor, targets: Tensor, nodes: Tensor) -> tuple:
        """Losses of the best epoch on the held-out nodes, its logits, and the last epoch's."""
        (module, _), met = pair, []
        for out in epochs(*pair, ((x, data.edge_index), targets, nodes), num_epochs):
            met.append((held_out_losses(out, data), out, copy.deepcopy(module.state_dict())))
        losses, kept, state = min(met, key=lambda found: found[0])
        module.load_state_dict(state)
        return losses, kept, out

    def one_round(lr: float) -> tuple:
        widths, options = (data.num_features, true.shape[1]), {"lr": lr, "weight_decay": 5e-4}
        modules = [network(data.backbone, width, true.shape[1]) for width in widths]
        features, labels = ((m, RMSprop(m.parameters(), **options)) for m in modules)
        _, out, _ = learned(features, data.x, true, data.train_mask)
        drawn = true.where(seen, OneHotCategorical(logits=out / 0.1).sample())
        _, _, last = learned(labels, drawn, drawn, every)
        return learned(features, data.x, true.where(seen, last.softmax(-1)), every)

    data = data.clone()
    data.logits = min(map(one_round, (0.01, 0.05)), key=lambda found: found[0])[1]
    return temperature(data)


class MaskedLabels(nn.Module):
    """
    Predicts labels from features and from known labels of other nodes (UniMP, Shi et al. 2021,
    "Masked Label Prediction", IJCAI): an embedding of each known label is added to a node's hidden
    units. Then come the layers of the backbone or, for an MLP, the attention of UniMP.
    """

    def __init__(self, kind: str, num_features: int, num_classes: int, width: int = 64) -> None:
        super().__init__()
        layer, wide = {
            "gcn": (GCNConv, {"cached": True}),
            "gat": (GATConv, {"heads": 4, "concat": False}),
            "mlp": (TransformerConv, {"heads": 4, "concat": False, "beta": True}),
        }[kind]
        self.features, self.labels = Linear(num_features, width), MaskLabel(num_classes, width)
        self.norm = nn.LayerNorm(width)  # features of small rows would drown beside the labels
        self.first, self.last = layer(width, width, **wide), layer(width, num_classes, **wide)

    def forward(self, x: Tensor, edges: Tensor, y: Tensor, known: Tensor) -> Tensor:
        hidden = F.dropout(self.labels(self.norm(self.features(x)), y, known), 0.5, self.training)
        hidden = F.dropout(self.first(hidden, edges).relu(), 0.5, self.training)
        return self.last(hidden, edges)


def masked_labels(data: Data, num_epochs: int = 300) -> Callable[[Tensor], Tensor]:
    """
    Marginals of :class:`MaskedLabels` given known labels. In each epoch a random share of the
    training labels is known and the others are predicted. The held-out labels choose the epoch and
    the share, and fit a temperature and a floor.
    """
    fits = []
    for share in (0.3, 0.7):
        module = MaskedLabels(data.backbone, data.num_features, data.logits.shape[1])
        optimizer = Adam(module.parameters(), lr=0.01, weight_decay=5e-4)

        def loss(module=module, share=share) -> Tensor:
            known = MaskLabel.ratio_mask(data.train_mask, share)
            asked = data.train_mask & ~known
            out = module.train()(data.x, data.edge_index, data.y, known)[asked]
            return F.cross_entropy(out, data.y[asked])

        for _ in steps(optimizer, loss, num_epochs):
            with torch.no_grad():
                out = module.eval()(data.x, data.edge_index, data.y, data.train_mask)
            held_out = held_out_losses(out, data)[1]
            if not fits or held_out < fits[-1][0]:
                fits.append((held_out, copy.deepcopy(module)))
    best = fits[-1][1]

    @torch.no_grad()
    def make(known: Tensor) -> Tensor:
        return best(data.x, data.edge_index, data.y, known).softmax(-1)

    return rescaled(make, data)


def rescaled(make: Callable[[Tensor], Tensor], data: Data) -> Callable[[Tensor], Tensor]:
    """``make`` with a temperature and a floor, which the held-out labels fit once."""
    values = [torch.zeros((), requires_grad=True), torch.tensor(-4.0, requires_grad=True)]
    held, labels = data.val_mask, data.y[data.val_mask]

    def at(probs: Tensor) -> Tensor:
        return floored(scaled(probs.clamp(min=1e-6).log(), values[0]), values[1])

    start = make(data.train_mask)[held]
    fit(lambda: F.nll_loss(at(start).double().clamp(min=1e-12).log(), labels), values)
    return lambda known: at(make(known)).detach()


def ensemble(data: Data, size: int = 5) -> Tensor:
    """``(M, N, C)``: logits of the classifier and of others from other random seeds."""
    others = [trained(data.backbone, data, 1000 + number) for number in range(size - 1)]
    return torch.stack([data.logits, *others])


def dropout(data: Data, size: int = 100) -> Tensor:
    """``(M, N, C)``: logits of a classifier with random dropout (Gal and Ghahramani 2016)."""
    module = network(data.backbone, data.num_features, data.logits.shape[1])
    inputs, adam = (data.x, data.edge_index), Adam(module.parameters(), lr=0.01, weight_decay=5e-4)
    taught = inputs, data.y, data.train_mask
    every = epochs(module, adam, taught, NUM_EPOCHS)
    states = ((out, copy.deepcopy(module.state_dict())) for out in every)
    _, state = stopped_early(states, lambda found: held_out_losses(found[0], data))
    module.load_state_dict(state)
    module.train()
    return torch.stack([module(*inputs).detach() for _ in range(size)])
