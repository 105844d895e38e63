#!/usr/bin/env python3
"""Applies the patches of this folder to a checkout of the host code base, or takes them back.

    python patches/apply.py CHECKOUT                       apply all
    python patches/apply.py CHECKOUT --only attn-norm-len  apply one (may be repeated)
    python patches/apply.py CHECKOUT --reverse             take all back
    python patches/apply.py CHECKOUT --check               say what would happen, change nothing

A patch's header names the commit that it is for; any other commit is refused. Hunks without context lines
find their place by line number alone, so this script works out what every touched file looks like under each
selection of patches, refuses a file that looks like none of them, and renumbers the hunks for the patches
that are already there. Patches can be applied and taken back in any order, one at a time or together; doing
it twice does no harm.

Needs git and Python's standard library; rich, where it is installed, prints the table. Exit status: 0 done or
nothing to do, 1 refused (the checkout is untouched), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")
# A git hook exports these; they would outrank the checkout that the user named.
_ENVIRONMENT = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY")


class PatchError(Exception):
    """A patch or the checkout is not what it has to be; the message says what to do."""


class Hunk(NamedTuple):
    """One change without context lines; `at` counts the pristine lines in front of it."""

    at: int
    removed: list[str]
    added: list[str]

    @property
    def growth(self) -> int:
        return len(self.added) - len(self.removed)


@dataclass(frozen=True)
class Patch:
    """One patch file: its hunks by path inside the checkout, relative to the pristine files of `commit`."""

    name: str
    title: str
    commit: str
    hunks: dict[str, list[Hunk]]

    def answers_to(self, name: str) -> bool:
        return name in (self.name, self.name.partition("-")[2], f"{self.name}.patch")

    def size(self) -> str:
        hunks = list(itertools.chain.from_iterable(self.hunks.values()))
        return f"+{sum(len(hunk.added) for hunk in hunks)} -{sum(len(hunk.removed) for hunk in hunks)}"


# ---- reading patches -----------------------------------------------------------------------------


def read_patch(path: Path) -> Patch:
    """Parses one patch file.

    Raises:
        PatchError: no `Commit:` line in the header, or not a `git diff -U0` between existing files.
    """
    header, _, diff = path.read_text(encoding="utf-8").partition("\ndiff --git ")
    commit = re.search(r"^Commit: ([0-9a-f]{40})$", header, re.MULTILINE)
    if commit is None:
        raise PatchError(f"{path.name}: the header has no line 'Commit: <40 hex digits>'; add it")
    hunks: dict[str, list[Hunk]] = {}
    lines = iter(_lines(diff))
    for line in lines:
        if line.startswith("+++ b/"):
            hunks[line[6:].strip()] = []
        elif head := _HUNK.match(line):
            start, old, new = int(head[1]), int(head[2] or 1), int(head[3] or 1)
            removed, added = _body(path, lines, "-", old), _body(path, lines, "+", new)
            hunks[next(reversed(hunks))].append(Hunk(start - 1 if old else start, removed, added))
        elif line[0] in "+-\\ " and not line.startswith("--- a/"):
            raise PatchError(f"{path.name}: unexpected line {line.rstrip()!r}; make the patch with git diff -U0")
    return Patch(path.stem, header.partition("\n")[0], commit[1], hunks)


def read_patches(folder: Path = HERE) -> list[Patch]:
    """All patches of a folder, by name.

    Raises:
        PatchError: there is none, one cannot be read, or they are for different commits.
    """
    patches = [read_patch(path) for path in sorted(folder.glob("*.patch"))]
    if not patches:
        raise PatchError(f"{folder} holds no *.patch file")
    if len({patch.commit for patch in patches}) > 1:
        raise PatchError(f"the patches in {folder} are for different commits; use one folder per commit")
    return patches


def _body(path: Path, lines: Iterator[str], sign: str, count: int) -> list[str]:
    body = list(itertools.islice(lines, count))
    if len(body) < count or any(line[0] != sign for line in body):
        raise PatchError(f"{path.name}: a hunk is not what its head says; make the patch with git diff -U0")
    return [line[1:] for line in body]


def _lines(text: str) -> list[str]:
    """Lines as git counts them, ends kept; `str.splitlines` knows more line ends than git does."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


