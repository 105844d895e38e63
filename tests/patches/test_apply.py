"""The patch script on a small repository of our own, with the host's paths and made-up lines."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest

from tests.patches.conftest import ROOT

STU = "generative_recommenders/modules/stu.py"
TRANSDUCER = "generative_recommenders/modules/hstu_transducer.py"
POSITION = "generative_recommenders/ops/pytorch/pt_position.py"
PATHS = (STU, TRANSDUCER, POSITION)


def git(root: Path, *arguments: str) -> str:
    identity = [
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@t",
        "-c",
        "commit.gpgsign=false",
        "-c",
        "core.autocrlf=false",
    ]
    command = ["git", "-C", str(root), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@dataclass
class Edit:
    """What one patch does to one file: the lines it drops, and what it puts in front of which line."""

    dropped: set[int] = field(default_factory=set)
    inserted: dict[int, list[str]] = field(default_factory=dict)


def edited(lines: list[str], edits: list[Edit]) -> str:
    """The oracle: walks the pristine lines one by one and knows nothing of hunks."""
    out: list[str] = []
    for number in range(len(lines) + 1):
        for edit in edits:
            out += edit.inserted.get(number, [])
        if number < len(lines) and not any(number in edit.dropped for edit in edits):
            out.append(lines[number])
    return "".join(out)


class Host:
    """A repository with the host's paths, and patches for it that were made by `git diff -U0`."""

    def __init__(self, folder: Path, edits: dict[str, dict[str, Edit]], lines: int = 40) -> None:
        self.root = folder / "checkout"
        self.patches = folder / "patches"
        self.patches.mkdir(parents=True)
        self.edits = edits
        # Every other line is the same, so that a hunk in the wrong place does not fail by chance.
        self.lines = [f"line {number}\n" if number % 2 else "same\n" for number in range(lines)]
        for path in PATHS:
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_text("".join(self.lines))
        (self.root / "README").write_text("untouched\n")
        git(folder, "init", "-q", str(self.root))
        git(self.root, "add", ".")
        git(self.root, "commit", "-q", "-m", "first")
        self.commit = git(self.root, "rev-parse", "HEAD").strip()
        for name, files in edits.items():
            for path, edit in files.items():
                (self.root / path).write_text(edited(self.lines, [edit]))
            diff = git(self.root, "diff", "-U0")
            (self.patches / f"{name}.patch").write_text(f"{name}\n\nCommit: {self.commit}\n\n{diff}")
            git(self.root, "checkout", "-q", ".")

    def expected(self, applied: set[str]) -> dict[str, str]:
        wanted = [self.edits[name] for name in sorted(applied)]
        return {path: edited(self.lines, [files[path] for files in wanted if path in files]) for path in PATHS}

    def content(self) -> dict[str, str]:
        return {path: (self.root / path).read_text() for path in PATHS}


def one_line(path: str, at: int, text: str) -> dict[str, Edit]:
    return {path: Edit(inserted={at: [f"{text}\n"]})}


@pytest.fixture
def small(tmp_path: Path) -> Host:
    """Patches `1-drop` (one line of two files) and `2-put` (a line behind that one in the first file)."""
    drop = {path: Edit(dropped={3}, inserted={4: ["instead\n", "of it\n"]}) for path in (STU, TRANSDUCER)}
    return Host(tmp_path, {"1-drop": drop, "2-put": one_line(STU, 20, "put")})


