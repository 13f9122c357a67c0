"""Who stops or dies is named, on time; who is asked to stop saves first; who is started again continues."""

import ctypes
import fcntl
import json
import multiprocessing
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.e2e.launch import (
    LAUNCHER_KEYS,
    ROOT,
    Ranks,
    command,
    metrics,
    plant_in_losses,
    tiny,
)
from tests.harness import PATIENCE, STUCK, Processes, free_port, need_gpus, until
from ulysses.watch.watch import Watch, grace_note, report_failure, tell

# where it happens: the rank, what becomes of it, and the phase; what is said of it
IS_GONE = r"rank 1 on \S+ has not moved since {}, \d+ s ago: .* gone"
ASLEEP = r"rank 1 on \S+ has not moved since {}, \d+ s ago: .* is alive"
STORE_GONE = r"rank 0 at 127.0.0.1:\d+ is gone, \d+ s ago; rank 1 on \S+ was at step 3"
THIRD = "step 3, forward"


class InjectedError(BaseException):
    """No error that anybody expects."""


def hold_interpreter():
    ctypes.PyDLL(None).sleep(STUCK)  # as a C extension that forgets to give the lock back


def crash():
    ctypes.string_at(0)


def raise_from_outside(kind=InjectedError):
    """Raise an exception in this thread, from another one."""
    raised = ctypes.pythonapi.PyThreadState_SetAsyncExc
    own, kind = ctypes.c_ulong(threading.get_ident()), ctypes.py_object(kind)
    threading.Thread(target=raised, args=(own, kind)).start()
    until(lambda: False)


def interrupt_from_outside():
    raise_from_outside(KeyboardInterrupt)


RAISED = "rank {}, step 3: InjectedError: no reason is given"
FAULTS = {
    "holds the interpreter": (1, hold_interpreter, THIRD, IS_GONE + ".*holds its interpreter"),
    "holds the interpreter of the first": (
        0,
        hold_interpreter,
        THIRD,
        IS_GONE.replace("1", "0", 1) + ".*holds its interpreter",
    ),
    "killed in the third step": (1, signal.SIGKILL, THIRD, IS_GONE),
    "killed with the store": (0, signal.SIGKILL, THIRD, STORE_GONE),
    "stopped in the third step": (1, signal.SIGSTOP, THIRD, IS_GONE + ", stop"),
    "asleep in the third step": (1, 0, THIRD, ASLEEP),
    "asleep in the first step": (1, 0, "step 1, forward", ASLEEP),
    "killed at the end": (1, signal.SIGKILL, "step 4, end", IS_GONE),
    "stopped in tokenising": (1, signal.SIGSTOP, "tokenising", IS_GONE + ", stop"),
}


def strike(fault):
    """A fault is a function, a signal, or sleep."""
    if callable(fault):
        fault()
    os.kill(os.getpid(), fault) if fault else time.sleep(STUCK)


def plant(name, timeout=10):
    """Until it comes to its fault a run has all the time that a busy machine takes."""
    victim, number, place, _ = FAULTS[name]

    def before(rank):
        phase, alive = Watch.phase, f"ulysses/alive/{rank}"

        def struck(self, *where):
            phase(self, *where)
            if self.place != place:
                return
            self.warning, self.timeout = 0.6 * timeout, timeout
            if rank == victim:
                # it has shown that it is alive, and where
                store = self.meeting.result()
                until(lambda: store.check([alive]) and place.encode() in store.get(alive))
                strike(number)

        Watch.phase = struck

    return before


@pytest.fixture(scope="module")
def drills(tmp_path_factory):
    """All faults at once: most of the time these processes wait."""
    runs = {}
    # none of them waits for another one's tokenising, which would count
    start(tmp_path_factory.mktemp("cache"), "--run.steps 1", processes=1).wait().check()
    settings = f"--run.timeout {PATIENCE} --run.stall_warning 0 --run.steps 4"
    for name in FAULTS:
        runs[name] = start(tmp_path_factory.mktemp("drill"), settings, plant(name))
    yield runs
    for run in runs.values():
        run.send(signal.SIGKILL)


