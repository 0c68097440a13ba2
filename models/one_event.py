# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Errors for plates, masks and scales that would count one event of all nodes several times."""

from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import get_plates
from torch import Size, Tensor

#: Plates that Pyro makes for copies of a whole program.
COPIES = ("num_particles_vectorized", "num_sleep_particles_vectorized", "_num_predictive_samples")


class OneEvent(Messenger):
    """Refuses scales and masks with an entry for every node, and sites of another ``observed``."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.num_rows = num_rows

    def _pyro_post_sample(self, msg) -> None:
        batch = msg["fn"].batch_shape
        for kind in ("scale", "mask"):
            shape = msg[kind].shape if isinstance(msg[kind], Tensor) else Size()
            sizes = zip(reversed(shape), reversed(batch), strict=False)
            if len(shape) > len(batch) or any(size not in (1, own) for size, own in sizes):
                raise ValueError(
                    f"poutine.{kind} of shape {tuple(shape)} around site {msg['name']!r} of batch "
                    f"shape {tuple(batch)} would count the joint log-probability of all nodes "
                    f"several times: leave nodes out with observed=, or give one number"
                )
        if msg["name"].rpartition("/")[2] in ("c", "y") and msg["value"] is not None:
            size = msg["value"].shape[-1]
            if size != self.num_rows:
                raise ValueError(
                    f"site {msg['name']!r} has {size} nodes from the guide, but observed selects "
                    f"{self.num_rows} here: give model and guide the same mask"
                )


def check_plates(batch_shape: Size) -> None:
    """Refuses plates in which neither parameters nor labels, of this batch shape, differ."""
    for frame in get_plates():
        if frame.dim is None or frame.name in COPIES or frame.size == 1:
            continue
        if -frame.dim > len(batch_shape) or batch_shape[frame.dim] == 1:
            raise ValueError(
                f"plate {frame.name!r} of size {frame.size} surrounds one labelling of all nodes, "
                f"whose joint log-probability would be counted {frame.size} times: use observed= "
                f"or poutine.scale, or give y, alpha or logits a batch dimension for the plate"
            )
