# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Hostile values (see hostile.py) that are answered, or refused by PyTorch, by reason."""

#: Calls by reason; several values of one argument are on one line, with bars between them.
FALLS = {
    "a batch, more nodes, or none of them: a valid input": """
        Annotators.fit(answers: a row more)
        ChosenLabels.__init__(alpha: a row more)
        ChosenLabels.__init__(choices: a dimension more | a row more | no row)
        ChosenLabels.log_prob(value: a row more | no row)
        NeighborChoice.log_prob(value: a row more | no row)
        Neighborhood.find(choices: a row more | no row)
        Neighborhood.sum(values: a row more | no row)
        Neighborhood.take(rows: a row more | no row)
        NormalEmission.log_prob(data: a row more | no row)
        PairwiseMRF.log_potential(value: a row more | no row)
        StackedNMM.fit(train: no row)
        check_dependence(draws: a row more)
        ising(field: a row more)
        ising_posterior(image: a row more)
        points(positions: a row more)
        potts(unary: a row more)
    """,
    "another graph that fits": """
        AmortizedNMM.__init__(hood: another graph)
        FieldPrior.forward(hood: another graph)
        FreeNMM.__init__(hood: another graph)
        MarginalGuide.__init__(hood: another graph)
        MeanFieldCorrection.forward(hood: another graph)
        MixtureGuide.__init__(hood: another graph)
    """,
    "an error that names what is made of the argument": """
        DGLFRMGuide.guide(x: inf | nan)
        DGLFRMGuide.link_logits(x: inf | nan)
        DGLFRMGuide.model(x: inf | nan)
        NMMNetwork.forward(hood: another graph)
        ising(coupling: nan)
        ising(field: inf | nan)
        ising_posterior(image: inf | nan)
        potts(coupling: nan)
    """,
    "NaN is a missing observation": """
        NormalEmission.log_prob(data: nan)
        NormalEmission.start(data: nan)
        fit_field(data: nan)
        hidden_field(data: nan)
        leave_one_out(data: nan)
    """,
    "labels (N, 1), as OGB has them": """
        PooledScores.terms(y: a dimension more)
        StackedNMM.fit(y: a dimension more)
        StackedNMM.forward(y: a dimension more)
        StackedNMM.posterior(y: a dimension more)
        StackedNMM.update(y: a dimension more)
    """,
    "a label that is not read: errors advise to leave such nodes out of the mask": """
        NeighborMixture.condition(y: -7 | 10^9)
        temperature_scaling(y: -7 | 10^9)
    """,
    "a valid value": """
        MarginalGuide.__init__(site: nonsense)
        MembershipMixture.log_prob(value: inf)
        MixtureGuide.__init__(site: nonsense)
        Neighborhood.find(choices: -7 | 10^9)
        StackedNMM.fit(folds: -7)
        check_dependence(draws: 10^9)
        check_dependence(y: 10^9)
        letters(text: nonsense)
        nmm_counts(total_count: 10^9)
        node_plate(y: 10^9)
        random_blocks(nodes: a row more | no row)
        walks(membership: 10^9)
    """,
    "an operation on tensors, as torch.softmax is: NaN goes through": """
        Neighborhood.log_softmax(logits: inf | nan)
        Neighborhood.softmax(logits: inf | nan)
        Neighborhood.sum(values: inf | nan)
    """,
}
