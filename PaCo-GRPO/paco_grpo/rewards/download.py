"""What the download commands share: ``python paco_grpo/rewards/{pickscore_scores,subfig_clipT}.py``."""

from __future__ import annotations

from collections.abc import Callable


def download(what: str, load: Callable[[], object]) -> None:
    """Load ``what`` once, so that it is in the cache.

    Raises:
        SystemExit: That failed; the message says what to do.
    """
    try:
        load()
    except Exception as error:  # hub, network and disk errors share no class
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SystemExit(
            f"error: {what} could not be loaded: {cause}\nSet HF_ENDPOINT to a mirror you can reach and HF_HUB_OFFLINE=0, "
            "or copy the cache (HF_HOME) of a machine that has it."
        ) from error
    print(f"{what} is in the cache")
