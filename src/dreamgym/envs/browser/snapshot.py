"""What a page shows: Chromium's accessibility tree, with an id for every element, as text.

The ids are written into the page as attributes, in document order; an element keeps its id as long as the
document lives. Texts come from pages and are hostile: each is one line of limited length, in quotes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ATTRIBUTE = "data-dreamgym-id"
MARK = """(name) => {
  const root = document.documentElement;
  let last = Number(root.getAttribute(name + '-last')) || 0;
  for (const element of document.querySelectorAll('body *'))
    if (!element.hasAttribute(name)) element.setAttribute(name, ++last);
  root.setAttribute(name + '-last', last);
}"""
ROLES = frozenset({
    "button", "checkbox", "combobox", "link", "listbox", "menuitem", "menuitemcheckbox", "menuitemradio",
    "option", "radio", "searchbox", "slider", "spinbutton", "switch", "tab", "textbox", "treeitem",
})  # fmt: skip
"""Of elements that can be acted on by their nature."""
TEXT = "StaticText"
_STATES = ("focused", "checked", "selected", "expanded", "pressed", "disabled", "readonly", "required")
_SKIPPED = frozenset({"InlineTextBox", "LineBreak", "Canvas"})
_TRANSPARENT = frozenset({"generic", "none", "LabelText", "MenuListPopup", "ignored", "presentation"})
"""Roles that mean nothing by themselves."""
_LEAVES = frozenset({TEXT, "textbox", "searchbox"})
"""What is inside a field is its value."""
_NAME = 300
"""Characters of a name or text."""
_NODES = 2000
"""Lines of a page; a longer page is cut off."""
_DEPTH = 200


@dataclass(slots=True)
class Node:
    """An element or a text of the page, with what it contains."""

    id: str
    """Empty for texts."""
    role: str
    name: str
    value: str = ""
    states: tuple[str, ...] = ()
    actionable: bool = False
    hint: str = ""
    """The class or id of an element without name and text."""
    tag: str = ""
    parent: Node | None = field(default=None, repr=False)
    children: list[Node] = field(default_factory=list, repr=False)

    def walk(self) -> Iterator[Node]:
        """This node and all below it, in document order."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))

    def text(self) -> str:
        """The name, or the texts inside."""
        if self.name or self.role == TEXT:
            return self.name
        return short(" ".join(each.name for each in self.walk() if each.name))


def clean(text: object) -> str:
    """One line without control characters.

    >>> clean("two\\n lines\\u202e\\x00")
    'two lines'
    """
    return " ".join("".join(letter if letter.isprintable() else " " for letter in str(text)).split())


def short(text: str, limit: int = _NAME) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1].rstrip()}…"


def build_tree(tree: Mapping[str, Any], snapshot: Mapping[str, Any]) -> Node:
    """The tree of ``Accessibility.getFullAXTree`` with ids and clickable elements of ``DOMSnapshot``."""
    elements = _elements(snapshot)
    raw = {str(node["nodeId"]): node for node in tree["nodes"]}
    root = Node("", "RootWebArea", "")
    tops = [node for node in tree["nodes"] if str(node.get("parentId", "")) not in raw]
    waiting = [(node, root, 0) for node in reversed(tops)]
    count = 0
    while waiting and count < _NODES:
        node, parent, depth = waiting.pop()
        made = _node(node, elements.get(node.get("backendDOMNodeId", -1)), parent)
        count += made is not None
        below = [raw[str(each)] for each in node.get("childIds", ()) if str(each) in raw]
        if depth < _DEPTH and not (made is not None and made.role in _LEAVES):
            waiting.extend((each, made or parent, depth + 1) for each in reversed(below))
    return root.children[0] if len(root.children) == 1 else root


@dataclass(frozen=True, slots=True)
class _Element:
    tag: str
    attributes: Mapping[str, str]
    clickable: bool
    box: bool
    """It takes up space on the page."""


