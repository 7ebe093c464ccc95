"""Every launcher keeps the contract; its options are checked before anything starts."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from medcil.errors import InvalidInput
from medcil.experiments.cluster import SlurmLauncher, SlurmOptions
from medcil.experiments.launcher import (
    Exit,
    Job,
    Launcher,
    LocalLauncher,
    exit_code,
    last_lines,
    make_launcher,
    run_on_node,
    start_child,
    stop_children,
)
from medcil.training.environment import visible_gpus

FAKE_RUN = Path(__file__).with_name("fake_run.py")
TOKEN = "0" * 64
"""One for all tests: Ray keeps the first it reads."""


@dataclass(frozen=True)
class FakeJob(Job):
    epochs: int = 2
    seconds: float = 0.0
    code: int = 0

    @property
    def command(self) -> list[str]:
        numbers = (self.epochs, self.seconds, self.code)
        return [sys.executable, str(FAKE_RUN), str(self.out), *map(str, numbers)]


def fake_job(key: str, tmp_path: Path, **how: float) -> FakeJob:
    return FakeJob(key, tmp_path / "recipes" / key, tmp_path / "runs" / key, **how)


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def wait_for_all(launcher: Launcher, n: int, seconds: float = 60) -> dict[str, Exit]:
    ended: dict[str, Exit] = {}
    deadline = time.monotonic() + seconds
    while len(ended) < n:
        assert time.monotonic() < deadline, f"only {sorted(ended)} ended"
        ended |= {end.key: end for end in launcher.wait(1.0)}
    return ended


def starts(job: Job) -> list[int]:
    path = job.out / "starts.txt"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def epochs_logged(job: Job) -> list[int]:
    path = job.out / "log.jsonl"
    return [json.loads(line)["epoch"] for line in path.read_text().splitlines()] if path.exists() else []


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def local(tmp_path: Path) -> Launcher:
    return LocalLauncher(tmp_path / "logs", at_once=8)


def ray(tmp_path: Path) -> Launcher:
    from medcil.experiments.cluster import RayLauncher, RayOptions

    return RayLauncher(tmp_path / "logs", RayOptions(cpus_per_run=0.2))


def slurm(tmp_path: Path) -> Launcher:
    """On submitit's own stand-in for a cluster: processes on this machine."""
    return SlurmLauncher(tmp_path / "logs", SlurmOptions(), cluster="local")


def test_a_job_goes_to_the_least_busy_gpu(tmp_path):
    launcher = LocalLauncher(tmp_path / "logs", at_once=8, gpus=["GPU-2", "GPU-5"])
    long = {"epochs": 600, "seconds": 0.1}
    try:
        for key, how in {"a": long, "b": {}, "c": long}.items():
            launcher.start(fake_job(key, tmp_path, **how))
        assert launcher.gpu_of == {"a": "GPU-2", "b": "GPU-5", "c": "GPU-2"}
        wait_for_all(launcher, 1)
        launcher.start(fake_job("d", tmp_path, **long))
        assert launcher.gpu_of["d"] == "GPU-5"  # where b has ended
    finally:
        launcher.stop()


