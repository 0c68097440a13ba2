# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Fits that are killed end with the same bits, refuse other runs' files, and never lose a file."""

import copy

import pyro
import pytest
import torch
from runs import changed, fit, pair, ring
from torch import nn
from torch_geometric.nn import MLP

from pyro_nmm import Neighborhood
from pyro_nmm.fitting import fingerprint, load_checkpoint, save_checkpoint, train
from pyro_nmm.guides import Consistency, fit_mixture
from pyro_nmm.models import (
    Annotators,
    FreeNMM,
    NMMNetwork,
    NormalEmission,
    fit_field,
    grid_edges,
    ising,
)
from pyro_nmm.models.backbones import appnp, gcn


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the library may catch it."""


def killed_after(number):
    """Progress that fails after so many steps of all starts."""
    left = iter(range(number - 1))

    def wrap(steps):
        for step in steps:
            yield step
            if next(left, None) is None:
                raise Killed

    return wrap


HOOD = Neighborhood.grid(6, 6)
HOPS = (HOOD.row != HOOD.source).double()
X = torch.randn(36, 2, generator=torch.Generator().manual_seed(0), dtype=torch.double)
QUICK = {"num_steps": 7, "num_starts": 2, "num_chains": 2, "num_draws": 2}


class Reads(MLP):
    def forward(self, x):
        return super().forward(torch.as_tensor(x))


def batch_norm(num_epochs=12, patience=12, validated=True, seed=0, **options):
    """A network with dropout and a buffer, so that generators and buffers matter."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    x, target = torch.randn(20, 4), torch.randn(20, 1)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.05)

    def backward(epoch):
        loss = (network(x) - target).square().mean()
        loss.backward()
        return loss.item()

    def validate():
        return (-(network(x) - target).square().mean().item(),)

    history = train(network, optimizer, backward, validate if validated else None,
                    num_epochs=num_epochs, patience=patience, **options)  # fmt: skip
    # The draws after a run are the same, too.
    return [*network.state_dict().values(), torch.tensor(history), torch.rand(2)]


def nodes(kind):
    def run(checkpoint=None, data=ring, **options):
        found, scores = fit(checkpoint, kind, data(), **{"num_epochs": 8} | options)
        return [found, torch.tensor(scores)]

    return run


def mixture(scale=1.0, **options):
    torch.manual_seed(0)
    field, hood = ising(grid_edges(2, 2), 0.3, torch.ones(4)), Neighborhood.grid(2, 2)
    options = {"num_steps": 6} | options
    mix, losses = fit_mixture(field.scaled(scale), hood, FreeNMM(hood, 2), **options)
    return [mix.alpha, mix.logits, torch.tensor(losses)]


def hidden(
    data=X, network=False, emission=None, edge_attr=HOPS, inputs=(X,), seed=1, **options
):  # fmt: skip
    pyro.set_rng_seed(seed)
    emission, options = emission or NormalEmission(3), QUICK | options
    if network:
        prior = NMMNetwork(Reads([2, 8, 3], dropout=0.5, norm=None), Reads([2, 4]), num_classes=3)
        field = fit_field(emission, HOOD, data, prior=prior, inputs=inputs, **options)
    else:
        field = fit_field(emission, HOOD, data, edge_attr, **options)
    return [field.probs, field.samples, torch.tensor(field.score), *field.prior.parameters()]


def annotators(**options):
    pyro.set_rng_seed(2)
    answers, edges = torch.randint(-1, 3, (36, 4)), torch.stack([HOOD.source, HOOD.row])
    options = {"num_steps": 6, "num_starts": 1, "num_draws": 2} | options
    return [Annotators(3).fit(edges, answers, **options).probs]