@pytest.mark.parametrize("seed", range(6))
def test_any_order_gives_what_the_edits_say(tool: ModuleType, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    names = ["1-a", "2-b", "3-c"]
    edits: dict[str, dict[str, Edit]] = {name: {} for name in names}
    for path in PATHS[:2]:
        # One patch may put lines where another drops one, before it as well as behind it.
        for number in range(1, 40):
            if number % 2 and rng.random() < 0.3:
                edits[rng.choice(names)].setdefault(path, Edit()).dropped.add(number)
            if rng.random() < 0.3:
                name = rng.choice(names)
                added = [f"{name} {number} {i}\n" for i in range(rng.randint(1, 3))]
                edits[name].setdefault(path, Edit()).inserted[number] = added
    host = Host(tmp_path, edits)
    applied: set[str] = set()
    for _ in range(10):
        chosen = rng.sample(names, rng.randint(1, 3))
        reverse = rng.random() < 0.4
        options = [word for name in chosen for word in ("--only", name)] + ["--reverse"] * reverse
        assert tool.main([str(host.root), *options], folder=host.patches) == 0
        applied = applied - set(chosen) if reverse else applied | set(chosen)
        assert host.content() == host.expected(applied)


def test_twice_is_once_and_reverse_restores(tool: ModuleType, small: Host, capsys: pytest.CaptureFixture[str]) -> None:
    pristine = small.content()
    for state in ("applied", "already applied"):
        assert tool.run(small.root, tool.read_patches(small.patches)) == {"1-drop": state, "2-put": state}
        assert small.content() == small.expected({"1-drop", "2-put"}) != pristine
    assert tool.main([str(small.root)], folder=small.patches) == 0
    assert "already applied" in capsys.readouterr().out
    for state in ("taken back", "not applied"):
        assert set(tool.run(small.root, tool.read_patches(small.patches), reverse=True).values()) == {state}
        assert small.content() == pristine
    assert git(small.root, "status", "--porcelain") == ""


def test_check_changes_nothing(tool: ModuleType, small: Host) -> None:
    patches = tool.read_patches(small.patches)
    pristine = small.content()
    assert tool.run(small.root, patches, check=True) == {"1-drop": "would apply", "2-put": "would apply"}
    assert tool.run(small.root, patches, check=True, reverse=True)["2-put"] == "not applied"
    assert small.content() == pristine
    tool.run(small.root, patches, ["put"])
    assert tool.run(small.root, patches, check=True) == {"1-drop": "would apply", "2-put": "already applied"}
    assert tool.run(small.root, patches, check=True, reverse=True)["2-put"] == "would take back"
    assert small.content() == small.expected({"2-put"})


def refused(tool: ModuleType, host: Host, *options: str, root: Path | None = None) -> str:
    """The message of a refusal, which must leave every file as it was."""
    before = {path: path.read_bytes() for path in host.root.rglob("*") if path.is_file() and ".git" not in path.parts}
    with pytest.raises(tool.PatchError) as caught:
        tool.run(root or host.root, tool.read_patches(host.patches), *options)
    assert before == {path: path.read_bytes() for path in before if path.is_file()}
    return str(caught.value)


def test_another_commit_is_refused(tool: ModuleType, small: Host, capsys: pytest.CaptureFixture[str]) -> None:
    git(small.root, "commit", "-q", "--allow-empty", "-m", "second")
    other = git(small.root, "rev-parse", "HEAD").strip()
    message = refused(tool, small)
    assert other[:12] in message
    assert f"checkout {small.commit}" in message
    assert tool.main([str(small.root)], folder=small.patches) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_a_file_changed_by_hand_is_refused(tool: ModuleType, small: Host) -> None:
    (small.root / TRANSDUCER).write_text("".join(small.lines) + "mine\n")
    # Also for a patch that does not touch that file: the next one would.
    assert f"{TRANSDUCER} is changed" in refused(tool, small, ["put"])
    git(small.root, "checkout", "-q", ".")
    tool.run(small.root, tool.read_patches(small.patches))
    (small.root / STU).write_text((small.root / STU).read_text().replace("instead", "INSTEAD"))
    assert f"{STU} is changed" in refused(tool, small)


def test_other_dirty_files_do_not_matter(tool: ModuleType, small: Host) -> None:
    (small.root / "README").write_text("mine\n")
    (small.root / POSITION).write_text("mine\n")
    tool.run(small.root, tool.read_patches(small.patches))
    tool.run(small.root, tool.read_patches(small.patches), reverse=True)
    assert (small.root / POSITION).read_text() == "mine\n"


def test_a_patch_in_one_of_its_files_is_refused(tool: ModuleType, small: Host) -> None:
    tool.run(small.root, tool.read_patches(small.patches))
    git(small.root, "checkout", "-q", "--", TRANSDUCER)
    message = refused(tool, small)
    assert f"1-drop is applied, but not in {TRANSDUCER}" in message


def test_what_is_no_checkout_is_refused(tool: ModuleType, small: Host, tmp_path: Path) -> None:
    assert "not the top" in refused(tool, small, root=small.root / "generative_recommenders")
    (tmp_path / "empty").mkdir()
    assert "not a git checkout" in refused(tool, small, root=tmp_path / "empty")
    assert "not a git checkout" in refused(tool, small, root=tmp_path / "absent")
    (small.root / STU).unlink()
    assert f"{STU} is missing" in refused(tool, small)


def test_an_unknown_name_is_refused(tool: ModuleType, small: Host) -> None:
    assert "no patch 'puts'; there are 1-drop, 2-put" in refused(tool, small, ["puts"])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("title\n\ndiff --git a/x b/x\n", "no line 'Commit:"),
        (
            "title\nCommit: {commit}\n\ndiff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n-a\n b\n",
            "head says",
        ),
        (
            "title\nCommit: {commit}\n\ndiff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n c\n",
            "unexpected",
        ),
        (
            "title\nCommit: {commit}\n\ndiff --git a/x b/x\n--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+b\n",
            "unexpected",
        ),
    ],
)
def test_a_malformed_patch_is_refused(tool: ModuleType, tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "x.patch").write_text(text.format(commit="0" * 40))
    with pytest.raises(tool.PatchError, match=complaint):
        tool.read_patches(tmp_path)


def test_an_environment_of_a_git_hook_does_not_matter(
    tool: ModuleType, small: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(ROOT / "nowhere"))
    assert tool.run(small.root, tool.read_patches(small.patches))["2-put"] == "applied"


def test_the_script_needs_the_standard_library_only(small: Host) -> None:
    script = small.patches / "apply.py"
    script.write_text((ROOT / "patches" / "apply.py").read_text())
    command = [sys.executable, "-I", "-S", str(script), str(small.root), "--only", "1-drop"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "patch   lines  state    what it is",
        "1-drop  +4 -2  applied  1-drop",
    ]


def test_the_patches_hold_no_context(tool: ModuleType) -> None:
    patches = tool.read_patches()
    assert [patch.name[5:] for patch in patches] == [
        "cached-forward",
        "attn-norm-len",
        "stu-hook",
        "time-buckets",
    ]
    removed = [line for p in patches for hunks in p.hunks.values() for hunk in hunks for line in hunk.removed]
    # Each removed line is a line of the host's; more than these four is more than is needed.
    assert len(removed) == 4
    for path in (ROOT / "patches").glob("*.patch"):
        heads = [line for line in path.read_text().splitlines() if line.startswith("@@")]
        # git writes a line of the file behind the second @@.
        assert heads
        assert all(line.endswith(" @@") for line in heads), path.name
