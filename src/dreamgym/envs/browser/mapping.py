"""From the accessibility tree to the paper's abstract state: the few elements that matter, one line each.

    [12] textbox: Username
    [17] button: Login

Rules choose them, the same in collection, in a dream and in reality: elements that share words with the
instruction come first, then fields and buttons. Ids are copied exactly, tables are taken whole, and texts
without an element are lines with the id ``-``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from dreamgym.envs.browser.snapshot import ROLES, TEXT, Node, clean, short

TEXTS = 5
"""Lines of texts that belong to no element."""
_DESCRIPTION, _CONTEXT, _LABEL, _ROW = 260, 180, 30, 600
"""Characters of a description, of the text around an element, of a label, and of a row of a table."""
TABLES = ("table", "grid", "treegrid")
_FIELDS = ("textbox", "searchbox", "combobox", "listbox", "slider", "spinbutton")
_PRIOR = {"button": 1.2, "tab": 0.8, "link": 0.3, "option": 0.4, "menuitem": 0.6} | dict.fromkeys(
    _FIELDS, 1.0
)
_FINISHING = frozenset({
    "apply", "book", "buy", "checkout", "confirm", "done", "finish", "go", "log", "login", "ok", "order",
    "pay", "save", "search", "send", "sign", "submit",
})  # fmt: skip
_MOVING = frozenset(["back", "close", "more", "next", "prev", "previous"])
"""Words of buttons that end a form, and that lead to another page."""
_TYPED = frozenset({"textbox", "searchbox"})
_OPTIONS, _VALUES, _PRESSED = 20, 8, ("ArrowLeft", "ArrowRight", "PageDown", "PageUp")
_WORD = re.compile(r"\w+")
_COMMON = frozenset({
    "a", "an", "and", "are", "as", "at", "by", "click", "enter", "find", "for", "from", "in", "into", "is",
    "it", "of", "on", "one", "or", "press", "select", "that", "the", "then", "them", "this", "to", "with",
    "you", "your",
})  # fmt: skip


def words(text: str) -> list[str]:
    """Words that carry meaning; a number is the same with and without leading zeros.

    >>> words("Select 05/09/2016 and hit Submit.")
    ['5', '9', '2016', 'hit', 'submit']
    """
    found = [word.lstrip("0") or "0" if word.isdigit() else word for word in _WORD.findall(text.lower())]
    return [word for word in found if word not in _COMMON]


def relevant_elements(root: Node, instruction: str, limit: int) -> list[Node]:
    """At most `limit` elements that can be acted on, in document order; a table counts as one, and its
    elements are all kept."""
    tables = [
        node for node in root.walk() if node.role in TABLES and _acts(node) and not _within(node, TABLES)
    ]
    inside = {id(node): table for table in tables for node in table.walk()}
    useful = useful_elements(root)
    single = [node for node in useful if id(node) not in inside]
    wanted = Counter(words(instruction))
    described = describe(root)
    rare = Counter(word for node in single for word in set(words(described[id(node)])))
    scores = {id(node): _score(node, described[id(node)], wanted, rare) for node in single}
    scores |= {id(table): 3.0 for table in tables}
    ranked = sorted([*single, *tables], key=lambda node: -scores[id(node)])
    chosen = {id(node) for node in ranked[:limit]}
    return [node for node in useful if id(inside.get(id(node), node)) in chosen]


def _acts(node: Node) -> bool:
    return any(each.actionable for each in node.walk())


def _within(node: Node, roles: Sequence[str]) -> bool:
    return any(each.role in roles for each in _ancestors(node))


def useful_elements(root: Node) -> list[Node]:
    """The elements that can be acted on, without options, which are listed with their field, and without the
    doubles that nested elements are: of a list and its items the items, of a tab and its link the tab."""
    found = []
    for node in root.walk():
        if not node.actionable or node.tag == "option":
            continue
        inner = [each for each in node.walk() if each.actionable and each is not node]
        same = bool(inner) and node.text() == " ".join(
            each.text() for each in _outermost(inner) if each.text()
        )
        outer = node.parent
        while outer is not None and not outer.actionable:
            outer = outer.parent
        doubled = outer is not None and outer.role in ROLES and outer.text() == node.text()
        if not doubled and not (same and node.role not in ROLES):
            found.append(node)
    return found


def _outermost(nodes: Sequence[Node]) -> list[Node]:
    """Those that are inside no other one."""
    known = {id(node) for node in nodes}
    return [node for node in nodes if not any(id(each) in known for each in _ancestors(node))]


def _ancestors(node: Node) -> Iterator[Node]:
    above = node.parent
    while above is not None:
        yield above
        above = above.parent


def _score(node: Node, text: str, wanted: Counter[str], rare: Counter[str]) -> float:
    """Words of the instruction count more in the element's own name, and less if many elements have them."""
    own = set(words(f"{node.text()} {node.value}"))
    score = sum(3 / rare[word] for word in own if word in wanted and rare[word])
    score += sum(1 / rare[word] for word in set(words(text)) - own if word in wanted and rare[word])
    score += _PRIOR.get(node.role, 0.5 if node.role in ROLES else 0.0)
    if node.role in ("button", "link"):
        score += 1.0 * bool(own & _FINISHING) + 0.5 * bool(own & _MOVING)
    done = any(state in ("checked", "pressed") or state == "selected" for state in node.states)
    return score - 2.0 * done + 0.5 * ("focused" in node.states)