def _elements(snapshot: Mapping[str, Any]) -> dict[int, _Element]:
    """By backend node id."""
    strings: Sequence[str] = snapshot["strings"]
    found: dict[int, _Element] = {}
    for document in snapshot["documents"][:1]:  # the page without its frames
        nodes, layout = document["nodes"], document["layout"]
        clickable = set(nodes["isClickable"]["index"])
        sizes = dict(zip(layout["nodeIndex"], layout["bounds"], strict=True))
        for place, number in enumerate(nodes["backendNodeId"]):
            flat = [strings[each] for each in nodes["attributes"][place]]
            attributes = dict(zip(flat[::2], flat[1::2], strict=False))
            tag = strings[nodes["nodeName"][place]].lower()
            works = place in clickable and tag not in ("#document", "html", "body", "label")
            *_, width, height = sizes.get(place, (0, 0))
            found[number] = _Element(tag, attributes, works, width > 0 and height > 0)
    return found


def _node(raw: Mapping[str, Any], element: _Element | None, parent: Node) -> Node | None:
    """The node, already appended to its parent; None for one that shows nothing itself."""
    role = "ignored" if raw.get("ignored") else str(raw.get("role", {}).get("value", "ignored"))
    if role in _SKIPPED:
        return None
    name = clean(raw.get("name", {}).get("value", ""))
    if role == TEXT:
        return _text(name, parent) if element is None or element.box else None
    attributes = element.attributes if element is not None else {}
    states = {each["name"]: each["value"].get("value") for each in raw.get("properties", ())}
    clickable = element is not None and element.box and (element.clickable or "tabindex" in attributes)
    number = attributes.get(ATTRIBUTE, "")
    number = number if number.isascii() and number.isdigit() else ""
    actionable = bool(number) and "disabled" not in _shown(states) and (role in ROLES or clickable)
    node = Node(
        number,
        "generic" if role in _TRANSPARENT else role,
        short(name),
        short(clean(raw.get("value", {}).get("value", ""))),
        _shown(states),
        actionable,
        short(clean(_hint(attributes)), 60),
        element.tag if element is not None else "",
        parent,
    )
    parent.children.append(node)
    return node


def _text(name: str, parent: Node) -> Node | None:
    """Adjacent texts of one parent are one line; a text that only repeats the name of its element is none."""
    if not name or name == parent.name:
        return None
    last = parent.children[-1] if parent.children else None
    if last is not None and last.role == TEXT:
        last.name = short(f"{last.name} {name}")
        return None
    made = Node("", TEXT, short(name), parent=parent)
    parent.children.append(made)
    return made


def _shown(states: Mapping[str, Any]) -> tuple[str, ...]:
    found = []
    for state in _STATES:
        value = states.get(state)
        if value in (None, False, "false"):
            continue
        found.append(state if value in (True, "true") else f"{state}={clean(value)}")
    if states.get("expanded") is False:
        found.append("collapsed")
    return tuple(found)


def _hint(attributes: Mapping[str, str]) -> str:
    """Words that a developer gave to an element without text."""
    for name in ("title", "aria-label", "alt", "id", "class", "name"):
        if given := attributes.get(name, "").split():
            return " ".join(given if name != "class" or len(given) <= 3 else given[:1])
    return ""


def render_tree(root: Node) -> str:
    """The flattened accessibility tree: a line for each node, indented by its depth.

    >>> button = Node("12", "button", "Buy 'now'", states=("focused",), actionable=True)
    >>> render_tree(Node("", "RootWebArea", "Shop", children=[button]))
    'RootWebArea \\'Shop\\'\\n\\t[12] button "Buy \\'now\\'", focused'
    """
    lines: list[str] = []

    def show(node: Node, depth: int) -> None:
        bare = node.role == "generic" and not node.actionable and not node.name
        if not bare:
            lines.append(depth * "\t" + _line(node))
        for child in node.children:
            show(child, min(depth + (not bare), _DEPTH))

    show(root, 0)
    return "\n".join(lines)


def _line(node: Node) -> str:
    head = f"[{node.id}] {node.role}" if node.id else node.role
    hint = [f"class={node.hint!r}"] if node.actionable and not node.text() and node.hint else []
    value = [f"value={node.value!r}"] if node.value and node.value != node.name else []
    clickable = ["clickable"] if node.actionable and node.role not in ROLES else []
    name = f" {node.name!r}" if node.name or node.actionable else ""
    return ", ".join([head + name, *value, *node.states, *clickable, *hint])
