"""Is a prefix stable? `audit` measures it for any model through a `KVAdapter`, and says why not."""

from mtserve_plugin.stability.histories import Histories
from mtserve_plugin.stability.measure import AuditReport, Encoding, KVAdapter, Reuse, audit

__all__ = ["AuditReport", "Encoding", "Histories", "KVAdapter", "Reuse", "audit"]
