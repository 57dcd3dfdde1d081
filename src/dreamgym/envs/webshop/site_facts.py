"""The hidden facts of a visit of the shop in a browser: those of `facts`, and what the search box holds.

The same shop lies behind the site, so its facts decide where a click leads. The site's pages follow from
them: `page_tree` is the accessibility tree of `site.page_html`, with the ids that the browser gives to its
elements, and the rules of `browser.mapping` make it a state.
"""

from __future__ import annotations

from collections.abc import Sequence

from dreamgym.envs.browser.actions import NOT_AN_ACTION, BrowserAction, parse_action
from dreamgym.envs.browser.annotator import SiteAnnotator
from dreamgym.envs.browser.facts import REFUSAL_NAMES, Step, refused
from dreamgym.envs.browser.mapping import elements_text, relevant_elements
from dreamgym.envs.browser.perform import NO_SUCH_ELEMENT, NOT_POSSIBLE
from dreamgym.envs.browser.snapshot import TEXT, Node, clean, render_tree, short
from dreamgym.envs.webshop import facts as shop_facts
from dreamgym.envs.webshop.facts import AGENT, VisitFacts
from dreamgym.envs.webshop.pages import Element, Page
from dreamgym.types import Change, Fact, Task, WorldSheet

BOX = "search box"
_OF_BOX = frozenset({"typed", "focus", "warned"})
_EMPTY = "Please fill out this field."
"""The browser's words for a search without words, until the box is filled or left."""
_FIRST_IDS = {"box": "5", "button": "6"}
"""On the search page."""


class _TreeWriter:
    """Numbers the elements as the browser does: in document order."""

    def __init__(self) -> None:
        self.root = Node("", "RootWebArea", "WebShop", tag="#document")
        html = self.add(self.root, "generic", tag="html", numbered=False)
        self.body = self.add(html, "generic", tag="body", numbered=False)
        self.targets: dict[str, str] = {}
        """What a click on an element names, by id."""
        self._last = 0

    def add(self, parent: Node, role: str, name: str = "", *, tag: str, numbered: bool = True) -> Node:
        number = ""
        if numbered:
            self._last += 1
            number = str(self._last)
        node = Node(number, role, short(clean(name)), tag=tag, parent=parent)
        node.actionable = role in ("button", "searchbox")
        parent.children.append(node)
        return node

    def text(self, parent: Node, text: str) -> None:
        parent.children.append(Node("", TEXT, short(clean(text)), parent=parent))

    def button(self, parent: Node, label: str, target: str, *, pressed: bool = False) -> None:
        form = self.add(parent, "form", tag="form")
        node = self.add(form, "button", label, tag="button")
        node.hint = "click"
        node.states = ("pressed",) if pressed else ()
        self.targets[node.id] = target

    def element(self, element: Element) -> None:
        if element.kind == "text":
            self.text(self.add(self.body, "paragraph", tag="p"), element.label)
        elif element.kind == "item":
            part = self.add(self.body, "generic", tag="div")
            self.button(part, element.target.upper(), element.target)
            self.text(part, f"{element.label} {element.note}")
            self._last += 1  # the price
        else:
            option = element.kind != "button"
            self.button(self.body, element.label, element.target, pressed=option and bool(element.note))


def page_tree(
    page: Page, instruction: str, *, typed: str = "", focused: bool = False, warned: bool = False
) -> tuple[Node, dict[str, str]]:
    """The accessibility tree of a page, and what a click on its elements names."""
    writer = _TreeWriter()
    if warned:
        writer.root.children.insert(0, Node("", "alert", _EMPTY, parent=writer.root))
    writer.add(writer.body, "heading", "WebShop", tag="h1")
    writer.text(writer.add(writer.body, "paragraph", tag="p"), f"Instruction: {instruction}")
    if page.can_search:
        form = writer.add(writer.body, "form", tag="form")
        label = writer.add(form, "generic", tag="label")
        writer.text(label, "Search")
        box = writer.add(label, "searchbox", "Search", tag="input")
        box.hint, box.value, box.states = "search", short(clean(typed)), ("focused",) * focused
        writer.add(form, "button", "Search", tag="button")
        return writer.root, {}
    group = ""
    for element in page.elements:
        if element.kind not in ("text", "button", "item") and element.kind != group:
            group = element.kind
            writer.add(writer.body, "heading", group, tag="h2")
        writer.element(element)
    return writer.root, writer.targets


