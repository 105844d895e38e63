"""Puts one defect at a time back into the native code and shows which native test notices.

    python tests/mutations/run.py [--only NAME]... [--seeds N] [--jobs N] [--json FILE]

Each `NNN-name.patch` beside this file is one defect; its header says which rule it breaks (`Row:`) and what goes wrong
(`Defect:`). The sources are copied to a temporary folder and built once; per patch only the objects that depend on a
changed file are built again. A defect that survives is a gap in the tests: exit code 1, as for a patch that no longer
applies.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PARTS = ("index", "engine", "transfer", "runtime", "tiers")
FLAGS = ["-std=c++20", "-O1", "-pthread", "-w", "-Icsrc"]
TIMEOUT = 120


@dataclass(frozen=True)
class Mutation:
    """One patch and what its header says."""

    name: str
    row: str
    defect: str
    path: Path

    @property
    def files(self) -> list[str]:
        """The files it changes, relative to the repository."""
        return re.findall(r"^\+\+\+ b/(\S+)", self.path.read_text(), re.MULTILINE)


@dataclass
class Outcome:
    """`caught` is None for a survivor; `seeds` counts the schedules that it took."""

    name: str
    row: str
    defect: str
    caught: str | None = None
    seeds: int | None = None
    message: str = ""
    seconds: float = 0.0


def read_mutations(only: list[str] | None = None) -> list[Mutation]:
    """All patches in order, or those whose name contains one of `only`.

    Raises:
        ValueError: a patch has no `Row:` or `Defect:` line.
    """
    found = []
    for path in sorted(HERE.glob("*.patch")):
        header = dict(re.findall(r"^(Row|Defect): (.+)$", path.read_text(), re.MULTILINE))
        if header.keys() != {"Row", "Defect"}:
            raise ValueError(f"{path.name} needs a 'Row:' and a 'Defect:' line above the diff")
        if not only or any(part in path.name for part in only):
            found.append(Mutation(path.stem, header["Row"], header["Defect"], path))
    return found


def apply(tree: Path, mutation: Mutation, *, check: bool = False) -> str:
    """Applies the patch to a source tree; returns what git says when it does not fit."""
    command = ["git", "apply", *(["--check"] if check else []), str(mutation.path)]
    # Not the repository around the tree: paths are taken from the tree itself.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip() or "does not apply"


def copy_sources(to: Path) -> None:
    for part in PARTS:
        shutil.copytree(ROOT / "csrc" / part, to / "csrc" / part)
    shutil.copytree(ROOT / "tests" / "native", to / "tests" / "native")


class Builder:
    """Builds the native tests of a tree, taking over objects that no change concerns."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self.folder = folder
        self.base = folder / "base"
        self.jobs = jobs
        copy_sources(self.base)
        self.sources = sorted(
            [path.relative_to(self.base) for part in PARTS for path in (self.base / "csrc" / part).glob("*.cpp")]
        )
        # The kernels are no part of what is mutated.
        tests = [path for path in (self.base / "tests" / "native").glob("*.cpp") if "kernels" not in path.name]
        self.tests = sorted(path.relative_to(self.base) for path in tests)
        # The traffic finds most, and names the seed.
        self.tests.sort(key=lambda path: path.stem != "sim_orderings")
        self.needs: dict[Path, set[str]] = {}

    def build_base(self) -> None:
        with ThreadPoolExecutor(self.jobs) as pool:
            for source, needs in pool.map(self._compile_base, [*self.sources, *self.tests]):
                self.needs[source] = needs
        for test in self.tests:
            self.link(self.base, test)

    def _compile_base(self, source: Path) -> tuple[Path, set[str]]:
        made = compile_one(self.base, source)
        text = made.with_suffix(".d").read_text().replace("\\\n", " ")
        return source, {os.path.normpath(name) for name in text.split(":", 1)[1].split()}

    def build(self, tree: Path, changed: list[str]) -> None:
        """Compiles in `tree` what depends on the changed files."""
        for source, needs in self.needs.items():
            if needs & set(changed):
                compile_one(tree, source)

    def link(self, tree: Path, test: Path) -> Path:
        objects = []
        for source in [test, *self.sources]:
            mine = object_of(tree, source)
            objects.append(str(mine if mine.exists() else object_of(self.base, source)))
        binary = tree / test.stem
        run_compiler(tree, ["-pthread", *objects, "-o", str(binary)])
        return binary


def object_of(tree: Path, source: Path) -> Path:
    return tree / "objects" / ("-".join(source.parts) + ".o")