@pytest.mark.parametrize("name", FAULTS)
def test_the_victim_is_named(name, drills):
    run, (victim, number, place, sentence) = drills[name], FAULTS[name]
    other = 1 - victim
    run.until(lambda: run.codes[other] is not None)
    assert run.codes[other] == 1
    run.send(signal.SIGKILL)
    outcome = run.wait()
    sentence = f"error: {sentence.format(place)}.*"
    assert re.fullmatch(sentence, *outcome.errors), outcome.errors
    if number == 0:
        warnings = re.findall(r"warning: rank 1 .* since step .*", outcome.stderr)
        assert len(warnings) == 1, "the line comes once, before the end"


ALONE = {
    hold_interpreter: r"rank 0 on \S+ has not moved since step 3, forward, 10 s ago: .* holds its interpreter",
    os.abort: r"rank 0 on \S+ has ended at step 3, forward, without a word: .* crashed",
    crash: r"rank 0 on \S+ has ended at step 3, forward, without a word: .* crashed",
    signal.SIGKILL: r"rank 0 on \S+ has ended at step 3, forward, without a word: .* killed",
    0: r"rank 0 on \S+ has not moved since step 3, forward, \d+ s ago: .* alive, and waits",
    raise_from_outside: RAISED.format(0),
    interrupt_from_outside: RAISED.format(0).replace("InjectedError", "KeyboardInterrupt"),
}


def test_one_process_is_watched_and_continues(tmp_path):
    """Whatever happens to it is told with its step and what to do; one that was killed is continued."""

    def before(fault):
        def planted(rank):
            # the watchdog begins with it
            Watch.__post_init__, begin = (
                lambda self: (begin(self), setattr(self, "timeout", 10)),
                Watch.__post_init__,
            )

            def struck(taken, compute):
                if taken == 2:
                    strike(fault)
                return compute()

            plant_in_losses(struck)

        return planted

    typed = "--run.save_every 1 --run.steps 4 --run.stall_warning 0"
    runs = {}
    for number, fault in enumerate(ALONE):
        (tmp_path / f"{number}").mkdir()
        runs[fault] = start(tmp_path / f"{number}", typed, before(fault), 1)
    for number, (fault, sentence) in enumerate(ALONE.items()):
        runs[fault].wait()
        told = runs[fault].logs / "0.err"
        # the watchdog tells it after the end
        assert until(
            lambda told=told, s=sentence: re.search(f"error: {s}.*", told.read_text())
        ), told.read_text()
        assert "--run.resume auto continues the run" in told.read_text().splitlines()[-1]
        if fault == signal.SIGKILL:
            again = start(tmp_path / f"{number}", f"{typed} --run.resume auto", None, 1)
            assert "resumed " in again.wait().check().stdout


def test_a_slow_rank_is_named_once(tmp_path):
    """What GPUs' recorders would tell: rank 0 waits in collectives for two thirds of the time, and rank 1 never."""

    def before(rank):
        import ulysses.run.stragglers as stragglers

        asked = [time.time_ns()]

        def record(active):
            began, asked[0] = asked[0], time.time_ns()
            waited = (asked[0] - began) / 1e6 * (0 if rank else 2 / 3)
            return [{"pg_id": 0, "time_created_ns": began, "duration_ms": waited}]

        stragglers.STEPS, stragglers.flight_record = 6, record

    outcome = start(tmp_path, "--run.steps 13", before).wait().check()
    slow = r"rank 1 on \S+ was slower than the others by \d+% up to step 6: they wait for it in \d+% of the time"
    assert len(re.findall(slow, outcome.stdout)) == 1 and "rank 0 on" not in outcome.stdout


