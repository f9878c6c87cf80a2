"""Train a generator.

``python scripts/train.py --config config/grpo.py:NAME [--config.a.b=value …]``, or a saved
config.yaml. Usually started by scripts/single_node/*.sh. All options: docs/configuration.md.

Exit status: 0 done, 2 refused before training, 3 stopped with state saved, 4 failed while training
with one message, 128+n ended by signal n.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from errno import EDQUOT, EFBIG, EIO, ENOSPC, EROFS, ESTALE
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paco_grpo.options import RunOptions
    from paco_grpo.training.trainer import Trainer

PR_SET_PDEATHSIG = 1  # of Linux: which signal the end of the parent sends
WRITE_ERRORS = (EDQUOT, EFBIG, EIO, ENOSPC, EROFS, ESTALE)


def main(arguments: list[str]) -> int:
    """Run to the end; returns the exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    end_with_launcher()
    is_main = os.environ.get("RANK", "0") == "0"
    level = logging.INFO if is_main else logging.WARNING
    logging.basicConfig(
        level=level, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )
    for noisy in ("httpx", "httpcore", "torch.distributed"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

    from paco_grpo.options import ConfigError, read_options

    try:
        options, name = read_options(arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return train(options, name)


def end_with_launcher() -> None:
    """Under torchrun, get a SIGTERM when it dies, also of SIGKILL.

    Otherwise this process trains on alone.
    """
    if "LOCAL_RANK" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def train(options: RunOptions, name: str) -> int:
    """Build and train; the heavy imports wait until the options are known to be readable."""
    try:
        from paco_grpo.training.build import USER_ERRORS, build_run
        from paco_grpo.training.checks import require_promised_gpu
        from paco_grpo.training.stopping import TrainingStopped
        from paco_grpo.training.trainer import Trainer
    except KeyboardInterrupt:
        return interrupted(None)

    trainer = None
    try:
        require_promised_gpu(os.environ)
        trainer = Trainer(build_run(options, name))
        trainer.fit()
    except TrainingStopped as stopped:
        print(f"stopped: {stopped}", file=sys.stderr)
        return 128 + stopped.signal_number if stopped.signal_number else 3
    except KeyboardInterrupt:
        return interrupted(trainer)
    except USER_ERRORS as error:
        return failed(str(error), trainer)
    except OSError as error:
        if not concerns_run_folder(error, options, trainer):
            raise
        return failed(describe(error), trainer)
    return 0


def failed(message: str, trainer: Trainer | None) -> int:
    """Report one error; returns the exit status."""
    began = trainer is not None and trainer.epochs_begun > 0
    again = f". Then: {resume_command(trainer)}" if began else ""
    print(f"error: {message}{again}", file=sys.stderr)
    return 4 if began else 2


def interrupted(trainer: Trainer | None) -> int:
    """Ctrl-C before training, or a second one that does not wait for the next safe point."""
    began = trainer is not None and trainer.epochs_begun > 0
    again = f" To resume from the last checkpoint: {resume_command(trainer)}" if began else ""
    print(f"interrupted: nothing was saved.{again}", file=sys.stderr)
    return 130


def resume_command(trainer: Trainer) -> str:
    """What continues the run, in words."""
    run_name = trainer.options.run_name
    return f"the same command with --config.run_name={run_name} --config.resume_from=latest"


def concerns_run_folder(error: OSError, options: RunOptions, trainer: Trainer | None) -> bool:
    """Whether a file of the run could not be read or written.

    Other errors are defects, and need their traceback.
    """
    if error.filename is None:  # a write to an open file does not know its name
        return error.errno in WRITE_ERRORS
    folder = trainer.run.folder if trainer else Path(options.save_dir).expanduser()
    return Path(os.fsdecode(error.filename)).absolute().is_relative_to(folder.absolute())


def describe(error: OSError) -> str:
    """The error with what helps, in one sentence."""
    from paco_grpo.atomic import remedy

    advice = remedy(error)
    full = "the disk is full: " if error.errno in (EDQUOT, ENOSPC) else ""
    text = f"{full}{error}; finished checkpoints are intact"
    return f"{text}. To mend it: {advice}" if advice else text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
