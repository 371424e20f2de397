"""Tables of profiles: the operators of one by kind, and the calls of two side by side."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from autopart.profiler.keys import operator_of
from autopart.profiler.measurement import STANDARD_ERROR
from autopart.text import printable

if TYPE_CHECKING:
    from autopart.profiler.profile_file import Entry, Profile


def format_profile(profile: Profile) -> str:
    """Kinds of operators: how many calls and different ones, milliseconds forward and backward, share of the whole."""
    kinds: dict[str, list[Entry]] = defaultdict(list)
    for key, entry in profile.entries.items():
        kinds[operator_of(key)].append(entry)
    whole = sum(entry.seconds for entry in profile.entries.values())
    order = sorted(kinds, key=lambda kind: (-sum(entry.seconds for entry in kinds[kind]), kind))
    rows = [_row(kind, kinds[kind], whole) for kind in order]
    rows.append(_row("all", list(profile.entries.values()), whole))
    device, rows_of_one = profile.device, profile.microbatch_size
    how = f"{profile.source} for" if profile.source == "analytic" else "measured on"
    lines = [
        f"{profile.model}, {how} {device.name}"
        + (f" ({device.model})" if device.model != device.name else "")
        + (f", one microbatch of {rows_of_one} {'row' if rows_of_one == 1 else 'rows'}" if rows_of_one else ""),
        "",
        tabulate(rows, headers="keys", floatfmt=".4g"),
        "",
        *_remarks(profile),
        *(f"Note: {note}" for note in profile.notes),
    ]
    return printable("\n".join(lines))


def _row(kind: str, entries: list[Entry], whole: float) -> dict[str, str | int | float]:
    forward, own = sum(e.count * e.time.forward_s for e in entries), sum(e.seconds for e in entries)
    return {
        "operator": kind,
        "calls": sum(e.count for e in entries),
        "distinct": len(entries),
        "forward ms": 1e3 * forward,
        "backward ms": 1e3 * (own - forward),
        "share": f"{own / whole if whole else 0.0:.1%}",
        "spread": f"{max((e.time.spread for e in entries), default=0.0):.0%}",
    }


def _remarks(profile: Profile) -> list[str]:
    """What the columns mean, and how far the times are known."""
    whole = sum(entry.count for entry in profile.entries.values())
    sums = sum(entry.count for key, entry in profile.entries.items() if _adds_gradients(key, entry))
    found = []
    if sums:
        found.append(
            f"calls: {whole - sums} of the model's operators, and {sums} that add up gradients in backward "
            "(aten.add_): of each weight into .grad, and of values with several readers. The optimizer has none here."
        )
    if profile.source == "measured":
        found.append(
            "spread: the middle half of the runs of one call, over their median; the largest of the row. "
            "The times are medians."
        )
    unknown = [entry.time.error or 0.0 for entry in profile.entries.values() if not entry.time.known]
    if unknown:
        found.append(
            f"{len(unknown)} of {len(profile.entries)} distinct calls reached the limit of time or runs before their "
            f"median was known to {STANDARD_ERROR:.0%} (the worst to {max(unknown):.0%}). "
            "On an idle machine, measure again: --again."
        )
    return found


def _adds_gradients(key: str, entry: Entry) -> bool:
    return operator_of(key) == "aten.add_" and not entry.forward and bool(entry.backward)


def format_diff(before: Profile, after: Profile, limit: int = 40) -> str:
    """Calls of two profiles, those first whose times differ most in sum; `ratio` is after / before.

    Args:
        limit: Most calls to show.
    """
    both = before.entries.keys() & after.entries.keys()
    order = sorted(both, key=lambda key: (-abs(_moved(before, after, key)), key))
    sums = [sum(p.entries[key].seconds for key in both) for p in (before, after)]
    rows = [_pair(key, before.entries[key], after.entries[key]) for key in order[:limit]]
    rows.append({"call": f"all {len(both)} of both", **_milliseconds(*sums)})
    lines = [
        f"before: {before.model}, {before.source}, {before.device.name} ({before.device.model})",
        f"after:  {after.model}, {after.source}, {after.device.name} ({after.device.model})",
        "",
        tabulate(rows, headers="keys", floatfmt=".4g"),
    ]
    if len(order) > limit:
        lines.append(f"{len(order) - limit} more calls are not shown; they are part of the sum.")
    for profile, name, other in ((before, "before", after), (after, "after", before)):
        alone = profile.entries.keys() - other.entries.keys()
        if alone:
            ms = 1e3 * sum(profile.entries[key].seconds for key in alone)
            lines.append(f"{len(alone)} calls are in '{name}' alone ({ms:.4g} ms).")
    return printable("\n".join(lines))


def diff_as_data(before: Profile, after: Profile) -> dict[str, Any]:
    """The calls of both, with the seconds of all calls in each."""
    both = sorted(before.entries.keys() & after.entries.keys())
    return {
        "schema": "autopart-profile-diff/1",
        "calls": {key: [before.entries[key].seconds, after.entries[key].seconds] for key in both},
        "only_before": sorted(before.entries.keys() - after.entries.keys()),
        "only_after": sorted(after.entries.keys() - before.entries.keys()),
    }


def _moved(before: Profile, after: Profile, key: str) -> float:
    return after.entries[key].seconds - before.entries[key].seconds


def _pair(key: str, before: Entry, after: Entry) -> dict[str, str | int | float]:
    return {"call": key, "count": after.count, **_milliseconds(before.seconds, after.seconds)}


def _milliseconds(before: float, after: float) -> dict[str, str | float]:
    ratio = f"{after / before:.3g}" if before else "-"
    return {"before ms": 1e3 * before, "after ms": 1e3 * after, "ratio": ratio}
