"""A stranger's regular expression, matched where it can be ended: some take longer than any machine lives."""

import json
import subprocess
from functools import lru_cache

from planner.core.children import python_argv
from planner.core.errors import SetupError

CPU_LIMIT_S = 5
WAIT_LIMIT_S = 120
_CHILD = """
import json, re, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]), int(sys.argv[1])))
except ImportError:  # native Windows
    pass
pattern, names = json.load(sys.stdin)
try:
    compiled = re.compile(pattern)
except (re.error, RecursionError, OverflowError) as error:
    json.dump(str(error), sys.stdout)
else:
    json.dump([name for name in names if compiled.fullmatch(name)], sys.stdout)
"""


@lru_cache(maxsize=64)
def full_matches(pattern: str, names: tuple[str, ...]) -> frozenset[str]:
    """Those of the names that the whole pattern matches, as `re.fullmatch`.

    Raises:
        SetupError: no valid pattern, or one that takes more than CPU_LIMIT_S.
    """
    try:
        child = subprocess.run(
            python_argv("-I", "-S", "-c", _CHILD, str(CPU_LIMIT_S)),
            input=json.dumps([pattern, names]),
            capture_output=True,
            text=True,
            timeout=WAIT_LIMIT_S,
            check=False,
        )
        answer = json.loads(child.stdout) if child.returncode == 0 else None
    except subprocess.TimeoutExpired:
        answer = None
    if isinstance(answer, str):
        raise SetupError(f"LoRA targets {pattern:.80} are no valid pattern: {answer}")
    if answer is None:
        raise SetupError(
            f"LoRA targets {pattern:.80} take more than {CPU_LIMIT_S} s to match",
            hint="write the pattern without a repetition inside a repetition, or name the modules",
        )
    return frozenset(answer)
