"""Packages that have to fit each other."""

from importlib.metadata import PackageNotFoundError, version

from paco_reward.errors import PacoRewardError


def check_torchaudio() -> None:
    """Import torchaudio, as LLaMA-Factory does for every model, audio or not.

    It refuses to be imported beside a torch that was built for another CUDA version. Its newest
    release, 2.11, fits torch 2.11 to 2.14.

    Raises:
        PacoRewardError: It cannot be imported.
    """
    try:
        import torchaudio  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise PacoRewardError(
            f"torch {_version('torch')} and torchaudio {_version('torchaudio')} do not work together "
            f"({reason}). Install a pair that does: pip install 'torch<2.15' 'torchvision<0.30' torchaudio"
        ) from error


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(missing)"
