"""The facts of a site for one task: its pages, and what each action does on them.

A page is the accessibility tree without what an agent changes by typing and ticking: which element has the
focus, which boxes are checked, what the fields hold. These are facts of their own. So a few pages stand for
all that forms can hold, and the text of every state follows by the rules of `mapping` (`state_texts`).

`exploration` finds the facts in the real browser. Where the effect of a button may depend on the form, two
are known: with the fields as the expert had filled them (``right``), and otherwise (``wrong``); all other
forms are taken to do the same. An action whose effect is not known is refused.

Pages, elements and texts have numbers for names (``page 2``, ``element 12``), which small models copy well.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dreamgym.envs.browser.actions import NOT_AN_ACTION, BrowserAction, parse_action
from dreamgym.envs.browser.mapping import elements_text, relevant_elements
from dreamgym.envs.browser.perform import NO_SUCH_ELEMENT, NO_SUCH_FILE, NOT_POSSIBLE
from dreamgym.envs.browser.snapshot import Node, render_tree
from dreamgym.types import Change, Fact, Task, WorldSheet

OTHER = "text 0"
"""Any text that the facts do not have."""
ANY, RIGHT, WRONG = "any", "right", "wrong"
"""Conditions of an effect: how the fields of the page are filled."""
FIELDS = frozenset({"textbox", "searchbox", "spinbutton", "combobox"})
BULLET = "•"
TICKED = "checkbox"
_NO_CHANGE = Change()
_OF_VISIT = frozenset({"at", "focus", "holds", "checked", "ended"})
"""Predicates of what changes during a visit."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A page, and what an agent has changed on it."""

    page: str
    """The rows of `page_rows` as JSON."""
    focus: str
    """Element ids, here and below; empty for none."""
    checked: frozenset[str]
    values: tuple[tuple[str, str], ...]
    """What the filled fields show."""


def page_rows(root: Node) -> Shown:
    """Take a tree apart; `tree_of` puts it together again."""
    rows: list[list[object]] = []
    places: dict[int, int] = {}
    focus, checked, values = "", set(), {}
    for node in root.walk():
        states = [each for each in node.states if each != "focused"] if node.tag != "option" else []
        if node.id and node.id != focus and "focused" in node.states:
            focus = node.id
        if node.role == TICKED and node.id and "checked" in states:
            checked.add(node.id)
            states.remove("checked")
        value = node.value
        if node.role in FIELDS and node.id:
            value = ""
            if node.value:
                values[node.id] = node.value
        parent = places.get(id(node.parent), -1)
        places[id(node)] = len(rows)
        rows.append(
            [parent, node.id, node.role, node.name, value, states, node.actionable, node.hint, node.tag]
        )
    page = json.dumps(rows, ensure_ascii=False, separators=(",", ":"))
    return Shown(page, focus, frozenset(checked), tuple(sorted(values.items())))


def tree_of(shown: Shown) -> Node:
    nodes: list[Node] = []
    values = dict(shown.values)
    for parent, number, role, name, value, states, actionable, hint, tag in json.loads(shown.page):
        now = ["focused"] * bool(number and number == shown.focus) + ["checked"] * (number in shown.checked)
        above = nodes[parent] if parent >= 0 else None
        node = Node(
            number, role, name, values.get(number, value), (*now, *states), actionable, hint, tag, above
        )
        if above is not None:
            above.children.append(node)
        nodes.append(node)
    return nodes[0]


@lru_cache(maxsize=4096)
def render(shown: Shown, instruction: str, view: str, limit: int) -> str:
    """The text of a state, as `BrowserFactory.state_of` writes it by the rules."""
    root = tree_of(shown)
    if view == "tree":
        return render_tree(root)
    return elements_text(root, relevant_elements(root, instruction, limit), instruction)


@lru_cache(maxsize=1024)
def elements_of(page: str) -> dict[str, tuple[str, str]]:
    """Role and tag of each element of a page, by id."""
    return {row[1]: (row[2], row[8]) for row in json.loads(page) if row[1]}


def element(number: str) -> str:
    """The name of an element in facts."""
    return f"element {number}"


@dataclass(frozen=True, slots=True)
class Step:
    """What an action does: a change, or a refusal."""

    reason: str
    change: Change = _NO_CHANGE
    refusal: str | None = None
    lines: tuple[str, ...] = ()
    """For a prompt: the facts that decide."""
    over: bool = False


