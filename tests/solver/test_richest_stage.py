"""The richest stage within a limit, against every labelling: never below the truth, and it where nothing is blurred."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import random_problem

from autopart.solver import richest_stage as module
from autopart.solver.richest_stage import FORBIDDEN, PRICES, any_rich, richest
from autopart.solver.sweep import AFTER, BEFORE, IN, narrow_order, sweep

PROPERTY = settings(max_examples=300, deadline=None, derandomize=True)
SEEDS = st.integers(0, 10**9)
# What is asked for, from the truth: much less, less, hardly less, a bit more. Labels are worth about 1.
ASKED = st.sampled_from([-5.0, -1.0, -0.01, 0.01])


class Case:
    """A stage of a small problem, worths of both signs, some of them forbidden, and a limit that some labellings keep.

    Attributes:
        every: (labels, seconds, worth) of each path.
    """

    def __init__(self, seed, forbidden=True):
        rng = random.Random(seed)
        self.items = rng.randint(3, 7)
        problem = random_problem(seed, items=self.items, stages=3, schedule="1f1b", tight=False)
        order = rng.choice([range(self.items), narrow_order(problem), rng.sample(range(self.items), self.items)])
        self.sweep = sweep(problem, rng.randrange(3), np.ones((self.items, 3), dtype=bool), order, 10**6)
        few = rng.random() < 0.3  # many labellings are worth the same
        draw = (lambda: float(rng.randint(-2, 2))) if few else (lambda: rng.uniform(-1, 1))
        self.worth = np.array([[draw() for _ in range(3)] for _ in range(self.items)])
        if forbidden:
            for v in range(self.items):
                if rng.random() < 0.2:
                    self.worth[v, rng.choice([BEFORE, IN, AFTER])] = FORBIDDEN
        self.every = _paths(self.sweep, self.worth)
        seconds = sorted(s for _, s, _ in self.every)
        self.limit = rng.choice([seconds[-1], *rng.choices(seconds, k=3)]) * (1 + 1e-9)
        self.price = rng.choice([0.01, 0.3, 1.0, 3.0, 100.0])

    @property
    def truth(self):
        return max(worth for _, seconds, worth in self.every if seconds <= self.limit)

    def richest(self, least, blur=0.0, most_stages=3):
        return richest(self.sweep, self.worth, self.limit, least, self.price, blur, most_stages)

    def relaxation(self):
        prices = self.price * PRICES
        rest = module._completions(*self.sweep.arrays, self.worth[self.sweep.order], prices)
        return module._bound(rest, prices, self.limit)

    def check_stages(self, found, least, most_stages):
        """The stages found are labellings within the limit, worth what was asked for, and the first one the most."""
        known = {labels: (seconds, worth) for labels, seconds, worth in self.every}
        rows = [tuple(int(label) for label in row) for row in found.stages]
        assert 1 <= len(rows) <= most_stages and len(set(rows)) == len(rows) == len(found.seconds)
        worths = [known[row][1] for row in rows]
        for row, seconds in zip(rows, found.seconds, strict=True):
            assert seconds == pytest.approx(known[row][0], rel=1e-12, abs=1e-12)
            assert seconds <= self.limit
        assert worths[0] == _near(found.most)
        assert all(worth >= least - _rounding(least) for worth in worths)
        assert all(a >= b - _rounding(b) for a, b in itertools.pairwise(worths))


@PROPERTY
@given(SEEDS, ASKED, st.integers(1, 5))
def test_without_blur_it_is_the_truth(seed, asked, most_stages):
    case = Case(seed)
    least = case.truth + asked
    found = case.richest(least, most_stages=most_stages)
    assert found.most == _near(max(case.truth, least))
    if case.truth >= least:
        case.check_stages(found, least, most_stages)
    else:
        assert not len(found.stages) and not len(found.seconds)


@PROPERTY
@given(SEEDS)
def test_everything_may_be_asked_for(seed):
    case = Case(seed)
    least = case.items * FORBIDDEN * 2
    found = case.richest(least, most_stages=4)
    assert found.most == _near(case.truth)
    case.check_stages(found, least, 4)


@PROPERTY
@given(SEEDS, ASKED | st.just(0.0), st.sampled_from([0.0, 1e-3, 0.05, 0.5, 5.0]))
def test_with_blur_it_is_at_most_so_much_above_the_truth(seed, asked, blur):
    case = Case(seed)
    least = case.truth + asked
    found = case.richest(least, blur)
    assert found.most >= case.truth - _rounding(case.truth)
    assert found.most <= max(case.truth + case.items * blur, least) + _rounding(case.truth)
    known = {labels: (seconds, worth) for labels, seconds, worth in case.every}
    for row, seconds in zip(found.stages, found.seconds, strict=True):
        own_seconds, worth = known[tuple(int(label) for label in row)]
        assert seconds == pytest.approx(own_seconds, rel=1e-12, abs=1e-12) and seconds <= case.limit
        assert worth >= least - case.items * blur - _rounding(least)


@PROPERTY
@given(SEEDS, st.sampled_from([(0.01, 0.1, 1.0, 1e3, 1e14), (1e14,), (1e-9, 1e-6)]))
def test_any_rich_stage_is_the_richest_as_far_down_as_it_is_looked_for(seed, below):
    case = Case(seed)
    found = any_rich(case.sweep, case.worth, case.limit, case.price, 0.0, 3, below)
    if case.truth <= FORBIDDEN / 2:  # no stage without a label that is not to be taken
        assert not len(found.stages) or found.most == _near(case.truth)
    elif case.relaxation() - below[-1] <= case.truth - 1e-9:
        assert found.most == _near(case.truth)
        case.check_stages(found, case.relaxation() - below[-1], 3)
    assert found.most >= case.truth - _rounding(case.truth)
    assert found.work >= len(case.sweep.source)


@settings(PROPERTY, max_examples=60)
@given(SEEDS)
def test_any_rich_stage_is_not_looked_for_further_down_where_there_is_no_room(seed):
    case = Case(seed, forbidden=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_search", module._search.py_func)
        patch.setattr(module, "PAIRS_AT_FIRST", 1)
        patch.setattr(module, "MOST_PAIRS", 1)
        found = any_rich(case.sweep, case.worth, case.limit, case.price, 0.0, 3, (1e3, 2e3, 4e3))
    assert found.work == len(case.sweep.source) + 1  # one search
    assert not len(found.stages) and found.most >= case.truth - _rounding(case.truth)


@PROPERTY
@given(SEEDS)
def test_the_bound_is_never_below_the_truth(seed):
    case = Case(seed)
    bound = case.relaxation()
    assert bound >= case.truth - _rounding(case.truth)
    found = case.richest(bound + 1e-6 * max(abs(bound), 1.0))
    assert not len(found.stages)


@PROPERTY
@given(SEEDS)
def test_nothing_is_found_where_no_labelling_is_within_the_limit(seed):
    """Only labels in the stage are left."""
    rng = random.Random(seed)
    problem = random_problem(seed, stages=3, schedule="1f1b", tight=False)
    inside = np.zeros((problem.items, 3), dtype=bool)
    inside[:, IN] = True
    graph = sweep(problem, 1, inside, range(problem.items), 10**6)
    worth = np.array([[rng.uniform(-1, 1) for _ in range(3)] for _ in range(problem.items)])
    ((_, seconds, value),) = _paths(graph, worth)
    least = value - 1.0
    if seconds > 0:
        found = richest(graph, worth, 0.9 * seconds, least, 1.0, 0.0, 3)
        assert found.most == least and not len(found.stages)
    found = richest(graph, worth, 1.1 * seconds, least, 1.0, 0.0, 3)
    assert found.most == _near(value) and len(found.stages) == 1


@settings(PROPERTY, max_examples=60)
@given(SEEDS, ASKED, st.sampled_from([0.0, 0.05]), st.integers(1, 30), st.integers(1, 30))
def test_a_search_that_ends_early_still_bounds_the_truth(seed, asked, blur, first, most):
    """The numbers of pairs are compiled in: the search runs as Python here."""
    case = Case(seed, forbidden=False)
    least = case.truth + asked
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_search", module._search.py_func)
        whole = case.richest(least, blur)
        patch.setattr(module, "PAIRS_AT_FIRST", first)
        grown = case.richest(least, blur)
        patch.setattr(module, "MOST_PAIRS", most)
        found = case.richest(least, blur)
    # Room that grows changes nothing.
    assert grown.most == whole.most and np.array_equal(grown.stages, whole.stages)
    assert found.most >= case.truth - _rounding(case.truth)
    bound = case.relaxation()
    if not len(found.stages):
        assert found.most <= max(bound, least) + _rounding(bound)


def test_two_items_that_do_not_both_fit():
    """Knapsack by hand: worth 5 and 4 in the stage for 3 seconds and 2, within a limit of 4."""
    problem = random_problem(1, items=2, stages=2, schedule="1f1b", travel="relayed", tight=False)
    free = np.zeros((2, 3), dtype=bool)
    free[:, [IN, AFTER]] = True
    none = np.zeros((2, 0))
    problem = dataclasses.replace(
        problem,
        work=np.array([[3.0, 2.0], [3.0, 2.0]]),
        nets=(),
        transfer=none[:1],
        touch=none,
        users=(),
        repeat=1.0,
    )
    worth = np.array([[0.0, 5.0, 0.0], [0.0, 4.0, 0.0]])
    graph = sweep(problem, 0, free, range(2), 10)
    for limit, most, labels in [
        (4.0, 5.0, [IN, AFTER]),
        (5.0, 9.0, [IN, IN]),
        (2.5, 4.0, [AFTER, IN]),
        (1.0, 0.0, None),
    ]:
        found = richest(graph, worth, limit, -1.0, 9 / 5, 0.0, 1)
        assert found.most == most
        assert found.stages.tolist() == [labels or [AFTER, AFTER]]


def _rounding(value):
    """Sums that hold something forbidden are exact to their own size only."""
    return 1e-9 * max(1.0, abs(value) * 1e-3)


def _near(value):
    return pytest.approx(value, rel=1e-12, abs=1e-9)


def _paths(graph, worth):
    """(labels of all items, seconds, worth) of each path."""
    here = {0: [((), 0.0, 0.0)]}
    for step, item in enumerate(graph.order):
        there = {}
        for state in range(graph.begin[step + 1], graph.begin[step + 2]):
            there[state] = [
                ((*labels, int(graph.label[a])), seconds + graph.seconds[a], value + worth[item, graph.label[a]])
                for a in range(graph.first[state], graph.first[state + 1])
                for labels, seconds, value in here[int(graph.source[a])]
            ]
        here = there
    place = np.argsort(graph.order)
    (paths,) = here.values()
    return [(tuple(labels[i] for i in place), seconds, value) for labels, seconds, value in paths]
