"""The protocol of the PaCo-Reward judge, shared by PaCo-Reward and PaCo-GRPO.

``from paco_judge import Judge`` is the short way to a score; see ``paco_judge.judge``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paco_judge.judge import Judge

__all__ = ["Judge"]


def __getattr__(name: str) -> Any:
    # Imported when it is used: parts of this package run where aiohttp need not be installed.
    if name == "Judge":
        from paco_judge.judge import Judge

        return Judge
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
