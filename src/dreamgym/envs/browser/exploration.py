"""Finds the facts of a task in the real browser: visits of their own, beside the episode.

First the expert's way. Then, until the budget of actions is spent, every action that the pages on this way
and next to it offer: a visit goes on while its page offers something that was not tried, and starts again
where it does not. Actions on elements of the same kind that did the same twice are not tried on the others.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from dreamgym.envs.browser.actions import parse_action
from dreamgym.envs.browser.effects import (
    SAME,
    Effect,
    absolute,
    effect_parts,
    element_of,
    general_name,
    is_local,
    kind_of_node,
    kinds_of,
    relative,
    text_of,
)
from dreamgym.envs.browser.facts import (
    ANY,
    BULLET,
    FIELDS,
    OTHER,
    RIGHT,
    TICKED,
    WRONG,
    Shown,
    action_names,
    element,
    elements_of,
    page_rows,
    tree_of,
    typed_text,
)
from dreamgym.envs.browser.mapping import admissible_actions, useful_elements
from dreamgym.envs.browser.perform import REFUSALS
from dreamgym.envs.browser.snapshot import Node
from dreamgym.types import Fact, Outcome, State

_ELEMENT = re.compile(r"element [0-9]+")
_TWICE = 2
"""Elements of a kind that did the same; others of the kind are taken to do it, too."""
Form = frozenset[tuple[str, str]]


class Visitor(Protocol):
    """An episode of the browser."""

    @property
    def tree(self) -> Node: ...

    @property
    def experts(self) -> tuple[str, ...]: ...

    async def start(self) -> State: ...

    async def step(self, action: str) -> Outcome: ...

    async def aclose(self) -> None: ...

    async def expert_action(self, expert: str | None = None) -> str: ...

    async def new_document(self) -> bool: ...


@dataclass(slots=True)
class _Moment:
    page: str
    focus: str
    checked: frozenset[str]
    holds: dict[str, str]
    form: Form


@dataclass(slots=True)
class Explorer:
    """What is known of a site so far."""

    make: Callable[[], Visitor]
    values: Sequence[str]
    budget: int
    pages: dict[str, str] = field(default_factory=dict)
    """Names by rows."""
    texts: dict[str, str] = field(default_factory=dict)
    masked: set[str] = field(default_factory=set)
    seen: dict[tuple[str, str], list[tuple[Form, Effect]]] = field(default_factory=dict)
    """Effects, and the form before them, by page and action."""
    start: _Moment | None = None
    spent: int = 0
    """Real actions."""
    _ways: dict[str, list[str]] = field(default_factory=dict)
    """By page: the actions that lead to it."""
    _form: dict[str, Form] = field(default_factory=dict)
    """By page: the form when the expert left it, else when it was left first."""
    _visit: Visitor | None = None
    _now: _Moment | None = None
    _way: list[str] = field(default_factory=list)
    _shown: dict[str, Shown] = field(default_factory=dict)
    _offers: dict[str, list[tuple[str, str, Node]]] = field(default_factory=dict)

    async def run(self) -> None:
        try:
            await self._follow_expert()
            while self.spent < self.budget:
                action = self._next_action()
                if action is None and not await self._go_where_something_is_left():
                    break
                if action is not None:
                    await self._act(action)
        finally:
            await self._leave()

    async def _follow_expert(self) -> None:
        now = await self._open()
        while self._visit is not None and self._visit.experts and self.spent < self.budget:
            page, form = now.page, now.form
            action = await self._visit.expert_action()
            effect = await self._act(action)
            if effect is not None and (effect.end or effect.to != page):
                self._form[page] = form
            if effect is None or effect.end or self._now is None:
                break
            now = self._now

    async def _open(self) -> _Moment:
        await self._leave()
        visit = self._visit = self.make()
        await visit.start()
        await visit.new_document()
        self._way = []
        now = self._now = self._observe(visit.tree, {}, "")
        self._ways.setdefault(now.page, [])
        if self.start is None:
            self.start = now
        return now

    async def _leave(self) -> None:
        visit, self._visit, self._now = self._visit, None, None
        if visit is not None:
            await visit.aclose()

    async def _act(self, action: str) -> Effect | None:
        """Take an action and note its effect; None if it was refused or its visit is over."""
        visit, before = self._visit, self._now
        if visit is None or before is None:
            return None
        self.spent += 1
        outcome = await visit.step(action)
        self._way = [*self._way, action]
        name = next(action_names(action, self._text), "")
        if outcome.next_state.text in REFUSALS or not name:
            if name:
                self.seen.setdefault((before.page, name), [])  # not to be tried again
            return None
        new = await visit.new_document()
        parsed = parse_action(action)
        acted = element(parsed.elements[0]) if parsed is not None and parsed.elements else ""
        typed = {acted: typed_text(parsed)} if parsed is not None and acted else {}
        now = self._observe(visit.tree, {} if new else before.holds, next(iter(typed.values()), ""), acted)
        end = "success" if outcome.success else "over" if outcome.terminated else ""
        effect = self._difference(before, now, new=new, end=end)
        self.seen.setdefault((before.page, name), []).append((before.form, effect))
        if not is_local(effect, before.page):
            self._form.setdefault(before.page, before.form)
        self._ways.setdefault(now.page, self._way)
        self._now = now
        if outcome.over:
            await self._leave()
        return effect

    def _observe(self, tree: Node, holds: dict[str, str], written: str, acted: str = "") -> _Moment:
        shown = page_rows(tree)
        page = self.pages.setdefault(shown.page, f"page {len(self.pages) + 1}")
        self._shown.setdefault(page, shown)
        known = {element(number) for number in elements_of(shown.page)}
        now = {name: text for name, text in holds.items() if name not in known}
        for number, value in shown.values:
            name, text = element(number), value
            before = holds.get(name, "")
            bullets = set(value) == {BULLET}
            if bullets and name == acted and len(written) == len(value):
                self.masked.add(name)
                text = written
            elif bullets and name in self.masked:
                text = next((t for t, n in self.texts.items() if n == before), value)
            now[name] = self._text(text)
        checked = frozenset(map(element, shown.checked))
        form = {(name, text) for name, text in now.items() if name in known}
        return _Moment(
            page,
            element(shown.focus) if shown.focus else "",
            checked,
            now,
            frozenset(form | {(name, "checked") for name in checked}),
        )

    def _text(self, text: str) -> str:
        return self.texts.setdefault(text, f"text {len(self.texts) + 1}")

    def _difference(self, before: _Moment, now: _Moment, *, new: bool, end: str) -> Effect:
        boxes = self._boxes(now.page)
        both = set() if new else boxes & self._boxes(before.page)
        held = {} if new else before.holds
        sets = [(name, text) for name, text in now.holds.items() if held.get(name) != text]
        sets += [(name, "") for name in held if name not in now.holds]
        return Effect(
            to=now.page,
            focus=now.focus,
            new=new,
            toggles=frozenset((before.checked ^ now.checked) & both),
            sets=tuple(sorted(sets)),
            checks=frozenset(now.checked - both),
            end=end,
        )

    def _boxes(self, page: str) -> frozenset[str]:
        return frozenset(map(element, elements_of(self._shown[page].page)))

    def _next_action(self) -> str | None:
        """Something that was not tried on the present page."""
        if self._now is None:
            return None
        return next(self._untried(self._now.page, self._now.form), None)

    def _untried(self, page: str, form: Form) -> Iterator[str]:
        """What leads further from a page with fields is tried once more, with another form."""
        for action, name, node in self._offered(page):
            known = self.seen.get((page, name))
            if known is None:
                if self._rule(page, name, node) is None:
                    yield action
            elif known and not self._settled(page, known) and form not in {each for each, _ in known}:
                yield action

    def _settled(self, page: str, known: Sequence[tuple[Form, Effect]]) -> bool:
        """Whether the form cannot decide, or was seen not to, or to."""
        local = all(is_local(effect, page) for _, effect in known)
        return local or not self._has_form(page) or len({form for form, _ in known}) > 1

    def _has_form(self, page: str) -> bool:
        return any(role in (*FIELDS, TICKED) for role, _ in elements_of(self._shown[page].page).values())

    def _offered(self, page: str) -> list[tuple[str, str, Node]]:
        """What can be done on a page: actions, their names, and the elements."""
        if page not in self._offers:
            self._offers[page] = list(self._offer(page))
        return self._offers[page]

    def _offer(self, page: str) -> Iterator[tuple[str, str, Node]]:
        for node in useful_elements(tree_of(replace(self._shown[page], values=(), checked=frozenset()))):
            actions = admissible_actions([node], self.values)
            actions += [f"click({node.id!r})"] if node.role in FIELDS else []
            for action in actions:
                yield action, next(action_names(action, self._text)), node

    def _rule(self, page: str, name: str, node: Node) -> Effect | None:
        """What other elements of this kind have done, or this one on other pages; None if it must be
        tried."""
        mine = element(node.id)
        elsewhere = {
            effect
            for (other, action), found in self.seen.items()
            if action == name and other != page
            for _, effect in found
        }
        pages = sum(action == name and bool(found) for (_, action), found in self.seen.items())
        if pages >= _TWICE and len(elsewhere) == 1 and not self._has_form(page):
            return next(iter(elsewhere))
        kind, verb, text = kind_of_node(node), name.split(maxsplit=1)[0], text_of(name)
        kept = (
            (effect, text_of(action))
            for (other, action), found in self.seen.items()
            if text and other == page and action.startswith(f"fill {mine} text ")
            for _, effect in found
        )
        for known, written in kept:  # a field that keeps one text keeps the others, too
            if general_name(f"fill {mine} {written}", known, page) == f"fill {mine}":
                return absolute(relative(known, mine, page, written), mine, page, text)
        seen: dict[str, set[Effect]] = defaultdict(set)
        for (other, action), found in self.seen.items():
            acted = element_of(action)
            like = acted and acted != mine and action.split(maxsplit=1)[0] == verb
            if like and kinds_of(self._shown[other]).get(acted) == kind:
                for _, effect in found:
                    seen[acted].add(relative(effect, acted, other, text_of(action)))
        same = {effect for found in seen.values() for effect in found}
        if len(seen) < _TWICE or len(same) != 1:
            return None
        effect = next(iter(same))
        ends = effect.end == "success" or (effect.end and self._has_form(page))
        local = effect.to == SAME and not effect.new and not ends
        return absolute(effect, mine, page, text_of(name)) if local else None

    async def _go_where_something_is_left(self) -> bool:
        """Start again and go to the first page with something to try."""
        for page, way in list(self._ways.items()):
            if next(self._untried(page, self._first_form(page)), None) is None:
                continue
            now = await self._open()
            for action in way:
                if self.spent >= self.budget or self._now is None:
                    break
                await self._act(action)
            now = self._now or now
            if self._now is not None and self._now.page == page and self._next_action() is not None:
                return True
            del self._ways[page]  # not to be reached again
            return bool(self._ways)
        return False

    def _first_form(self, page: str) -> Form:
        shown = self._shown[page]
        held = {(element(number), self._text(value)) for number, value in shown.values}
        return frozenset(held | {(element(number), "checked") for number in shown.checked})

    def facts(self, view: str, limit: int) -> tuple[Fact, ...]:
        """What was found, from the start of a visit on."""
        assert self.start is not None
        begin = self.start
        found: list[Fact] = [("at", begin.page)]
        found += [("focus", begin.focus)] if begin.focus else []
        found += [("holds", *each) for each in sorted(begin.holds.items())]
        found += [("checked", each) for each in sorted(begin.checked)]
        effects = list(self._effects())
        found += [("view", view, str(limit)), ("explored", str(self.spent))]
        found += [("masked", name) for name in sorted(self.masked)]
        found += [("wanted", page, *each) for page, form in self._form.items() for each in sorted(form)]
        found += effects
        told = dict.fromkeys(name for fact in found for part in fact for name in _ELEMENT.findall(part))
        found += [("element", name) for name in told]  # a reply may begin facts only about known names
        found += [("text", name, text) for text, name in self.texts.items() if text]
        found += [("text", OTHER, "another text")]
        return (*dict.fromkeys(found), *(("page", name, rows) for rows, name in self.pages.items()))

    def _effects(self) -> Iterator[Fact]:
        for (page, name), seen in self.seen.items():
            by_condition = self._by_condition(page, seen)
            for condition, effect in by_condition.items():
                yield (
                    "does",
                    page,
                    general_name(name, effect, page),
                    condition,
                    *effect_parts(effect, page, name),
                )
        for page in self._shown:
            for _, name, node in self._offered(page):
                same = self._rule(page, name, node) if (page, name) not in self.seen else None
                if same is not None:
                    yield ("does", page, general_name(name, same, page), ANY, *effect_parts(same, page, name))

    def _by_condition(self, page: str, seen: Sequence[tuple[Form, Effect]]) -> dict[str, Effect]:
        if seen and len({effect for _, effect in seen}) == 1 and self._settled(page, seen):
            return {ANY: seen[0][1]}
        found: dict[str, Effect] = {}
        for form, effect in seen:
            found.setdefault(RIGHT if form == self._form.get(page) else WRONG, effect)
        return found
