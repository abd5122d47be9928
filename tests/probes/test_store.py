"""The store: append-only, safe under several writers and crashes, nothing lost silently."""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fault_worker import measured
from moved_clock import PATIENCE_S, becomes

from planner.core.errors import ConfigError, EnvironmentProblem, UsageError
from planner.setup import TrainSetup
from planner.setup.codec import BadOutcome
from planner.setup.interchange import setup_to_dict
from planner.setup.outcome import FailureKind, Fidelity, ProbeFailure
from probes import store as store_module
from probes.fingerprint import conditions_digest, fingerprint
from probes.gpu.environment import read_environment
from probes.gpu.evaluate import record_of
from probes.gpu.request import Limits, ProbeRequest
from probes.store import Record, Store, StoreWarning, decode_line, encode_line

TESTS = Path(__file__).parent


def request(**changes: object) -> ProbeRequest:
    return ProbeRequest(
        **{"model_id": "tiny", "config": {"model_type": "llama"}, "setup": TrainSetup(), "device": "cpu", **changes}  # type: ignore[arg-type]
    )


def record(key: str = "k", step_s: float = 0.5) -> Record:
    return Record(
        key=key,
        model_id="tiny",
        config_digest="d",
        setup=setup_to_dict(TrainSetup()),
        request={"limits": {"time_s": 10.0}},
        outcome=measured(request(), step_s=step_s),
        recorded_at="2026-11-21T00:00:00+00:00",
    )


def failed(kind: FailureKind, key: str = "k", time_s: float = 10.0, log: str = "a") -> Record:
    outcome = ProbeFailure(level=Fidelity.PROBE, kind=kind, message="m", log_path=log)
    return replace(record(key), outcome=outcome, request={"limits": {"time_s": time_s}})


def test_record_survives_its_line_and_any_changed_byte_is_noticed() -> None:
    line = encode_line(record())
    assert decode_line(line) == record()
    rng = random.Random(0)
    for _ in range(200):
        at = rng.randrange(len(line) - 1)
        changed = bytearray(line)
        changed[at] ^= 1 << rng.randrange(7)
        try:
            decoded = decode_line(bytes(changed))
        except BadOutcome:
            continue
        assert decoded == record()  # a change that JSON does not see (white space) is no damage


def test_store_appends_and_a_second_reader_sees_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "store.jsonl"
    first, second = Store(path), Store(path)
    assert first.get("a") is None
    first.append(record("a"))
    second.append(record("b", 0.25))
    assert [entry.key for entry in first.records()] == ["a", "b"]
    assert second.get("a") == record("a")
    first.append(record("a", 0.75))
    stored = second.get("a")
    assert stored.outcome == record("a", 0.75).outcome  # the last one holds, whatever its clock says
    assert [entry.key for entry in second.latest()] == ["a", "b"]


def test_order_is_the_file_s_not_the_clock_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes backwards between two writers changes neither what is stored nor which record holds."""
    texts = iter(["2026-11-21T10:00:00+00:00", "2001-01-01T00:00:00+00:00"])
    monkeypatch.setattr(store_module, "now_text", lambda: next(texts))
    store = Store(tmp_path / "s.jsonl")
    store.append(replace(record(step_s=1.0), recorded_at=store_module.now_text()))
    store.append(replace(record(step_s=2.0), recorded_at=store_module.now_text()))
    stored = Store(tmp_path / "s.jsonl").get("k")
    assert stored.recorded_at.startswith("2001")
    assert stored.outcome == record(step_s=2.0).outcome


@pytest.mark.parametrize("damage", ["flip", "cut", "binary", "json"])
def test_damaged_line_is_skipped_and_told(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    lines = [encode_line(record(key)) for key in "abc"]
    bad = {
        "flip": lines[1].replace(b"0.5", b"0.6", 1),
        "cut": lines[1][:40] + b"\n",
        "binary": b"\x00\xff\xfe garbage\n",
        "json": b'{"hello": 1}\n',
    }[damage]
    path.write_bytes(lines[0] + bad + lines[2])
    store = Store(path)
    with pytest.warns(StoreWarning, match="1 damaged line"):
        assert [entry.key for entry in store.records()] == ["a", "c"]
    assert len(store.records()) == 2  # told once
    assert path.read_bytes() == lines[0] + bad + lines[2]  # the store itself is never rewritten


def test_torn_last_line_is_closed_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(encode_line(record("a")) + encode_line(record("b"))[:60])
    store = Store(path)
    with pytest.warns(StoreWarning, match="torn"):
        assert [entry.key for entry in store.records()] == ["a"]
    store.append(record("c"))
    assert [entry.key for entry in store.records()] == ["a", "c"]
    with pytest.warns(StoreWarning):
        assert [entry.key for entry in Store(path).records()] == ["a", "c"]


def test_line_that_lacks_only_its_newline_is_read(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(encode_line(record("a")).rstrip(b"\n"))
    store = Store(path)
    assert [entry.key for entry in store.records()] == ["a"]
    store.append(record("b"))
    assert [entry.key for entry in store.records()] == ["a", "b"]
    assert [entry.key for entry in Store(path).records()] == ["a", "b"]


WRITER = textwrap.dedent("""
    import sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    from test_store import record
    from probes.store import Store
    store = Store(Path(sys.argv[2]))
    for index in range(int(sys.argv[4])):
        store.append(record(f"{sys.argv[3]}-{index}"))
