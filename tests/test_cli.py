"""The command line: what it imports, what it prints, how it ends."""

from __future__ import annotations

import importlib
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import mtserve_plugin
from mtserve_plugin.cli import app
from mtserve_plugin.errors import CacheError, ConfigError
from mtserve_plugin.replay.options import MODES, ReplayOptions, parse_bytes

_HELP_WITHOUT_IMPORTS = """
import sys
from typer.testing import CliRunner
from mtserve_plugin.cli import app
for words in ([], ["replay"], ["simulate"], ["plan"], ["audit"], ["bench"], ["bench", "index"], ["doctor"]):
    result = CliRunner().invoke(app, [*words, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage" in result.output
heavy = {"torch", "torchrec", "fbgemm_gpu", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())


def test_help_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _HELP_WITHOUT_IMPORTS], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_help_teaches() -> None:
    _, text = run("replay", "--help")
    for wanted in ("mtserve replay --batch-sizes 8", "exit code is 1", "[default: kuairand-like]", "2GiB"):
        assert wanted in text
    assert "mtserve bench index --ids" in run("bench", "index", "--help")[1]
    assert run("--version") == (0, mtserve_plugin.__version__)


def test_mtserve_alone_names_the_first_steps() -> None:
    result = CliRunner().invoke(app, [], env={"COLUMNS": "80"})
    steps = [line.split() for line in result.output.splitlines() if line.startswith("  mtserve ")]
    assert [words[1] for words in steps] == ["doctor", "replay", "replay", "simulate", "plan", "audit"]
    assert "attach(model, cache)" in result.output
    for words in steps:
        named = [word for word in words[2:4] if word.startswith("--")]
        known = run(words[1], "--help")[1]
        assert all(option in known for option in named)


def test_the_package_gives_its_names_when_asked() -> None:
    for name in mtserve_plugin.__all__:
        assert getattr(mtserve_plugin, name).__name__ == name
        assert name in dir(mtserve_plugin)
    assert mtserve_plugin.CacheError is CacheError
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = mtserve_plugin.nothing


# ---- bad usage -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trace", "no/such/trace.csv"], "no/such/trace.csv: no such file or folder; give the path"),
        (["--trace", "no.such.module:trace"], "no importable 'package.module:name'"),
        (["--pages", "0"], "--pages 0 must be at least 1"),
        (["--modes", "recompute,hybrid"], "'hybrid' is not known; use some of recompute, device, paper, hierarchical"),
        (["--model", "huge"], "'huge' is not known; use one of tiny, small"),
        (["--dtype", "int8"], "'int8' is not known; use one of float32"),
        (["--batch-sizes", "1,0"], "--batch-sizes 1,0 must be one or more numbers of at least 1"),
        (["--batch-sizes", "4,4"], "names one twice"),
        (["--batch-sizes", "1;4"], "must be whole numbers separated by commas"),
        (["--host-bytes", "2 bananas"], "'2 bananas' is no size; write bytes"),
        (["--host-bytes", "0"], "leaves no host tier; give more, or --modes recompute,device"),
        (["--at-cap", "drop"], "--at-cap: at_cap='drop' is not known; use 'stop', 'slide', or 'step:N'"),
        (["--json", "no/such/folder/out.json"], "the folder no/such/folder does not exist"),
        (["--json", "."], "is a folder; give the name of a file"),
        (["--requests", "none"], "Invalid value for '--requests'"),
    ],
)
def test_bad_usage_is_explained(words: list[str], message: str) -> None:
    code, text = run("replay", *words)
    assert code == 2
    assert message in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("user_id,item_id,timestamp\n1,2,3\n1,oops\n", "line 3"),
        ("user_id,item_id,timestamp\n", "holds no events"),
        ("a,b,c\n1,2,3\n", "no column for the user"),
        ("user_id,item_id,timestamp\n1,2,3\n", "no request has a history"),
        ("user_id,item_id,timestamp\n1,2,3\n1,3,9000\n", "has 1 requests; use --requests 1 or fewer"),
    ],
)
def test_a_trace_that_cannot_be_used_is_explained(tmp_path: Path, text: str, message: str) -> None:
    log = tmp_path / "log.csv"
    log.write_text(text, encoding="utf-8")
    code, said = run("replay", "--trace", str(log))
    assert code == 2
    assert message in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host-bytes", "1KiB"], "holds not even one chunk"),
        (["--host-bytes", "4TiB"], "the host tiers (8.0 TiB) do not fit into this machine's"),
        (["--pages", "2000000000"], "do not fit into this machine's"),
        (["--chunk", "100"], "page_size=32 does not divide chunk_size=100"),
        (["--mean-history", "5000"], "mean_history=5000 must lie between"),
    ],
)
def test_sizes_that_cannot_be_had_are_explained(words: list[str], message: str) -> None:
    small = ["--model", "tiny", "--users", "4", "--requests", "4", "--max-history", "100"]
    code, text = run("replay", *small, *words)
    assert code == 2
    assert message in text


def test_defects_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = importlib.import_module("mtserve_plugin.replay.run")

    def fails(error: Exception) -> None:
        def run_replay(*_: object) -> None:
            raise error

        monkeypatch.setattr(replay, "run_replay", run_replay)

    fails(ZeroDivisionError("a defect"))
    with pytest.raises(ZeroDivisionError):
        run("replay")
    fails(CacheError("the index is broken"))
    assert run("replay") == (1, "error: the index is broken")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("123", 123),
        ("64KiB", 65_536),
        ("512 MiB", 512 << 20),
        ("2GiB", 2 << 30),
        ("2gib", 2 << 30),
        ("1.5g", 3 << 29),
        ("1T", 1 << 40),
        ("2GB", 2 * 10**9),
        ("7b", 7),
        ("9007199254740993", 9_007_199_254_740_993),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "1 GiB 2", "1_000", "0x10", "1PiB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        parse_bytes(text)


def test_recompute_always_runs() -> None:
    assert ReplayOptions(modes=("hierarchical",)).ordered_modes == ("recompute", "hierarchical")
    assert ReplayOptions(modes=MODES[::-1]).ordered_modes == MODES


# ---- files, progress, Ctrl-C ---------------------------------------------------------------------


@pytest.mark.parametrize("command", ["doctor", "replay", "simulate", "plan", "audit"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(command: str) -> None:
    code, text = run(command, "--json", "/proc/no-such.json")
    assert code == 2
    assert "--json /proc/no-such.json cannot be written (" in text


def test_a_refused_command_leaves_files_alone(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("kept")
    for path in (old, new):
        assert run("simulate", "--trace", "no/such.csv", "--json", str(path))[0] == 2
    assert old.read_text() == "kept"
    assert not new.exists()


def test_progress_keeps_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = importlib.import_module("mtserve_plugin.commands.progress")
    out = io.StringIO()
    monkeypatch.setattr(progress, "console", lambda **_: Console(file=out, force_terminal=True, width=80))
    with progress.progress_bar() as step:
        step("one", 3, 3)
        time.sleep(1.05)
        step("two", 1, 3)
    assert "0:00:01" in out.getvalue()


def test_progress_without_a_terminal_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = importlib.import_module("mtserve_plugin.commands.progress")
    out = io.StringIO()
    monkeypatch.setattr(progress, "console", lambda **_: Console(file=out, width=80))
    with progress.progress_bar() as step:
        step("soon over", 1, 3)
    assert out.getvalue() == ""
    monkeypatch.setattr(progress, "_SECONDS_PER_LINE", -1.0)
    with progress.progress_bar() as step:
        step("long [work]", 1000, 3000)
    assert out.getvalue() == "long [work]: 1,000 of 3,000, 0 s\n"


_WAITING = """
import time
print("waiting", flush=True)
time.sleep(60)
"""


def test_ctrl_c_ends_without_a_traceback_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(_WAITING)
    words = ["simulate", "--trace", "waits:trace", "--json", str(tmp_path / "out.json")]
    started = subprocess.Popen(
        # -P: like the installed script, without the current folder in front of the path.
        [sys.executable, "-P", "-c", "from mtserve_plugin.cli import main; main()", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "waiting\n"
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=30)
    assert (started.returncode, said) == (130, "stopped before the end; no file was written\n")
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".json"] == []


_EARLY = """
import sys
class Interrupts:
    def find_spec(self, name, *_):
        if name == "mtserve_plugin.commands.replay":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
