"""The commands of `mtserve`, one file each. What they run is imported when they run: `--help` stays fast."""

from __future__ import annotations

import logging


def quiet_imports() -> None:
    """Keeps a warning away that torchrec's import provokes and that tells a user nothing."""
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
