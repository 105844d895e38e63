"""The layers of a batch as recorded CUDA graphs, one between any two waits; see `LayerGraphs`.

buckets.py says which sizes share a recording, metadata.py how a batch reaches it, operator.py is the attention that
reads its batch on the device, recorder.py records, layers.py puts them together.
"""

from mtserve_plugin.graphs.buckets import GraphLimits
from mtserve_plugin.graphs.layers import LayerGraphs

__all__ = ["GraphLimits", "LayerGraphs"]
