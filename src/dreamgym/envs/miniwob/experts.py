"""Scripted experts of MiniWoB++, one for each kind of task: from the instruction and the page alone.

Each chooses the next action in whatever condition the page is, so it also recovers from errors of others.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from dreamgym.envs.browser.mapping import relevant_elements, words
from dreamgym.envs.browser.site import Found, Visit
from dreamgym.envs.browser.snapshot import ATTRIBUTE
from dreamgym.envs.miniwob.instructions import EMAIL, FLIGHT, MOVIE, quoted, texts_to_type

EXPERTS = ("script", "heuristic")
"""The script solves its kind of task; the heuristic knows no kind, see `heuristic_action`."""
Solver = Callable[[Visit], Awaitable[str]]
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)  # fmt: skip
_ROW_OF_FIELD = """(name) => [...document.querySelectorAll('#area input')].map((e) => [
  e.getAttribute(name), e.value, e.closest('p, .row, tr, .field, .ui-entry').textContent])"""
_STUCK = "noop()"


def click(element: Found) -> str:
    return f"click({element.id!r})"


def fill(element: Found, text: str) -> str:
    return f"fill({element.id!r}, {text!r})"


async def shown(visit: Visit, selector: str) -> list[Found]:
    return [each for each in await visit.find(selector) if each.visible]


async def one(visit: Visit, selector: str) -> Found | None:
    """The first visible element of a selector."""
    return next(iter(await shown(visit, selector)), None)


async def press_button(visit: Visit, selector: str) -> str:
    button = await one(visit, selector)
    return click(button) if button is not None else _STUCK


async def type_into(visit: Visit, selector: str, text: str) -> str | None:
    """Type a text where it is not yet; None if it is there."""
    box = await one(visit, selector)
    if box is None:
        return _STUCK
    return fill(box, text) if box.value != text else None


async def enter_text(visit: Visit) -> str:
    (text,) = quoted(visit.task.instruction)
    return await type_into(visit, "#tt", text) or await press_button(visit, "#subbtn")


async def login_user(visit: Visit) -> str:
    user, password = quoted(visit.task.instruction)
    return (
        await type_into(visit, "#username", user)
        or await type_into(visit, "#password", password)
        or await press_button(visit, "#subbtn")
    )


async def multi_layouts(visit: Visit) -> str:
    wanted = MOVIE.fullmatch(visit.task.instruction)
    assert wanted is not None
    labels = {"genre": "genre", "director": "director", "year": "year", "released": "year"}
    for number, value, row in await visit.page.evaluate(_ROW_OF_FIELD, ATTRIBUTE):
        key = next((name for label, name in labels.items() if label in row.lower()), None)
        if key is not None and value != wanted[key]:
            return f"fill({number!r}, {wanted[key]!r})"
    return await press_button(visit, "#area button, #area .final, #area .ui-submit")


async def use_autocomplete(visit: Visit) -> str:
    start, *end = quoted(visit.task.instruction)
    last = end[0] if end else ""
    box = await one(visit, "#tags")
    if box is None:
        return _STUCK
    entered = box.value if box.value.startswith(start) and box.value.endswith(last) else ""
    fitting = [item for item in await shown(visit, ".ui-menu-item") if item.text.endswith(last)]
    fitting = [item for item in fitting if item.text.startswith(start)]
    if entered and not any(item.text != entered for item in fitting):
        return await press_button(visit, "#subbtn")
    return click(fitting[0]) if fitting else fill(box, start)


async def search_engine(visit: Visit) -> str:
    text = quoted(visit.task.instruction)[0]
    place = re.search(r"the (\d+)\w\w search result", visit.task.instruction)
    assert place is not None
    page, position = divmod(int(place[1]) - 1, 3)
    typed = await type_into(visit, "#search-text", text)
    if typed is not None:
        return typed
    current = await one(visit, ".page-item.active")
    results = await shown(visit, "#page-content a")
    if visit.data != text or current is None or len(results) <= position:
        visit.data = text  # what was searched for last
        return await press_button(visit, "#search")
    if current.text != str(page + 1):
        pages = await shown(visit, ".page-item a")
        return next((click(each) for each in pages if each.text == str(page + 1)), _STUCK)
    return click(results[position])


async def phone_book(visit: Visit) -> str:
    wanted = re.fullmatch(
        r"Find (\S+) in the contact book and click on their (\w+).*", visit.task.instruction
    )
    assert wanted is not None
    name = await one(visit, "#contact .name")
    if name is not None and name.text == wanted[1]:
        return await press_button(visit, f"#contact .{wanted[2]}")
    if await one(visit, ".page-item.next:not(.disabled)"):
        return await press_button(visit, ".page-item.next a")
    return await press_button(visit, ".page-item.prev a")


async def click_checkboxes(visit: Visit) -> str:
    listed = re.fullmatch(r"Select (.*) and click Submit\.", visit.task.instruction)
    assert listed is not None
    wanted = set(listed[1].split(", "))
    labels, boxes = await visit.find("#area label"), await visit.find("#area label input")
    for label, box in zip(labels, boxes, strict=True):
        if box.checked != (label.text in wanted):
            return click(box)
    return await press_button(visit, "#subbtn")


async def click_tab(visit: Visit) -> str:
    (word,) = quoted(visit.task.instruction)
    for link in await shown(visit, "#area .alink"):
        if link.text == word:
            return click(link)
    tabs = await shown(visit, "#area ul li")
    links = await shown(visit, "#area ul li a")
    active = next((place for place, tab in enumerate(tabs) if "ui-tabs-active" in tab.classes), -1)
    return click(links[(active + 1) % len(links)]) if links else _STUCK


async def navigate_tree(visit: Visit) -> str:
    (name,) = quoted(visit.task.instruction)
    for item in await shown(visit, "#tree span"):
        if item.text == name:
            return click(item)
    return await press_button(visit, "#tree li.expandable > span.folder")


async def find_greatest(visit: Visit) -> str:
    """Turn each card over, then the greatest again: only one is open at a time."""
    seen: dict[int, int] = visit.data if isinstance(visit.data, dict) else {}
    visit.data = seen
    cards = await visit.find(".card")
    opened = next((place for place, card in enumerate(cards) if "hidden" not in card.classes), None)
    if opened is not None and cards[opened].text.isdigit():
        seen[opened] = int(cards[opened].text)
    unseen = [place for place in range(len(cards)) if place not in seen]
    best = max(seen, key=lambda place: seen[place]) if not unseen and seen else None
    if unseen:
        return click(cards[unseen[0]])
    return click(cards[best]) if best is not None and best != opened else await press_button(visit, "#submit")


async def order_food(visit: Visit) -> str:
    by_type = re.fullmatch(r"Order (\d+) items that are (\S+)", visit.task.instruction)
    names = [each.text for each in await visit.find(".food-item .item-name")]
    quantities = [int(each.text or 0) for each in await visit.find(".food-item .quantity")]
    add, remove = await visit.find(".food-item .add"), await visit.find(".food-item .remove")
    if by_type:
        fitting = [
            each.text for each in await visit.find(f'.food-item:has(img[alt="{by_type[2]}"]) .item-name')
        ]
        wanted = {fitting[0]: int(by_type[1])}
    else:
        listed = visit.task.instruction.partition(": ")[2].split(",")
        wanted = {name.strip(): 1 for name in listed}
    for place, name in enumerate(names):
        if quantities[place] != wanted.get(name, 0):
            return click((add if quantities[place] < wanted.get(name, 0) else remove)[place])
    return await press_button(visit, "#submit-order button")


async def form_sequence(visit: Visit) -> str:
    wanted = re.fullmatch(
        r"Select (-?\d+) with the slider, click the (\d)\w\w checkbox.*", visit.task.instruction
    )
    value, handle = await one(visit, "#val"), await one(visit, ".ui-slider-handle")
    if wanted is None or value is None or handle is None:
        return _STUCK
    missing = int(wanted[1]) - int(value.text or 0)
    if missing:
        far = abs(missing) >= 4  # the slider's page is a fifth of its range
        key = (
            ("PageUp" if missing > 0 else "PageDown")
            if far
            else ("ArrowRight" if missing > 0 else "ArrowLeft")
        )
        return f"press({handle.id!r}, {key!r})"
    for place, box in enumerate(await shown(visit, "#area input[type=checkbox]"), start=1):
        if box.checked != (place == int(wanted[2])):
            return click(box)
    return await press_button(visit, "#subbtn")


async def choose_date(visit: Visit) -> str:
    date = re.search(r"\d+/\d+/\d+", visit.task.instruction)
    assert date is not None
    return await _pick_date(visit, date[0]) or await press_button(visit, "#subbtn")


async def _pick_date(visit: Visit, date: str) -> str | None:
    """The next action towards a date in the date picker; None if it is chosen."""
    box = await one(visit, "#datepicker")
    if box is None:
        return _STUCK
    if box.value == date:
        return None
    month, day, _ = map(int, date.split("/"))
    open_month = await one(visit, ".ui-datepicker-month")
    if open_month is None:
        return click(box)
    distance = month - 1 - _MONTHS.index(open_month.text)
    if distance:
        return await press_button(visit, f".ui-datepicker-{'next' if distance > 0 else 'prev'}")
    days = await shown(visit, ".ui-datepicker-calendar td a")
    return next((click(each) for each in days if each.text == str(day)), _STUCK)


async def book_flight(visit: Visit) -> str:
    wanted = FLIGHT.fullmatch(visit.task.instruction)
    assert wanted is not None
    flights = await shown(visit, ".flight")
    if flights:
        number = r"\$(\d+)" if wanted["wish"] == "cheapest" else r"Duration:\s*(\d+)h (\d+)m"
        found = [re.search(number, flight.text) for flight in flights]
        costs = [tuple(map(int, each.groups())) if each is not None else (10_000,) for each in found]
        books = await shown(visit, ".flight .flight-price")
        return click(books[costs.index(min(costs))])
    for selector, place in (("#flight-from", wanted["start"]), ("#flight-to", wanted["end"])):
        box = await one(visit, selector)
        if box is None or (place in box.value and box.value.endswith(")")):
            continue
        items = [item for item in await shown(visit, ".ui-menu-item") if place in item.text]
        exact = [item for item in items if f"({place})" in item.text or item.text.startswith(f"{place} (")]
        return click((exact or items)[0]) if items else fill(box, place)
    return await _pick_date(visit, wanted["date"]) or await press_button(visit, "#search")


async def social_media(visit: Visit) -> str:
    wanted = re.fullmatch(r'For the user (\S+), click on the "(.+)" button\.', visit.task.instruction)
    assert wanted is not None
    users = [each.text for each in await visit.find(".media .username")]
    post = f".media:nth-child({users.index(wanted[1]) + 1})" if wanted[1] in users else ".media"
    icons = {"Reply": "reply", "Retweet": "retweet", "Like": "like"}
    if wanted[2] in icons:
        return await press_button(visit, f"{post} .{icons[wanted[2]]}")
    for item in await shown(visit, f"{post} li"):
        if item.text.startswith(wanted[2]):
            return click(item)
    return await press_button(visit, f"{post} .more")


async def email_inbox(visit: Visit) -> str:
    wanted = EMAIL.fullmatch(visit.task.instruction)
    assert wanted is not None
    if await one(visit, "#reply"):
        if not wanted["text"]:
            return await press_button(visit, "#close-reply")
        return await type_into(visit, "#reply-text", wanted["text"]) or await press_button(
            visit, "#send-reply"
        )
    if await one(visit, "#forward"):
        if not wanted["to"]:
            return await press_button(visit, "#close-forward")
        return await type_into(visit, ".forward-sender", wanted["to"]) or await press_button(
            visit, "#send-forward"
        )
    sender = await one(visit, "#email .email-sender")
    if sender is not None:
        if sender.text != wanted["sender"]:
            return await press_button(visit, "#close-email")
        part = (
            f".{wanted['icon']}" if wanted["icon"] else ".email-reply" if wanted["text"] else ".email-forward"
        )
        return await press_button(visit, f"#email {part}")
    if await one(visit, "#search-cancel"):
        return await press_button(visit, "#search-cancel")
    for thread in await shown(visit, "#main .email-thread"):
        if thread.text.split()[:1] == [wanted["sender"]]:
            if not wanted["icon"]:
                return click(thread)
            return await press_button(visit, f'[{ATTRIBUTE}="{thread.id}"] .{wanted["icon"]}')
    return _STUCK


def heuristic_action(visit: Visit) -> str:
    """Type what the instruction names into empty fields, in order; else click what shares most of its words
    and was not clicked yet."""
    clicked: list[str] = visit.data if isinstance(visit.data, list) else []
    visit.data = clicked
    kept = relevant_elements(visit.tree, visit.task.instruction, 10)
    fields = [node for node in kept if node.role == "textbox" and "readonly" not in node.states]
    missing = [
        text for text in texts_to_type(visit.task.instruction) if all(text != each.value for each in fields)
    ]
    for node in fields:
        if not node.value and missing:
            return f"fill({node.id!r}, {missing[0]!r})"
    wanted = set(words(visit.task.instruction))
    others = [node for node in kept if node not in fields and node.id not in clicked]
    if not others:
        clicked.clear()
        return _STUCK
    best = max(others, key=lambda node: len(wanted & set(words(node.text()))))
    clicked.append(best.id)
    return f"click({best.id!r})"


SOLVERS: dict[str, Solver] = {
    "book-flight": book_flight,
    "choose-date": choose_date,
    "click-checkboxes-large": click_checkboxes,
    "click-tab-2-hard": click_tab,
    "email-inbox": email_inbox,
    "enter-text": enter_text,
    "find-greatest": find_greatest,
    "form-sequence": form_sequence,
    "login-user": login_user,
    "multi-layouts": multi_layouts,
    "navigate-tree": navigate_tree,
    "order-food": order_food,
    "phone-book": phone_book,
    "search-engine": search_engine,
    "social-media": social_media,
    "use-autocomplete": use_autocomplete,
}
