"""`trace` reads a CPU's and a GPU's profile, cuts a device's time into spans, and adds tracks.

No GPU is here: its profile is made by hand, with the planes, lines and stats of XLA's collector.
"""

import gzip
import json

import pytest
from jax.profiler import ProfileData

from jaxspec.phases import LOOP, PARTS, part_of, phase_of
from jaxspec.trace import Event, Span, add_track, count_events, read_events, spans

STATS = """
stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
stat_metadata { key: 2 value { id: 2 name: "hlo_module" } }
stat_metadata { key: 3 value { id: 3 name: "device_ordinal" } }
stat_metadata { key: 4 value { id: 4 name: "jit_step" } }
stat_metadata { key: 5 value { id: 5 name: "jit_other" } }
stat_metadata { key: 6 value { id: 6 name: "dot.1" } }
event_metadata { key: 1 value { id: 1 name: "sm90_gemm" } }
"""


def event(start_us, took_us, *, module=4, op=True, device=0):
    name = "stats { metadata_id: 1 ref_value: 6 }" if op else ""
    return f"""events {{ metadata_id: 1 offset_ps: {start_us * 10**6} duration_ps: {took_us * 10**6}
      stats {{ metadata_id: 2 ref_value: {module} }} {name}
      stats {{ metadata_id: 3 uint64_value: {device} }} }}"""


def written(tmp_path, *planes):
    text = "".join(f"planes {{ {plane} {STATS} }}" for plane in planes)
    path = tmp_path / "vm.xplane.pb"
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return path


def test_a_gpus_streams_are_read_and_its_summaries_are_not(tmp_path):
    stream = f'lines {{ name: "Stream #13(Compute)" {event(10, 5)} {event(20, 5, op=False)} }}'
    other = f'lines {{ name: "Stream #20(MemcpyH2D)" timestamp_ns: 1000 {event(30, 5)} }}'
    again = f'lines {{ name: "XLA Modules" {event(0, 99)} }}'
    host = f'name: "/host:CPU" lines {{ name: "python" {event(0, 99, module=5)} }}'
    gpus = (f'name: "/device:GPU:{i}" {stream} {other} {again}' for i in range(2))
    found = read_events(written(tmp_path, host, *gpus), "jit_step")
    events = [Event(10e3, 15e3, "dot.1"), Event(20e3, 25e3, None), Event(31e3, 36e3, "dot.1")]
    assert found == {"/device:GPU:0": events, "/device:GPU:1": events}


def test_of_a_cpu_only_the_program_is_read(tmp_path):
    line = f"{event(0, 1)} {event(2, 1, module=5)} {event(4, 1, device=1)}"
    cpu = f'name: "/host:CPU" lines {{ name: "t" {line} }}'
    found = read_events(written(tmp_path, cpu), "jit_step")
    assert found == {"CPU 0": [Event(0, 1e3, "dot.1")], "CPU 1": [Event(4e3, 5e3, "dot.1")]}


def test_events_are_of_the_program_that_the_thread_runs(tmp_path):
    """Whatever the order in which they were written down; those before the first are of none."""
    between = "".join(
        f"events {{ metadata_id: 1 offset_ps: {at * 10**6} }}" for at in (0, 2, 3, 5, 7)
    )
    line = f"{between} {event(6, 1)} {event(1, 1)} {event(4, 1, module=5)}"
    other = event(9, 1, module=5)
    cpu = f'name: "/host:CPU" lines {{ name: "t" {line} }} lines {{ name: "u" {other} }}'
    operations, events = count_events(written(tmp_path, cpu))
    assert (events["jit_step"], events["jit_other"], events["jit_none"]) == (5, 3, 0)
    assert operations == {"jit_step": 2, "jit_other": 2}


def test_every_instant_is_in_one_span():
    """The loop stands around all; b and c overlap; nothing runs before a, between, and after."""
    events = [
        Event(0, 100, "loop"),
        Event(10, 20, "a"),
        Event(50, 70, "c"),
        Event(40, 60, "b"),
        Event(65, 65, "no time"),
    ]
    assert list(spans(events, lambda name: name == "loop")) == [
        Span(0, 10, ("a",), True),
        Span(10, 20, ("a",), False),
        Span(20, 40, ("b",), True),
        Span(40, 50, ("b",), False),
        Span(50, 60, ("b", "c"), False),
        Span(60, 70, ("c",), False),
        Span(70, 100, ("c",), True),
    ]


def test_a_profile_without_operations_is_refused():
    with pytest.raises(ValueError, match="no operation"):
        list(spans([Event(0, 9, "loop")], lambda name: True))


def test_a_track_is_in_both_files(tmp_path):
    folder = tmp_path / "plugins" / "profile" / "run"
    folder.mkdir(parents=True)
    xplane = written(folder, f'name: "/host:CPU" lines {{ name: "t" {event(0, 1)} }}')
    shown = {"traceEvents": [{"ph": "X", "pid": 7, "tid": 1, "name": "dot.1", "ts": 0, "dur": 1}]}
    (folder / "vm.trace.json.gz").write_bytes(gzip.compress(json.dumps(shown).encode()))
    track = [(1000.0, 3000.0, "verify/experts"), (3000.0, 3500.0, "accept")]

    add_track(tmp_path, {"CPU 0": track})

    old, new = ProfileData.from_file(str(xplane)).planes
    assert (old.name, new.name) == ("/host:CPU", "/device:CUSTOM:jaxspec phases")
    (line,) = new.lines
    found = [(e.start_ns, e.start_ns + e.duration_ns, e.name) for e in line.events]
    assert (line.name, found) == ("CPU 0", track)
    events = json.loads(gzip.decompress((folder / "vm.trace.json.gz").read_bytes()))["traceEvents"]
    assert events[0] == shown["traceEvents"][0]
    added = [(e["name"], e["ts"], e["dur"]) for e in events[1:] if e["ph"] == "X"]
    assert added == [("verify/experts", 1.0, 2.0), ("accept", 3.0, 0.5)]
    assert all(e["pid"] == 8 for e in events[1:])


@pytest.mark.parametrize(
    ("scopes", "phase", "part"),
    [
        (["jit(traced)/while/body/verify/while/body/attention/dot"], "verify", "verify/attention"),
        (["jit(f)/while/body/verify/while/body/slice"], "verify", "verify/rest"),
        # An operation of the compiler's own has no name: the loop around it has one.
        (["jit(f)/while/body/propose/levels/while", ""], "propose", "propose/levels"),
        # A body that equal loops share keeps one's names: the loop itself decides.
        (["jit(f)/extend/while", "jit(f)/propose/levels/while/body/dot"], "extend", "extend"),
        # Merged operations: the first one's.
        (["jit(f)/verify/head/dot;jit(f)/accept/dot"], "verify", "verify/head"),
        # The draft has a head, and attention, too, that are no parts of its phases.
        (["jit(f)/propose/head/dot"], "propose", "propose/rest"),
        (["jit(f)/while/cond/lt"], LOOP, LOOP),
        ([], LOOP, LOOP),
    ],
)
def test_phases_by_scope(scopes, phase, part):
    assert (phase_of(scopes), part_of(scopes)) == (phase, part) and part in PARTS
