# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Noise, speed, memory and mini-batches. docs/results/speed.md and docs/results/batches.md say what
each task measures, with which options the stored rows were made, and what came out.
"""

from pathlib import Path

from benchmarks.scale import large, speed, training
from benchmarks.shared.records import Records, run


def main(argv: list[str] | None = None) -> Records:
    tasks = [speed.variance, speed.gradients, speed.marginals, speed.likelihood]
    tasks += [speed.draw, speed.step, speed.evidence, speed.growth]
    tasks += [large.scale, large.sizes, large.cuts, training.epochs, training.tightness]
    tasks += [training.training, training.bound, training.throughput]
    samples = {"shares": [0.05, 1.0], "samples": ([1, 8], "particles or draws"), "repeats": 30}
    graphs = {"datasets": ["cora", "pubmed"], "sizes": [10**4, 10**5], "parts": [1, 10]}
    fits = {"batch_sizes": [20], "num_seeds": 3, "num_epochs": 400, "data_root": Path}
    return run(argv, __doc__, tasks, **samples, **graphs, **fits, results=Path)


if __name__ == "__main__":
    main()
