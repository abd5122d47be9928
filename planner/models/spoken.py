"""What people call a model: "llama 3.1 8b", llama3.1:8b, "mistral 7b", unsloth/Meta-Llama-3.1-8B.

A name is taken apart into words and numbers. Each of them must be in the hub id that is taken, and what that id has
more may only be what leaves the model's shape alone: tuning (`-Instruct`, `-Base`), a revision (`-v0.3`), a date, a
context length. A family, a generation or a size that was not said is never guessed: it is asked.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations

from planner.core.errors import UnknownModelError
from planner.core.records import dataclass
from planner.models import catalogue
from planner.models.hub import is_repo_id
from planner.models.stored import PLAIN_COPIES

MAX_NAME = 100
MAX_LISTED = 8
MAX_JOINED = 6
_TOKEN = re.compile(r"\d+x\d+(?:\.\d+)?b|[ae]\d+(?:\.\d+)?b|v\d+(?:\.\d+)*|\d+(?:\.\d+)*[a-z]*|[a-z]+")
_SIZE = re.compile(r"(?:\d++x)?\d++(?:\.\d++)?[bm]")
_PART_SIZE = re.compile(r"[ae]\d+(?:\.\d+)?b|\d+e")
"""Active parameters ("a3b"), number of experts ("16e")."""
_REVISION = re.compile(r"v\d+(?:\.\d+)+|\d{4}")
_DATE = re.compile(r"\d{4}")
_CONTEXT = re.compile(r"\d+k")
TUNED = frozenset({"instruct", "chat", "it"})
PLAIN = frozenset({"base", "pt"})
BASE = "-base"
FILLERS = frozenset({"meta", "hf", "beta"})
"""Words of a hub id that say nothing of its shape."""
SPOKEN_FILLERS = frozenset({"hf", "model", "llm", "latest"})
SIZE_TOLERANCE_FRACTION = 0.1
TYPO_SHARE = 0.84
"""Letters in common that make another word a misspelling: "lama" (0.89) of llama, not "llava" (0.80)."""
MIN_TYPO_LETTERS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """The catalogue's model that a name stands for.

    Attributes:
        catalogue_id: its id, in lower case.
        model_id: what a launch file names: that id as it is spelled, or a copy's own.
        words: what was taken for what, one clause; the name stands before it.
    """

    catalogue_id: str
    model_id: str
    words: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _HubId:
    """One id of the catalogue, taken apart; `entry`: number of its configuration, `main`: whether that bears this id;
    `num_params`: for ids that name no size."""

    text: str
    owner: str
    words: tuple[str, ...]
    numbers: tuple[str, ...]
    entry: int
    main: bool
    num_params: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Match:
    """An id that has all that was said.

    Attributes:
        more: what else it has; blocking: of that, what is never guessed.
        retuned: whether another tuning was said than it has; unmet: words for it that it has not.
    """

    hub_id: _HubId
    more: tuple[str, ...]
    blocking: tuple[str, ...]
    retuned: bool
    unmet: int

    @property
    def distance(self) -> tuple[bool, int, int]:
        """How far it is from what was said."""
        return self.retuned, len(self.more), self.unmet

    @property
    def revision(self) -> tuple[int, ...]:
        """Its revision, of which nothing was said: higher is newer."""
        found = [one for one in self.more if _REVISION.fullmatch(one)]
        return tuple(int(digits) for one in found for digits in re.findall(r"\d+", one))

    @property
    def spelled(self) -> str:
        """The id as its owner spells it."""
        model = catalogue.load(self.hub_id.text)
        assert model is not None  # the ids are the catalogue's
        return model.model_id


def understand(name: str) -> Taken | None:
    """The one model of the catalogue that a name can mean, None where it means none of them.

    Raises:
        UnknownModelError: several, by a size, a generation or a word that was not said.
    """
    owner, slash, rest = name.strip().lower().rpartition("/")
    if len(name) > MAX_NAME or "/" in owner or not rest.isascii():
        return None
    found = _matches(*_split(rest))
    if not slash:
        return _best(name, found or _matches(*_respelled(rest)))
    tuned = catalogue.load(name.strip().lower().removesuffix(BASE)) if not found and rest.endswith(BASE) else None
    if tuned is not None:  # "GLM-4.5-Air-Base": the id names no size, and "base" could be one
        words = f"no config.json at hand: planned as {tuned.model_id}, which is tuned from it"
        return Taken(catalogue_id=tuned.model_id.lower(), model_id=name.strip(), words=words)
    from planner.core.close import close_names

    owners = {one.hub_id.owner for one in found}
    meant = owner if owner in owners else next(iter(close_names(owner, owners, num=1, cutoff=TYPO_SHARE)), "")
    if own := [one for one in found if one.hub_id.owner == meant]:
        return _best(name, own)
    copied = [one for one in found if not one.blocking and {*one.more} <= TUNED | PLAIN]
    return _best(name, copied, copy=True)


def of_other_size(name: str) -> list[str]:
    """Ids of what a name says but for its size, the nearest size first; none where that is no family either."""
    words, numbers, _ = _split(name.lower().rpartition("/")[2][:MAX_NAME])
    said = [one for one in numbers if _SIZE.fullmatch(one)]
    words = words if _matches(words, (), ()) else _respelled(" ".join(words))[0]
    found = _matches(words, [one for one in numbers if one not in said], ()) if words else []
    size = _num_params(said[0]) if said else 1.0

    def far(one: _Match) -> tuple[bool, float]:
        return one.retuned, abs(math.log(one.hub_id.num_params / size)) if said else float(len(one.more))

    return [one.hub_id.text for one in sorted(found, key=far)]


def _best(name: str, found: Sequence[_Match], *, copy: bool = False) -> Taken | None:
    """The nearest of what a name can mean; `copy`: published by somebody else under a name that was given in full.

    Raises:
        UnknownModelError: several of which none is nearest, or none that says no more than what may be left out.
    """
    whole = [one for one in found if not one.blocking]
    nearest = [one for one in whole if one.distance == min(each.distance for each in whole)]
    newest = max((one.revision for one in nearest), default=())
    latest = [one for one in nearest if one.revision == newest]
    if not found:
        return None
    if len({one.hub_id.entry for one in latest}) != 1:
        raise _ambiguous(name, latest or found)
    best = min(latest, key=lambda one: not one.hub_id.main)
    if is_repo_id(name) and "/" in name and (copy or best.retuned):  # weights of their own, in the same shape
        words = f"no config.json at hand: planned as {best.spelled}, which it is named after"
        return Taken(catalogue_id=best.hub_id.text, model_id=name, words=words)
    others = dict.fromkeys(one.spelled for one in nearest if one.hub_id.entry != best.hub_id.entry)
    beside = f" (there is {', '.join(others)} too)" if others else ""
    return Taken(catalogue_id=best.hub_id.text, model_id=best.spelled, words=f"taken as {best.spelled}{beside}")


def _ambiguous(name: str, found: Sequence[_Match]) -> UnknownModelError:
    """That a name leaves open which model is meant; the hint lists those nearest, one id for each."""
    entries: dict[int, _Match] = {}
    for one in sorted(found, key=lambda one: (len(one.blocking), one.distance, not one.hub_id.main)):
        entries.setdefault(one.hub_id.entry, one)
    listed = ", ".join(one.spelled for one in list(entries.values())[:MAX_LISTED])
    error = UnknownModelError(
        f"{name!r:.80} is not one model: sizes, generations and variants are not guessed", hint=f"say which: {listed}"
    )
    error.could_be = tuple(one.hub_id.text for one in entries.values())
    return error


Split = tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[int, ...], ...]]
"""(words, numbers, runs of neighbouring numbers as their places)."""


def _split(name: str) -> Split:
    """A name without its owner, taken apart."""
    text = re.sub(r"(\d)\s*([bm])illions?\b", r"\1\2", name.lower())
    text = re.sub(r"(\d)\s+([bm])\b", r"\1\2", text)
    text = re.sub(r"(?<![\d.])(\d)b(\d)(?![\da-z])", r"\1.\2b", text)  # bloom-1b1
    text = re.sub(r"(?<![a-z\d])(a\d)[\W_](\db)\b", r"\1.\2", text)  # Qwen1.5-MoE-A2.7B
    words: list[str] = []
    numbers: list[str] = []
    runs: list[list[int]] = []
    after_number = False
    for token in _TOKEN.findall(text):
        if token.isalpha():
            words.append(token)
        else:
            runs += [] if after_number else [[]]
            runs[-1].append(len(numbers))
            numbers.append(token)
        after_number = not token.isalpha()
    return tuple(words), tuple(numbers), tuple(map(tuple, runs))


@cache
def _hub_ids() -> tuple[_HubId, ...]:
    """Every id that the catalogue knows."""
    published = catalogue.hub_ids()
    sizes = {ids[0]: num_params for ids, num_params in published}
    copies = (((copy.lower(),), sizes[original]) for original, copy in PLAIN_COPIES.items())
    found = []
    for entry, (ids, num_params) in enumerate((*published, *copies)):
        for text in ids:
            owner, _, name = text.rpartition("/")
            words, numbers, _ = _split(re.sub(r"(?<=\d)_(?=\d)", ".", name))
            parts = _HubId(
                text=text,
                owner=owner,
                words=words,
                numbers=numbers,
                entry=entry,
                main=text == ids[0],
                num_params=num_params,
            )
            found.append(parts)
    return tuple(found)


def _matches(words: Sequence[str], numbers: Sequence[str], runs: Sequence[Sequence[int]]) -> list[_Match]:
    """The ids that have all that was said, by the first way to read the numbers by which any has."""
    if words or numbers:
        for reading in _readings(numbers, runs):
            if found := [one for hub_id in _hub_ids() if (one := _match(hub_id, words, reading)) is not None]:
                return found
    return []


def _readings(numbers: Sequence[str], runs: Sequence[Sequence[int]]) -> Iterator[tuple[str, ...]]:
    """The numbers as they stand, then with neighbours joined by a point: "llama-3-1-8b" is 3.1 and 8b."""
    seconds = [place for run in runs for place in run[1:] if _plain(numbers[place - 1]).isdecimal()][:MAX_JOINED]
    for num in range(len(seconds) + 1):
        for chosen in combinations(seconds, num):
            if not any(place + 1 in chosen for place in chosen):
                joined = [f"{numbers[at - 1]}.{one}" if at in chosen else one for at, one in enumerate(numbers)]
                yield tuple(one for at, one in enumerate(joined) if at + 1 not in chosen)


def _match(hub_id: _HubId, words: Sequence[str], numbers: Sequence[str]) -> _Match | None:
    """What the id has more than was said, None where it lacks something of it."""
    said = {*map(_plain, numbers)}
    sized = [place for place, one in enumerate(hub_id.numbers) if _SIZE.fullmatch(one)]
    # "base" is a size of T5's and Whisper's, whose ids have no number for it
    tuning = TUNED | PLAIN if sized or any(map(_DATE.fullmatch, hub_id.numbers)) else TUNED
    covered = _covered(
        [one for one in words if one not in tuning and one not in SPOKEN_FILLERS],
        (*hub_id.words, *re.findall("[a-z]+", hub_id.owner)),
    )
    beyond = list((Counter(map(_plain, numbers)) - Counter(map(_plain, hub_id.numbers))).elements())
    if not sized:  # "mistral nemo 12b": its id names no size
        beyond = [one for one in beyond if not _is_about(one, hub_id.num_params)]
    if beyond or covered is None:
        return None
    wanted = "tuned" if TUNED & {*words} else "plain" if PLAIN & tuning & {*words} else ""
    satisfied = {"tuned": TUNED, "plain": PLAIN & tuning, "": frozenset[str]()}[wanted]
    more = [one for at, one in enumerate(hub_id.words) if at not in covered and one not in FILLERS | satisfied]
    unsaid = [one for one in hub_id.numbers if _plain(one) not in said]
    neutral = {one for one in unsaid if _DATE.fullmatch(one) or _CONTEXT.fullmatch(one)}
    neutral |= {one for one in unsaid if _REVISION.fullmatch(one) and sized and hub_id.numbers.index(one) > sized[0]}
    if any(map(_SIZE.fullmatch, numbers)):
        neutral |= {one for one in unsaid if _SIZE.fullmatch(one) or _PART_SIZE.fullmatch(one)}
    return _Match(
        hub_id=hub_id,
        more=(*more, *unsaid),
        blocking=(*(one for one in more if one not in tuning), *(one for one in unsaid if one not in neutral)),
        unmet=len((TUNED | PLAIN) & {*words} - {*hub_id.words}),
        retuned=bool(wanted) and (wanted == "tuned") != bool(TUNED & {*hub_id.words}),
    )


def _plain(number: str) -> str:
    return number.removeprefix("v")


def _is_about(size: str, num_params: float) -> bool:
    """Whether a size as people say it ("12b") is that of so many parameters."""
    return bool(_SIZE.fullmatch(size)) and abs(num_params / _num_params(size) - 1) <= SIZE_TOLERANCE_FRACTION


def _num_params(size: str) -> float:
    """Of "8b", "0.5b", "135m", "8x7b"."""
    experts, _, each = size[:-1].rpartition("x")
    return int(experts or 1) * float(each) * (1e9 if size[-1] == "b" else 1e6)


def _covered(said: Sequence[str], words: Sequence[str]) -> set[int] | None:
    """Places of the words that are said, None where something else is; "tiny llama" says "tinyllama", and "gptj" says
    "gpt", "j"."""
    found: set[int] = set()
    at = 0
    while at < len(said):
        for num_said, num in ((1, 1), (2, 1), (1, 2), (3, 1), (1, 3)):
            wanted = "".join(said[at : at + num_said])
            place = next((one for one in range(len(words) - num + 1) if "".join(words[one : one + num]) == wanted), -1)
            if place >= 0 and at + num_said <= len(said):
                found.update(range(place, place + num))
                at += num_said
                break
        else:
            return None
    return found


def _respelled(name: str) -> Split:
    """The parts of a name with its misspelled words as the one word of the catalogue's ids that each must mean."""
    from planner.core.close import close_names

    words, numbers, runs = _split(name)
    known = sorted({word for hub_id in _hub_ids() for word in (*hub_id.words, *re.findall("[a-z]+", hub_id.owner))})
    found = []
    for word in words:
        close = close_names(word, known, num=1, cutoff=TYPO_SHARE) if len(word) >= MIN_TYPO_LETTERS else []
        found.append(close[0] if close else word)
    return (tuple(found), numbers, runs) if tuple(found) != words else ((), (), ())
