"""Small random partition problems that cover every term of the objective and every kind of limit."""

import dataclasses
import random

import numpy as np

from autopart.runtime.schedules import processes_of_stages
from autopart.solver.pipeline import IN_FLIGHT, repeats
from autopart.solver.problem import Blocks, Net, Problem


def random_problem(seed, items=None, stages=None, tight=None, schedule=None, travel=None):
    """Up to 8 items with branches, skips, results, shared states, unequal devices, ties in cost, and memory limits."""
    rng = random.Random(seed)
    schedule = schedule or rng.choice(["1f1b", "1f1b", "gpipe", "interleaved1f1b", "zbv"])
    per_process = 1 if schedule in ("1f1b", "gpipe") else 2
    stages = stages or rng.choice([2, 3, 4] if per_process == 1 else [4])
    items = items or rng.randint(stages, 8 if stages < 4 else 6)
    microbatches = rng.choice([1, 2, 4, 8])
    few = rng.random() < 0.3  # few distinct values: many equal optima
    draw = (lambda: float(rng.choice([1, 1, 2]))) if few else (lambda: rng.uniform(0.1, 3.0))

    # How values travel: relayed, sent directly (then some flow back, from later items), or relayed beside the work.
    way = rng.choice(["relayed", "relayed", "direct", "hidden"]) if per_process == 1 else "relayed"
    way = travel or way
    nets = []
    for v in range(items):
        readers = tuple(r for r in range(v + 1, items) if rng.random() < 2.0 / items)
        to_end = rng.random() < 0.1
        if readers or to_end:
            nets.append(Net(v, readers, to_end))
        if way == "direct" and v and rng.random() < 0.5:
            nets.append(Net(v, tuple(sorted(rng.sample(range(v), rng.randint(1, min(2, v))))), backward=True))
    users = []
    for _ in range(rng.randint(0, 4)):
        users.append(tuple(sorted(rng.sample(range(items), rng.randint(1, min(3, items))))))
    unequal = rng.random() < 0.4
    speed = [rng.choice([1.0, 1.0, 2.0]) if unequal else 1.0 for _ in range(stages)]
    process = processes_of_stages(schedule, stages)
    speed = [speed[p] for p in process]
    work = np.array([draw() if rng.random() < 0.9 else 0.0 for _ in range(items)])
    backward = np.array([rng.random() for _ in range(items)])
    transfer = np.array([draw() * rng.choice([0.0, 0.1, 1.0]) for _ in nets])
    touch = transfer * (way == "direct")
    transfer = transfer * (way != "direct")
    boundary = [rng.choice([1.0, 3.0]) if unequal else 1.0 for _ in range(stages - 1)]
    boundary = [0.0 if process[b] == process[b + 1] else x for b, x in enumerate(boundary)]
    in_flight = [IN_FLIGHT[schedule](microbatches, s, stages) for s in range(stages)]
    saved = np.array([draw() for _ in range(items)])
    size = np.array([draw() * (way != "direct") for _ in nets])
    state_bytes = np.array([draw() * 3 for _ in users])
    update = np.array([rng.choice([0.0, 1.0]) * draw() for _ in users])
    sync = np.array([rng.choice([0.0, 1.0]) * draw() for _ in users])
    repeat, fill_weight = rng.choice([repeats(schedule, microbatches)] * 3 + [(1.0, 0.0), (0.0, 1.0)])
    workspace = np.array([draw() * rng.choice([0.0, 2.0]) for _ in range(items)])
    processes = max(process) + 1
    total = sum(saved) * max(in_flight) + state_bytes.sum() * 2 + size.sum() * microbatches + workspace.max()
    tight = rng.random() < 0.5 if tight is None else tight
    limits = [total * rng.uniform(0.15, 0.8) / per_process if tight else np.inf for _ in range(processes)]
    return Problem(
        work=np.outer(speed, work),
        fill=np.outer(speed, work * (backward if schedule == "zbv" else 1.0)),
        saved=np.outer(in_flight, saved),
        workspace=workspace,
        nets=tuple(nets),
        transfer=np.outer(boundary, transfer).reshape(stages - 1, len(nets)),
        send=np.outer(in_flight[:-1], size).reshape(stages - 1, len(nets)),
        receive=np.full((stages - 1, 1), microbatches + 1.0) * size.reshape(1, len(nets)),
        touch=np.outer(speed, touch).reshape(stages, len(nets)),
        users=tuple(users),
        state_bytes=state_bytes,
        update=np.outer(speed, update).reshape(stages, len(users)),
        sync=np.ones((stages, 1)) * sync.reshape(1, len(users)),
        process=process,
        limits=np.array(limits),
        repeat=repeat,
        fill_weight=fill_weight,
        hidden=way == "hidden",
        idle=rng.random() < 0.25,
    )


def plain_problem(nets, items, stages):
    """A second an item on every stage, sent for nothing, without limits."""
    problem = random_problem(0, items=items, stages=stages, schedule="1f1b", travel="relayed", tight=False)
    none, per_net = np.zeros((stages, 0)), np.zeros((stages - 1, len(nets)))
    return dataclasses.replace(
        problem,
        work=np.ones((stages, items)),
        fill=np.ones((stages, items)),
        nets=tuple(nets),
        transfer=per_net,
        send=per_net,
        receive=per_net,
        touch=np.zeros((stages, len(nets))),
        users=(),
        state_bytes=np.zeros(0),
        update=none,
        sync=none,
        limits=np.full(stages, np.inf),
        repeat=1.0,
    )


def with_blocks(problem, seed):
    """The problem with up to four disjoint blocks that may be computed again, some of them equal."""
    rng = random.Random(seed)
    draw = (lambda: float(rng.choice([1, 2]))) if rng.random() < 0.5 else (lambda: rng.uniform(0.2, 1.5))
    items = list(range(problem.items))
    rng.shuffle(items)
    blocks = []
    for _ in range(rng.randint(1, 4)):
        size = rng.choice([1, 1, 2])
        if len(items) >= size:
            blocks.append(tuple(sorted(items.pop() for _ in range(size))))
    kept = np.array([problem.saved[:, list(block)].sum(axis=1) for block in blocks]).T
    share = np.array([rng.choice([0.0, 0.5, 0.9, 0.9, 1.0]) for _ in blocks])
    speed = problem.work.max(axis=1, keepdims=True) / max(problem.work.max(), 1e-9)
    return dataclasses.replace(
        problem,
        blocks=Blocks(
            items=tuple(blocks),
            again=speed * np.array([draw() * 0.5 for _ in blocks]),
            spared=kept * share,
            peak=np.array([draw() * rng.choice([0.0, 0.5]) for _ in blocks]),
        ),
    )


def foldable_problem(seed, travel, items=None):
    """Idle stages, many items without work or bytes, and nets of sizes that often shrink or grow along the way."""
    rng = random.Random(seed)
    problem = random_problem(seed, items=items, schedule="1f1b", travel=travel, tight=rng.random() < 0.3)
    light = np.array([rng.random() < 0.4 for _ in range(problem.items)])
    scale = np.where(light, rng.choice([0.0, 0.1]), 1.0)
    empty = np.where(light, rng.choice([0.0, 0.2]), 1.0)
    return dataclasses.replace(
        problem,
        work=problem.work * scale,
        fill=problem.fill * scale,
        saved=problem.saved * empty,
        workspace=problem.workspace * (empty > 0),
        idle=True,
    )
