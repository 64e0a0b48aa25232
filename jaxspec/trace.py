"""Reading what JAX's profiler wrote of one program: which operation ran when, device by device.

On a CPU the profiler notes each operation on the thread that runs it; on a GPU each kernel on its
stream, with the operation that it is of. The second has not met a GPU here: it is tested with a
profile made by hand, after what XLA's CUPTI collector writes (xla/backends/profiler/gpu).
"""

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jax.profiler import ProfileData

__all__ = ["Event", "Span", "add_track", "count_events", "profile_files", "read_events", "spans"]

_TRACK = "jaxspec phases"


class Event(NamedTuple):
    """An operation at work.

    Attributes:
      start_ns, end_ns: since the profile began.
      operation: name of the instruction; None for what a GPU did without saying for which.
    """

    start_ns: float
    end_ns: float
    operation: str | None


class Span(NamedTuple):
    """A stretch of a device's time in which the same operations ran.

    Attributes:
      operations: those that ran; where none did, the one that was waited for.
      is_idle: none ran.
    """

    start_ns: float
    end_ns: float
    operations: tuple[str | None, ...]
    is_idle: bool


def profile_files(directory: Path) -> tuple[Path, Path]:
    """What the profiler left of its only run: events for XProf, and a trace for Perfetto."""
    (events,) = directory.rglob("*.xplane.pb")
    (trace,) = directory.rglob("*.trace.json.gz")
    return events, trace


def read_events(xplane: Path, module: str) -> dict[str, list[Event]]:
    """The events of a program, by device.

    Args:
      xplane: what the profiler left for XProf.
      module: the program's name. All that a GPU did is taken for it, since nothing else runs.
    """
    found: dict[str, list[Event]] = {}
    for plane in ProfileData.from_file(str(xplane)).planes:
        is_gpu = plane.name.startswith("/device:GPU:")
        for line in plane.lines:
            # Other lines of a GPU say the same again, as modules and frameworks see it.
            if is_gpu and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = dict(event.stats)
                if not is_gpu and stats.get("hlo_module") != module:
                    continue
                device = plane.name if is_gpu else f"CPU {stats.get('device_ordinal', 0)}"
                end_ns = event.start_ns + event.duration_ns
                name = stats.get("hlo_op")
                found.setdefault(device, []).append(
                    Event(event.start_ns, end_ns, None if name is None else str(name))
                )
    return found


def count_events(xplane: Path) -> tuple[Counter[str], Counter[str]]:
    """What a CPU's threads noted of each program: its operations, and all events while it ran,
    those between operations too: their ends, and what threads told each other."""
    operations, events = Counter(), Counter()
    for plane in ProfileData.from_file(str(xplane)).planes:
        for line in plane.lines:
            latest = None
            for event in sorted(line.events, key=lambda event: event.start_ns):
                if (ran := dict(event.stats).get("hlo_module")) is not None:
                    latest = ran
                    operations[ran] += 1
                if latest is not None:
                    events[latest] += 1
    return operations, events


def spans(events: Sequence[Event], runs_others: Callable[[str | None], bool]) -> Iterator[Span]:
    """The time from the first event's start to the last one's end, cut where something changes.

    Args:
      runs_others: whether an operation only runs others, as a loop does: its own events stand
        around theirs, and count for nothing here.

    Raises:
      ValueError: nothing ran.
    """
    leaves = [e for e in events if e.end_ns > e.start_ns and not runs_others(e.operation)]
    if not leaves:
        raise ValueError("the profile has no operation of the program")
    edges = [(e.start_ns, True, index) for index, e in enumerate(leaves)]
    edges += [(e.end_ns, False, index) for index, e in enumerate(leaves)]
    now, running = min(e.start_ns for e in events), {}
    for at, is_start, index in sorted(edges):
        if at > now:
            operations = tuple(running.values()) or (leaves[index].operation,)
            yield Span(now, at, operations, is_idle=not running)
            now = at
        if is_start:
            running[index] = leaves[index].operation
        else:
            del running[index]
    end_ns = max(e.end_ns for e in events)
    if end_ns > now:
        last = max(leaves, key=lambda e: e.end_ns)
        yield Span(now, end_ns, (last.operation,), is_idle=True)


def add_track(directory: Path, tracks: Mapping[str, Iterable[tuple[float, float, str]]]) -> None:
    """Adds tracks to both files of a profile, by device: what went on from when to when, in ns."""
    stretches = {device: list(track) for device, track in tracks.items()}
    xplane, trace = profile_files(directory)
    with xplane.open("ab") as file:
        # Two messages one after the other are one message with the planes of both.
        file.write(ProfileData.text_proto_to_serialized_xspace(_plane(stretches)))
    shown = json.loads(gzip.decompress(trace.read_bytes()))
    pid = 1 + max((event.get("pid", 0) for event in shown["traceEvents"]), default=0)
    added = [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": _TRACK}}]
    for tid, (device, track) in enumerate(stretches.items()):
        name = {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": device}}
        added.append(name)
        added += [
            {"ph": "X", "pid": pid, "tid": tid, "name": what, "ts": a / 1e3, "dur": (b - a) / 1e3}
            for a, b, what in track
        ]
    shown["traceEvents"] += added
    trace.write_bytes(gzip.compress(json.dumps(shown).encode(), compresslevel=1))


def _plane(tracks: Mapping[str, Sequence[tuple[float, float, str]]]) -> str:
    """A plane of XProf's with these tracks, in protobuf's text form."""
    names = sorted({what for track in tracks.values() for _, _, what in track})
    lines = []
    for index, (device, track) in enumerate(tracks.items()):
        events = "".join(
            f"events {{ metadata_id: {1 + names.index(what)} offset_ps: {round(1e3 * a)} "
            f"duration_ps: {round(1e3 * (b - a))} }}\n"
            for a, b, what in track
        )
        lines.append(f'lines {{ id: {index} name: "{device}"\n{events}}}\n')
    named = "".join(
        f'event_metadata {{ key: {index} value {{ id: {index} name: "{name}" }} }}\n'
        for index, name in enumerate(names, 1)
    )
    # XProf shows planes that others add under names of this form.
    return f'planes {{ name: "/device:CUSTOM:{_TRACK}"\n{"".join(lines)}{named}}}'