class SiteFacts:
    """An index of the facts of one moment. Names are those of the facts."""

    def __init__(self, facts: Iterable[Fact]) -> None:
        self.facts = tuple(facts)
        self.pages: dict[str, str] = {}
        self.texts: dict[str, str] = {}
        self.masked: set[str] = set()
        self.effects: dict[tuple[str, str, str], tuple[str, ...]] = {}
        """By page, action and condition."""
        self.wanted: dict[str, set[tuple[str, str]]] = defaultdict(set)
        """By page: what the expert's form held."""
        self.view, self.limit = "elements", 10
        self.at = self.focus = self.first = ""
        self.checked: set[str] = set()
        self.holds: dict[str, str] = {}
        self.ended: list[tuple[str, str]] = []
        for fact in self.facts:
            match fact:
                case ("page", name, rows):
                    self.pages[name] = rows
                case ("text", name, text):
                    self.texts[name] = text
                case ("masked", name):
                    self.masked.add(name)
                case ("does", page, action, condition, *effect):
                    self.effects[page, action, condition] = tuple(effect)
                case ("wanted", page, name, value):
                    self.wanted[page].add((name, value))
                case ("view", view, limit) if limit.isdecimal():
                    self.view, self.limit = view, int(limit)
                case ("at", page):
                    self.at = page
                case ("focus", name):
                    self.focus = name
                case ("checked", name):
                    self.checked.add(name)
                case ("holds", name, text):
                    self.holds[name] = text
                case ("ended", page, action):
                    self.ended.append((page, action))

    def shown(self) -> Shown | None:
        """The present page; None if the facts do not have it."""
        rows = self.pages.get(self.at)
        if rows is None:
            return None
        known = elements_of(rows)
        values = {name.removeprefix("element "): self._value(name, text) for name, text in self.holds.items()}
        checked = (name.removeprefix("element ") for name in self.checked)
        return Shown(
            rows,
            self.focus.removeprefix("element "),
            frozenset(each for each in checked if known.get(each, ("",))[0] == TICKED),
            tuple(sorted((n, v) for n, v in values.items() if known.get(n, ("",))[0] in FIELDS)),
        )

    def _value(self, name: str, text: str) -> str:
        written = self.texts.get(text, "another text")
        return BULLET * len(written) if name in self.masked else written

    def form(self, page: str) -> set[tuple[str, str]]:
        """What the fields of a page hold."""
        names = {element(number) for number in elements_of(self.pages.get(page, "[]"))}
        held = {(name, text) for name, text in self.holds.items() if name in names}
        return held | {(name, "checked") for name in self.checked if name in names}

    def mistakes(self, page: str) -> int:
        """Fields that do not hold what the expert had there."""
        return len({name for name, _ in self.form(page) ^ self.wanted[page]})

    def effect(self, page: str, action: str) -> tuple[tuple[str, ...] | None, str]:
        """What an action does there now, and the condition that decides."""
        known = self.effects.get((page, action, ANY))
        if known is not None:
            return known, ANY
        condition = WRONG if self.mistakes(page) else RIGHT
        return self.effects.get((page, action, condition)), condition

    def text_name(self, text: str) -> str:
        return next((name for name, known in self.texts.items() if known == text), OTHER)

    def step(self, text: str) -> Step:
        """What an action does from here."""
        action = parse_action(text)
        if action is None:
            return refused("no such action", NOT_AN_ACTION)
        if not action.elements:
            return Step("nothing changes", lines=(f"next: ={self.at}",))
        known = elements_of(self.pages.get(self.at, "[]"))
        for number in action.elements:
            if number not in known:
                last = max((int(each) for each in known), default=0)
                missing = int(number) > last
                reason = f"{element(number)} on {self.at}: no"
                return refused(reason, NO_SUCH_ELEMENT if missing else NOT_POSSIBLE)
        for name in action_names(text, self.text_name):
            effect, condition = self.effect(self.at, name)
            if effect is not None:
                return self._apply(action, name, effect, condition)
        return refused(f"{action.name} {element(action.elements[0])}: no effect known", NOT_POSSIBLE)

    def _apply(self, action: BrowserAction, name: str, effect: tuple[str, ...], condition: str) -> Step:
        ended: list[Fact] = []
        begun: list[Fact] = []
        over = "over" in effect or "success" in effect
        place = next((each.removeprefix("to ") for each in effect if each.startswith("to ")), self.at)
        focus = next((each.removeprefix("focus ") for each in effect if each.startswith("focus ")), "")
        if place != self.at:
            ended.append(("at", self.at))
            begun.append(("at", place))
        if focus != self.focus:
            ended += [("focus", self.focus)] if self.focus else []
            begun += [("focus", focus)] if focus else []
        if over:  # what the form held decides afterwards, too
            begun.append(("ended", self.at, name))
        else:
            checked, holds = self._form_after(action, effect)
            ended += [("checked", each) for each in sorted(self.checked - checked)]
            begun += [("checked", each) for each in sorted(checked - self.checked)]
            ended += [("holds", *each) for each in sorted(self.holds.items() - holds.items())]
            begun += [("holds", *each) for each in sorted(holds.items() - self.holds.items())]
        lines = [f"- {line}" for line in _state_lines(ended)]
        lines += [f"+ {line}" for line in _state_lines(begun)]
        reason = f"{action.name}"
        if condition != ANY:
            lines.append(f"mistakes: {self.mistakes(self.at)}")
            reason += f". mistakes, {self.mistakes(self.at)} = 0: {'yes' if condition == RIGHT else 'no'}"
        lines.append(f"next: ={place}")
        change = Change(ended=tuple(ended), begun=tuple(begun))
        return Step(reason, change, lines=tuple(lines), over=over)

    def _form_after(self, action: BrowserAction, effect: tuple[str, ...]) -> tuple[set[str], dict[str, str]]:
        """The checked boxes, and what the fields hold."""
        kept = "new document" not in effect
        checked, holds = (set(self.checked), dict(self.holds)) if kept else (set(), {})
        acted, written = element(action.elements[0]), typed_text(action)
        for each in effect:
            verb, _, rest = each.partition(" ")
            if verb == "toggle":
                checked ^= {rest}
            elif verb == "check":
                checked.add(rest)
            elif verb == "unset":
                holds.pop(rest, None)
            elif verb == "set":
                target, _, number = rest.rpartition(" text ")
                holds[target] = f"text {number}"
            elif verb == "hold" and written:
                holds[acted] = self.text_name(written)
            elif verb == "hold":
                holds.pop(acted, None)
        return checked, holds

    def done(self) -> bool:
        """Whether the visit has ended as the expert's did."""
        return any("success" in (self.effect(page, action)[0] or ()) for page, action in self.ended)