""")


def writer(path: Path, name: str, num: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", WRITER, str(TESTS), str(path), name, str(num)])


@pytest.mark.processes
def test_two_writers_on_one_store_lose_nothing(tmp_path: Path) -> None:
    path, num = tmp_path / "s.jsonl", 60
    for child in [writer(path, "a", num), writer(path, "b", num)]:
        assert child.wait(PATIENCE_S) == 0
    keys = [entry.key for entry in Store(path).records()]
    assert sorted(keys) == sorted(f"{name}-{index}" for name in "ab" for index in range(num))


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore::probes.store.StoreWarning")
def test_writers_killed_at_random_moments_lose_at_most_the_line_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    rng = random.Random(1)
    for round_ in range(4):
        child = writer(path, f"r{round_}", 100_000)
        key = f"r{round_}"
        assert becomes(lambda key=key: any(entry.key.startswith(key) for entry in Store(path).records()))
        time.sleep(rng.uniform(0.0, 0.1))
        child.send_signal(signal.SIGKILL)
        child.wait(PATIENCE_S)
    records = Store(path).records()
    for round_ in range(4):
        numbers = [int(entry.key.split("-")[1]) for entry in records if entry.key.startswith(f"r{round_}-")]
        assert numbers == list(range(len(numbers)))  # no gap: every earlier line is there and whole
        assert numbers


FULL_DISK = textwrap.dedent("""
    import resource, sys, warnings
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    from test_store import record
    from probes.store import Store, StoreWarning
    path = Path(sys.argv[2])
    store = Store(path)
    store.append(record("before"))
    size = path.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + size // 2, resource.RLIM_INFINITY))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        where = store.append(record("full"))
    assert where != path and where == store.fallback_path, where
    assert any(issubclass(one.category, StoreWarning) and str(where) in str(one.message) for one in told)
    assert path.stat().st_size == size, "a half-written line was left"
    assert store.get("full") is not None, "lost in memory"
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.append(record("after"))
    assert store.merge(where) == (1, 0)
    assert [one.key for one in Store(path).records()] == ["before", "after", "full"]
""")


def test_full_disk_keeps_the_measurement_in_memory_and_beside(tmp_path: Path) -> None:
    """The kernel refuses the second half of a line (EFBIG from RLIMIT_FSIZE, as ENOSPC from a full disk)."""
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    command = [sys.executable, "-c", FULL_DISK, str(TESTS), str(tmp_path / "s.jsonl")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_device_that_is_always_full_is_refused_with_a_message() -> None:
    with pytest.raises(EnvironmentProblem, match="/dev/full"):
        Store(Path("/dev/full")).records()


READ_ONLY = textwrap.dedent("""
    import os, sys, warnings
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    from test_store import record
    from probes.store import Store, StoreWarning
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    store = Store(Path(sys.argv[2]))
    assert [one.key for one in store.records()] == ["a"]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        where = store.append(record("b"))
    assert where == store.fallback_path, where
    assert "cannot be written" in str(told[-1].message)
    assert [one.key for one in store.records()] == ["a", "b"]
""")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user reaches; pytest's are private to root, and each new run makes them so again."""
    folder = Path(tempfile.mkdtemp(prefix="store-", dir=os.environ["PYTEST_DEBUG_TEMPROOT"]))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_read_only_store_is_read_and_new_records_go_beside(open_folder: Path) -> None:
    folder = open_folder / "ro"
    folder.mkdir()
    path = folder / "s.jsonl"
    Store(path).append(record("a"))
    path.chmod(0o444)
    folder.chmod(0o555)
    scratch = open_folder / "scratch"
    scratch.mkdir(mode=0o777)
    scratch.chmod(0o777)
    environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", READ_ONLY, str(TESTS), str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    folder.chmod(0o755)
    assert done.returncode == 0, done.stderr


