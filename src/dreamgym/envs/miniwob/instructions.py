"""What the instructions of MiniWoB++ say, for experts and for texts that are worth typing."""

from __future__ import annotations

import re

FLIGHT = re.compile(
    r"Book the (?P<wish>\w+) one-way flight from: (?P<start>.+) to: (?P<end>.+) on (?P<date>[\d/]+)\."
)
MOVIE = re.compile(r"Search for (?P<genre>\w+) movies directed by (?P<director>.+) from year (?P<year>\d+)\.")
EMAIL = re.compile(
    r"Find the email by (?P<sender>\S+) and (?:reply to them with the text \"(?P<text>.+)\"|"
    r"forward that email to (?P<to>\S+)|click the (?P<icon>trash|star) icon to .+)\."
)
_QUOTED = re.compile(r"\"([^\"]+)\"")


def quoted(instruction: str) -> list[str]:
    return _QUOTED.findall(instruction)


def texts_to_type(instruction: str) -> list[str]:
    """
    >>> texts_to_type('Book the shortest one-way flight from: Fairbanks, AK to: ZNZ on 12/06/2016.')
    ['Fairbanks, AK', 'ZNZ']
    >>> texts_to_type('Find the email by Ava and forward that email to Bo.')
    ['Bo']
    """
    if flight := FLIGHT.fullmatch(instruction):
        return [flight["start"], flight["end"]]
    if movie := MOVIE.fullmatch(instruction):
        return [movie["genre"], movie["director"], movie["year"]]
    if (email := EMAIL.fullmatch(instruction)) and email["to"]:
        return [email["to"]]
    return quoted(instruction)
