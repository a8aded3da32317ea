"""The command line without a model: names, options, errors, exit codes, settings."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from autopipe import __version__
from autopipe.cli.main import COMMANDS, autopipe
from autopipe.commands.training import runs
from autopipe.report.results import CheckReport, TrainResult

ROOT = Path(__file__).resolve().parents[3]
REPORT = CheckReport(True, True, 0.0, ())
RESULT = TrainResult((2.5, 1.5), 2, 3.0, 21.3, 2, "1f1b", 2, "runs/a", "runs/a/checkpoints/step-2")


@pytest.fixture
def checked(monkeypatch):
    """Replace the check by a function that keeps its settings."""
    seen = []
    monkeypatch.setattr(runs, "check", lambda settings, progress: seen.append(settings) or REPORT)
    return seen


@pytest.fixture
def trained(monkeypatch):
    seen = []

    def train(settings, events, rendezvous=None):
        seen.append(settings)
        return RESULT

    monkeypatch.setattr(runs, "train", train)
    return seen


# -- names, options, help ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_every_command_has_help_under_both_names(run, name):
    short, long = (run(*filter(None, [name, option])) for option in ("-h", "--help"))
    assert short.exit_code == long.exit_code == 0
    assert short.stdout == long.stdout != ""


def test_the_list_of_commands_shows_the_help_of_each_command(run):
    for name, (_, text) in COMMANDS.items():
        assert text in run("--help").stdout
        assert autopipe.get_command(click.Context(autopipe), name) is not None


@pytest.mark.parametrize("name", ["profile", "plan", "generate", "check", "train", "eval", "export"])
def test_help_of_commands_that_load_a_model_file_says_that_its_code_runs(run, name):
    assert "is code, and it is run" in " ".join(run(name, "--help").stdout.split())


@pytest.mark.parametrize(
    ("name", "options"),
    {
        "profile": "--device --microbatch-sizes --arg --input --loss --data --eval-data --optimizer --lr --json",
        "plan": "--gpus --batch-size --schedule --cluster --gpu-memory --link --microbatch-size --recompute "
        "--explain --json",
        "check": "--gpus --schedule --steps --json",
        "simulate": "--schedule --json",
        "train": "--gpus --schedule --device --batch-size --num-microbatches --steps --epochs --seed --lr --precision "
        "--clip-grad-norm --checkpoint-every --resume --launcher --hosts --run-dir --threads-per-rank --json",
        "export": "-o --json",
    }.items(),
)
def test_the_documented_options_exist(run, name, options):
    shown = run(name, "--help-all" if name not in ("simulate", "export") else "--help").stdout
    assert [option for option in options.split() if f"{option} " not in shown.replace(",", " ") + " "] == []


def test_the_version_is_that_of_the_package(run):
    assert run("--version").stdout == f"autopipe {__version__}\n"


def test_the_reference_page_equals_the_help_texts():
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "make_cli.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


# -- usage errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (["pln"], "Did you mean 'plan'?"),
        (["plan", "--schedule", "gpip"], "Did you mean 'gpipe'?"),
        (["plan", "--device", "cpuu"], "Did you mean 'cpu'?"),
        (["train", "--launcher", "slurn"], "Did you mean 'slurm'?"),
        (["plan", "--gpu-memory", "24 apples"], "unknown unit 'apples'"),
        (["plan", "--link", "25"], "write a bandwidth such as 10GB/s or 400Gbit/s"),
        (["plan", "--gpus", "0"], "gpus must be a whole number of at least 1, got 0"),
        (["plan", "--gpus", "two"], "gpus must be a whole number of at least 1, got 'two'"),
        (["train", "--max-restarts", "-1"], "max_restarts must be a whole number of at least 0, got -1"),
        (["plan", "--stages", "2"], "the number of stages is --gpus N --replicas never"),
        (["run", "x.py", "--stages", "2"], "the number of stages is --gpus N --replicas never\n"),
        (
            ["profile", "x.py", "--microbatch-sizes", "1,zero"],
            "a list of whole numbers of at least 1, such as 1,2,4",
        ),
        (["profile", "x.py", "--arg", "depth"], "'depth' is not name=value"),
        (["plan", "--num-microbatches", "4", "--microbatch-size", "2"], "exclude each other"),
        (["train", "--steps", "4", "--epochs", "2"], "--steps and --epochs exclude each other"),
        (["profile"], "Missing argument 'TARGET'"),
        (["plan", "--schedul", "gpipe"], "--schedule"),
        (["export"], "Missing option '-o'"),
    ],
)
def test_a_usage_error_has_exit_code_2_and_names_valid_values(run, args, shown):
    done = run(*args)
    assert done.exit_code == 2
    assert shown in done.stderr
    assert done.stdout == ""


def test_a_usage_error_is_a_document_with_json(run):
    done = run("plan", "--schedule", "gpip", "--json")
    assert done.exit_code == 2
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    assert "Did you mean 'gpipe'?" in document["error"]["what"]


def test_without_a_command_the_exit_code_is_2_and_help_is_suggested(run):
    done = run()
    assert done.exit_code == 2
    assert "autopipe --help lists all commands" in done.output
    assert "Commands:" in run("--help").output


# -- where an option comes from ----------------------------------------------------------------------------------------


def test_precedence_is_command_line_then_variable_then_file_then_default(run, checked):
    Path("autopipe.toml").write_text("gpus = 5\nlr = 0.5\n[check]\nsteps = 7\n")
    env = {"AUTOPIPE_GPUS": "4", "AUTOPIPE_CHECK_BATCH_SIZE": "9"}
    assert run("check", "x.py", "--gpus", "3", env=env).exit_code == 0
    assert run("check", "x.py", env=env).exit_code == 0
    assert run("check", "x.py").exit_code == 0
    Path("autopipe.toml").unlink()
    assert run("check", "x.py").exit_code == 0
    settings = [(s.plan.gpus, s.plan.batch_size, s.plan.profile.model.learning_rate, s.steps) for s in checked]
    assert settings == [(3, 9, 0.5, 7), (4, 9, 0.5, 7), (5, None, 0.5, 7), (None, None, None, None)]


def test_the_variable_of_a_command_overrides_the_variable_of_all_commands(run, checked):
    run("check", "x.py", env={"AUTOPIPE_GPUS": "4", "AUTOPIPE_CHECK_GPUS": "3"})
    assert checked[0].plan.gpus == 3


def test_pyproject_is_read_as_a_settings_file(run, checked):
    Path("pyproject.toml").write_text('[tool.autopipe]\nschedule = "gpipe"\nnum-microbatches = 6\narg = ["depth=3"]\n')
    assert run("check", "x.py").exit_code == 0
    assert (checked[0].plan.schedule, checked[0].plan.num_microbatches) == ("gpipe", 6)
    assert checked[0].plan.profile.model.arguments == {"depth": "3"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("gpu = 2\n", "unknown option 'gpu'"),
        ("[trian]\nsteps = 2\n", "Did you mean 'train'?"),
        ("[simulate]\ngpus = 2\n", "[simulate] unknown option 'gpus'"),
        ("gpus = \n", "is not a TOML file"),
    ],
)
def test_a_settings_file_with_an_unknown_key_is_a_usage_error(run, text, shown):
    Path("autopipe.toml").write_text(text)
    done = run("check", "x.py")
    assert done.exit_code == 2
    assert shown in done.stderr


def test_a_value_of_the_settings_file_is_validated_like_an_option(run):
    Path("autopipe.toml").write_text('gpu_memory = "24 apples"\n')
    assert "unknown unit 'apples'" in run("check", "x.py").stderr


def test_every_option_of_train_sets_its_setting(run, trained):
    args = (
        "x.py --gpus 3 --schedule gpipe --device cpu --batch-size 12 --num-microbatches 4 --steps 9 --seed 5 --lr 0.1 "
    )
    args += "--clip-grad-norm 1.5 --checkpoint-every 3 --resume --run-dir here --threads-per-rank 2 --arg depth=4 "
    args += (
        "--data d.py:data --optimizer sgd --eval-data d.py:held --loss torch.nn:MSELoss --input x:f32[4] --work-dir w "
    )
    args += "--gpu-memory 1GiB --link 8bit/s --recompute never --microbatch-sizes 1,2 --keep-checkpoints 1"
    assert run("train", *args.split()).exit_code == 0
    (s,) = trained
    assert (s.steps, s.clip_grad_norm, s.checkpoint_every, s.resume, s.keep_checkpoints) == (9, 1.5, 3, True, 1)
    assert s.run_dir == Path("here")
    plan = s.plan
    assert (plan.gpus, plan.schedule, plan.batch_size, plan.num_microbatches, plan.recompute) == (
        3,
        "gpipe",
        12,
        4,
        "never",
    )
    assert (plan.cluster.gpu_memory_bytes, plan.cluster.link) == (2**30, 1.0)
    profile = plan.profile
    assert (profile.work_dir, profile.device, profile.threads, profile.microbatch_sizes) == (
        Path("w"),
        "cpu",
        2,
        (1, 2),
    )
    model = profile.model
    assert (model.target, model.arguments, model.inputs) == ("x.py", {"depth": "4"}, ("x:f32[4]",))
    assert model.hooks == {
        "loss": "torch.nn:MSELoss",
        "data": "d.py:data",
        "optimizer": "sgd",
        "evaluate_data": "d.py:held",
    }
    assert (model.learning_rate, model.seed) == (0.1, 5)


# -- output ------------------------------------------------------------------------------------------------------------


def test_train_json_is_one_document_with_the_documented_keys(run, trained):
    document = json.loads(run("train", "x.py", "--json").stdout)
    assert document["schema_version"] == 1
    assert document["losses"] == [2.5, 1.5]
    keys = {"losses", "steps", "seconds", "samples_per_second", "ranks", "schedule", "stages", "run_dir", "checkpoint"}
    assert set(document) >= keys


def test_a_loss_that_is_nan_is_null_in_json(run, monkeypatch):
    result = TrainResult((float("nan"),), 1, 1.0, 1.0, 2, "1f1b", 2, "runs/a", "")
    monkeypatch.setattr(runs, "train", lambda settings, events, rendezvous=None: result)
    assert json.loads(run("train", "x.py", "--json").stdout)["losses"] == [None]


def test_events_of_a_run_are_lines_on_stderr(run, monkeypatch):
    def train(settings, events, rendezvous=None):
        events("progress", {"what": "measuring: block 1", "fraction": 0.1})
        events("progress", {"what": "measuring: block 2", "fraction": 0.2})
        events("note", {"text": "planned 2 stages"})
        events("start", {"ranks": 2, "steps": 2, "start_step": 0, "batch_size": 4, "run_dir": "runs/a"})
        for step in range(2):
            events("step", {"step": step, "loss": 2.0 - step, "seconds": step + 1.0, "samples_per_second": 4.0})
        events("checkpoint", {"step": 2, "path": "runs/a/c"})
        return RESULT

    monkeypatch.setattr(runs, "train", train)
    done = run("train", "x.py")
    assert done.stderr.splitlines() == [
        "  measuring ...",
        "  planned 2 stages",
        "training on 2 ranks, run directory runs/a",
        "  step 1/2  loss 2.000000  4.0 samples/s  1.0 s",
        "  step 2/2  loss 1.000000  4.0 samples/s  2.0 s",
        "  checkpoint of step 2: runs/a/c",
        "next: autopipe export runs/a -o model.safetensors",
        "no step of the run is proven: none was compared with plain training, and none audited",
    ]
    assert run("train", "x.py", "-q").stderr == ""


def test_doctor_lists_its_findings(run):
    done = run("doctor", "--json")
    document = json.loads(done.stdout)
    names = [finding["name"] for finding in document["findings"]]
    assert {"autopipe", "python", "torch", "gloo", "cores", "memory", "work directory", "disk"} <= set(names)
    assert document["healthy"] == (done.exit_code == 0)
    assert "python" in run("doctor").stdout


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_doctor_suggests_a_remedy_for_a_read_only_folder(run, tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    done = run("doctor", "--work-dir", str(folder))
    assert done.exit_code == 1
    assert "choose a writable --work-dir" in done.stdout


def test_threads_of_a_command_wait_without_spinning():
    """libgomp prints its settings when torch is imported; what this process starts does not inherit them."""
    code = (
        "import os; from autopipe.cli import running; running.import_torch(); print(os.environ.get('OMP_WAIT_POLICY'))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "GOMP_SPINCOUNT = '0'" in done.stderr and done.stdout == "None\n"
