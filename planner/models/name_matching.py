"""What people call a model: "llama 3.1 8b", llama3.1:8b, "mistral 7b", unsloth/Meta-Llama-3.1-8B.

A name is taken apart into words and numbers. Each of them must be in the hub id that is taken, and what that id has
more may only be what leaves the model's shape alone: tuning (`-Instruct`, `-Base`), a revision (`-v0.3`), a date, a
context length. A family, a generation or a size that was not said is never guessed: it is asked.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations

from planner.core.errors import UnknownModelError
from planner.core.records import dataclass
from planner.models import catalogue
from planner.models.hub import is_repo_id
from planner.models.stored import PLAIN_COPIES, PUBLISHERS

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
_REASONS = re.compile(r"-(?:thinking|reasoning)\b")
"""Of ids in full: weights of their own, beside those of an `-Instruct` of the same shape."""
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
        revisions = [word for word in self.more if _REVISION.fullmatch(word)]
        return tuple(int(digits) for revision in revisions for digits in re.findall(r"\d+", revision))

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
    matches = _matches(*_split(rest))
    if not slash:
        return _best(name, matches or _matches(*_respelled(rest)))
    tuned = catalogue.load(name.strip().lower().removesuffix(BASE)) if not matches and rest.endswith(BASE) else None
    if tuned is not None:  # "GLM-4.5-Air-Base": the id names no size, and "base" could be one
        words = f"no config.json at hand: planned as {tuned.model_id}, which is tuned from it"
        return Taken(catalogue_id=tuned.model_id.lower(), model_id=name.strip(), words=words)
    if not matches and (shorter := _REASONS.sub("", rest)) != rest:
        taken = understand(f"{owner}/{shorter}")
        shape = catalogue.load(taken.catalogue_id) if taken is not None else None
        if taken is None or shape is None:
            return None
        words = f"no config.json at hand: planned as {shape.model_id}, which has its shape"
        return replace(taken, model_id=name.strip(), words=words)
    from planner.core.close import close_names

    owners = {match.hub_id.owner for match in matches}
    meant = owner if owner in owners else next(iter(close_names(owner, owners, num=1, cutoff=TYPO_SHARE)), "")
    from_owner = [match for match in matches if match.hub_id.owner == meant]
    copied = [match for match in matches if not match.blocking and {*match.more} <= TUNED | PLAIN]
    mirrors = meant in PUBLISHERS and all(match.blocking for match in from_owner)  # gpt-oss-20b, beside its -BF16
    if from_owner and not (mirrors and copied):
        return _best(name, from_owner)
    return _best(name, copied, copy=True)


def of_other_size(name: str) -> list[str]:
    """Ids of what a name says but for its size, the nearest size first; none where that is no family either."""
    words, numbers, _ = _split(name.lower().rpartition("/")[2][:MAX_NAME])
    sizes = [number for number in numbers if _SIZE.fullmatch(number)]
    words = words if _matches(words, (), ()) else _respelled(" ".join(words))[0]
    matches = _matches(words, [number for number in numbers if number not in sizes], ()) if words else []
    size = _num_params(sizes[0]) if sizes else 1.0

    def far(match: _Match) -> tuple[bool, float]:
        return match.retuned, abs(math.log(match.hub_id.num_params / size)) if sizes else float(len(match.more))

    return [match.hub_id.text for match in sorted(matches, key=far)]


def _best(name: str, matches: Sequence[_Match], *, copy: bool = False) -> Taken | None:
    """The nearest of what a name can mean; `copy`: published by somebody else under a name that was given in full.

    Raises:
        UnknownModelError: several of which none is nearest, or none that says no more than what may be left out.
    """
    whole = [match for match in matches if not match.blocking]
    nearest = [match for match in whole if match.distance == min(each.distance for each in whole)]
    newest = max((match.revision for match in nearest), default=())
    latest = [match for match in nearest if match.revision == newest]
    if not matches:
        return None
    if len({match.hub_id.entry for match in latest}) != 1:
        raise _ambiguous(name, latest or matches)
    best = min(latest, key=lambda match: not match.hub_id.main)
    if is_repo_id(name) and "/" in name and (copy or best.retuned):  # weights of their own, in the same shape
        words = f"no config.json at hand: planned as {best.spelled}, which it is named after"
        return Taken(catalogue_id=best.hub_id.text, model_id=name, words=words)
    others = dict.fromkeys(match.spelled for match in nearest if match.hub_id.entry != best.hub_id.entry)
    note = f" (there is {', '.join(others)} too)" if others else ""
    note += " (of another tuning, in the same shape: a hub id in full names your own)" if best.retuned else ""
    return Taken(catalogue_id=best.hub_id.text, model_id=best.spelled, words=f"taken as {best.spelled}{note}")


def _ambiguous(name: str, matches: Sequence[_Match]) -> UnknownModelError:
    """That a name leaves open which model is meant; the hint lists those nearest, one id for each."""
    entries: dict[int, _Match] = {}
    for match in sorted(
        matches, key=lambda candidate: (len(candidate.blocking), candidate.distance, not candidate.hub_id.main)
    ):
        entries.setdefault(match.hub_id.entry, match)
    listed = ", ".join(match.spelled for match in list(entries.values())[:MAX_LISTED])
    which = "say which" if len(entries) > 1 else "the catalogue has one that may be meant"
    error = UnknownModelError(
        f"{name!r:.80} is not one model: sizes, generations and variants are not guessed", hint=f"{which}: {listed}"
    )
    error.could_be = tuple(match.hub_id.text for match in entries.values())
    return error


Split = tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[int, ...], ...]]
"""(words, numbers, runs of neighbouring numbers as their places)."""


def _split(name: str) -> Split:
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
    published = catalogue.hub_ids()
    sizes = {ids[0]: num_params for ids, num_params in published}
    copies = (((copy.lower(),), sizes[original]) for original, copy in PLAIN_COPIES.items())
    hub_ids = []
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
            hub_ids.append(parts)
    return tuple(hub_ids)


def _matches(words: Sequence[str], numbers: Sequence[str], runs: Sequence[Sequence[int]]) -> list[_Match]:
    """The ids that have all that was said, by the first way to read the numbers by which any has."""
    if {*words} - SPOKEN_FILLERS or numbers:
        for reading in _readings(numbers, runs):
            if matches := [match for hub_id in _hub_ids() if (match := _match(hub_id, words, reading)) is not None]:
                return matches
    return []


def _readings(numbers: Sequence[str], runs: Sequence[Sequence[int]]) -> Iterator[tuple[str, ...]]:
    """The numbers as they stand, then with neighbours joined by a point: "llama-3-1-8b" is 3.1 and 8b."""
    seconds = [place for run in runs for place in run[1:] if _plain(numbers[place - 1]).isdecimal()][:MAX_JOINED]
    for num in range(len(seconds) + 1):
        for chosen in combinations(seconds, num):
            if not any(place + 1 in chosen for place in chosen):
                joined = [
                    f"{numbers[at - 1]}.{number}" if at in chosen else number for at, number in enumerate(numbers)
                ]
                yield tuple(number for at, number in enumerate(joined) if at + 1 not in chosen)


def _match(hub_id: _HubId, words: Sequence[str], numbers: Sequence[str]) -> _Match | None:
    """What the id has more than was said, None where it lacks something of it."""
    stated = {*map(_plain, numbers)}
    sized = [place for place, number in enumerate(hub_id.numbers) if _SIZE.fullmatch(number)]
    # "base" is a size of T5's and Whisper's, whose ids have no number for it
    tuning = TUNED | PLAIN if sized or any(map(_DATE.fullmatch, hub_id.numbers)) else TUNED
    covered = _covered(
        [word for word in words if word not in tuning and word not in SPOKEN_FILLERS],
        (*hub_id.words, *re.findall("[a-z]+", hub_id.owner)),
    )
    beyond = list((Counter(map(_plain, numbers)) - Counter(map(_plain, hub_id.numbers))).elements())
    if not sized:  # "mistral nemo 12b": its id names no size
        beyond = [
            number
            for number in beyond
            if not _SIZE.fullmatch(number) or abs(hub_id.num_params / _num_params(number) - 1) > SIZE_TOLERANCE_FRACTION
        ]
    if beyond or covered is None:
        return None
    wanted = "tuned" if TUNED & {*words} else "plain" if PLAIN & tuning & {*words} else ""
    satisfied = {"tuned": TUNED, "plain": PLAIN & tuning, "": frozenset[str]()}[wanted]
    more = [word for at, word in enumerate(hub_id.words) if at not in covered and word not in FILLERS | satisfied]
    unsaid = [number for number in hub_id.numbers if _plain(number) not in stated]
    neutral = {number for number in unsaid if _DATE.fullmatch(number) or _CONTEXT.fullmatch(number)}
    neutral |= {
        number for number in unsaid if _REVISION.fullmatch(number) and sized and hub_id.numbers.index(number) > sized[0]
    }
    if any(map(_SIZE.fullmatch, numbers)):
        neutral |= {number for number in unsaid if _SIZE.fullmatch(number) or _PART_SIZE.fullmatch(number)}
    return _Match(
        hub_id=hub_id,
        more=(*more, *unsaid),
        blocking=(
            *(word for word in more if word not in tuning),
            *(number for number in unsaid if number not in neutral),
        ),
        unmet=len((TUNED | PLAIN) & {*words} - {*hub_id.words}),
        retuned=bool(wanted) and (wanted == "tuned") != bool(TUNED & {*hub_id.words}),
    )


def _plain(number: str) -> str:
    return number.removeprefix("v")


def _num_params(size: str) -> float:
    """Of "8b", "0.5b", "135m", "8x7b"."""
    experts, _, each = size[:-1].rpartition("x")
    return int(experts or 1) * float(each) * (1e9 if size[-1] == "b" else 1e6)


def _covered(query: Sequence[str], words: Sequence[str]) -> set[int] | None:
    """Places of the words that are said, None where something else is; "tiny llama" says "tinyllama", and "gptj" says
    "gpt", "j"."""
    places: set[int] = set()
    at = 0
    while at < len(query):
        for num_said, num in ((1, 1), (2, 1), (1, 2), (3, 1), (1, 3)):
            wanted = "".join(query[at : at + num_said])
            place = next(
                (start for start in range(len(words) - num + 1) if "".join(words[start : start + num]) == wanted), -1
            )
            if place >= 0 and at + num_said <= len(query):
                places.update(range(place, place + num))
                at += num_said
                break
        else:
            return None
    return places


def _respelled(name: str) -> Split:
    """The parts of a name with its misspelled words as the one word of the catalogue's ids that each must mean."""
    from planner.core.close import close_names

    words, numbers, runs = _split(name)
    vocabulary = sorted(
        {word for hub_id in _hub_ids() for word in (*hub_id.words, *re.findall("[a-z]+", hub_id.owner))}
    )
    respelled = []
    for word in words:
        close = close_names(word, vocabulary, num=1, cutoff=TYPO_SHARE) if len(word) >= MIN_TYPO_LETTERS else []
        respelled.append(close[0] if close else word)
    return (tuple(respelled), numbers, runs) if tuple(respelled) != words else ((), (), ())