def compile_one(tree: Path, source: Path) -> Path:
    made = object_of(tree, source)
    made.parent.mkdir(exist_ok=True)
    run_compiler(tree, [*FLAGS, "-MMD", "-MF", str(made.with_suffix(".d")), "-c", str(source), "-o", str(made)])
    return made


def run_compiler(tree: Path, arguments: list[str]) -> None:
    command = [os.environ.get("CXX", "g++"), *arguments]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[:4000]}")


def run_test(binary: Path, seeds: int) -> tuple[bool, int | None, str]:
    """Whether the test failed, at which seed, and what it said."""
    arguments = ["--seeds", str(seeds)] if binary.name == "sim_orderings" else ["--quick"]
    try:
        done = subprocess.run([binary, *arguments], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return True, None, "hangs"
    text = (done.stdout.strip() or done.stderr.strip()).splitlines()
    seed = re.search(r"^seed (\d+): (.*)", done.stdout, re.MULTILINE)
    if seed:
        # A deadlock is described on the other stream.
        detail = done.stderr.strip().splitlines()
        return done.returncode != 0, int(seed[1]), seed[2] if not detail else f"{seed[2]}: {detail[0]}"
    return done.returncode != 0, None, text[-1] if text else f"exit code {done.returncode}"


def try_mutation(builder: Builder, mutation: Mutation, seeds: int) -> Outcome:
    outcome = Outcome(mutation.name, mutation.row, mutation.defect)
    started = time.monotonic()
    tree = builder.folder / mutation.name
    copy_sources(tree)
    try:
        problem = apply(tree, mutation)
        if problem:
            outcome.message = problem
            return outcome
        builder.build(tree, mutation.files)
        for test in builder.tests:
            failed, seed, message = run_test(builder.link(tree, test), seeds)
            if failed:
                outcome.caught, outcome.seeds, outcome.message = test.stem, seed, message
                return outcome
    except RuntimeError as error:
        outcome.message = f"does not build: {error}"
    finally:
        outcome.seconds = time.monotonic() - started
        shutil.rmtree(tree)
    return outcome


def show(outcomes: list[Outcome], console: Console) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("mutation", "row", "caught by", "seeds", "what was seen"):
        table.add_column(name, overflow="fold", justify="right" if name == "seeds" else "left")
    for o in outcomes:
        if o.caught:
            table.add_row(o.name, o.row, o.caught, "" if o.seeds is None else str(o.seeds), o.message)
        else:
            table.add_row(o.name, o.row, "[bold red]SURVIVED[/]", "", o.message or o.defect)
    console.print(table)


def run(only: list[str], seeds: int, jobs: int, console: Console | None = None) -> list[Outcome]:
    """Tries the mutations whose names contain one of `only`; all of them when empty.

    A test that fails without any mutation proves nothing: it is left out and counts as a survivor.
    """
    mutations = read_mutations(only)
    if not mutations:
        raise SystemExit(f"no patch matches {' or '.join(only)}; see {HERE}")
    with tempfile.TemporaryDirectory(prefix="mtserve-mutations-") as folder:
        builder = Builder(Path(folder), jobs)
        builder.build_base()
        broken = []
        for test in list(builder.tests):
            failed, _, message = run_test(builder.base / test.stem, min(seeds, 200))
            if failed:
                broken.append(Outcome(test.stem, "-", "", message=f"fails without any mutation: {message}"))
                builder.tests.remove(test)
        if not builder.tests:
            return broken
        outcomes = list(broken)
        with ThreadPoolExecutor(jobs) as pool:
            for outcome in pool.map(lambda mutation: try_mutation(builder, mutation, seeds), mutations):
                outcomes.append(outcome)
                if console is not None:
                    seen = f"caught by {outcome.caught}" if outcome.caught else "SURVIVED"
                    done = len(outcomes) - len(broken)
                    console.print(f"{done}/{len(mutations)} {outcome.name}: {seen}", style="dim")
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="patches whose name contains this")
    parser.add_argument("--seeds", type=int, default=3000, help="schedules that the traffic runs at most")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutations tried at once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes here")
    options = parser.parse_args()
    outcomes = run(options.only, options.seeds, options.jobs, Console(stderr=True))
    show(outcomes, Console() if sys.stdout.isatty() else Console(width=160))
    survivors = [o.name for o in outcomes if o.caught is None]
    if options.json:
        options.json.write_text(json.dumps({"outcomes": [asdict(o) for o in outcomes], "ok": not survivors}, indent=2))
    print(f"{len(outcomes) - len(survivors)} of {len(outcomes)} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
