"""An asyncio-native Kafka consumer framework: partitions in parallel, keys in order, nothing lost."""

from typing import TYPE_CHECKING, Any

from aioshard.app import App
from aioshard.attempts import BatchContext, CallNext, Context
from aioshard.core.options import Adaptive, Batch, CircuitBreaker, DeadLetter, Growing, Limit, Park, Retry
from aioshard.errors import AioshardError, BatchError, ParkLater, RetryLater
from aioshard.observe import HandlerStatistics, JournalStatistics, LimitStatistics, PartitionStatistics, Statistics
from aioshard.ports import Message
from aioshard.records import PartitionInfo, Record, TopicPartition
from aioshard.router import Router
from aioshard.serde.payloads import message

if TYPE_CHECKING:
    from aioshard.settings import Settings
else:

    def __getattr__(name: str) -> Any:
        # Settings need pydantic; importing the package does not. Type checkers must not see this function: they would
        # conclude that every name exists.
        if name == "Settings":
            from aioshard.settings import Settings  # noqa: PLC0415

            return Settings
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"

__all__ = [
    "Adaptive",
    "AioshardError",
    "App",
    "Batch",
    "BatchContext",
    "BatchError",
    "CallNext",
    "CircuitBreaker",
    "Context",
    "DeadLetter",
    "Growing",
    "HandlerStatistics",
    "JournalStatistics",
    "Limit",
    "LimitStatistics",
    "Message",
    "Park",
    "ParkLater",
    "PartitionInfo",
    "PartitionStatistics",
    "Record",
    "Retry",
    "RetryLater",
    "Router",
    "Settings",
    "Statistics",
    "TopicPartition",
    "__version__",
    "message",
]