# ---- files under a selection of patches ----------------------------------------------------------


def placed(path: str, patches: Iterable[Patch]) -> list[tuple[Hunk, Patch]]:
    """The hunks of some patches in one file, top to bottom; at one place insertions first, then by name."""
    found = [(hunk, patch) for patch in patches for hunk in patch.hunks.get(path, [])]
    return sorted(found, key=lambda item: (item[0].at, bool(item[0].removed), item[1].name))


def compose(path: str, pristine: str, patches: Iterable[Patch]) -> str:
    """The file as it is with these patches applied.

    Raises:
        PatchError: a patch removes a line that is not there, or two patches change the same line.
    """
    lines = _lines(pristine)
    out: list[str] = []
    done = 0
    for hunk, patch in placed(path, patches):
        end = hunk.at + len(hunk.removed)
        if hunk.at < done or lines[hunk.at : end] != hunk.removed:
            raise PatchError(f"{patch.name} does not fit {path}, line {hunk.at + 1}; make the patch anew")
        out += lines[done : hunk.at] + hunk.added
        done = end
    return "".join(out + lines[done:])


def renumbered(path: str, base: Sequence[Patch], extra: Sequence[Patch]) -> str:
    """The zero-context diff from the file with `base` to the file with `base` and `extra`; may be empty."""
    out: list[str] = []
    shift = growth = 0
    for hunk, patch in placed(path, [*base, *extra]):
        if patch in base:
            shift += hunk.growth
            continue
        old = _span(hunk.at + shift, len(hunk.removed))
        new = _span(hunk.at + shift + growth, len(hunk.added))
        out.append(f"@@ -{old} +{new} @@\n")
        out += [f"-{line}" for line in hunk.removed] + [f"+{line}" for line in hunk.added]
        growth += hunk.growth
    return "".join([f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n", *out]) if out else ""


def _span(at: int, count: int) -> str:
    return f"{at + 1 if count else at},{count}"


# ---- the checkout --------------------------------------------------------------------------------


class Checkout:
    """A git checkout of the host code base, at the commit that the patches are for."""

    def __init__(self, root: Path, patches: Sequence[Patch]) -> None:
        self.root = root
        self.patches = patches
        commit = patches[0].commit
        self._check_commit(commit)
        paths = sorted({path for patch in patches for path in patch.hunks})
        self._pristine = {path: self._git("show", f"{commit}:{path}") for path in paths}

    def applied(self) -> list[Patch]:
        """The patches that are applied now.

        Raises:
            PatchError: a file looks like no selection of patches, or a patch is in some of its files only.
        """
        found = {path: self._selection(path) for path in self._pristine}
        for patch in self.patches:
            missing = [path for path in patch.hunks if patch not in found[path]]
            if 0 < len(missing) < len(patch.hunks):
                raise PatchError(
                    f"{patch.name} is applied, but not in {', '.join(missing)}; start anew: "
                    f"git -C {self.root} checkout -- {' '.join(patch.hunks)}"
                )
        return [patch for patch in self.patches if any(patch in chosen for chosen in found.values())]

    def change(self, base: Sequence[Patch], extra: Sequence[Patch], *, reverse: bool, check: bool) -> None:
        """Adds `extra` to a checkout that has `base`, or takes it away again; all files or none."""
        diff = "".join(renumbered(path, base, extra) for path in self._pristine)
        if diff:
            options = [*(["--check"] if check else []), *(["--reverse"] if reverse else [])]
            self._git("-c", "apply.whitespace=nowarn", "apply", "--unidiff-zero", *options, "-", text=diff)

    def _selection(self, path: str) -> tuple[Patch, ...]:
        file = self.root / path
        current = file.read_bytes().decode("utf-8", "replace") if file.is_file() else None
        candidates = [patch for patch in self.patches if path in patch.hunks]
        for size in range(len(candidates) + 1):
            for chosen in itertools.combinations(candidates, size):
                if compose(path, self._pristine[path], chosen) == current:
                    return chosen
        raise PatchError(
            f"{path} is {'missing' if current is None else 'changed'}: it is neither as committed nor as the "
            f"patches leave it; save what you need, then git -C {self.root} checkout -- {path}"
        )

    def _check_commit(self, commit: str) -> None:
        try:
            top = Path(self._git("rev-parse", "--show-toplevel").strip())
        except PatchError as error:
            raise PatchError(f"{self.root} is not a git checkout; name the folder you cloned ({error})") from None
        if top.resolve() != self.root.resolve():
            raise PatchError(f"{self.root} is not the top of its git checkout; name {top}")
        try:
            head = self._git("rev-parse", "--verify", "HEAD^{commit}").strip()
        except PatchError:
            head = "none"
        if head != commit:
            raise PatchError(
                f"{self.root} is at commit {head[:12]}, the patches are for {commit[:12]}; "
                f"git -C {self.root} checkout {commit}"
            )

    def _git(self, *arguments: str, text: str = "") -> str:
        environment = {name: value for name, value in os.environ.items() if name not in _ENVIRONMENT}
        command = ["git", "-C", str(self.root), *arguments]
        try:
            done = subprocess.run(command, input=text.encode(), capture_output=True, env=environment, check=False)
        except FileNotFoundError:
            raise PatchError("git is not on PATH; install it") from None
        if done.returncode:
            raise PatchError(f"git: {done.stderr.decode('utf-8', 'replace').strip()}")
        return done.stdout.decode("utf-8", "replace")


# ---- command line --------------------------------------------------------------------------------


def run(
    root: Path,
    patches: Sequence[Patch],
    only: Sequence[str] = (),
    *,
    reverse: bool = False,
    check: bool = False,
) -> dict[str, str]:
    """Applies or takes back the selected patches; returns what became of each, by patch name.

    Raises:
        PatchError: a name is unknown, or the checkout is not what it has to be; nothing was changed.
    """
    unknown = [name for name in only if not any(patch.answers_to(name) for patch in patches)]
    if unknown:
        raise PatchError(f"no patch {unknown[0]!r}; there are {', '.join(patch.name for patch in patches)}")
    checkout = Checkout(root, patches)
    there = checkout.applied()
    wanted = [patch for patch in patches if not only or any(patch.answers_to(name) for name in only)]
    extra = [patch for patch in wanted if (patch in there) is reverse]
    base = [patch for patch in there if patch not in extra]
    checkout.change(base, extra, reverse=reverse, check=check)
    expected = there if check else base if reverse else [*base, *extra]
    if {patch.name for patch in checkout.applied()} != {patch.name for patch in expected}:
        raise PatchError(f"git apply did not do what was asked; look at git -C {root} diff")
    done = ("take back" if reverse else "apply", "taken back" if reverse else "applied")
    verb = f"would {done[0]}" if check else done[1]
    idle = "not applied" if reverse else "already applied"
    return {patch.name: verb if patch in extra else idle for patch in wanted}


def show(patches: Sequence[Patch], states: dict[str, str]) -> None:
    """Prints one line per patch: its name, the lines it adds and removes, what became of it, its title."""
    head = ("patch", "lines", "state", "what it is")
    rows = [(patch.name, patch.size(), states[patch.name], patch.title) for patch in patches if patch.name in states]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[column]) for row in [head, *rows]) for column in range(4)]
        for row in [head, *rows]:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    table = Table(*head, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def main(arguments: Sequence[str] | None = None, folder: Path = HERE) -> int:
    """The command line; `folder` holds the patches. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Apply the patches of this folder, or take them back.")
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="top folder of the host's git checkout")
    parser.add_argument("--reverse", action="store_true", help="take the patches back")
    parser.add_argument("--check", action="store_true", help="say what would happen, change nothing")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this patch; may be repeated")
    options = parser.parse_args(arguments)
    try:
        patches = read_patches(folder)
        states = run(options.checkout, patches, options.only, reverse=options.reverse, check=options.check)
    except PatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    show(patches, states)
    return 0


if __name__ == "__main__":
    sys.exit(main())
