"""Runs a whole request trace through the index alone, without keys, values or a model; `run` is the place to start."""
