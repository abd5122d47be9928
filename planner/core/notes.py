"""Notes: sentences that stand beside a plan, and when a person must know each."""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import partial


class Place(IntEnum):
    """In which order notes are read."""

    FOUND = 0  # measured or refuted here: the answer itself depends on it
    RISK = 1
    PLAIN = 2  # how far to trust the plan, and what it needs
    USUAL = 3  # true of every plan


class Note(str):
    """A sentence with its place; a plain string stands at `Place.PLAIN`."""

    place: Place

    def __new__(cls, text: str, place: Place = Place.PLAIN) -> "Note":
        """The sentence, at its place; pickle, by which a dry run's child answers, sets the place afterwards."""
        note = super().__new__(cls, text)
        note.place = place
        return note

    def __reduce__(self) -> tuple[type["Note"], tuple[str, Place]]:
        return Note, (str(self), self.place)


measured = partial(Note, place=Place.FOUND)
"""A note that was measured or refuted here."""
risk = partial(Note, place=Place.RISK)
"""A note without which the plan may go wrong."""
usual = partial(Note, place=Place.USUAL)
"""A note that every plan of this kind has."""


def place_of(note: str) -> Place:
    return note.place if isinstance(note, Note) else Place.PLAIN


def places(notes: Iterable[str]) -> list[int]:
    """The places beside the notes, as JSON keeps them; empty where all are plain."""
    numbers = [int(place_of(note)) for note in notes]
    return numbers if set(numbers) - {Place.PLAIN} else []


def placed(notes: Iterable[str], places: Sequence[int]) -> tuple[str, ...]:
    """Notes back from JSON with their places.

    Raises:
        ValueError: as many places as notes, or none, are expected, and places that exist.
    """
    if not places:
        return tuple(notes)
    pairs = zip(notes, places, strict=True)
    return tuple(note if place == Place.PLAIN else Note(note, Place(place)) for note, place in pairs)