def refused(reason: str, refusal: str) -> Step:
    return Step(reason, refusal=refusal, lines=(f"next: ={REFUSAL_NAMES[refusal]}",))


def typed_text(action: BrowserAction) -> str:
    """The text that an action writes or chooses."""
    if action.name in ("fill", "press"):
        return str(action.arguments[1])
    if action.name == "select_option" and isinstance(action.arguments[1], tuple):
        return action.arguments[1][0]
    return ""


def action_names(text: str, text_name: Callable[[str], str]) -> Iterator[str]:
    """The names under which facts have an action on an element, the most exact one first."""
    action = parse_action(text)
    if action is None or not action.elements:
        return
    name = " and ".join(map(element, action.elements))
    if action.name in ("fill", "select_option", "clear"):
        if written := typed_text(action):
            yield f"fill {name} {text_name(written)}"
        yield f"fill {name}"
    elif action.name == "press":
        yield f"press {name} {typed_text(action)}"
    else:
        yield f"{action.name} {name}"


def _state_lines(facts: Sequence[Fact]) -> Iterator[str]:
    return (f"{fact[0]} {', '.join(fact[1:])}" for fact in facts)


REFUSAL_NAMES = {
    NOT_AN_ACTION: "no such action",
    NO_SUCH_ELEMENT: "no such element",
    NOT_POSSIBLE: "not allowed",
    NO_SUCH_FILE: "no such file",
}


def facts_for(sheet: WorldSheet, action: str) -> list[str]:
    """The lines of a prompt about the sheet before an action, in the words of the reply: what the action ends
    and begins, how many fields differ from the expert's where that decides, and the name of the state."""
    known = SiteFacts(sheet.facts)
    return [f"next: ={known.at}"] if action == "start" else list(known.step(action).lines)


def state_texts(task: Task, sheet: WorldSheet) -> dict[str, str]:
    """The page that the agent sees, if the facts have it, and the refusals, by their names."""
    known = SiteFacts(sheet.facts)
    shown = known.shown()
    found = {} if shown is None else {known.at: render(shown, task.instruction, known.view, known.limit)}
    return found | {name: text for text, name in REFUSAL_NAMES.items()}


def goal_met(task: Task, sheet: WorldSheet) -> bool:
    """Whether the last action ended the visit as the expert's did, with the same form."""
    return SiteFacts(sheet.facts).done()


def can_succeed(task: Task, sheet: WorldSheet) -> bool:
    """Whether the visit goes on, and an action is known that ends it with success."""
    known = SiteFacts(sheet.facts)
    return not known.ended and any("success" in effect for effect in known.effects.values())
