"""Run the commands that the documentation shows, and put their real output under them.

A line `<!-- $ plan ... -->` followed by a fenced block: the block becomes what the command prints at 80 columns.

    python docs/refresh.py            # rewrite
    python docs/refresh.py --check    # exit 1 where a page is out of date
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

BLOCK = re.compile(r"(<!-- \$ (?P<command>plan [^\n]*) -->\n```text\n)(?P<output>.*?)(```)", re.DOTALL)


def output_of(command: str) -> str:
    """What the command prints on stdout, without trailing spaces."""
    program = Path(sys.executable).with_name("plan")
    words = shlex.split(command)[1:]
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    done = subprocess.run([program, *words], capture_output=True, text=True, env=environment, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{command}\nexit {done.returncode}\n{done.stderr}")
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    return "\n".join([f"$ {command}", *lines]) + "\n"


def refreshed(text: str) -> str:
    """The page with the output of today."""
    return BLOCK.sub(lambda match: match[1] + output_of(match["command"]) + match[4], text)


def main() -> None:
    """Rewrite or check every page of this folder."""
    stale = []
    for page in sorted(Path(__file__).parent.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        new = refreshed(text)
        if new != text:
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(new, encoding="utf-8")
    print(f"out of date: {', '.join(stale) or 'none'}")
    sys.exit(1 if stale and "--check" in sys.argv else 0)


if __name__ == "__main__":
    main()
