import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cnmm.chain import Chain, count_networks, initial_logits, to_network, to_sequence
from cnmm.lattice import Dag, full_dag, path_edges
from tests.strategies import chains, cut_chains, literal_probability

ERROR_RATE = 1e-6
"""Probability that one of the statistical tests fails although the code is right, for a random seed."""


@given(cut_chains())
def test_the_probabilities_of_all_networks_sum_to_one(cut):
    chain, exit, edges = cut
    total = math.fsum(math.exp(chain.log_prob(n, exit, edges)) for n in chain.networks(exit, edges))
    assert total == pytest.approx(1, abs=1e-12)


@given(cut_chains())
def test_flow_is_the_probability_of_the_networks_that_use_the_edge(cut):
    chain, exit, edges = cut
    used = dict.fromkeys(edges, 0.0)
    for network in chain.networks(exit, edges):
        for edge in path_edges(network):
            used[edge] += math.exp(chain.log_prob(network, exit, edges))
    flow = chain.flow(exit, edges)
    assert flow.keys() == used.keys()
    for edge in used:
        assert flow[edge] == pytest.approx(used[edge], abs=1e-12)


@given(cut_chains())
def test_networks_are_distinct_and_counted_exactly(cut):
    chain, exit, edges = cut
    networks = list(chain.networks(exit, edges))
    assert len(set(networks)) == len(networks) == chain.count(exit, edges)
    assert all(set(path_edges(network)) <= edges for network in networks)


@given(cut_chains())
def test_the_chain_is_the_papers_over_sequences(cut):
    chain, exit, edges = cut
    for network in chain.networks(exit, edges):
        sequence = to_sequence(network)
        expected = literal_probability(chain, sequence, edges)
        assert math.exp(chain.log_prob(network, exit, edges)) == pytest.approx(expected, abs=1e-12)
        assert to_network(sequence) == network


@given(cut_chains(), st.data())
def test_a_cut_moves_the_weight_of_the_edge_to_the_older_inputs(cut, data):
    chain, exit, edges = cut
    candidates = sorted((i, j) for i, j in edges if sum(b == j for _, b in edges) > 1)
    if not candidates:
        return
    i, j = data.draw(st.sampled_from(candidates))
    before = chain.weights(exit, edges)
    after = chain.weights(exit, edges - {(i, j)})
    inputs = sorted(a for a, b in edges if b == j)
    for newer in inputs[inputs.index(i) + 1 :]:
        if i == inputs[0] and newer == inputs[1]:  # the next oldest is the new base and takes all that is left
            assert after[newer, j] == pytest.approx(before[newer, j] + before[i, j], abs=1e-12)
        else:
            assert after[newer, j] == pytest.approx(before[newer, j], abs=1e-12)
    older = inputs[: inputs.index(i)]
    if older:
        gained = sum(after[a, j] for a in older) - sum(before[a, j] for a in older)
        assert gained == pytest.approx(before[i, j], abs=1e-12)


@pytest.mark.parametrize("depth", range(1, 11))
def test_the_full_dag_has_the_papers_numbers(depth):
    dag = full_dag(depth)
    assert len(dag.edges) == depth * (depth + 1) // 2
    assert count_networks(dag) == 2 ** (depth - 1)


@pytest.mark.parametrize("depth", range(1, 6))
def test_sequences_and_networks_are_one_to_one(depth):
    """Of all non-decreasing sequences, exactly those that obey s_{t-1} in {t-1, s_t} are networks."""
    dag = full_dag(depth)
    sequences = [to_sequence(network) for network in Chain(dag, [0.0] * len(dag.edges)).networks()]
    valid = {
        s
        for s in itertools.product(range(depth + 1), repeat=depth + 1)
        if s[0] == 0 and s[depth] == depth and all(s[t - 1] in (t - 1, s[t]) for t in range(1, depth + 1))
    }
    assert set(sequences) == valid
    assert len(sequences) == len(valid)


def test_the_papers_example():
    assert to_sequence((0, 1, 4)) == (0, 1, 4, 4, 4)
    assert to_network((0, 1, 4, 4, 4)) == (0, 1, 4)
    for ruled_out in ("01144", "01114"):
        with pytest.raises(ValueError, match="must be"):
            to_network([int(digit) for digit in ruled_out])
    assert len(list(Chain(full_dag(4), [0.0] * 10).networks())) == 8


def test_exits_of_the_full_dag_bound_the_depth():
    """Figure 2: samples h^4_2 come from the networks 01444 and 04444."""
    networks = set(Chain(full_dag(4), [0.0] * 10).networks(exit=2))
    assert {"".join(map(str, to_sequence(n))) for n in networks} == {"01444", "04444"}


@pytest.mark.parametrize("bad", [(0,), (1, 1), (0, 2, 1), (0, 1, 1)])
def test_sequences_that_encode_no_network_are_refused(bad):
    with pytest.raises(ValueError, match="sequence"):
        to_network(bad)


@given(cut_chains(max_maps=6))
def test_tensors_give_the_same_as_floats_and_are_differentiable(cut):
    chain, exit, edges = cut
    logits = torch.tensor(chain.logits, dtype=torch.float64, requires_grad=True)
    tensor = Chain(chain.dag, logits)
    with torch.no_grad():
        for ours, floats in ((tensor.flow(exit, edges), chain.flow(exit, edges)), (tensor.gates(), chain.gates())):
            for edge, value in floats.items():
                assert float(ours[edge]) == pytest.approx(value, abs=1e-12)
    network = next(chain.networks(exit, edges))
    with torch.no_grad():
        log_prob = float(tensor.log_prob(network, exit, edges))
    assert log_prob == pytest.approx(chain.log_prob(network, exit, edges), abs=1e-12)
    probabilities = [tensor.log_prob(n, exit, edges) for n in tensor.networks(exit, edges)]
    if len(probabilities) > 1:  # probabilities sum to one, so do not change in total
        total = torch.stack([torch.as_tensor(p, dtype=torch.float64) for p in probabilities]).exp().sum()
        (gradient,) = torch.autograd.grad(total, logits)
        assert gradient.abs().max() < 1e-12