def test_a_job_sees_its_gpu_alone(tmp_path):
    log = tmp_path / "log"
    look = [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
    start_child(look, log, gpu="GPU-5").wait(20)
    assert log.read_text() == "GPU-5\n"


def test_gpus_are_named_by_what_they_are(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda number: SimpleNamespace(uuid=f"{number}-f")
    )
    assert visible_gpus() == ["GPU-0-f", "GPU-1-f"]


@pytest.mark.parametrize(
    "make",
    [local, pytest.param(ray, marks=pytest.mark.slow), pytest.param(slurm, marks=pytest.mark.slow)],
)
def test_every_launcher_keeps_the_contract(make, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    good, bad = fake_job("good", tmp_path), fake_job("bad", tmp_path, code=7)
    long = fake_job("long", tmp_path, epochs=600, seconds=0.1)
    launcher = make(tmp_path)
    try:
        assert launcher.capacity >= 3
        assert not launcher.is_running("good")
        for job in (long, good, bad):
            launcher.start(job)
        ended = wait_for_all(launcher, 2)
        assert ended["good"] == Exit("good", 0, "")
        assert ended["bad"].exit_code == 7
        assert ended["bad"].output.splitlines()[-1] == "the reason it failed"
        assert (good.out / "metrics.json").exists()
        assert not launcher.is_running("good")
        wait_until(lambda: len(starts(long)) == 1)
        assert launcher.is_running("long")
        before = time.monotonic()
        assert not launcher.wait(0.3)
        assert time.monotonic() - before >= 0.25
    finally:
        launcher.stop()
    assert (long.out / "interrupted").exists()
    assert not is_alive(*starts(long))


def test_what_a_job_says_and_how_it_ended_are_kept(tmp_path):
    log = tmp_path / "logs" / "job.log"
    say = "import sys; print('\\n'.join(map(str, range(1000)))); sys.exit(5)"
    child = start_child([sys.executable, "-c", say], log)
    child.wait(20)
    assert exit_code(child) == 5
    assert last_lines(log, 3) == "997\n998\n999"
    assert last_lines(tmp_path / "none.log") == ""
    child = start_child([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], log)
    child.wait(20)
    assert exit_code(child) == 137


def test_the_last_line_of_a_job_says_why_it_ended_and_nothing_here_is_imported(tmp_path, monkeypatch):
    """An error of several lines, in a working folder with a file called as a module."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("training: {epoch: 1, batchsize: 2}\nmethod: finetune\n")
    (tmp_path / "yaml.py").write_text("raise SystemExit('it was imported')")
    log = tmp_path / "logs" / "key.log"
    log.parent.mkdir()
    log.write_text("What another attempt said.\n")
    monkeypatch.chdir(tmp_path)
    launcher = local(tmp_path)
    launcher.start(Job("key", recipe, tmp_path / "run"))
    ended = wait_for_all(launcher, 1)["key"]
    assert ended.exit_code == 2
    lines = ended.output.splitlines()
    assert len(lines) > 2
    assert lines[-1] == lines[0] != lines[-2]
    assert str(recipe) in lines[-1]


def test_a_job_that_goes_on_keeps_its_log(tmp_path):
    launcher = local(tmp_path)
    for _ in range(2):
        launcher.start(fake_job("bad", tmp_path, code=7))
        ended = wait_for_all(launcher, 1)["bad"]
    assert ended.output.splitlines().count("the reason it failed") == 2


def test_ray_without_a_token_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(InvalidInput, match="RAY_AUTH_MODE is 'disabled'"):
        ray(tmp_path)


def test_a_child_ends_with_the_process_that_started_it(tmp_path):
    pid_file = tmp_path / "pid"
    starter = f"""
import sys, time
from pathlib import Path
from medcil.experiments.launcher import start_child
child = start_child([sys.executable, "-c", "import time; time.sleep(100)"], Path({str(tmp_path / "log")!r}))
Path({str(pid_file)!r}).write_text(str(child.pid))
time.sleep(100)
"""
    with subprocess.Popen([sys.executable, "-c", starter]) as process:
        wait_until(lambda: pid_file.exists() and bool(pid_file.read_text()))
        child = int(pid_file.read_text())
        assert is_alive(child)
        process.kill()
    wait_until(lambda: not is_alive(child), seconds=5)


def test_a_child_that_does_not_hear_is_killed(tmp_path):
    ready = tmp_path / "ready"
    deaf = f"""
import pathlib, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
pathlib.Path({str(ready)!r}).touch()
time.sleep(100)
"""
    child = start_child([sys.executable, "-c", deaf], tmp_path / "log")
    wait_until(ready.exists)
    stop_children([child], patience=0.2)
    assert exit_code(child) == 137


def test_a_job_waits_while_another_process_is_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("medcil.experiments.launcher.LOCK_POLL", 0.1)
    first = fake_job("job", tmp_path, epochs=15, seconds=0.1)
    other = start_child(first.command, tmp_path / "other.log")
    wait_until(lambda: len(starts(first)) == 1)
    how = {"output": str(tmp_path / "job.log"), "folder": str(tmp_path)}
    code, said = run_on_node(first.command, lock_patience=0.0, **how)
    assert (code, said) == (3, "Another process is working here.")
    assert other.poll() is None
    assert run_on_node(first.command, lock_patience=60.0, **how) == (0, "")
    assert other.wait(20) == 0
    assert epochs_logged(first) == list(range(15))


class TestSlurm:
    """On submitit's stand-in, and against programs that answer as SLURM's do."""

    @pytest.mark.slow
    def test_a_lost_job_ends_like_a_lost_process_and_goes_on_when_it_is_started_again(self, tmp_path):
        job = fake_job("job", tmp_path, epochs=20, seconds=0.05)
        launcher = slurm(tmp_path)
        try:
            launcher.start(job)
            wait_until(lambda: (job.out / "log.jsonl").exists())
            node = launcher._submitted["job"]._process.pid
            attempt = int(Path(f"/proc/{node}/task/{node}/children").read_text())
            for pid in (node, attempt):
                os.kill(pid, signal.SIGKILL)
            assert wait_for_all(launcher, 1)["job"].exit_code == 6
            launcher.start(job)
            assert wait_for_all(launcher, 1)["job"] == Exit("job", 0, "")
        finally:
            launcher.stop()
        assert len(set(starts(job))) == 2
        assert epochs_logged(job) == list(range(20))

    @pytest.mark.slow
    def test_a_preempted_job_is_queued_again_by_submitit(self, tmp_path):
        job = fake_job("job", tmp_path, epochs=20, seconds=0.05)
        launcher = slurm(tmp_path)
        try:
            launcher.start(job)
            wait_until(lambda: (job.out / "log.jsonl").exists())
            node = launcher._submitted["job"]._process.pid
            os.kill(int(Path(f"/proc/{node}/task/{node}/children").read_text()), signal.SIGUSR2)
            assert wait_for_all(launcher, 1)["job"] == Exit("job", 0, "")
        finally:
            launcher.stop()
        assert (job.out / "interrupted").exists()
        assert len(set(starts(job))) == 2
        assert epochs_logged(job) == list(range(20))

    def test_what_sbatch_is_asked_for_and_what_its_states_mean(self, tmp_path, monkeypatch):
        """sbatch keeps the script and starts nothing; sacct says what the test writes into a file."""
        programs = tmp_path / "bin"
        programs.mkdir()
        asked, state, cancelled = tmp_path / "asked", tmp_path / "state", tmp_path / "cancelled"
        asked.mkdir()
        answers = {
            "srun": "exit 0",
            "sbatch": f'n=$(ls {asked} | wc -l); cp "$1" {asked}/$n; echo Submitted batch job 10$n',
            "scancel": f"echo $1 >> {cancelled}",
            "sacct": f"echo 'JobID|State|NodeList'; for n in 0 1; do echo \"10$n|$(cat {state})|\"; done",
        }
        for name, lines in answers.items():
            (programs / name).write_text(f"#!/bin/sh\n{lines}\n")
            (programs / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
        monkeypatch.setattr("medcil.experiments.cluster.ASK_EVERY", 0.0)
        options = ["partition=gpu", "gpus_per_run=1", "minutes_per_run=90", "retries=1", "sbatch.account=lab"]
        launcher = make_launcher("slurm", options, out=tmp_path, at_once=None)
        state.write_text("PENDING")
        launcher.start(fake_job("key", tmp_path))
        script = (asked / "0").read_text()
        for line in ("partition=gpu", "gpus-per-node=1", "time=90", "account=lab", "job-name=medcil-key"):
            assert f"#SBATCH --{line}" in script
        assert not launcher.wait(0.1)
        assert not launcher.is_running("key")
        state.write_text("NODE_FAIL")
        (ended,) = launcher.wait(10)
        assert (ended.exit_code, ended.output) == (6, "SLURM reports NODE_FAIL.")
        assert cancelled.read_text() == "100\n"  # or SLURM might queue it again by itself
        launcher.start(fake_job("key", tmp_path))
        assert len(list(asked.iterdir())) == 2
        launcher.stop()

    def test_no_folder_that_others_can_write_to(self, tmp_path):
        folder = tmp_path / "slurm"
        folder.mkdir()
        folder.chmod(0o777)
        with pytest.raises(InvalidInput, match="chmod 700"):
            SlurmLauncher(tmp_path, SlurmOptions(), cluster="local")

    def test_a_machine_without_slurm(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(InvalidInput, match="SLURM is not available"):
            make_launcher("slurm", [], out=tmp_path, at_once=None)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rai", [], r"No such launcher: 'rai'. Did you mean 'ray'\?"),
        ("ray", ["adress=auto"], r"unknown key 'adress'. Did you mean 'address'\?"),
        ("local", ["address=auto"], "unknown key 'address'. There are none."),
        ("ray", ["gpus_per_run=half"], "gpus_per_run: .*valid number"),
        ("ray", ["gpus_per_run=nan"], "gpus_per_run: .*finite"),
        ("ray", ["cpus_per_run=0"], "cpus_per_run: .*greater"),
        ("ray", ["retries=-1"], "retries: .*greater"),
        ("slurm", ["gpus_per_run=0.5"], "gpus_per_run: .*valid integer"),
        ("ray", ["sbatch.account=lab"], "unknown key 'sbatch'"),
        ("ray", ["address"], "address has no value"),
    ],
)
def test_options_are_checked(name, options, message, tmp_path):
    with pytest.raises(InvalidInput, match=message) as raised:
        make_launcher(name, options, out=tmp_path, at_once=None)
    assert raised.value.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_at_least_one_at_once(tmp_path):
    with pytest.raises(InvalidInput, match="--at-once 0"):
        make_launcher("local", [], out=tmp_path, at_once=0)
    assert make_launcher("local", [], out=tmp_path, at_once=3).capacity == 3


@pytest.mark.parametrize(("name", "package"), [("ray", "ray"), ("slurm", "submitit")])
def test_missing_packages_are_named(name, package, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InvalidInput, match=rf"pip install 'medcil\[{name}\]'"):
        make_launcher(name, [], out=tmp_path, at_once=None)
