"""The settings of `paco-reward build-dataset`."""

from dataclasses import dataclass
from pathlib import Path

from paco_reward.errors import PacoRewardError
from paco_reward.pairing.chat import Server


@dataclass(frozen=True)
class Options:
    """What the command line sets; see its --help. Of ``grids`` and ``sub_figures`` at most one is set."""

    output: Path
    grids: Path | None = None
    sub_figures: Path | None = None
    metadata: Path | None = None
    rankings: Path | None = None
    editing: Path | None = None
    sets_only: bool = False
    server: Server | None = None
    rank_by: str = "scores"
    reasons: bool = False
    reason_model: str | None = None
    reason_tokens: int = 256
    reasons_file: Path | None = None
    candidates: int = 4
    sets_per_prompt: int = 8
    yes_ranks: int = 1
    no_ranks: int = 1
    min_gap: float = 0.1
    duplicate_bits: int = 4
    test_share: float = 0.05
    seed: int = 42
    name: str = "consistency_reward"
    editing_name: str = "sharegpt_editing"

    @property
    def images(self) -> Path | None:
        """The folder of grids or sub-figures."""
        return self.grids or self.sub_figures

    def check(self) -> None:
        """Refuse combinations that cannot work, before any file is read.

        Raises:
            PacoRewardError: names the option and what to give.
        """
        for problem, message in (
            (self.grids and self.sub_figures, "--grids and --sub_figures exclude each other; give one"),
            (not self.images and not self.editing, "nothing to build from: give --grids, --sub_figures or --editing"),
            (self.images and not self.metadata, "--metadata is missing: the jsonl file with the images' prompts"),
            (
                not self.images and (self.rankings or self.sets_only or self.metadata),
                "--metadata, --rankings and --sets_only need the images: give --grids or --sub_figures",
            ),
            (
                self.images and not (self.rankings or self.server or self.sets_only),
                "labels come from rankings: give --rankings FILE (by people), --server URL (a model ranks) or --sets_only",
            ),
            (self.rankings and self.sets_only, "--sets_only writes sets to be ranked; leave --rankings out"),
            (self.reasons and not self.server, "--reasons are written by a model: give --server URL"),
            (self.reasons_file and self.reasons, "--reasons_file and --reasons exclude each other; give one"),
            (
                self.reasons_file and (self.editing or not self.images),
                "--reasons_file holds reasons for pairs of sub-figures; build edits in a run of their own",
            ),
            (self.name == self.editing_name, "--name and --editing_name must differ"),
            (self.rank_by not in ("scores", "order"), f"--rank_by is scores or order, not {self.rank_by}"),
        ):
            if problem:
                raise PacoRewardError(message)
        self._check_numbers()

    def _check_numbers(self) -> None:
        for name, lowest, highest in (
            ("candidates", 2, 100),
            ("sets_per_prompt", 1, 10**6),
            ("yes_ranks", 1, 99),
            ("no_ranks", 1, 99),
            ("min_gap", 0, 1),
            ("duplicate_bits", 0, 64),
            ("test_share", 0, 0.9),
            ("reason_tokens", 16, 8192),
        ):
            value = getattr(self, name)
            if not lowest <= value <= highest:
                raise PacoRewardError(f"--{name} must lie between {lowest} and {highest}, not {value}")
        if not self.rankings and self.images and self.yes_ranks + self.no_ranks > self.candidates:
            raise PacoRewardError(
                f"--yes_ranks {self.yes_ranks} and --no_ranks {self.no_ranks} need more than --candidates "
                f"{self.candidates}; a candidate has one label"
            )