def test_flow_and_log_prob_gradients_match_finite_differences():
    dag = full_dag(5)
    torch.manual_seed(0)
    logits = torch.randn(len(dag.edges), dtype=torch.float64, requires_grad=True)

    def flows(values):
        return torch.stack([torch.as_tensor(f) for f in Chain(dag, values).flow(4).values()])

    def log_prob(values):
        return Chain(dag, values).log_prob((0, 1, 3, 5), 5)

    def relaxed(values):
        return Chain(dag, values).rsample((3,), generator=torch.Generator().manual_seed(1))

    assert torch.autograd.gradcheck(flows, logits)
    assert torch.autograd.gradcheck(log_prob, logits)
    assert torch.autograd.gradcheck(log_prob, torch.zeros_like(logits, requires_grad=True))
    assert torch.autograd.gradcheck(relaxed, logits)


def test_batches_of_gates_are_mixed_independently():
    dag = full_dag(4)
    logits = torch.randn(3, len(dag.edges), dtype=torch.float64)
    together = Chain(dag, logits).flow()
    for row in range(3):
        alone = Chain(dag, logits[row]).flow()
        assert all(together[edge].expand(3)[row] == alone[edge] for edge in alone)


def _bernstein(probability, draws, tests):
    """How far a frequency may be off: beyond that with probability below ERROR_RATE over all `tests`."""
    log = math.log(2 * tests / ERROR_RATE)
    return math.sqrt(2 * probability * (1 - probability) * log / draws) + 2 * log / (3 * draws)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cuts", [0, 3])
def test_hard_samples_hit_networks_with_the_right_frequencies(seed, cuts):
    draws = 20_000
    dag = full_dag(6)
    torch.manual_seed(seed)
    chain = Chain(dag, torch.randn(len(dag.edges), dtype=torch.float64))
    exit = 6 - seed
    edges = dag.exit_edges(exit) - set([(0, 3), (1, 4), (2, 3)][:cuts])
    edges = dag.exit_edges(exit, edges)
    samples = chain.sample((draws,), generator=torch.Generator().manual_seed(seed)).tolist()
    counts = Counter(chain.chosen(gates, exit, edges) for gates in samples)
    networks = list(chain.networks(exit, edges))
    assert set(counts) <= set(networks)
    for network in networks:
        probability = math.exp(chain.log_prob(network, exit, edges))
        assert counts[network] / draws == pytest.approx(
            probability, abs=_bernstein(probability, draws, len(networks))
        ), network


def test_relaxed_gates_are_open_as_often_as_their_probability():
    """sigmoid((logit + noise) / temperature) exceeds 1/2 with probability pi, at any temperature."""
    draws = 20_000
    dag = full_dag(5)
    logits = torch.linspace(-3, 3, len(dag.edges), dtype=torch.float64)
    chain = Chain(dag, logits)
    for temperature in (0.5, 2.0):
        gates = chain.rsample((draws,), temperature=temperature, generator=torch.Generator().manual_seed(3))
        assert gates.min() > 0
        assert gates.max() < 1
        for probability, frequency in zip(logits.sigmoid().tolist(), (gates > 0.5).double().mean(0), strict=True):
            assert frequency == pytest.approx(probability, abs=_bernstein(probability, draws, 2 * len(dag.edges)))


def test_low_temperature_is_hard():
    chain = Chain(full_dag(5), torch.randn(15, dtype=torch.float64))
    gates = chain.rsample((1000,), temperature=1e-3, generator=torch.Generator().manual_seed(0))
    assert ((gates < 1e-3) | (gates > 1 - 1e-3)).double().mean() > 0.99


def test_uniform_initialisation_gives_equal_weights():
    dag = full_dag(6)
    weights = Chain(dag, initial_logits(dag, "uniform")).weights()
    for (_, j), weight in weights.items():
        assert weight == pytest.approx(1 / len(dag.inputs[j]), abs=1e-12)
    assert set(Chain(dag, initial_logits(dag, "half")).gates().values()) == {0.5}


@given(chains(max_maps=5))
def test_bad_requests_name_what_is_allowed(chain):
    with pytest.raises(ValueError, match=f"must be an exit from 1 to {chain.dag.num_exits}"):
        chain.flow(chain.dag.num_exits + 1)
    with pytest.raises(ValueError, match="does not exist"):
        chain.log_prob((0, 99))
    with pytest.raises(ValueError, match="gate logits"):
        Chain(chain.dag, [*chain.logits, 0.0])


def test_temperature_must_be_positive():
    with pytest.raises(ValueError, match="temperature=0"):
        Chain(full_dag(2), torch.zeros(3)).rsample(temperature=0)


@pytest.mark.parametrize(
    ("inputs", "exits"),
    [
        (((), (1,)), (0,)),
        (((), ()), (0,)),
        (((0,), (0,)), (0,)),
        (((), (0,), (1, 0)), (1,)),
        (((), (0,), (1,)), (0,)),
        (((), (0,)), ()),
    ],
)
def test_graphs_that_are_none_are_refused(inputs, exits):
    with pytest.raises(ValueError, match=r"must be|follows"):
        Dag(inputs=inputs, exits=exits)