#: By name: the run, and steps after which it is killed. All save every two steps.
RUNS = {
    "train": (batch_norm, (1, 4, 9)),
    "train, not validated": (lambda **o: batch_norm(validated=False, **o), (1, 4, 9)),
    "classifier": (nodes("classifier"), (3,)),
    "nmm": (nodes("nmm"), (3,)),
    "mixture": (mixture, (3,)),
    "field": (hidden, (1, 5, 8, 12)),
    "field of a network": (lambda **o: hidden(network=True, **o), (6,)),
    "annotators": (annotators, (3,)),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_fit_ends_with_the_same_bits(name, tmp_path):
    run, kills = RUNS[name]
    whole, seen = run(), []
    for number in kills:
        path = tmp_path / f"{number}.pt"
        with pytest.raises(Killed):
            run(checkpoint=path, save_every=2, progress=killed_after(number))
        seen.clear()
        for _ in range(2):  # from the middle, then from the end
            again = run(checkpoint=str(path) if name == "field" else path, save_every=2,
                        progress=lambda steps: seen.append(steps) or steps)  # fmt: skip
            assert all(map(torch.equal, again, whole))
        starts = len(seen) // 2
        total = sum(steps.stop for steps in seen[:starts])
        last = number % seen[0].stop
        assert sum(map(len, seen[:starts])) == total - number + last % 2
        assert not any(map(len, seen[starts:]))


def test_killed_many_times(tmp_path):
    whole, path = batch_norm(), tmp_path / "run.pt"
    for number in (1, 2, 3, 1, 2, 3, 2, 2, 4):
        try:
            batch_norm(checkpoint=path, save_every=1, progress=killed_after(number))
        except Killed:
            continue
        break
    else:
        raise AssertionError("no run ended")
    assert all(map(torch.equal, batch_norm(checkpoint=path), whole))


def moved(value, index=0, by=1):
    value = value.clone()
    value.view(-1)[index] += by
    return value


def frozen():
    network = pair()
    network.omega.requires_grad_(False)
    return network


class Wrapped(nn.Module):
    """Networks of one repr."""

    def __init__(self, dropout=0.5, act="relu", depth=10):
        super().__init__()
        self.labels = MLP([4, 5, 2], dropout=dropout, norm=None, act=act)
        self.attention = appnp(4, 3)
        self.attention.network.module_1.K = depth

    def forward(self, hood, x, edge_index):
        alpha, logits = self.labels(x), self.attention(x, edge_index)
        return alpha.exp() + 1, torch.zeros(hood.num_edges) + logits.mean()

    def __repr__(self):
        return "Wrapped"


class Scaled:
    """An emission that is no data class."""

    def __init__(self, scale):
        self.num_labels, self.scale = 3, scale

    def __getattr__(self, name):
        return getattr(NormalEmission(3, self.__dict__["scale"]), name)


def sparse(scale=1):
    return changed(x=scale * ring().x.relu().to_sparse_csr())


DATA = {
    "x": lambda x: moved(x, by=0.01),
    "edge_index": lambda edges: edges.roll(1, 1),
    "y": lambda y: 1 - y,
    "train_mask": lambda mask: mask & (torch.arange(12) > 0),
    "val_mask": lambda mask: mask & (torch.arange(12) > 1),
}
#: A run, the change of another one, and the name of the difference; ``first`` changes the first.
OTHERS = [
    *((kind, {"data": lambda n=name, f=change: changed(**{n: f(ring()[n])})}, rf"data\.{name} \(")
      for kind in ("classifier", "nmm") for name, change in DATA.items()),
    ("classifier", {"data": lambda: sparse(2), "first": {"data": sparse}}, r"data\.x \("),
    ("nmm", {"hood": Neighborhood(torch.tensor([[0], [1]]), 12)}, r"\bhood\b"),
    ("nmm", {"seed": 1}, r"seed \(0 there, 1 here\).*initial weights"),
    ("nmm", {"skipped": 1}, "initial weights"),
    ("nmm", {"network": lambda: pair(gcn(4, 2, dropout=0.4))}, r"dropout \(0\.5 there, 0\.4 here"),
    ("nmm", {"network": lambda: pair(gcn(4, 2, drop_nodes=0.2))}, "drop_nodes"),
    ("nmm", {"network": lambda: pair(link="square")}, r"link \('exp' there, 'square' here\)"),
    ("nmm", {"network": lambda: pair(floor=0.5)}, "floor"),
    ("nmm", {"network": frozen}, "frozen"),
    ("nmm", {"lr": 0.02}, r"optimizer\.lr"),
    ("nmm", {"weight_decay": 0.0}, r"optimizer\.weight_decay"),
    ("nmm", {"criterion": "likelihood"}, "criterion"),
    ("nmm", {"estimator": "no_score"}, "estimator"),
    ("nmm", {"num_particles": 3}, "num_particles"),
    ("nmm", {"num_samples": 9}, r"num_samples \(8 there, 9 here\)"),
    ("nmm", {"consistency": Consistency(12, 2)}, "consistency|module"),
    *(("nmm", {"network": lambda o=o: Wrapped(**o), "first": {"network": Wrapped}}, name)
      for name, o in ((r"dropout \(\[0\.5, 0\.0\] there, \[0\.1", {"dropout": 0.1}),
                      ("ReLU there, ELU", {"act": "elu"}), ("10 there, 3 here", {"depth": 3}))),
    ("mixture", {"scale": 2.0}, "field"),
    ("field", {"data": X + 1}, "data"),
    ("field", {"num_steps": 9}, "num_steps"),
    ("field", {"num_chains": 3}, "num_chains"),
    ("field", {"lr": 0.2}, r"optimizer\.lr"),
    ("field", {"network": True}, "prior"),
    ("field", {"known": torch.zeros(36, dtype=torch.long)}, "known"),
    ("field", {"edge_attr": 2 * HOPS}, "edge_attr"),
    ("field", {"emission": NormalEmission(3, 2.0)}, "emission"),
    ("field", {"emission": Scaled(2.0), "first": {"emission": Scaled(1.0)}}, "emission's attrib"),
    ("field", {"seed": 2}, "seed"),
    ("field of a network", {"inputs": ((X + 1).numpy(),), "first": {"inputs": (X.numpy(),)}},
     "inputs"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "difference"), OTHERS, ids=[f"{n}-{d}" for n, _, d in OTHERS]
)
def test_a_checkpoint_of_another_run_is_refused(name, change, difference, tmp_path):
    change = dict(change)
    path, (run, _), first = tmp_path / "run.pt", RUNS[name], change.pop("first", {})
    few = {"nmm": {"num_epochs": 1}, "classifier": {"num_epochs": 1}}.get(name, {})
    run(checkpoint=path, **few | first)
    must = rf"run\.pt(\.0)? is of another run, which differs in .*(?:{difference}).*: remove it or"
    with pytest.raises(ValueError, match=must):
        run(checkpoint=path, **few | first | change)


def test_labels_outside_the_masks_make_no_other_run(tmp_path):
    run, other = RUNS["nmm"][0], ring()
    other.y[~(other.train_mask | other.val_mask)] = 1
    first = run(checkpoint=tmp_path / "run.pt")
    assert all(map(torch.equal, run(checkpoint=tmp_path / "run.pt", data=lambda: other), first))


def test_the_checkpoint_of_another_loop(tmp_path):
    mixture(checkpoint=tmp_path / "run.pt")
    with pytest.raises(ValueError, match="of another run"):
        fit(tmp_path / "run.pt")


def test_more_and_fewer_epochs_than_are_stored(tmp_path):
    path = tmp_path / "run.pt"
    batch_norm(20, 20, checkpoint=path)
    for fewer in ({"num_epochs": 10, "patience": 20}, {"num_epochs": 20, "patience": 0}):
        must = "holds 20 epochs, more than num_epochs={num_epochs} and patience={patience} allow"
        with pytest.raises(ValueError, match=must.format(**fewer)):
            batch_norm(**fewer, checkpoint=path)
    whole = batch_norm(30, 30)
    assert all(map(torch.equal, batch_norm(30, 30, checkpoint=path), whole))
    batch_norm(4, validated=False, checkpoint=tmp_path / "steps.pt")
    with pytest.raises(ValueError, match="holds 4 steps, more than num_epochs=2 "):
        batch_norm(2, validated=False, checkpoint=tmp_path / "steps.pt")


def test_nan_in_a_checkpoint_is_refused(tmp_path):
    """Also after the last epoch, when no loss would show it."""
    path = tmp_path / "run.pt"
    batch_norm(checkpoint=path)
    state = load_checkpoint(path)
    state["module"]["0.weight"].view(-1)[0] = torch.nan
    save_checkpoint(state, path)
    with pytest.raises(ValueError, match=r"0\.weight holds NaN after reading .*run.pt: remove"):
        batch_norm(checkpoint=path)


@pytest.mark.parametrize("path", ["", 3])
def test_a_checkpoint_needs_a_path(path):
    with pytest.raises(ValueError, match="checkpoint must be the path of a file"):
        hidden(checkpoint=path)


def test_texts_of_a_fingerprint():
    """Functions by name, numbers by value, tensors by content."""

    def line(value):
        return dict(fingerprint({}, {"value": value}))["value"]

    assert line(nn.functional.relu) == "relu"
    assert line(torch.eye(2).numpy()) == line(torch.eye(2)) != line(torch.eye(2).float())
    assert line(torch.eye(2).to_sparse_csr()) == line(torch.eye(2).to_sparse()) != line(2)
    assert line([*range(99)]) != line([*range(98), 3])


@pytest.mark.parametrize("content", [nn.Linear(2, 2).state_dict(), [1, 2], {"settings": "lr=1"}])
def test_something_else_under_the_path(tmp_path, content):
    path = tmp_path / "model.pt"
    torch.save(content, path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"checkpoint .*model\.pt holds no run of this kind"):
        batch_norm(checkpoint=path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_checkpoint_falls_back_to_the_previous(tmp_path, share):
    whole, path = batch_norm(), tmp_path / "run.pt"
    with pytest.raises(Killed):
        batch_norm(checkpoint=path, save_every=3, progress=killed_after(8))
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.warns(UserWarning, match=r"checkpoint .*run\.pt cannot be read"):
        assert all(map(torch.equal, batch_norm(checkpoint=path), whole))


def test_nothing_readable_changes_nothing(tmp_path):
    path = tmp_path / "run.pt"
    path.write_bytes(b"some file of the user's")
    must = pytest.raises(RuntimeError, match=r"run\.pt cannot be read; remove to start anew")
    with pytest.warns(UserWarning, match="cannot be read"), must:
        batch_norm(checkpoint=path)
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]


# The loop.


def walk(step=lambda epoch: 0.0, score=lambda: (0.0,), module=None, **options):
    """Four epochs of a linear layer, whose weight starts at zero."""
    module = module or nn.Linear(1, 1, bias=False)
    module.weight.data.zero_()
    optimizer = torch.optim.SGD(module.parameters(), 1.0)
    return train(module, optimizer, step, score, **{"num_epochs": 4, "patience": 4} | options)


@pytest.mark.parametrize(("peak", "patience", "epochs"), [(4, 5, 9), (None, 3, 4)])
def test_early_stopping_returns_the_best_epoch(peak, patience, epochs):
    """Ended ``patience`` epochs after the best one; of equal ones the first."""
    module = nn.Linear(1, 1, bias=False)

    def step(epoch):
        module.weight.grad = -torch.ones_like(module.weight)
        return 0.0

    def score():
        return (-abs(module.weight.item() - peak) if peak else 0.0,)

    scores = walk(step, score, module, num_epochs=100, patience=patience)
    assert len(scores) == epochs
    assert module.weight.item() == (peak or 1)
    assert not module.training


def test_a_run_stops_at_what_is_not_finite(tmp_path):
    """A loss, a score, or weights whose score does not tell; such an epoch is not stored."""
    module, number = nn.Linear(1, 1, bias=False), {"nan": torch.nan, "inf": torch.inf}

    def spoil(epoch):
        module.weight.grad = torch.full_like(module.weight, torch.nan if epoch == 2 else 0.0)
        return 0.0

    runs = {
        r"the loss is nan in epoch 2": {"step": lambda e: number["nan"] if e == 2 else 0.0},
        r"the loss is inf in epoch 2": {"step": lambda e: number["inf"] if e == 2 else 0.0},
        r"weight holds NaN after epoch 2.*lr": {"step": spoil, "module": module},
    }
    for place, (message, run) in enumerate(runs.items()):
        path = tmp_path / f"{place}.pt"
        with pytest.raises(ValueError, match=message):
            walk(**copy.copy(run), checkpoint=path, save_every=1)
        assert len(load_checkpoint(path)["history"]) == 2
    with pytest.raises(ValueError, match=r"validate returned \(nan,\) in epoch 0"):
        walk(score=lambda: (torch.nan,))


@pytest.mark.parametrize(
    ("name", "wrong"), [("num_epochs", 0), ("patience", -1), ("save_every", 0), ("num_epochs", 2.5)]
)
def test_numbers_of_train(name, wrong):
    with pytest.raises(ValueError, match=rf"{name} must be an integer of .*, got {wrong}"):
        walk(**{name: wrong})
