"""The commands of `mtserve`, one file each. What they run is imported when they run: `--help` stays fast."""
