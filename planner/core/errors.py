"""The exception tree: what a person did wrong or what a machine lacks, always with a remedy.

    PlannerError                 message, hint, exit code
    |-- UsageError        (2)    a flag, a name or a value that cannot be meant
    |   |-- UnknownGpuError
    |   |-- UnknownModelError
    |   |-- NotExpressed         no setup that the options allow can be written for a launch target
    |   `-- SetupError           a combination of settings that cannot exist
    |-- ConfigError       (2)    a config.json, YAML or JSON that cannot be read or makes no sense
    |   |-- NotATraining         one in which nothing trains
    |   |-- NotPlanned           one that trains something whose memory is not modelled
    |   `-- Undetermined  (3)    one that leaves open what decides the answer
    `-- EnvironmentProblem (3)   no GPU, no network, full disk, a missing extra

Every other exception is a fault of this program: exit code 70 and a report file (`finetune_planner.cli.faults`).
Expected outcomes (out of memory, a timeout, nothing fits) are data, never exceptions.
"""

EXIT_OK = 0
EXIT_NOTHING_FITS = 1
EXIT_BAD_INPUT = 2
EXIT_ENVIRONMENT = 3
EXIT_INTERNAL = 70
"""A fault of this program (sysexits.h: EX_SOFTWARE); none of the codes that say something about a plan."""


class PlannerError(Exception):
    """An error a person can mend; `hint` says how, in the words of its kind where the place has none of its own."""

    exit_code = EXIT_BAD_INPUT
    usual_hint = "plan COMMAND --help lists what can be given"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.usual_hint


class UsageError(PlannerError):
    """A flag, a name or a value that cannot be meant."""


class UnknownGpuError(UsageError):
    """No row of the GPU table matches the name given; `could_be`: the keys of those that it may stand for."""

    could_be: tuple[str, ...] = ()


class UnknownModelError(UsageError):
    """No directory, catalogue entry, cached or hub model matches the name given; `could_be`: lower-case hub ids that it
    may stand for."""

    could_be: tuple[str, ...] = ()


class NotExpressed(UsageError):
    """A launch target has no setup that the options allow; `reason`: what stands most often in the way."""

    usual_hint = "leave out the option that it cannot keep, or name another --target"
    reason: str = ""


class SetupError(UsageError, ValueError):
    """A combination of settings that cannot exist."""

    usual_hint = "change one of the settings that the message names"


class ConfigError(PlannerError):
    """A configuration file that cannot be read or makes no sense."""

    usual_hint = "correct the file where the message says"


class NotATraining(ConfigError):
    """A file in which nothing trains: of another tool, a helper, inference."""


class NotPlanned(ConfigError):
    """A training whose memory is not modelled: another objective, another adapter, a loop of its own."""


class OwnLoop(NotPlanned):
    """A loop that cannot be read without running it."""


class Undetermined(ConfigError):
    """A file that leaves open what decides the answer; the hint names the options that supply it."""

    exit_code = EXIT_ENVIRONMENT
    usual_hint = "say what the message asks for with --set, --model or --args"


class LayoutAlone(Undetermined):
    """A launcher's file, which says how a job is spread and leaves the job itself open."""


class EnvironmentProblem(PlannerError):
    """The machine lacks something: a GPU, the network, disk space, an optional dependency."""

    exit_code = EXIT_ENVIRONMENT
    usual_hint = "plan doctor says what this machine lacks, and how to mend it"
