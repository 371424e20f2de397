"""Brute force over every assignment, in plain Python: shares no code with the solver but the Problem's fields."""

import itertools
import math


def value_and_memory(problem, stage, recomputed=()):
    """(step time, bytes of each process, seconds of each process) of an assignment, from the definition.

    The blocks in `recomputed` are computed again.
    """
    stages = len(problem.process)

    def crosses(net, b):
        if net.backward:
            return False
        last = stages - 1 if net.to_end else max([stage[r] for r in net.readers], default=-1)
        return stage[net.producer] <= b < last

    fill = sum(problem.fill[s][v] for v, s in enumerate(stage))
    work = [0.0] * len(problem.limits)
    sent = [[0.0] * stages for _ in problem.limits]
    once = [0.0] * len(problem.limits)
    memory = [0.0] * len(problem.limits)
    workspace = [0.0] * len(problem.limits)
    for b in range(stages - 1):
        for n, net in enumerate(problem.nets):
            if crosses(net, b):
                seconds = problem.transfer[b][n]
                fill += seconds
                sent[problem.process[b]][b] += problem.repeat * seconds
                sent[problem.process[b + 1]][b] += problem.repeat * seconds
                memory[problem.process[b]] += problem.send[b][n]
                memory[problem.process[b + 1]] += problem.receive[b][n]
    for v, s in enumerate(stage):
        p = problem.process[s]
        work[p] += problem.repeat * problem.work[s][v]
        memory[p] += problem.saved[s][v]
        workspace[p] = max(workspace[p], problem.workspace[v])
    peak = [0.0] * len(problem.limits)
    for b in recomputed:
        s = stage[problem.blocks.items[b][0]]
        p = problem.process[s]
        fill += problem.blocks.again[s][b]
        work[p] += problem.repeat * problem.blocks.again[s][b]
        memory[p] -= problem.blocks.spared[s][b]
        peak[p] = max(peak[p], problem.blocks.peak[b])
    for n, net in enumerate(problem.nets):
        touched = {stage[net.producer], *(stage[r] for r in net.readers)}
        if len(touched) > 1:
            for s in touched:
                work[problem.process[s]] += problem.repeat * problem.touch[s][n]
    for r, users in enumerate(problem.users):
        holders = {stage[v] for v in users}
        for s in holders:
            once[problem.process[s]] += problem.update[s][r] + (problem.sync[s][r] if len(holders) > 1 else 0.0)
            memory[problem.process[s]] += problem.state_bytes[r]
    busy = [max(w, *b) if problem.hidden else w + sum(b) for w, b in zip(work, sent, strict=True)]
    loads = [b + o for b, o in zip(busy, once, strict=True)]
    totals = [sum(parts) for parts in zip(memory, workspace, peak, strict=True)]
    return problem.fill_weight * fill + max(loads), totals, loads


def legal(problem, stage):
    if not problem.idle and set(stage) != set(range(len(problem.process))):
        return False
    return all(stage[net.producer] <= stage[r] for net in problem.nets if not net.backward for r in net.readers)


def loads_of_plans(problem):
    """(assignment, largest load) of every legal assignment."""
    every = itertools.product(range(len(problem.process)), repeat=problem.work.shape[1])
    return [(plan, max(value_and_memory(problem, plan)[2])) for plan in every if legal(problem, plan)]


def optimum(problem):
    """The least step time over all legal assignments that fit; infinite if there is none."""
    best = math.inf
    for stage in itertools.product(range(len(problem.process)), repeat=problem.work.shape[1]):
        if legal(problem, stage):
            for recomputed in choices(problem, stage):
                value, memory, _ = value_and_memory(problem, stage, recomputed)
                if value < best and all(m <= limit for m, limit in zip(memory, problem.limits, strict=True)):
                    best = value
    return best


def choices(problem, stage):
    """Every set of blocks that may be computed again."""
    blocks = [] if problem.blocks is None else problem.blocks.items
    whole = [b for b, items in enumerate(blocks) if len({stage[v] for v in items}) == 1]
    for count in range(len(whole) + 1):
        yield from itertools.combinations(whole, count)