from mtserve_plugin.cli import main
"""


def test_ctrl_c_before_anything_runs_is_quiet() -> None:
    done = subprocess.run([sys.executable, "-c", _EARLY], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (130, "")


# ---- doctor --------------------------------------------------------------------------------------


def test_doctor_reports_and_fails_when_something_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dependencies = importlib.import_module("mtserve_plugin.dependencies")
    found = dependencies.Finding
    good = [found("torch", "2.13.0", "ok", "fits"), found("nvcc", "", "warn", "too new", "use the older one")]
    monkeypatch.setattr(dependencies, "diagnose", lambda: good)
    code, text = run("doctor", "--json", str(tmp_path / "doctor.json"))
    assert code == 0
    assert "to mend nvcc: use the older one" in text
    assert "Next: mtserve replay" in text
    written = json.loads((tmp_path / "doctor.json").read_text(encoding="utf-8"))
    assert [finding["status"] for finding in written["findings"]] == ["ok", "warn"]

    long_fix = "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && pip install " + "x" * 150
    bad = [*good, found("fbgemm", "1.7", "error", "made for [another] torch", long_fix)]
    monkeypatch.setattr(dependencies, "diagnose", lambda: bad)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert f"to mend fbgemm: {long_fix}\n" in result.output, "the command is not on one line"
    assert "made for [another] torch" in result.output
    assert "run mtserve doctor again" in result.output
    assert "mtserve replay" not in result.output


def test_doctor_looks_at_this_installation() -> None:
    code, text = run("doctor")
    assert code in (0, 1)
    assert "torchrec" in text
