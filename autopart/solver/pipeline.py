"""What a pipeline schedule means for time and memory, as a table.

With stage times w_s = f_s + b_s, m microbatches, P processes of V stages each, and load_p the work of a process for one
microbatch, a step takes

    T = (1 / V) sum_s w_s + (m - 1 / V) max_p load_p

For V = 1 this is the step time of GPipe and 1F1B, sum_s w_s + (m - 1) max_s w_s (Narayanan et al., PipeDream-Flush,
2021; Huang et al., GPipe, 2019); for equal stages and V = 2 it is m W + (P - 1) W / 2, the time of the interleaved
schedule (Narayanan et al., Megatron-LM, 2021, section 2.2), W being the work of a process. Where the schedule computes
weight gradients apart, they fill the bubble (Qi et al., Zero Bubble, 2023), and the first sum has only the forward and
the input gradient: w_s = f_s + bi_s.
"""

from __future__ import annotations

from collections.abc import Callable

from autopart.costs import NodeTime
from autopart.runtime.schedules import SCHEDULES

# Schedule -> microbatches whose activations stage s of S keeps at the same time, of m; upper bounds where a process has
# two stages (its total there is within one microbatch of the engine's warm-up).
IN_FLIGHT: dict[str, Callable[[int, int, int], int]] = {
    "gpipe": lambda m, s, stages: m,
    "1f1b": lambda m, s, stages: min(m, stages - s),
    "interleaved1f1b": lambda m, s, stages: min(m, _interleaved(s, stages)),
    "loopedbfs": lambda m, s, stages: m,
    # Inputs and output gradients are kept until the weight gradient: one lap more.
    "interleavedzerobubble": lambda m, s, stages: min(m, stages),
    "zbv": lambda m, s, stages: min(m, stages - s),
    "dualpipev": lambda m, s, stages: min(m, stages - s + 1),
}


def _interleaved(s: int, stages: int) -> int:
    lap, place = divmod(s, stages // 2)
    return stages // 2 if lap else stages - 2 * place


def repeats(schedule: str, microbatches: int) -> tuple[float, float]:
    """Weights of the largest load and of the sum over stages: m - 1 / V and 1 / V."""
    share = 1.0 / SCHEDULES[schedule].stages_per_process
    return microbatches - share, share


def fill_time(schedule: str, time: NodeTime) -> float:
    """What a node adds to the time of the first microbatch through all stages."""
    if SCHEDULES[schedule].splits_backward:
        return time.forward_s + time.backward_input_s
    return time.forward_s + time.backward_s