def on_gpus(folder, processes, fault, typed, *more):
    """Train on GPUs through a real launcher; `fault` are lines of a function of the steps taken, on the last rank."""
    need_gpus(processes)
    script = folder / "script.py"
    script.write_text(f"""
import os, sys, torch
import ulysses.run.stragglers as stragglers
from tests.e2e.launch import plant_in_losses
from ulysses.train import start

def faulty(taken, compute):
    if os.environ.get("RANK", "0") == "{processes - 1}" and "auto" not in sys.argv:
        {fault}
    return compute()

stragglers.STEPS = 6
plant_in_losses(faulty)
start(sys.argv[1:])
""")
    launcher = command("torchrun" if processes > 1 else "python", processes, free_port())
    line = [script, *tiny("sft", folder / "run", f"--run.export false {typed}"), *more]
    env = {k: v for k, v in os.environ.items() if k not in LAUNCHER_KEYS}
    env |= {"PYTHONPATH": str(ROOT)}
    return subprocess.run([*launcher, *line], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.gpu
@pytest.mark.parametrize("processes", [1, 2])
def test_a_kernel_that_never_ends_is_named(tmp_path, processes):
    """The hosts run ahead and wait: only the GPU of the victim has not come to the collective of the others."""
    typed = "--run.save_every 1 --run.keep 0 --run.steps 4 --run.timeout 30"
    given = tmp_path, processes, "taken == 2 and torch.cuda._sleep(2**62)", typed
    ended = on_gpus(*given)
    victim = rf"error: rank {processes - 1} on \S+ has not moved since step 3, .* alive.*--run.resume auto"
    assert ended.returncode and re.search(victim, ended.stderr), ended.stderr[-3000:]
    again = on_gpus(*given, "--run.resume", "auto")
    assert again.returncode == 0 and "resumed " in again.stdout, again.stderr[-3000:]


@pytest.mark.gpu
def test_a_slow_gpu_is_named_once(tmp_path):
    """Its kernels take a second more in each step, and the others' hosts wait no longer than its own."""
    done = on_gpus(tmp_path, 2, "torch.cuda._sleep(2 * 10**9)", "--run.steps 13")
    slow = r"rank 1 on \S+ was slower than the others by \d+% up to step 6"
    assert len(re.findall(slow, done.stdout)) == 1, done.stdout + done.stderr[-3000:]


def start(folder, typed="", before=None, processes=2):
    line = tiny("sft", folder / "run", f"--run.export false --run.save_last false {typed}")
    return Ranks(line, processes, before=before)


def slow_steps(rank):
    from ulysses.run.trainer import Trainer

    step = Trainer.train_step
    Trainer.train_step = lambda self: (time.sleep(0.2), step(self))[1]


def training(folder, before=slow_steps, processes=2, typed=""):
    """Start a long run, and wait for its second step."""
    run = start(folder, f"--run.steps 400 {typed}", before, processes)
    file = folder / "run/metrics.jsonl"
    run.until(lambda: file.exists() and file.read_text().count("\n") > 1)
    return run


def saved(folder):
    return sorted(path.name for path in (folder / "run/checkpoints").glob("step-*"))


def test_no_process_group_gives_up_before_the_watch(tmp_path):
    """torch's own limit would end a collective with a trace, and is not changed while collectives run."""

    def before(rank):
        from ulysses.run.trainer import Trainer

        save = Trainer.save

        def shown(self):
            groups = dist.distributed_c10d._world.pg_map
            limits = [g._get_backend(torch.device("cpu")).options._timeout for g in groups]
            print("limits", len(limits), {limit.days for limit in limits}, flush=True)
            save(self)

        Trainer.save = shown

    settings = "--run.steps 1 --parallel.sequence_parallel_size 2 --run.save_last true"
    printed = start(tmp_path, settings, before).wait().check().stdout
    # the mesh's and the reduction's, too
    assert len(re.findall(r"^limits [3-9] \{1\}$", printed, re.M)) == 2


def test_what_the_watch_reads_itself_is_no_progress():
    """It reads its own counters in each beat."""
    store, alive = dist.HashStore(), "ulysses/alive/0"
    watch = Watch()
    watch.phase("save")
    watch.start(lambda: store)
    assert until(lambda: store.check([alive]) and json.loads(store.get(alive))[2] > 4)
    watch.stop()


@pytest.mark.parametrize("alone", [True, False])
def test_a_store_that_does_not_answer_keeps_no_error_from_being_told(alone, capsys):
    """But who only cannot reach another process says nothing."""

    def refuse(*_):
        raise dist.DistStoreError

    mute = SimpleNamespace(compare_set=refuse)
    tell(mute, "error: rank 0, full", alone=alone)
    assert capsys.readouterr().err == "\nerror: rank 0, full\n" * alone


def test_an_error_without_a_text_is_told_on_its_own_line(capsys):
    report_failure(MemoryError(), debug=False)
    told = "error: rank 0, MemoryError: no reason is given; has this process no memory left?"
    assert capsys.readouterr().err.endswith(f"\n\n{told}\n")


def test_a_run_outside_of_with_ends_no_program(capfd):
    """It does not belong to the run how long a program looks at its data; once it enters, it does."""

    def program(*_):
        watch = Watch(0, 1)
        watch.pause()
        watch.start(dist.HashStore)
        time.sleep(3)
        print("still here", flush=True)
        watch.phase("start")
        time.sleep(STUCK)

    run = Processes(program, 1)
    run.end()
    said = capfd.readouterr()
    assert run.codes == [1] and said.out == "still here\n"
    assert "error: rank 0 on" in said.err and "has not moved since start" in said.err


def test_a_run_folder_that_is_moved_is_told_in_one_error(tmp_path):
    """The process that speaks for rank 0 where it ends without a word has nothing to add."""
    alone = "--parallel.sequence_parallel_size 1 --run.trackers []"
    run = training(tmp_path, processes=1, typed=alone)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    outcome = run.wait().check(1)
    outcome.refused("run/metrics.jsonl or its folder was moved or deleted while the run wrote")
    assert outcome.stderr.count("error:") == 1
    assert "as requested" not in outcome.stdout and len(saved(tmp_path)) == 1


def test_a_terminal_that_closes_lets_the_run_save(tmp_path):
    """Its end sends SIGHUP, and whatever the run prints afterwards fails."""

    def before(rank):
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
        ours, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSCTTY, 0)
        # streams of a terminal in place of those of files, which close their numbers when they go
        sys.stdout = sys.stderr = None
        for number in (0, 1, 2):
            os.dup2(its, number)
        os.close(its)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        closed = []

        def closes(taken, compute):
            if taken == 1 and not closed:
                closed.append(os.close(ours))
            return compute()

        plant_in_losses(closes)

    start(tmp_path, "--run.steps 5", before, 1).wait().check()
    assert saved(tmp_path) == ["step-2"]


