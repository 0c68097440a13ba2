# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""Gibbs sweeps in two blocks [1] for devices: few calls, shapes that are known before, no wait.

Label distributions are independent over sources given choices, and choices are independent over
rows given label distributions:

.. math::

    z_j \mid c, u \sim \mathrm{Dirichlet}(\alpha_j + s_j), \qquad
    p(c_i = j, u_i = k \mid z, w) \propto L_{ij} \, z_{jk} \, e^{e_{ijk}} .

The states :math:`(c, u)` have the stationary distribution of collapsed sweeps
(:mod:`pyro_nmm.ops.sweeps`), and need more sweeps for it. All is in logarithms, because variates of
small concentrations underflow: :math:`\log G_a = \log G_{a + 1} - E / a` with an exponential
variate :math:`E` [2]. A row draws the entry that wins a race of exponential variates.

[1] Martin A. Tanner, Wing Hung Wong (1987) "The Calculation of Posterior Distributions by Data
Augmentation", Journal of the American Statistical Association 82,
https://doi.org/10.1080/01621459.1987.10478458.
[2] George Marsaglia, Wai Wan Tsang (2000) "A Simple Method for Generating Gamma Variables", ACM
Transactions on Mathematical Software 26, https://doi.org/10.1145/358407.358414.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, embedding_bag

from pyro_nmm.blocks import blocks, rows_at
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.entries import edge_evidence


class TwoBlocks(NamedTuple):
    """Entries of rows, numbered ``edge * size + k``, with batch dimensions of one or ``B`` last."""

    ptr: Tensor  #: ``(num_rows + 1,)`` first entry of each row
    log_weight: Tensor  #: ``(num_entries, b)``, up to a constant of each row
    key: Tensor  #: ``(num_entries, b)``, places in ``alpha``, source by source
    place: Tensor  #: ``(num_entries,)`` their numbers
    alpha: Tensor  #: ``(num_sources, W, b)``; zero where a source has no such label
    size: int

    @classmethod
    def of(
        cls, rows: Neighborhood, log_attention: Tensor, alpha: Tensor, data: Tensor
    ) -> "TwoBlocks":
        """Of observed labels ``(b, num_rows)`` or shifted evidence, with ``alpha`` of sources."""
        width, table = alpha.shape[-1], alpha.movedim(0, -1)
        if data.is_floating_point():
            weight = log_attention[..., None] + edge_evidence(rows, data)
            labels = torch.arange(width, device=rows.device)
            key = torch.add(labels, rows.source[:, None], alpha=width).view(-1, 1)
            place = torch.arange(len(key), device=key.device)
            return cls(rows.ptr * width, weight.flatten(1).T, key, place, table, width)

        def keys() -> tuple[Tensor, Tensor]:
            labels = data.index_select(-1, rows.row)
            key = torch.add(labels, rows.source, alpha=width).reshape(-1, rows.num_edges).T
            return key, torch.arange(len(key), device=key.device)

        key, place = rows.last_keys.get((data, width), keys)
        return cls(rows.ptr, log_attention.T, key, place, table, 1)

    @torch.no_grad()
    def sweep(self, numbers: Tensor, num_sweeps: int, shares: Tensor | None = None) -> list[Tensor]:
        """``(B, num_rows)`` each: entries after each sweep of chains at such entries, in eleven
        calls a sweep. ``shares`` ``(num_entries, B)`` gets the probabilities of entries when rows
        are drawn, in seven calls more. Cost: :math:`O(S B (E K + M W))`."""
        (num_sources, width), number = self.alpha.shape[:2], len(numbers)
        cells, num_entries = num_sources * width, len(self.place)
        alpha = self.alpha.expand(-1, -1, number).flatten(0, 1)
        state, states, shared = numbers.T, [], self.key.shape[1] == 1
        for part in blocks(num_sweeps, number * (cells + num_entries)):
            size = part.stop - part.start, cells + num_entries, number
            noise = alpha.new_empty(size).exponential_()
            races = self.log_weight - noise[:, cells:].log()
            for k in range(size[0]):
                at = self.key[:, 0][state] if shared else self.key.gather(0, state)
                shape = alpha.scatter(0, at, 1.0, reduce="add")
                gamma = torch._standard_gamma(shape + 1).log_()
                log_z = gamma.addcdiv_(noise[k, :cells], shape, value=-1)
                log_z = log_z.view(num_sources, width, number).log_softmax(1).flatten(0, 1)
                z = rows_at(log_z, self.key[:, 0]) if shared else log_z.gather(0, self.key)
                # Of ties, and of numbers that are none, it takes an entry of the row.
                state = self._bags(z + races[k], 2)[3]
                states.append(state.T)
                if shares is not None:
                    row = torch.searchsorted(self.ptr, self.place, right=True) - 1
                    scores = z + self.log_weight
                    scores = (scores - rows_at(self._bags(scores, 2)[0], row)).exp()
                    shares += scores / rows_at(self._bags(scores, 0)[0], row)
        return states

    def _bags(self, values: Tensor, mode: int) -> Any:
        """Sums, mode 0, or greatest values and their entries, mode 2, of rows."""
        return embedding_bag(values, self.place, self.ptr, mode=mode, include_last_offset=True)
