"""What is computed again costs least, for one assignment and over all of them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from partition_oracle import choices, legal, optimum, value_and_memory
from random_problems import random_problem, with_blocks

from autopart.solver.enumeration import down_sets
from autopart.solver.recomputation import least_added
from autopart.solver.recomputed_stages import best_recomputing
from autopart.solver.score import score
from autopart.solver.search import search

SEEDS = st.integers(0, 10**6)
number = st.one_of(st.integers(1, 3).map(float), st.floats(0.1, 3.0))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(number, number, number), min_size=1, max_size=7), st.floats(0.01, 1.1))
def test_least_added_equals_the_best_of_all_sets(blocks: list[tuple[float, float, float]], share: float) -> None:
    again, spared, peak = (np.array(column) for column in zip(*blocks, strict=True))
    excess = float(share * spared.sum())
    sets = (list(c) for k in range(1, len(blocks) + 1) for c in itertools.combinations(range(len(blocks)), k))
    best = min((again[c].sum() for c in sets if spared[c].sum() - peak[c].max() >= excess), default=math.inf)
    pick = least_added(again, spared, peak, excess)
    if pick is None:
        assert math.isinf(best)
    else:
        assert spared[pick].sum() - peak[pick].max() >= excess * (1 - 1e-9)
        assert again[pick].sum() == pytest.approx(best, rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_the_scorer_finds_the_best_set_of_an_assignment(seed: int) -> None:
    problem = with_blocks(random_problem(seed, tight=True), seed)
    generator = np.random.default_rng(seed)
    stage = np.sort(generator.integers(0, problem.stages, problem.items))
    found = score(problem, stage)
    values = []
    for recomputed in choices(problem, list(stage)):
        value, memory, _ = value_and_memory(problem, list(stage), recomputed)
        if all(m <= limit for m, limit in zip(memory, problem.limits, strict=True)):
            values.append(value)
    chosen = tuple(int(b) for b in np.flatnonzero(found.recomputed.any(axis=0)))
    value, memory, loads = value_and_memory(problem, list(stage), chosen)
    assert found.step_s == pytest.approx(value) and list(found.memory) == pytest.approx(memory)
    assert list(found.loads_s) == pytest.approx(loads)
    assert found.fits(problem) == bool(values)
    if values:
        assert found.step_s == pytest.approx(min(values))


@settings(max_examples=150, deadline=None)
@given(SEEDS)
@example(36703)  # transfers are hidden by what is computed again
def test_chains_of_down_sets_find_the_optimum(seed: int) -> None:
    problem = with_blocks(random_problem(seed, tight=True, schedule="1f1b"), seed)
    inside = down_sets(problem, 400)
    assert inside is not None
    best = optimum(problem)
    assignment, bound = best_recomputing(problem, inside, 1e-6)
    if assignment is None:
        assert math.isinf(best) and math.isinf(bound)
        return
    assert legal(problem, assignment)
    result = score(problem, assignment)
    assert result.fits(problem)
    assert result.step_s == pytest.approx(best, rel=2e-6)
    assert bound <= best * (1 + 1e-9) and bound >= best * (1 - 2e-6)


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.sampled_from(["1f1b", "gpipe", "interleaved1f1b"]), st.booleans())
def test_the_search_finds_the_optimum(seed: int, schedule: str, chains: bool) -> None:
    problem = with_blocks(random_problem(seed, tight=True, schedule=schedule), seed)
    best = optimum(problem)
    with pytest.MonkeyPatch.context() as patch:
        if not chains:  # the integer program has to do it
            patch.setattr("autopart.solver.down_sets.MOST_TABULATED", 0)
        answer = search(problem, 1e-3, 20.0)
    assert answer.bound <= best * (1 + 1e-9)
    if answer.assignment is None:
        assert math.isinf(best)
        return
    assert legal(problem, answer.assignment)
    assert score(problem, answer.assignment).fits(problem)
    assert answer.value == pytest.approx(score(problem, answer.assignment).step_s)
    assert answer.value >= best * (1 - 1e-9)
    if answer.stopped_by == "proof":
        assert answer.value * (1 - 1e-3) <= best * (1 + 1e-9)
