"""Step time and memory of a plan, from its assignment, the graph and the costs: shares no code with the solver."""

# Copies of a parameter that are held; how often they are read or written in a cache, and operator by operator.
OPTIMIZER = {"sgd": (2, 3, 3), "sgd-momentum": (3, 5, 8), "adam": (4, 7, 18), "adamw": (4, 7, 20)}


def stages_of_state(graph, plan):
    """State key -> the stages that use it."""
    used = {}
    for node in graph.primary.graph.nodes:
        if node.op == "get_attr":
            users = {plan.assignment[u.name] for u in node.users if u.name in plan.assignment}
            used.setdefault(node.target, set()).update(users)
    return used


def crossings(graph, plan):
    """(node name, boundary) for every value that crosses a boundary, relays included."""
    last = plan.strategy.stages - 1
    outputs = {n.name for node in graph.primary.graph.nodes if node.op == "output" for n in node.all_input_nodes}
    found = []
    for node in graph.primary.calls:
        readers = [plan.assignment[u.name] for u in node.users if u.name in plan.assignment]
        if node.name in outputs:
            readers.append(last)
        made = plan.assignment[node.name]
        found += [(node.name, b) for b in range(made, max(readers, default=made))]
    return found


def step_time(graph, costs, cluster, workload, plan):
    """sum of stage times and transfers + max over stages of (m - 1) (stage time + its transfers) + optimizer + sync."""
    stages = plan.strategy.stages
    training = workload.mode == "training"
    devices = [cluster.devices[stage.devices[0]] for stage in plan.per_stage]
    work = [0.0] * stages
    for name, stage in plan.assignment.items():
        time = costs.times[devices[stage].name][name]
        work[stage] += time.forward_s + (time.backward_input_s + time.backward_weight_s if training else 0.0)
    transfer = [0.0] * (stages - 1)
    for name, b in crossings(graph, plan):
        memory = costs.memory[name]
        link = cluster.link(plan.per_stage[b].devices[0], plan.per_stage[b + 1].devices[0])
        sizes = [memory.output_bytes] + ([memory.gradient_bytes] if training and memory.gradient_bytes else [])
        transfer[b] += sum(link.latency_s + size / link.bandwidth_bytes_per_s for size in sizes)
    once = [0.0] * stages
    if training:
        for key, holders in stages_of_state(graph, plan).items():
            entry = graph.state[key]
            if entry.tensor.requires_grad:
                for s in holders:
                    copies, in_cache, in_memory = OPTIMIZER[workload.optimizer]
                    fits = devices[s].kind == "cpu" and copies * entry.bytes <= devices[s].cache_bytes
                    moved = entry.bytes * (in_cache if fits else in_memory)
                    once[s] += moved / devices[s].memory_bandwidth_bytes_per_s
                    if len(holders) > 1:
                        link = cluster.intra_node if len(set(cluster.nodes)) == 1 else cluster.inter_node
                        once[s] += link.latency_s + 2 * entry.bytes / link.bandwidth_bytes_per_s
    loads = []
    for s in range(stages):
        busy = work[s] + (transfer[s - 1] if s else 0.0) + (transfer[s] if s < stages - 1 else 0.0)
        loads.append((workload.microbatches - 1) * busy + once[s])
    return sum(work) + sum(transfer) + max(loads)


def least_memory(graph, costs, workload, plan, stage):
    """Bytes that stage certainly needs under 1F1B: its states and what autograd saves there, in flight."""
    copies = OPTIMIZER[workload.optimizer][0]
    total = 0
    for key, holders in stages_of_state(graph, plan).items():
        if stage in holders:
            entry = graph.state[key]
            total += entry.bytes * (copies if entry.tensor.requires_grad else 1)
    in_flight = min(workload.microbatches, plan.strategy.stages - stage)
    for saved in costs.saved:
        if plan.assignment.get(saved.owner) == stage:
            total += saved.bytes * in_flight
    return total