def test_a_run_under_nohup_stays_deaf_to_the_end_of_its_terminal():
    watch, others = Watch(), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    watch.start(lambda: None)
    with watch.signals():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    watch.stop()
    signal.signal(signal.SIGHUP, others)


def test_only_what_is_meant_for_the_run_stops_it(capfd):
    """Not the ends of child processes, which torch's DataLoader listens to; and a child ends when it is told to."""
    watch, others = Watch(), signal.signal(signal.SIGCHLD, lambda *_: None)
    watch.start(lambda: None)
    with watch.signals():
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(STUCK,))
        child.start()
        child.terminate()
        child.join(PATIENCE)
        assert child.exitcode == -signal.SIGTERM
        time.sleep(2)
        assert not watch.stop_wanted and capfd.readouterr().err == ""
        os.kill(os.getpid(), signal.SIGTERM)
        assert until(lambda: "asked to stop" in capfd.readouterr().err)
        assert watch.stop_wanted
    watch.stop()
    signal.signal(signal.SIGCHLD, others)


def test_a_second_interrupt_leaves_at_once(tmp_path):
    run = training(tmp_path, plant("asleep in the third step", PATIENCE))
    time.sleep(1)  # rank 1 is asleep, rank 0 is stuck in a collective
    run.send(signal.SIGINT)
    run.until(lambda: False, 2)
    assert run.codes == [None, None]

    # one that has not heard the first yet takes the second for it
    run.until(lambda: run.send(signal.SIGINT) or time.sleep(1))
    run.wait()
    assert run.codes == [130, 130] and saved(tmp_path) == []


def test_a_checkpoint_after_some_time_on_one_clock(tmp_path):
    """The clocks of two ranks would not agree on the step; steps of at least 0.2 s, a checkpoint after 0.5 s."""
    settings = f"--run.steps 8 --run.save_minutes {0.5 / 60} --run.keep 0"
    start(tmp_path, settings, slow_steps).wait().check()
    assert saved(tmp_path)


