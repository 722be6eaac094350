"""Errors of the job steps: one line a person can act on, printed last so that log readers find it.

StepError (exit 1)
ConfigError (exit 2)    the command or plan is wrong: no retry helps
DatasetError            a row of the dataset is wrong
CheckpointError         the model's files are damaged or incomplete
NumericalError          the model computed NaN or infinity
VerificationError       recomputed states differ from the stored ones
IncompleteError         the run ended and samples are missing
"""

from __future__ import annotations


class StepError(Exception):
    """A failure with a known cause. `hint` says what to type or change next; it is printed before the error."""

    exit_status = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(StepError):
    """The command line, the plan or the environment cannot work; running it again changes nothing."""

    exit_status = 2


class DatasetError(StepError):
    """A row of the dataset cannot be used; the message holds file and line."""


class CheckpointError(StepError):
    """A file of the model is missing, truncated or not what the configuration says."""


class NumericalError(StepError):
    """Hidden states hold NaN or infinity."""


class VerificationError(StepError):
    """Freshly computed hidden states differ from the stored ones."""


class IncompleteError(StepError):
    """Fewer valid sample files than dataset rows at the end of the run."""