def describe(root: Node) -> dict[int, str]:
    """Descriptions of the elements that can be acted on, by `id(node)`."""
    nodes = [node for node in root.walk() if node.actionable]
    texts = Counter((node.role, _pattern(node)) for node in nodes)
    return {id(node): _description(node, repeated=texts[node.role, _pattern(node)] > 1) for node in nodes}


def _pattern(node: Node) -> str:
    """Texts that differ only in numbers say little about their elements."""
    return re.sub(r"\d+", "0", node.text())


def _description(node: Node, *, repeated: bool) -> str:
    """The element's text; for an unclear one also the text around it; what is entered and chosen."""
    own = node.text()
    unclear = (repeated or not any(map(str.isalpha, own))) and not (own and _within(node, TABLES))
    around = context(node) if unclear or node.role in ("link", *_FIELDS) else ""
    if not unclear and len(around) > _LABEL:
        around = ""
    own = own or ("" if around and node.role in _FIELDS else node.hint)
    parts = [own, f"({around})" if around and around != own else ""]
    if node.role in ("combobox", "listbox"):
        options = [each.name for each in node.walk() if each.role == "option"]
        parts.append(f"options: {', '.join(options[:_OPTIONS])}" if options else "")
    if node.value and node.value != own:
        parts.append(f"= {node.value!r}")
    parts += [f"<{state}>" for state in node.states if state not in ("required", "readonly")]
    return short(" ".join(part for part in parts if part), _DESCRIPTION)


def context(node: Node) -> str:
    """The text of the smallest part of the page around an element that has text of its own: the label of a
    field, the row of a button."""
    below, part = node, node.parent
    found: list[str] = []
    while part is not None and part.role != "RootWebArea":
        found = [*_texts(part, without=below), *found]
        text = " ".join(found)
        if any(map(str.isalpha, text)):
            return text if len(text) <= _CONTEXT else ""
        below, part = part, part.parent
    return ""


def _texts(part: Node, *, without: Node) -> list[str]:
    """Texts in a part of the page that belong to no element inside it."""
    found: list[str] = []
    waiting = [each for each in reversed(part.children) if each is not without]
    while waiting:
        node = waiting.pop()
        if node.actionable:
            continue
        if node.name:
            found.append(node.name)
        else:
            waiting.extend(reversed(node.children))
    return found


def elements_text(root: Node, kept: Sequence[Node], instruction: str) -> str:
    """The state: the kept elements, the tables that they are in, and texts that belong to none of them."""
    chosen = {id(node) for node in kept}
    described = describe(root)
    said = " ".join(described[id(node)] for node in kept)
    texts = _free_texts(root, said, instruction)
    lines: list[str] = []
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node.role in TABLES and any(id(each) in chosen for each in node.walk()):
            lines += _table(node, described, chosen)
            continue
        if id(node) in chosen:
            kind = node.role if node.role != "generic" else node.tag or "element"
            lines.append(f"[{node.id}] {kind}: {described[id(node)]}".rstrip())
        elif id(node) in texts:
            lines.append(
                f"[-] {'heading' if node.role == 'heading' else 'text'}: {short(node.name, _DESCRIPTION)}"
            )
        waiting.extend(reversed(node.children))
    return "\n".join(lines) or "[-] text: The page is empty."


def _free_texts(root: Node, said: str, instruction: str) -> set[int]:
    """Texts that no line shows yet: headings and those that share words with the instruction first."""
    wanted = set(words(instruction))
    free = [
        node
        for node in root.walk()
        if node.name and node.role in (TEXT, "heading", "alert", "status") and node.name not in said
    ]
    start = clean(instruction)[:100]
    free = [node for node in free if start not in node.name]  # the task states it already
    free = [node for node in free if node.parent is None or node.parent.name != node.name]
    ranked = sorted(free, key=lambda node: -len(wanted & set(words(node.name))) - (node.role == "heading"))
    return {id(node) for node in ranked[:TEXTS]}


def _table(table: Node, described: Mapping[int, str], chosen: Set[int]) -> list[str]:
    """One line for each row; elements keep their ids."""
    lines = [f"[{table.id or '-'}] table: {short(table.name, _DESCRIPTION)}".rstrip()]
    rows = [node for node in table.walk() if node.role == "row"]
    for row in rows or [table]:
        cells: list[str] = []
        waiting = list(reversed(row.children))
        while waiting:
            node = waiting.pop()
            if id(node) in chosen:
                cells.append(f"[{node.id}] {described[id(node)]}")
            elif node.name and not _acts(node):
                cells.append(node.name)
            else:
                waiting.extend(reversed(node.children))
        if cells:
            lines.append(f"  {short(' | '.join(cells), _ROW)}")
    return lines


def admissible_actions(kept: Iterable[Node], values: Sequence[str]) -> list[str]:
    """What can be done with these elements; texts to type come from `values`."""
    found: list[str] = []
    for node in kept:
        if node.role in _TYPED and "readonly" not in node.states:
            found += [f"fill({node.id!r}, {value!r})" for value in values[:_VALUES] if value != node.value]
        elif node.role == "combobox" and node.tag == "select":
            options = [each.name for each in node.walk() if each.role == "option"]
            found += [
                f"select_option({node.id!r}, {each!r})" for each in options[:_OPTIONS] if each != node.value
            ]
        elif node.role == "slider" or (
            node.role == "generic" and node.tag == "span" and "slider" in node.hint
        ):
            found += [f"press({node.id!r}, {key!r})" for key in _PRESSED]
        else:
            found.append(f"click({node.id!r})")
    return found