def test_an_error_while_saving_names_the_step_that_was_saved(tmp_path):
    def before(rank):
        import ulysses.run.trainer as trainer

        def full(*_, **__):
            raise OSError(28, "No space left on device")

        trainer.save_checkpoint = full

    outcome = start(tmp_path, "--run.save_every 2", before, 1).wait()
    assert outcome.code == 1 and "error: rank 0, step 2: OSError" in outcome.stderr


def test_torchrun_starts_a_run_again_and_it_continues(tmp_path):
    """All attempts share one store."""

    def before(rank):
        def killed(taken, compute):
            if taken == 3 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            return compute()

        plant_in_losses(killed)

    line = tiny("sft", tmp_path / "run", "--run.save_every 2 --run.export false")
    outcome = Ranks(line, 2, before=before, restarts=2).wait().check()
    assert "resumed " in outcome.stdout
    # on a busy machine the last word of a process that is killed may be older than its step
    assert re.search(IS_GONE.format(r"[\w ,]+"), *outcome.errors)
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_a_reward_that_ends_all_processes_is_told_of(tmp_path):
    run = Ranks(tiny("ppo", tmp_path / "run", "--ppo.reward tests.e2e.drills:leave"), 1)
    assert run.wait().code == 0
    assert until(lambda: "error: rank 0 on" in (run.logs / "0.err").read_text())


@pytest.mark.parametrize(
    "word, launcher, says",
    [
        ("step 3", "true", True),
        ("step 3\ntold", "true", False),
        ("step 3\n", "true", False),  # it belongs to no run
        ("step 3", "exec sleep 3", True),  # a slow one
        ("step 3", f"sleep {STUCK} & wait", False),
    ],
)
def test_the_watchdog_speaks_if_nobody_else_can(word, launcher, says):
    """Nobody has told the reason, and no process is left that could."""
    shell = subprocess.Popen(["sh", "-c", launcher], start_new_session=True)
    line = f"{sys.executable} -P {ROOT}/ulysses/watch/watchdog.py {shell.pid} {STUCK} 2 it"
    given = {"input": f"{word}\n", "capture_output": True, "text": True}
    done = subprocess.run(line.split(), **given, check=True)
    with suppress(ProcessLookupError):
        os.killpg(shell.pid, signal.SIGKILL)
    shell.wait()
    assert done.stderr.startswith("\nerror: it has ended at step 3, without") == says
    assert says or not done.stderr


def test_a_run_that_ends_while_its_watchdog_starts_has_not_failed(monkeypatch, capfd):
    watch, stopping = Watch(), threading.Event()
    start, tell_it, end = watch._start_watchdog, watch._tell_watchdog, watch.stopped.set
    lines = []

    def start_late():
        stopping.wait(PATIENCE)
        start()

    def end_late():
        stopping.set()
        until(lambda: "start" in lines)
        end()

    def note(line):
        tell_it(line)
        lines.append(line)

    monkeypatch.setattr(watch, "_start_watchdog", start_late)
    monkeypatch.setattr(watch, "_tell_watchdog", note)
    monkeypatch.setattr(watch.stopped, "set", end_late)
    earlier = {*psutil.Process().children()}
    watch.start(lambda: None)
    watch.stop()
    [watchdog] = {*psutil.Process().children()} - earlier
    watchdog.wait(PATIENCE)
    assert not capfd.readouterr().err


def test_ranks_whose_launcher_is_gone_save_and_end(tmp_path):
    """As under deepspeed, whose launcher has another one in front of it, which is what a user kills."""

    def before(rank):
        os.environ["CROSS_SIZE"] = "1"
        slow_steps(rank)

    front = Processes(
        lambda *_: Processes(lambda *_: training(tmp_path, before).wait(), 1).end(), 1
    )
    file = tmp_path / "run/metrics.jsonl"
    front.until(lambda: file.exists() and file.read_text().count("\n") > 1)
    [launcher] = psutil.Process(front.processes[0].pid).children()
    ranks = launcher.children()
    front.send(signal.SIGKILL)
    assert until(lambda: not any(map(psutil.Process.is_running, ranks))) and len(ranks) == 2
    assert len(saved(tmp_path)) == 1


def test_a_step_that_outlasts_the_launchers_patience_is_said(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    assert grace_note(5) == ""
    assert "a step takes 40 s, but launchers kill a run 30 s after" in grace_note(40)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "160")
    assert grace_note(40) == ""
