"""No Python below a trace imports PyTorch without the phantom GPU, whatever it was told to ignore.

`-I`, `-E`, `-S` and an empty environment keep a Python from our `sitecustomize`. None keeps it from its own
`encodings`, which every CPython imports before anything else: in the program's tree (`overlays`) that file of every
interpreter of this machine is one that also watches for `import torch`. Standard library alone, as all of the keeper.

Not reached: an interpreter in none of the usual places, that none of the command, PATH and the environment names.
"""

import glob
import os
import re
from collections.abc import Iterator, Sequence

GUARD = """

def _watch_for_torch(environment, root):
    import sys

    class Guard:
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            if name != "torch" or "probes.phantom.boot" in sys.modules:
                return None
            import os
            try:
                os.environ.update(environment)
                sys.path.append(root)
                from probes.phantom import boot
                boot.begin()
            except BaseException as error:
                os.write(2, f"plan trace: no phantom GPU: {{error!r}}\\n".encode())
                os._exit(97)
            found = (one.find_spec(name, path, target) for one in sys.meta_path if one is not cls)
            return next((one for one in found if one is not None), None)

    sys.meta_path.insert(0, Guard)


_watch_for_torch({environment!r}, {root!r})
"""
"""What is added to `encodings`."""
_USUAL = (
    "/usr", "/usr/local", "/opt/*", "~", "~/.pyenv", "~/.conda", "~/.asdf", "~/.local/share/mise", "~/.local/share/uv",
    "~/*conda*", "~/*mamba*", "~/*forge*",
)  # fmt: skip
_BELOW = ("", "envs/*", "versions/*", "installs/python/*", "python/*")
"""Where an installation keeps further ones."""


def encodings_of(command: Sequence[str]) -> list[str]:
    paths = set()
    for prefix in {os.path.realpath(folder) for folder in _prefixes(command)}:
        for below in _BELOW:
            paths.update(glob.glob(f"{glob.escape(prefix)}/{below}/lib*/python3*/encodings/__init__.py"))
    return sorted({os.path.realpath(path) for path in paths})


def _prefixes(command: Sequence[str]) -> Iterator[str]:
    for pattern in _USUAL:
        yield from glob.glob(os.path.expanduser(pattern))
    for folder in (*os.environ.get("PATH", "").split(":"), *(os.path.dirname(word) for word in command)):
        if folder:
            yield os.path.dirname(os.path.abspath(folder))
            for program in glob.glob(f"{glob.escape(folder)}/python*"):
                yield os.path.dirname(os.path.dirname(os.path.realpath(program)))
    environments = (os.environ.get(name, "") for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYENV_ROOT"))
    for folder in (*filter(None, environments), *glob.glob("*venv*"), *glob.glob(".*venv*")):
        yield folder
        yield from _base_installation(f"{folder}/pyvenv.cfg")


def _base_installation(path: str) -> Iterator[str]:
    try:
        with open(path) as file:
            match = re.search(r"^home\s*=\s*(.+)$", file.read(65536), re.MULTILINE)
    except (OSError, ValueError):
        return
    if match:
        yield os.path.dirname(match[1].strip())
        yield os.path.dirname(os.path.dirname(os.path.realpath(f"{match[1].strip()}/python3")))
