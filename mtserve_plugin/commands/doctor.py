"""`mtserve doctor`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from mtserve_plugin.commands.outcome import FAILED_CHECK, reported
from mtserve_plugin.report import check_writable, console, print_findings, write_json


def doctor(
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the findings here.")] = None,
) -> None:
    """Look for what is missing or does not fit in this installation, and say how to mend it.

    Checks torch, CUDA, fbgemm, torchrec, the native libraries, the CPU and the GPU. The exit code is 1 when something
    does not work; warnings alone leave it 0.

    Example:

        mtserve doctor
    """
    with reported():
        check_writable(json_file)
        from mtserve_plugin.dependencies import diagnose

        findings = [dataclasses.asdict(finding) for finding in diagnose()]
        write_json(json_file, {"findings": findings})
        print_findings(console(), findings)
        if any(finding["status"] == "error" for finding in findings):
            raise typer.Exit(FAILED_CHECK)
