"""Request traces: logs of events cut into requests, synthetic traffic, and what a model is given for a
request.

`load_trace` opens a trace by name or path, `batches` groups its requests, `build_features` turns a batch into
model input, `statistics` describes a trace, `Trace` is the class to derive your own from. Needs numpy alone.
"""

from mtserve_plugin.workload.batching import batches
from mtserve_plugin.workload.candidates import CandidateSampler
from mtserve_plugin.workload.cap import HistoryCap
from mtserve_plugin.workload.check import check_trace
from mtserve_plugin.workload.features import Features, build_features
from mtserve_plugin.workload.fitted import FITTED
from mtserve_plugin.workload.load import load_trace
from mtserve_plugin.workload.log_format import LogFormat
from mtserve_plugin.workload.log_reader import Log, read_log
from mtserve_plugin.workload.log_trace import LogTrace
from mtserve_plugin.workload.summary import ReturnIntervals, statistics
from mtserve_plugin.workload.synthetic import SyntheticTrace
from mtserve_plugin.workload.synthetic_config import KUAIRAND_LIKE, MT_LIKE, SyntheticConfig
from mtserve_plugin.workload.trace import Events, Requests, Trace

__all__ = [
    "FITTED",
    "KUAIRAND_LIKE",
    "MT_LIKE",
    "CandidateSampler",
    "Events",
    "Features",
    "HistoryCap",
    "Log",
    "LogFormat",
    "LogTrace",
    "Requests",
    "ReturnIntervals",
    "SyntheticConfig",
    "SyntheticTrace",
    "Trace",
    "batches",
    "build_features",
    "check_trace",
    "load_trace",
    "read_log",
    "statistics",
]
