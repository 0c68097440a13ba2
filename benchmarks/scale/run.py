# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Noise, speed, memory and mini-batches. README.md explains the tasks."""

from pathlib import Path

from benchmarks.scale import large, speed, training
from benchmarks.shared.records import command

TASKS = [speed.variance, speed.gradients, speed.marginals, speed.likelihood]
TASKS += [speed.draw, speed.step, speed.evidence, speed.growth, speed.device]
TASKS += [large.scale, large.sizes, training.epochs, training.tightness]
TASKS += [training.training, training.bound, training.throughput]
OPTIONS = {"shares": [0.05, 1.0], "samples": ([1, 8], "particles or draws"), "repeats": 30}
OPTIONS |= {"datasets": ["cora", "pubmed"], "sizes": [10**4, 10**5], "parts": [1, 10]}
OPTIONS |= {"batch_sizes": [20], "num_seeds": 3, "num_epochs": 400, "data_root": Path}
main = command(__doc__, TASKS, **OPTIONS, results=Path)

if __name__ == "__main__":
    main()
