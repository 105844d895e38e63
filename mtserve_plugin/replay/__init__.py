"""Replays a request trace through a model, with and without the cache; `run` is the place to start reading."""
