"""`autopipe simulate`: bytes of the simulated schedule, one measure per line, and a trace for Perfetto."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.stored_profiles import stored_profile

from autopipe.cli.main import autopipe
from autopipe.ir import artifact
from autopipe.ir.timeline import Timeline

# 16 microbatches: gpipe holds all of them, 1f1b two at most, of four layers with 1 MiB each
PLAN = ("--gpus", "2", "--link", "10GB/s", "--microbatch-size", "1", "--recompute", "never", "--schedule")
ROOMY = ("--gpu-memory", "8GiB")
TIGHT = ("--gpu-memory", "40MiB")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command in a folder with a profile and no model file."""
    monkeypatch.chdir(tmp_path)
    artifact.save(stored_profile(), Path(".autopipe/profile.json"))

    def call(*args, code=0):
        done = CliRunner().invoke(autopipe, args)
        assert done.exit_code == code, done.output
        return done

    return call


def peaks(document):
    return [stage["peak_bytes"] for stage in document["stages"]]


def test_the_bytes_are_those_of_the_simulated_schedule(run):
    planned = json.loads(run("plan", *PLAN, "gpipe", *ROOMY, "--json").stdout)
    other = json.loads(run("plan", *PLAN, "1f1b", *ROOMY, "--json").stdout)
    assert [stage["first"] for stage in planned["stages"]] == [stage["first"] for stage in other["stages"]]
    document = json.loads(run("simulate", "--schedule", "gpipe", "--json").stdout)
    assert document["peak_bytes"] == peaks(document) == peaks(planned)
    assert min(peaks(planned)) > 2 * max(peaks(other))
    assert (document["fits"], document["memory_bytes"]) == (True, [8 * 2**30] * 2)
    timeline = artifact.load(Timeline, Path(document["path"]), renew="")
    assert list(timeline.peak_bytes) == peaks(planned)


def test_the_schedule_of_the_plan_has_the_planned_bytes(run):
    planned = json.loads(run("plan", *PLAN, "1f1b", *TIGHT, "--json").stdout)
    done = run("simulate", "--json")
    assert peaks(json.loads(done.stdout)) == peaks(planned)
    assert "next: autopipe train\n" in done.stderr


def test_a_schedule_that_does_not_fit_is_reported_and_not_suggested(run):
    run("plan", *PLAN, "1f1b", *TIGHT)
    done = run("simulate", "--schedule", "gpipe")
    assert re.search(
        r"warning: it does not fit: with gpipe rank \d needs .* MiB, and the plan is for devices of 40\.0 MiB, "
        r".* MiB less \(so it is on 1 other rank too\)",
        done.stderr,
    )
    assert "autopipe train" not in done.stderr
    assert "next: autopipe plan --schedule gpipe, with the --gpus and the memory of this plan" in done.stderr
    assert done.stdout.count("MiB too much") == 2
    document = json.loads(run("simulate", "--schedule", "gpipe", "--json").stdout)
    assert (document["fits"], document["memory_bytes"], len(document["warnings"])) == (False, [40 * 2**20] * 2, 1)


def test_the_simulated_schedule_is_in_the_suggested_command(run):
    run("plan", *PLAN, "1f1b", *ROOMY)
    done = run("simulate", "--schedule", "pipedream", "--vertical-sync", "--warmup-depth", "2")
    assert "next: autopipe train --schedule pipedream --vertical-sync --warmup-depth 2\n" in done.stderr


def seconds(line):
    number, unit = re.search(r"([\d.]+) (s|ms)\b", line).groups()
    return float(number) * {"s": 1, "ms": 1e-3}[unit]


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream", "2bw"])
def test_the_rate_belongs_to_the_step_time_on_its_line(run, schedule):
    run("plan", *PLAN, schedule, *ROOMY)
    lines = run("simulate").stdout.splitlines()
    (line,) = [text for text in lines if text.startswith("simulated:")]
    rate = float(re.search(r"([\d.]+) samples/s", line)[1])
    assert rate * seconds(line) == pytest.approx(16, rel=0.01)
    document = json.loads(run("simulate", "--json").stdout)
    assert document["predicted"]["step_seconds"] == pytest.approx(seconds(line), rel=0.01)
    first = [text for text in lines if text.startswith("the first minibatch alone")]
    if schedule == "1f1b":
        assert (document["timeline_of"], first) == ("a step", [])
        assert document["seconds"] == pytest.approx(document["predicted"]["step_seconds"])
    else:
        assert document["timeline_of"] == "the first minibatch alone"
        assert seconds(first[0]) == pytest.approx(document["seconds"], rel=0.01)
        assert document["seconds"] > document["predicted"]["step_seconds"]


def test_a_trace_for_perfetto_has_the_spans_of_the_timeline(run):
    run("plan", *PLAN, "1f1b", *ROOMY)
    assert "--trace FILE" in run("simulate").stderr
    done = run("simulate", "--schedule", "gpipe", "--trace", "gpipe.json")
    assert "gpipe.json, which ui.perfetto.dev opens" in done.stderr
    events = json.loads(Path("gpipe.json").read_text())["traceEvents"]
    timeline = artifact.load(Timeline, Path(".autopipe/timeline.json"), renew="")
    assert len([event for event in events if event["ph"] == "X"]) == len(timeline.spans) > 0
    assert [event["args"]["bytes"] for event in events if event["ph"] == "C"] == list(timeline.peak_bytes)
    assert "cannot write gpipe.json" in run("simulate", "--trace", "/dev/null/gpipe.json", code=1).stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--vertical-sync",), "schedule 1f1b takes no --vertical-sync"),
        (("--schedule", "1f1b", "--warmup-depth", "3"), "schedule 1f1b takes no --warmup-depth"),
        (("--stages-per-rank", "2"), "schedule 1f1b takes no --stages-per-rank"),
        (("--schedule", "gpipe", "--vertical-sync"), "choose a schedule that does: pipedream"),
        (("--schedule", "2bw", "--warmup-depth", "65"), "--warmup-depth 65 is out of range: it runs from 1 to 64"),
    ],
)
def test_messages_name_options_as_typed(run, args, message):
    run("plan", *PLAN, "1f1b", *ROOMY)
    done = run("simulate", *args, code=1)
    assert message in done.stderr
    assert "vertical_sync" not in done.stderr
    assert "'depth'" not in done.stderr


@pytest.mark.parametrize("version", [0, 99])
def test_a_profile_of_another_version_is_refused_as_such(run, version):
    path = Path(".autopipe/profile.json")
    path.write_text(path.read_text().replace('"schema_version": 1', f'"schema_version": {version}'))
    done = run("plan", "--gpus", "2", code=1)
    text = f"profile.json was written by another version of autopipe: it is a Profile of format {version}"
    assert text in done.stderr
    assert "try: autopipe profile TARGET" in done.stderr
