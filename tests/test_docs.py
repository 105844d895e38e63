"""What the README and docs/ tell a reader to type is run: every shell command and every Python block.

A block that cannot be run says why in a comment in front of it, `<!-- not run: reason -->`, with one of `REASONS`.
`<!-- given: ... -->` names what the text takes for granted. What a `print` shows is in the comment behind it.
Commands run with smaller sizes, which are appended: the last option wins, and the options as written are checked too.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import typer
from typer.testing import CliRunner

from mtserve_plugin import HierarchicalKVCache
from mtserve_plugin.cli import app
from mtserve_plugin.models.hstu import HSTURanker, HSTURankerConfig
from mtserve_plugin.replay.paper.experiments import plan_runs

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])

REASONS = {"needs a checkout of generative_recommenders", "needs a CUDA device"}
SHELL = ("bash", "sh", "console")

# Sizes for a test, behind what the page says.
SMALL = {
    "replay": "--model tiny --requests 12 --batch-sizes 2 --threads 1 --max-history 400 --candidates 9 --pages 80 "
    "--host-bytes 64MiB",
    "replay synthetic": "--users 16 --mean-history 150",
    "replay --paper": "--scale small --requests 6 --threads 1 --heads 2 --dim 8 --candidates 5",
    "replay --paper synthetic": "--users 8",
    "replay --paper figure1": "--scale small --threads 1 --heads 2 --dim 8",
    "simulate": "--limit 400 --host-bytes 1GiB",
    "simulate synthetic": "--users 300 --requests 400",
    "plan": "--users 60 --tokens 300 --new-tokens 6 --model tiny --device-memory 80MiB --host-memory 64MiB "
    "--batch-size 2",
    "bench index": "--ids 20000 --users 2000 --visits 6",
    "bench transfer": "--layers 4 --rounds 2 --users 2 --tokens 1024",
    "bench forward": "--history 70 --delta 5 --candidates 7 --layers 2 --heads 2 --dim 16 --rounds 1",
    "audit": "--rows 3 --length 60 --candidates 20",
}


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    directive: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def not_run(self) -> str:
        return self.directive.removeprefix("not run: ") if self.directive.startswith("not run: ") else ""


def blocks_of(page: Path) -> Iterator[Block]:
    directive, language, start = "", "", 0
    body: list[str] | None = None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if body is not None:
            if line.startswith("```"):
                yield Block(page, start, language, directive, "\n".join(body) + "\n")
                body, directive = None, ""
            else:
                body.append(line)
        elif line.startswith("```"):
            body, language, start = [], line.removeprefix("```").strip(), number
        elif found := re.fullmatch(r"<!-- ((?:given|not run): .*) -->", line):
            directive = found[1]
        elif line.strip():
            directive = ""
    assert body is None, f"{page.name}:{start}: the block does not end"


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = {page.name: [block for block in BLOCKS if block.page == page and block.language == "python"] for page in PAGES}


def commands_of(block: Block) -> Iterator[str]:
    for line in block.text.replace("\\\n", " ").splitlines():
        if block.language == "console":
            line = line.removeprefix("$ ") if line.startswith("$ ") else ""
        if line.split("#")[0].strip():
            yield line.strip()


COMMANDS = [
    pytest.param(line, id=f"{block.name}-{line.split('#')[0].strip()[:60]}")
    for block in BLOCKS
    if block.language in SHELL and not block.not_run
    for line in commands_of(block)
]


# ---- Python ------------------------------------------------------------------------------------------------------


@pytest.fixture
def doubles() -> Iterator[Any]:
    """The stand-ins for `generative_recommenders`, as the notebooks use them."""
    path = str(ROOT / "examples")
    sys.path.insert(0, path)
    try:
        import ranking_service
    finally:
        sys.path.remove(path)
    with ranking_service.serving(None) as service:
        yield service


def ranker(**sizes: Any) -> tuple[HSTURanker, Any]:
    from mtserve_plugin.stability.adapters import ranker_features
    from mtserve_plugin.stability.demo import sample_histories

    config = HSTURankerConfig.small()
    cache = HierarchicalKVCache(config.cache_config(num_pages=64, **sizes))
    return HSTURanker(config, cache).eval(), ranker_features(sample_histories(3, 60, 20, 1))


def _bind(page: Path) -> None:
    gin = pytest.importorskip("gin")
    gin.clear_config()
    for block in blocks_of(page):
        if block.language == "gin":
            gin.parse_config(block.text)


def given(directive: str, page: Path, service: Any) -> dict[str, Any]:
    """What a directive names."""
    model, features = ranker()
    if directive == "given: model, an HSTURanker, and features":
        return {"model": model, "features": features}
    if directive == "given: cache":
        return {"cache": model.cache}
    known = ("given: model, a DlrmHSTU", "given: model, a DlrmHSTU, and cache")
    assert directive in (*known, "given: model, a DlrmHSTU, and the bindings below"), f"{directive!r} is not known"
    from mtserve_plugin import CacheConfig

    model = service.build()
    names = {"model": model}
    if directive.endswith("and cache"):
        names["cache"] = HierarchicalKVCache(CacheConfig.for_model(model, attn_norm_len=256, num_pages=64))
    if directive.endswith("bindings below"):
        _bind(page)
    return names


@pytest.mark.parametrize("page", [name for name, blocks in PYTHON.items() if blocks])
def test_python_runs_and_prints_what_the_page_says(page: str, doubles: Any, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": page}
    for block in PYTHON[page]:
        if block.not_run:
            continue
        if block.directive:
            names |= given(block.directive, block.page, doubles)
        capsys.readouterr()
        text = block.text.replace("start_http_server(9090)", "start_http_server(0)")
        exec(compile("\n" * block.line + text, str(block.page), "exec"), names)
        shown = capsys.readouterr().out.splitlines()
        prints = re.findall(r"^print\(.*$", block.text, re.MULTILINE)
        if prints:
            assert shown == [line.rpartition("  # ")[2] for line in prints], block.name


# ---- commands ----------------------------------------------------------------------------------------------------


class Accepted(Exception):
    """Raised where a command would begin its work."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with the files that the pages speak of."""
    data = tmp_path / "KuaiRand-1K" / "data"
    data.mkdir(parents=True)
    header = (ROOT / "tests/data/kuairand/log_standard_4_22_to_5_08_1k.csv").read_text().splitlines()[0]
    items = torch.randint(200, (24, 6, 12), generator=torch.Generator().manual_seed(1))
    for half, name in enumerate(("4_08_to_4_21", "4_22_to_5_08")):
        lines = [header]
        for visit, user, event in itertools.product(range(12 * half, 12 * half + 12), range(6), range(12)):
            time = 1_650_600_000_000 + 3_600_000 * visit + 60_000 * user + 1000 * event
            row = {"user_id": user, "video_id": int(items[visit, user, event]), "is_click": event % 2, "time_ms": time}
            lines.append(",".join(str(row.get(column, 0)) for column in header.split(",")))
        (data / f"log_standard_{name}_1k.csv").write_text("\n".join(lines) + "\n")

    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").touch()
    guide = [block.text for block in PYTHON["integration.md"] if not block.directive]
    (package / "models.py").write_text("\n".join(guide))

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("OMP_WAIT_POLICY", os.environ.get("OMP_WAIT_POLICY", "PASSIVE"))
    monkeypatch.delenv("GENERATIVE_RECOMMENDERS", raising=False)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)
    for name in ("my_package", "my_package.models"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("line", COMMANDS)
def test_command_runs(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, comment = line.partition("#")
    expected = int(found[1]) if (found := re.search(r"exit code (\d)", comment)) else 0
    for part in code.split("&&"):
        words = shlex.split(part)
        while re.fullmatch(r"[A-Z_]+=.*", words[0]):
            name, _, value = words.pop(0).partition("=")
            monkeypatch.setenv(name, value)
        if words[:2] == ["uv", "run"]:
            words = without_uv(words[2:])
        run_command(words, expected, monkeypatch)


def without_uv(words: list[str]) -> list[str]:
    while words[0] == "--extra":
        assert words[1] in EXTRAS
        words = words[2:]
    assert not words[0].startswith("-"), f"uv run {words[0]} is not known here"
    return words


def run_command(words: list[str], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *arguments = words
    if program == "mtserve":
        check_options(arguments, monkeypatch)
        result = CliRunner().invoke(app, [*arguments, *small(arguments)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == expected, result.output
        files = [value_of(option, arguments, "") for option in ("--json", "--plot", "--report")]
        assert all(Path(file).stat().st_size for file in files if file)
    elif program == "pip":
        assert arguments.pop(0) == "install"
        check_installed(arguments)
    elif program == "pytest":
        assert all((ROOT / word).exists() for word in arguments if not word.startswith("-"))
    elif program == "python":
        script = ROOT / arguments[0]
        monkeypatch.setattr(sys, "argv", [str(script), *arguments[1:]])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
        assert not ended.value.code
    else:
        raise AssertionError(f"{program}: say here how this command is tested")


def small(arguments: list[str]) -> list[str]:
    command = " ".join(arguments[: 2 if arguments[0] == "bench" else 1])
    if "--paper" in arguments:
        command = "replay --paper" + " figure1" * ("figure1" in arguments)
    if command == "audit" and "--module" in arguments:
        return []
    sizes = SMALL.get(command, "")
    if "/" not in value_of("--trace", arguments, ""):
        sizes += " " + SMALL.get(f"{command} synthetic", "")
    return sizes.split()


def value_of(option: str, arguments: list[str], default: str) -> str:
    return arguments[arguments.index(option) + 1] if option in arguments else default


def check_options(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The options as the page writes them are accepted."""
    work = {
        "replay": "mtserve_plugin.replay.run.run_replay",
        "simulate": "mtserve_plugin.simulate.run.run_simulation",
    }
    if "--paper" in arguments:
        assert plan_runs(value_of("--paper", arguments, ""), value_of("--scale", arguments, "small"))
    elif arguments[0] in work:

        def begins(*_: Any) -> None:
            raise Accepted

        with monkeypatch.context() as patched:
            patched.setattr(work[arguments[0]], begins)
            result = CliRunner().invoke(app, arguments)
        assert isinstance(result.exception, Accepted), result.output


def check_installed(arguments: list[str]) -> None:
    words = iter(arguments)
    for word in words:
        if word == "-r":
            assert (ROOT / next(words)).exists()
        elif not word.startswith("-"):
            name, _, extras = word.partition("[")
            assert name == "mtserve-plugin"
            assert set(extras.rstrip("]").split(",")) <= EXTRAS


# ---- pages -------------------------------------------------------------------------------------------------------


def test_what_is_not_run_has_an_accepted_reason() -> None:
    reasons = [block.not_run for block in BLOCKS if block.not_run]
    assert set(reasons) <= REASONS
    assert len(reasons) <= 3, reasons


def test_commands_are_marked_as_such() -> None:
    words = ("mtserve ", "python ", "pip ", "uv ", "pytest", "GENERATIVE_RECOMMENDERS")
    assert [block.name for block in BLOCKS if block.language not in SHELL and block.text.startswith(words)] == []
    assert {block.language for block in BLOCKS} <= {*SHELL, "python", "json", "gin", "text"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_text_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for line in re.findall(r"`mtserve ([^`]+)`", text):
        command: Any = typer.main.get_command(app)
        words = line.split()
        while hasattr(command, "commands") and words:
            command = command.commands[words.pop(0)]
        known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
        assert {word for word in words if word.startswith("--")} <= known, line


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "examples/README.md", ROOT / "patches/README.md"], ids=lambda p: p.name
)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


# The comparison names files of other repositories.
@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "comparison"], ids=lambda page: page.name)
def test_named_files_and_extras_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:mtserve_plugin|csrc|docs|tests|benchmarks|patches|examples)/[\w./-]*)`", text):
        assert (ROOT / name).exists(), name
    for names in re.findall(r"mtserve-plugin\[([\w,]+)\]", text):
        assert set(names.split(",")) <= EXTRAS


def test_the_configuration_page_is_what_the_code_says() -> None:
    path = ROOT / "docs/generate_configuration.py"
    spec = importlib.util.spec_from_file_location("generate_configuration", path)
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    render: Callable[[], str] = generator.render
    assert (ROOT / "docs/configuration.md").read_text() == render(), "run python docs/generate_configuration.py"


def test_every_counter_is_explained() -> None:
    with HierarchicalKVCache(HSTURankerConfig.small().cache_config(num_pages=4)) as cache:
        told = set(re.findall(r"`(\w+)`", (ROOT / "docs/operating.md").read_text()))
        assert set(cache.stats()) <= told