class _SiteVisit:
    """The facts of one moment."""

    def __init__(self, task: Task, sheet: WorldSheet) -> None:
        self.shop = VisitFacts(sheet.facts)
        self.sheet = sheet
        self.of_box = [fact for fact in sheet.facts if fact[0] in _OF_BOX]
        self.typed = next((fact[2] for fact in self.of_box if fact[0] == "typed" and len(fact) > 2), "")
        self.view = next((fact[1:] for fact in sheet.facts if fact[0] == "view"), ("elements", "16"))
        self.name, self.page = self.shop.page()
        focused, warned = (any(fact[0] == each for fact in self.of_box) for each in ("focus", "warned"))
        words = self.shop.searches.get(self.typed, "")
        self.tree: Node | None = None
        self.targets: dict[str, str] = {}
        if self.page is not None:
            self.tree, self.targets = page_tree(
                self.page, task.instruction, typed=words, focused=focused, warned=warned
            )

    def text(self, instruction: str) -> str | None:
        if self.tree is None:
            return None
        if self.view[0] == "tree":
            return render_tree(self.tree)
        kept = relevant_elements(self.tree, instruction, int(self.view[1]))
        return elements_text(self.tree, kept, instruction)

    def step(self, text: str) -> Step:
        action = parse_action(text)
        if action is None:
            return refused("no such action", NOT_AN_ACTION)
        if not action.elements:
            return Step("nothing changes", lines=("nothing changes",))
        if self.tree is None:
            return refused("the page is not known", NOT_POSSIBLE)
        number = action.elements[0]
        last = max(int(node.id) for node in self.tree.walk() if node.id)
        if int(number) > last or number == "0":
            return refused(f"element {number} on {self.name}: no", NO_SUCH_ELEMENT)
        can_search = self.page is not None and self.page.can_search
        if can_search and number in _FIRST_IDS.values():
            return self._search(action)
        if action.name == "click" and number in self.targets:
            return self._shop_step(f"click[{self.targets[number]}]")
        if action.name in ("fill", "clear", "select_option", "upload_file", "press"):
            return refused(f"{action.name} element {number}: no", NOT_POSSIBLE)
        return self._box((), f"{action.name}: nothing")

    def _search(self, action: BrowserAction) -> Step:
        box = action.elements[0] == _FIRST_IDS["box"]
        focus: Fact = ("focus", AGENT, BOX)
        warned: Fact = ("warned", BOX)
        now: tuple[Fact, ...] = tuple(fact for fact in self.of_box if fact[0] != "focus")
        enters = action.name == "press" and action.arguments[1] == "Enter"
        if (action.name == "click" and not box) or enters:
            if not self.typed:
                return self._box((warned, focus), "search: nothing typed")
            return self._shop_step(f"search[{self.shop.searches[self.typed]}]")
        if not box or action.name not in ("click", "dblclick", "focus", "fill", "clear"):
            return refused(f"{action.name} here: no", NOT_POSSIBLE)
        if action.name in ("fill", "clear"):
            words = str(action.arguments[1]) if action.name == "fill" else ""
            name = next((each for each, known in self.shop.searches.items() if known == words), None)
            name = name or self.shop.nearest_list(words)
            if words and name is None:
                return refused("fill: no such search known", NOT_POSSIBLE)
            now = (("typed", BOX, name),) if words and name else tuple(set(now) & {warned})
        return self._box((*now, focus), f"{action.name}: {now[0][-1] if now else 'nothing'}")

    def _box(self, facts: Sequence[Fact], line: str) -> Step:
        ended = tuple(fact for fact in self.of_box if fact not in facts)
        begun = tuple(fact for fact in facts if fact not in self.of_box)
        return Step(f"agent on {self.name}. {line}", Change(ended=ended, begun=begun), lines=(line,))

    def _shop_step(self, action: str) -> Step:
        step = self.shop.step(action)
        if step.refusal is not None or (action.startswith("search") and not step.change.begun):
            return refused(step.reason, NOT_POSSIBLE)
        change = Change(ended=(*step.change.ended, *self.of_box), begun=step.change.begun)
        over = any(fact[0] == "bought" for fact in change.begun)
        shown = shop_facts.facts_for(self.sheet, action)
        return Step(step.reason, change, lines=tuple(shown), over=over)


def site_step(task: Task, sheet: WorldSheet, action: str) -> Step:
    """What an action does from here."""
    return _SiteVisit(task, sheet).step(action)


def facts_for(sheet: WorldSheet, action: str) -> list[str]:
    """The lines of a prompt about the sheet before an action."""
    visit = _SiteVisit(Task(id="", instruction="", environment=""), sheet)
    if action == "start":
        return [f"at {AGENT}, {visit.name}"]
    lines = [*visit.step(action).lines, f"at {AGENT}, {visit.name}"]
    lines += [f"{fact[0]} {', '.join(fact[1:])}" for fact in visit.of_box]
    return list(dict.fromkeys(lines))


def state_texts(task: Task, sheet: WorldSheet) -> dict[str, str]:
    """The page that the customer sees, if the facts have it, and the refusals, by their names."""
    visit = _SiteVisit(task, sheet)
    text = visit.text(task.instruction)
    return ({} if text is None else {visit.name: text}) | {name: each for each, name in REFUSAL_NAMES.items()}


class ShopSiteAnnotator(SiteAnnotator):
    """States where the customer is, what the action does there, and whether the product is right."""

    name = "webshop-site-rules"
    step = staticmethod(site_step)
    texts = staticmethod(state_texts)