def test_nowhere_to_write_is_an_environment_problem_and_memory_still_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    store = Store(blocker / "s.jsonl")
    monkeypatch.setattr(Store, "fallback_path", blocker / "fallback.jsonl")
    with pytest.raises(EnvironmentProblem, match="neither"):
        store.append(record("a"))
    assert store.get("a") is not None


def test_reusable_follows_what_stays_true(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.jsonl")
    for kind in (FailureKind.OUT_OF_MEMORY, FailureKind.UNSUPPORTED):
        store.append(failed(kind, key=kind.value))
        assert store.reusable(kind.value) is not None
    store.append(failed(FailureKind.TIMEOUT, key="t", time_s=10))
    assert store.reusable("t", time_s=10) is not None
    assert store.reusable("t", time_s=60) is None  # a longer limit may be enough
    store.append(failed(FailureKind.CRASHED, key="c", log="1"))
    assert store.reusable("c") is None  # once may be bad luck
    store.append(failed(FailureKind.CRASHED, key="c", log="2"))
    assert store.reusable("c") is not None
    store.append(record("c"))
    assert store.reusable("c") == record("c")
    shared = replace(record("d"), outcome=replace(measured(request()), flags=("device-shared",)))
    store.append(shared)
    assert store.reusable("d") is None  # alone on the GPU it is another measurement


def test_export_and_merge_round_trip(tmp_path: Path) -> None:
    store = Store(tmp_path / "a.jsonl")
    store.extend([record("a", 1.0), record("a", 2.0), record("b")])
    target = tmp_path / "out" / "export.jsonl"
    assert store.export(target) == 2
    other = Store(tmp_path / "b.jsonl")
    assert other.merge(target) == (2, 0)
    assert other.merge(target) == (0, 2)
    assert {entry.key: entry.outcome for entry in other.latest()} == {
        entry.key: entry.outcome for entry in store.latest()
    }
    with pytest.raises(EnvironmentProblem, match="no such file"):
        other.merge(tmp_path / "missing.jsonl")


def test_store_replaced_by_a_shorter_file_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    store = Store(path)
    store.extend([record("a"), record("b")])
    path.write_bytes(encode_line(record("z")))
    assert [entry.key for entry in store.records()] == ["z"]


def test_fingerprint_names_what_matters_and_nothing_else() -> None:
    environment = read_environment("cpu", None)
    digest = fingerprint(request(), environment)
    same = request(limits=Limits(time_s=1.0, measure_s=1.0), config={"model_type": "llama", "_name_or_path": "x"})
    assert fingerprint(same, environment) == digest
    others = [
        fingerprint(request(setup=TrainSetup(micro_batch_seqs=2)), environment),
        fingerprint(request(config={"model_type": "llama", "hidden_size": 3}), environment),
        fingerprint(request(depths=(0,)), environment),
        fingerprint(request(level=Fidelity.CONFIRM), environment),
        fingerprint(request(limits=Limits(memory_bytes=24 << 30)), environment),
        fingerprint(request(), replace(environment, gpu_name="another")),
        fingerprint(request(), replace(environment, libraries={**environment.libraries, "torch": "9.9"})),
    ]
    assert len({digest, *others}) == len(others) + 1
    assert fingerprint(request(), replace(environment, python="3.99")) == digest
    # a study's trials are kept apart by the same, but for the setup
    conditions = conditions_digest(request(), environment)
    assert conditions_digest(request(setup=TrainSetup(micro_batch_seqs=2)), environment) == conditions
    assert conditions_digest(request(config={"model_type": "llama", "hidden_size": 3}), environment) != conditions
    assert conditions_digest(request(), replace(environment, device="cuda")) != conditions


def test_fingerprint_names_driver_libraries_and_the_allocators_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a probe's child runs with: what every launch file sets, or what the user has set in its place."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    environment = read_environment("cuda:0", None)
    assert environment.settings["allocator"] == "expandable_segments:True"
    digest = fingerprint(request(), environment)
    others = [
        replace(environment, driver="other"),
        *(replace(environment, libraries={**environment.libraries, name: "9.9"}) for name in ("trl", "triton")),
        replace(environment, libraries={**environment.libraries, "accelerate": "9.9"}),
        replace(environment, settings={**environment.settings, "c_compiler": "another"}),
    ]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    others.append(read_environment("cuda:0", None))
    assert others[-1].settings["allocator"] == "max_split_size_mb:64"
    assert len({digest, *(fingerprint(request(), other) for other in others)}) == len(others) + 1


def test_record_of_a_request_is_stored_under_its_fingerprint() -> None:
    environment = read_environment("cpu", None)
    made = record_of(request(), environment, measured(request()))
    assert made.key == fingerprint(request(), environment)
    assert made.request["limits"] == {**made.request["limits"], "time_s": Limits().time_s}  # type: ignore[dict-item]


def line_of(body: dict[str, Any]) -> bytes:
    """A line whose checksum is right, whatever it says."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    checksum = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f'{{"sha256":"{checksum}","record":{text}}}\n'.encode()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("environment", []), ("step_times_s", [-0.5]), ("step_times_s", [0.0]), ("step_times_s", []),
        ("peak_device_bytes", -1), ("peak_allocated_bytes", 1.5), ("tokens_per_step", 0),
        ("phase_peaks_bytes", {"forward": -3}), ("outcome", "guess"), ("schema", 99),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::probes.store.StoreWarning")
def test_an_outcome_that_nothing_can_measure_costs_itself_only(field: str, value: object, tmp_path: Path) -> None:
    bad = json.loads(encode_line(record("bad")))["record"]
    bad["outcome"][field] = value
    path = tmp_path / "s.jsonl"
    path.write_bytes(encode_line(record("a")) + line_of(bad) + encode_line(record("b")))
    assert [entry.key for entry in Store(path).records()] == ["a", "b"]


def test_a_request_whose_limit_is_no_number_costs_itself_only(tmp_path: Path) -> None:
    for limits in ([], {"time_s": "long"}):
        bad = json.loads(encode_line(record("bad")))["record"]
        bad["request"]["limits"] = limits
        path = tmp_path / "s.jsonl"
        path.write_bytes(line_of(bad) + encode_line(record("a")))
        with pytest.warns(StoreWarning):
            assert [entry.key for entry in Store(path).records()] == ["a"]


def test_importing_a_file_that_no_store_wrote_is_an_error_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("# Read me\n\nNot a store.\n")
    with (
        pytest.warns(StoreWarning, match="damaged line"),
        pytest.raises(ConfigError, match="no line that a store wrote"),
    ):
        Store(tmp_path / "s.jsonl").merge(readme)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_a_store_that_cannot_be_written_takes_nothing_in_and_says_how_to_bring_a_measurement_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    Store(tmp_path / "from.jsonl").append(record())
    blocked = tmp_path / "from.jsonl" / "my store.jsonl"  # below a file, so that root cannot write it either
    with pytest.raises(EnvironmentProblem, match="nothing was added"):
        Store(blocked).merge(tmp_path / "from.jsonl")
    assert not list((tmp_path / "tmp").rglob("*.jsonl"))
    with pytest.warns(StoreWarning, match=re.escape(f"--store '{blocked}'`")):
        Store(blocked).append(record())


def test_a_store_is_not_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder from a stranger holds `measurements.jsonl -> ~/.bashrc`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    victim = tmp_path / "bashrc"
    victim.write_text("alias ll='ls -l'\n")
    (tmp_path / "s.jsonl").symlink_to(victim)
    with pytest.warns(StoreWarning, match="cannot be written"):
        where = Store(tmp_path / "s.jsonl").append(record())
    assert victim.read_text() == "alias ll='ls -l'\n"
    assert Store(where).get("k") is not None


@pytest.mark.parametrize("trap", ["link", "open"])
def test_the_fallback_lies_in_a_folder_of_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str
) -> None:
    """Another user made `finetune-planner-UID` first, with a link in the fallback's name."""
    tmp, victim = tmp_path / "tmp", tmp_path / "victim"
    tmp.mkdir()
    victim.write_text("mine")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp))
    folder = tmp / f"finetune-planner-{os.getuid()}"
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    store = Store(Path("/dev/null/no/s.jsonl"))
    name = store.fallback_path.name
    folder.rmdir()
    (outside / name).symlink_to(victim)
    if trap == "link":
        folder.symlink_to(outside)
    else:
        folder.mkdir()
        folder.chmod(0o777)
        (folder / name).symlink_to(victim)
    with pytest.warns(StoreWarning):
        where = store.append(record())
    assert victim.read_text() == "mine"
    assert where.parent.stat().st_mode & 0o777 == 0o700
    assert where.parent != folder


def test_reading_a_pipe_as_a_store_ends_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "s.jsonl")
    with pytest.raises(EnvironmentProblem, match="cannot read the store"):
        Store(tmp_path / "s.jsonl").records()


def test_an_export_onto_the_store_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text("")
    with pytest.raises(UsageError, match="is the store itself"):
        Store(tmp_path / "s.jsonl").export(tmp_path / "." / "s.jsonl")
